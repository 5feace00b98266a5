package jsonrpc

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
)

// Edit replaces the bytes from Start to End of a message with others.
type Edit struct {
	Start, End int
	With       []byte
}

// Splice returns raw with the edits made and every other byte as it was. The
// result is always new memory. The edits may come in any order; it panics where
// they overlap or lie outside, because then the caller mixed up two messages.
func Splice(raw []byte, edits ...Edit) []byte {
	if len(edits) > 1 {
		edits = slices.Clone(edits)
		slices.SortFunc(edits, func(a, b Edit) int { return a.Start - b.Start })
	}
	size, at := len(raw), 0
	for _, e := range edits {
		if e.Start < at || e.End < e.Start || e.End > len(raw) {
			panic(fmt.Sprintf("jsonrpc: edit of bytes %d to %d after %d, of %d", e.Start, e.End, at, len(raw)))
		}
		size += len(e.With) - (e.End - e.Start)
		at = e.End
	}
	out, at := make([]byte, 0, size), 0
	for _, e := range edits {
		out = append(append(out, raw[at:e.Start]...), e.With...)
		at = e.End
	}
	return append(out, raw[at:]...)
}

// SetID returns the edit of m.Raw that gives the message another id, a valid JSON
// value. For a notification it is the edit that changes nothing.
func (m *Message) SetID(id json.RawMessage) Edit {
	if m.ID == nil {
		return Edit{}
	}
	return Edit{Start: m.id.start, End: m.id.end, With: id}
}

// SetParam returns the edit of m.Raw that replaces the value of a member of
// params, or of a member of that, along path. It reports false where there is no
// such member.
func (m *Message) SetParam(value json.RawMessage, path ...string) (Edit, bool) {
	start, end, ok := Find(m.Params, path...)
	if !ok || m.Params == nil {
		return Edit{}, false
	}
	return Edit{Start: m.params.start + start, End: m.params.start + end, With: value}, true
}

// WithID returns the message with another id, as new memory.
func (m *Message) WithID(id json.RawMessage) []byte {
	return Splice(m.Raw, m.SetID(id))
}

// envelope is how every message that is built here begins.
const envelope = `{"jsonrpc":"2.0",`

// AppendRequest appends a request to dst. params may be nil.
func AppendRequest(dst []byte, id json.RawMessage, method string, params json.RawMessage) []byte {
	dst = append(append(append(dst, envelope+`"id":`...), orNull(id)...), ',')
	return appendCall(dst, method, params)
}

// AppendNotification appends a notification to dst. params may be nil.
func AppendNotification(dst []byte, method string, params json.RawMessage) []byte {
	return appendCall(append(dst, envelope...), method, params)
}

// appendCall appends the method, the params and the closing brace.
func appendCall(dst []byte, method string, params json.RawMessage) []byte {
	dst = AppendQuote(append(dst, `"method":`...), method)
	if params != nil {
		dst = append(append(dst, `,"params":`...), params...)
	}
	return append(dst, '}')
}

// AppendResult appends a response with a result to dst.
func AppendResult(dst []byte, id, result json.RawMessage) []byte {
	dst = append(append(dst, envelope+`"id":`...), orNull(id)...)
	return append(append(append(dst, `,"result":`...), orNull(result)...), '}')
}

// AppendError appends a response with an error to dst. A nil id is null; nil data
// is absent.
func AppendError(dst []byte, id json.RawMessage, code int, message string, data json.RawMessage) []byte {
	dst = append(append(dst, envelope+`"id":`...), orNull(id)...)
	dst = strconv.AppendInt(append(dst, `,"error":{"code":`...), int64(code), 10)
	dst = AppendQuote(append(dst, `,"message":`...), message)
	if data != nil {
		dst = append(append(dst, `,"data":`...), data...)
	}
	return append(dst, '}', '}')
}

// orNull returns raw, null for nil.
func orNull(raw json.RawMessage) json.RawMessage {
	if raw == nil {
		return json.RawMessage("null")
	}
	return raw
}
