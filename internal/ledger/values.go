package ledger

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"net"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/jsonrpc"
)

// ellipsis ends a text that was cut.
const ellipsis = "…"

// timeFormat is RFC 3339 with microseconds; every timestamp is in UTC.
const timeFormat = "2006-01-02T15:04:05.000000Z"

func unix(sec, nsec int64) time.Time { return time.Unix(sec, nsec).UTC() }

// close makes a row of the values that were added since the last one.
func (o *op) close(stmt int) {
	from := 0
	if n := len(o.rows); n > 0 {
		from = o.rows[n-1].to
	}
	o.rows = append(o.rows, row{stmt, from, len(o.values)})
}

func (o *op) nulls(n int) {
	for range n {
		o.values = append(o.values, value{})
	}
}

func (o *op) integer(n int64) {
	o.values = append(o.values, value{kind: integer, n: n})
}

// text adds one text for each argument: without secrets, valid UTF-8, at most
// MaxText bytes, NULL for "".
func (o *op) text(texts ...string) {
	for _, s := range texts {
		o.values = append(o.values, o.textValue(s))
	}
}

func (o *op) textValue(s string) value {
	if s == "" {
		return value{}
	}
	s = o.redact.text(s)
	if len(s) <= MaxText && utf8.ValidString(s) {
		return value{kind: str, s: s}
	}
	return o.written(func(b []byte) []byte { return appendCut(b, s) })
}

// json adds the display form of a JSON value: compact, without secrets, at most
// MaxText bytes, NULL for none.
func (o *op) json(raw []byte) {
	if len(raw) == 0 {
		o.nulls(1)
		return
	}
	raw = o.redact.bytes(raw)
	o.values = append(o.values, o.written(func(b []byte) []byte { return appendCompact(b, raw) }))
}

func (o *op) time(t time.Time) {
	o.values = append(o.values, o.written(func(b []byte) []byte { return t.UTC().AppendFormat(b, timeFormat) }))
}

// code adds an error's code, NULL where there is none.
func (o *op) code(e *event.Error) {
	if e == nil || e.Code == 0 {
		o.nulls(1)
		return
	}
	o.integer(int64(e.Code))
}

// written is a text that appending to the scratch makes. When the scratch
// grows, older texts keep the memory that they point to.
func (o *op) written(add func([]byte) []byte) value {
	from := len(o.scratch)
	o.scratch = add(o.scratch)
	return value{kind: bytesText, b: o.scratch[from:len(o.scratch):len(o.scratch)]}
}

// appendCut appends s as valid UTF-8, at most MaxText bytes of it.
func appendCut(b []byte, s string) []byte {
	head := s[:min(len(s), MaxText+utf8.UTFMax)]
	return cut(append(b, head...), len(b), len(head) < len(s))
}

// appendCompact appends JSON without the white space between its tokens, at
// most MaxText bytes of it. It reads no more of raw than it needs.
func appendCompact(b, raw []byte) []byte {
	start, quoted, escaped := len(b), false, false
	for i, c := range raw {
		if len(b)-start > MaxText+utf8.UTFMax {
			return cut(b, start, i < len(raw))
		}
		switch {
		case escaped:
			escaped = false
		case c == '"':
			quoted = !quoted
		case quoted:
			escaped = c == '\\'
		case c == ' ' || c == '\t' || c == '\n' || c == '\r':
			continue
		}
		b = append(b, c)
	}
	return cut(b, start, false)
}

// cut makes b[start:] valid UTF-8 of at most MaxText bytes. The ellipsis says
// that something is missing: also where there was more that is not in b.
func cut(b []byte, start int, more bool) []byte {
	if !utf8.Valid(b[start:]) {
		b = append(b[:start], bytes.ToValidUTF8(b[start:], []byte("\uFFFD"))...)
	}
	if !more && len(b)-start <= MaxText {
		return b
	}
	end := min(len(b), start+MaxText-len(ellipsis))
	for end < len(b) && !utf8.RuneStart(b[end]) {
		end--
	}
	return append(b[:end], ellipsis...)
}

