package jsonrpc

import "encoding/json"

// Error codes. Those down to CodeParse are JSON-RPC 2.0 §5.1; the others are ours
// and, where the Model Context Protocol has one for the case, its.
const (
	CodeParse          = -32700
	CodeInvalidRequest = -32600 // also: blocked by a rule
	CodeMethodNotFound = -32601
	CodeInvalidParams  = -32602
	CodeInternal       = -32603 // we, or a server, failed
	CodeTimeout        = -32000 // also: busy
	CodeTransport      = -32001 // lost, or too large
	CodeNoResource     = -32002
)

// Detail names the rule that a refused message broke, in a word that is stable
// and fit for a ledger.
type Detail string

// The rules, in the order in which they are applied.
const (
	TooLarge        Detail = "too_large"
	NotJSON         Detail = "not_json"
	NotUTF8         Detail = "not_utf8"
	NotObject       Detail = "not_object"
	Batch           Detail = "batch"
	DuplicateMember Detail = "duplicate_member"
	CaseVariant     Detail = "case_variant"
	LoneSurrogate   Detail = "lone_surrogate"
	TooDeep         Detail = "too_deep"
	Version         Detail = "version"
	IDKind          Detail = "id_kind"
	IDNull          Detail = "id_null"
	IDMissing       Detail = "id_missing" // a response without one
	MethodMissing   Detail = "method_missing"
	MethodKind      Detail = "method_kind"
	MethodEmpty     Detail = "method_empty"
	Mixed           Detail = "mixed" // request and response in one, or result and error
	ParamsKind      Detail = "params_kind"
	ErrorKind       Detail = "error_kind"
)

// text says what is wrong, for a person.
func (d Detail) text() string {
	switch d {
	case TooLarge:
		return "message too large"
	case NotJSON:
		return "not valid JSON"
	case NotUTF8:
		return "not valid UTF-8"
	case NotObject:
		return "not an object"
	case Batch:
		return "batches are not supported"
	case DuplicateMember:
		return "an object has two members of the same name"
	case CaseVariant:
		return "member names that differ only in case"
	case LoneSurrogate:
		return "a string has half of a surrogate pair"
	case TooDeep:
		return "nested too deeply"
	case Version:
		return `jsonrpc must be "2.0"`
	case IDKind:
		return "id must be a string or a number"
	case IDNull:
		return "id must not be null"
	case IDMissing:
		return "a response needs an id"
	case MethodMissing:
		return "method is missing"
	case MethodKind:
		return "method must be a string"
	case MethodEmpty:
		return "method is empty"
	case Mixed:
		return "method, result and error exclude each other"
	case ParamsKind:
		return "params must be an object or an array"
	case ErrorKind:
		return "error must be an object"
	}
	return string(d)
}

// Error says why a message was refused, and what an answer to it must carry. Its
// text has nothing of the message's content.
type Error struct {
	// Code is what to answer with: CodeParse or CodeInvalidRequest, for
	// TooLarge CodeTransport.
	Code   int
	Detail Detail
	// Message is the text of the answer.
	Message string
	// ID is the id to echo, part of the message's bytes; nil stands for null.
	ID json.RawMessage
	// Kind and Method are what the message would have been, as far as that
	// could be told.
	Kind   Kind
	Method string
	// Offset is the byte of the input at which the fault was seen.
	Offset int
}

// Error implements error.
func (e *Error) Error() string { return e.Message }

// Response returns the answer that the refused message gets.
func (e *Error) Response() []byte {
	return AppendError(nil, e.ID, e.Code, e.Message, nil)
}

// ErrorObject is what a response's error member says.
type ErrorObject struct {
	Code    int64
	Message string
	// Data is nil when absent.
	Data json.RawMessage
}

// ParseError reads a response's error member. It reports false where code is not
// an integer or message not a string (JSON-RPC 2.0 §5.1).
func ParseError(raw json.RawMessage) (ErrorObject, bool) {
	var e ErrorObject
	code, ok := Member(raw, "code")
	if !ok || json.Unmarshal(code, &e.Code) != nil || code[0] == 'n' {
		return ErrorObject{}, false
	}
	message, _ := Member(raw, "message")
	if e.Message, ok = String(message); !ok {
		return ErrorObject{}, false
	}
	e.Data, _ = Member(raw, "data")
	return e, true
}
