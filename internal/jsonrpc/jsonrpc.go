// Package jsonrpc reads JSON-RPC messages without changing them.
//
// A relay that decodes a message and encodes it again sends on something else
// than it read: ids above 2^53 are rounded, members that it does not know are
// lost, and of two members with one name it has judged one and the server runs
// the other. Here a message is parsed once, strictly, and stays the bytes that
// came: [Message] holds slices of them, and what must differ on the way (an id, a
// tool's name) is spliced in by [Splice], which touches no other byte.
//
// # What is refused
//
// [Parse] accepts exactly the messages of JSON-RPC 2.0
// (https://www.jsonrpc.org/specification) that the Model Context Protocol allows:
// one object, no batch (removed in protocol version 2025-06-18), no null id on a
// request. It refuses, beyond what is no JSON (RFC 8259) or no UTF-8, every
// message that two correct parsers could read differently (RFC 8259 §4 and §8.2,
// RFC 7493 §2):
//
//   - two members of one object with the same name, at any depth, compared after
//     unescaping: "n\u0061me" is "name";
//   - members of the message or of params whose names differ only in case, and a
//     member of the message that differs from one of the specification's only in
//     case, because some decoders ignore case;
//   - escapes that name one half of a surrogate pair;
//   - arrays and objects nested deeper than [MaxDepth].
//
// The error is an *[Error], which carries the code to answer with, the id to echo
// and, as [Detail], which rule was broken.
//
// # Why a scanner of its own
//
// github.com/go-json-experiment/json/jsontext is as strict about names and
// surrogates and about as fast, but it reports a lone surrogate as it reports
// invalid UTF-8, stops at its first complaint (a message must be refused as
// "not JSON" whether the duplicate name or the syntax error comes first), knows
// nothing of case, and gives neither the id to echo in an answer to what it
// refused nor the places of members. Fuzz tests compare this scanner with it and
// with encoding/json.
//
// Parsing is one pass, and allocates only for the method's name and for objects
// with very many members.
package jsonrpc

import (
	"encoding/json"
)

// Bounds of what is parsed.
const (
	// MaxDepth is how many arrays and objects may be open at once, the message
	// itself included.
	MaxDepth = 128
	// MaxSize is the size in bytes over which nothing is parsed. It only keeps
	// offsets in 32 bits: the transports have far lower bounds of their own.
	MaxSize = 1 << 30
)

// Kind says what a message is.
type Kind int

// The kinds of message. The zero value is none of them.
const (
	// Request has a method and an id.
	Request Kind = iota + 1
	// Notification has a method and no id.
	Notification
	// Response has a result or an error.
	Response
)

// String returns the kind in lower case.
func (k Kind) String() string {
	switch k {
	case Request:
		return "request"
	case Notification:
		return "notification"
	case Response:
		return "response"
	}
	return "unknown"
}

// Message is one JSON-RPC message. Every slice is part of Raw and has no white
// space around it, so that its first byte tells its type. Nobody may change them.
type Message struct {
	// Raw is the message from its opening to its closing brace.
	Raw  []byte
	Kind Kind
	// ID is the id as it stands: a string or a number; nil for a notification;
	// null in a response whose sender could not tell what it answers.
	ID json.RawMessage
	// Method is empty in a response.
	Method string
	// Params is an object or an array, nil when absent.
	Params json.RawMessage
	// Result and Error are a response's; exactly one of them is set. Error is an
	// object.
	Result, Error json.RawMessage

	id, params span
}

// Parse reads one message. The error is an *[Error].
func Parse(raw []byte) (Message, error) {
	if len(raw) > MaxSize {
		return Message{}, &Error{Code: CodeTransport, Detail: TooLarge, Message: "message too large"}
	}
	s := newScanner(raw)
	if !s.document() {
		return Message{}, &Error{
			Code: CodeParse, Detail: s.syntax, Offset: s.i,
			Message: "Parse error: " + s.syntax.text(),
		}
	}
	m := s.message()
	if d, at := s.judge(&m); d != "" {
		return Message{}, &Error{
			Code: CodeInvalidRequest, Detail: d, Offset: at, ID: s.echo(), Kind: m.Kind, Method: m.Method,
			Message: "Invalid Request: " + d.text(),
		}
	}
	return m, nil
}

// message fills a Message from the members that the scanner met, as far as they
// are there. Nothing is verified yet.
func (s *scanner) message() Message {
	m := Message{Raw: s.b[s.root.start:s.root.end]}
	get := func(name memberName) (json.RawMessage, span) {
		c := s.members[name]
		if !c.set {
			return nil, span{}
		}
		rel := span{c.value.start - s.root.start, c.value.end - s.root.start}
		return m.Raw[rel.start:rel.end:rel.end], rel
	}
	m.ID, m.id = get(memberID)
	m.Params, m.params = get(memberParams)
	m.Result, _ = get(memberResult)
	m.Error, _ = get(memberError)
	method, _ := get(memberMethod)
	m.Method, _ = String(method)
	switch {
	case method != nil && m.ID != nil:
		m.Kind = Request
	case method != nil:
		m.Kind = Notification
	case m.Result != nil || m.Error != nil:
		m.Kind = Response
	}
	return m
}

// judge returns the first rule that the message breaks and where, "" for none.
func (s *scanner) judge(m *Message) (Detail, int) {
	switch s.b[s.root.start] {
	case '{':
	case '[':
		return Batch, s.root.start
	default:
		return NotObject, s.root.start
	}
	if s.fault != "" {
		return s.fault, s.faultAt
	}
	version := s.members[memberVersion]
	if v := s.b[version.value.start:version.value.end]; len(v) == 0 || v[0] != '"' || !sameName(v[1:len(v)-1], "2.0") {
		return Version, version.value.start
	}
	if id := s.members[memberID]; id.set {
		switch c := s.b[id.value.start]; {
		case c == '"' || c == '-' || '0' <= c && c <= '9':
		case c != 'n':
			return IDKind, id.value.start
		case m.Kind != Response || m.Error == nil:
			return IDNull, id.value.start
		}
	}
	if m.Kind == Response {
		return s.judgeResponse(m)
	}
	return s.judgeCall(m)
}

// judgeCall verifies what requests and notifications have in common.
func (s *scanner) judgeCall(m *Message) (Detail, int) {
	method, params := s.members[memberMethod], s.members[memberParams]
	switch {
	case !method.set:
		return MethodMissing, s.root.start
	case s.b[method.value.start] != '"':
		return MethodKind, method.value.start
	case m.Method == "":
		return MethodEmpty, method.value.start
	case m.Result != nil || m.Error != nil:
		return Mixed, s.root.start
	case params.set && m.Params[0] != '{' && m.Params[0] != '[':
		return ParamsKind, params.value.start
	}
	return "", 0
}

// judgeResponse verifies a message that has a result or an error and no method.
func (s *scanner) judgeResponse(m *Message) (Detail, int) {
	switch {
	case m.ID == nil:
		return IDMissing, s.root.start
	case m.Result != nil && m.Error != nil:
		return Mixed, s.root.start
	case m.Error != nil && m.Error[0] != '{':
		return ErrorKind, s.members[memberError].value.start
	}
	return "", 0
}

// echo returns the id that an answer to a refused message carries: the message's
// own where it is one string or number, beyond doubt; else nil, which is null.
func (s *scanner) echo() json.RawMessage {
	id := s.members[memberID]
	if !id.set || id.faulty {
		return nil
	}
	if c := s.b[id.value.start]; c == '"' || c == '-' || '0' <= c && c <= '9' {
		return s.b[id.value.start:id.value.end:id.value.end]
	}
	return nil
}