// argvJSON is an argv as JSON. An argument is bytes: one that is not UTF-8 is
// an object with its base64.
func argvJSON(argv []string) []byte {
	if len(argv) == 0 {
		return nil
	}
	b := []byte{'['}
	for i, arg := range argv {
		if i > 0 {
			b = append(b, ',')
		}
		if utf8.ValidString(arg) {
			b = jsonrpc.AppendQuote(b, arg)
			continue
		}
		b = append(b, `{"base64":"`...)
		b = base64.StdEncoding.AppendEncode(b, []byte(arg))
		b = append(b, `"}`...)
	}
	return append(b, ']')
}

// judgedEvent is what security_rule_events keeps of the event: what was judged,
// without bodies.
type judgedEvent struct {
	Type           event.Type          `json:"type"`
	Intent         event.Intent        `json:"intent,omitempty"`
	VM             string              `json:"vm,omitempty"`
	InitiatorKind  event.InitiatorKind `json:"initiator_kind,omitempty"`
	InitiatorID    string              `json:"initiator_id,omitempty"`
	Actor          string              `json:"actor,omitempty"`
	Process        string              `json:"process,omitempty"`
	Detail         string              `json:"detail,omitempty"`
	Method         string              `json:"method,omitempty"`
	Server         string              `json:"server,omitempty"`
	Tool           string              `json:"tool,omitempty"`
	Effect         event.Effect        `json:"effect,omitempty"`
	Changed        bool                `json:"definition_changed,omitempty"`
	Resource       string              `json:"resource,omitempty"`
	Prompt         string              `json:"prompt,omitempty"`
	URL            string              `json:"url,omitempty"`
	RedirectedFrom string              `json:"redirected_from,omitempty"`
	Argv           json.RawMessage     `json:"argv,omitempty"`
	Cwd            string              `json:"cwd,omitempty"`
	User           string              `json:"user,omitempty"`
	Op             string              `json:"op,omitempty"`
	Path           string              `json:"path,omitempty"`
	Size           int64               `json:"size,omitempty"`
}

func eventJSON(ev *event.Event) []byte {
	j := judgedEvent{
		Type: ev.Type, Intent: ev.Intent, VM: ev.VM.ID, InitiatorKind: ev.Initiator.Kind, InitiatorID: ev.Initiator.ID,
		Actor: ev.Actor, Process: ev.Process, Detail: ev.Detail,
	}
	if m := ev.MCP; m != nil {
		j.Method, j.Server, j.Resource, j.Prompt = m.Method, m.Server, m.ResourceURI, m.PromptName
		if t := m.Tool; t != nil {
			j.Tool, j.Effect, j.Changed = t.Name, t.Effect, t.DefinitionChanged
		}
	}
	if h := ev.HTTP; h != nil {
		j.Method, j.URL, j.RedirectedFrom = h.Method, h.Scheme+"://"+hostPort(h)+h.Path, h.RedirectedFrom
		if h.Query != "" {
			j.URL += "?" + h.Query
		}
	}
	if c := ev.Exec; c != nil {
		j.Argv, j.Cwd, j.User = argvJSON(c.Argv), c.Cwd, c.User
	}
	if f := ev.File; f != nil {
		j.Op, j.Path, j.Size = f.Op, f.Path, f.Size
	}
	b, err := json.Marshal(j)
	if err != nil { // argvJSON is the only raw part, and valid
		return nil
	}
	return b
}

func hostPort(h *event.HTTPRequest) string {
	if h.Port == 0 {
		return h.Host
	}
	return net.JoinHostPort(h.Host, strconv.Itoa(h.Port))
}

// matches adds a row for each rule that matched.
func (o *op) matches(ev *event.Event, matches []event.Match) {
	if len(matches) == 0 {
		return
	}
	judged := eventJSON(ev)
	for _, m := range matches {
		o.common(ev)
		o.text(string(ev.Type), m.Rule, m.Action, m.Severity, m.Phase.String(), m.Reason)
		o.integer(truth(m.Broken))
		o.text(m.Digest)
		o.json(judged)
		o.close(insertRow(securityRuleEvents))
	}
}
