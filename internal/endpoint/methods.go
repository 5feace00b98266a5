package endpoint

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/inspect"
	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/route"
)

// versions are the protocol versions that initialize negotiates, newest first.
var versions = []string{"2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"}

// answer serves one request.
func (c *conn) answer(ctx context.Context, who inspect.Caller, m jsonrpc.Message) []byte {
	timeout := RequestTimeout
	if m.Method == "tools/call" {
		timeout = CallTimeout
	}
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("no answer within %s", timeout))
	defer cancel()
	if m.Method == "tools/call" {
		return c.call(ctx, who, m)
	}
	return c.own(ctx, who, m, c.local(m))
}

// local is how we answer a method that no server is asked for.
func (c *conn) local(m jsonrpc.Message) func(context.Context) (json.RawMessage, *event.Error) {
	switch m.Method {
	case "initialize":
		return func(context.Context) (json.RawMessage, *event.Error) { return c.initialize(m.Params) }
	case "ping":
		return func(context.Context) (json.RawMessage, *event.Error) { return json.RawMessage(`{}`), nil }
	case "tools/list":
		return func(ctx context.Context) (json.RawMessage, *event.Error) { return c.list(ctx, m.Params) }
	}
	return func(context.Context) (json.RawMessage, *event.Error) {
		return nil, &event.Error{Code: jsonrpc.CodeMethodNotFound, Message: "method not found"}
	}
}

// own takes a request that we answer ourselves through the gate.
func (c *conn) own(ctx context.Context, who inspect.Caller, m jsonrpc.Message, do func(context.Context) (json.RawMessage, *event.Error)) []byte {
	ev := who.MCP(inspect.Message{
		Method: m.Method, ID: m.ID, Params: m.Params, Origin: event.OriginMCP, Transport: "vsock",
	})
	_, out := c.e.opts.Gate.Do(ctx, ev, func(ctx context.Context) event.Outcome {
		result, failure := do(ctx)
		if failure != nil {
			return failed(ctx, failure, true)
		}
		return event.Outcome{
			Status: event.Done, CarriedOut: true, BytesReceived: int64(len(result)),
			MCP: &event.MCPResponse{Message: jsonrpc.AppendResult(nil, m.ID, result), Result: result},
		}
	})
	return reply(m.ID, ev, out)
}

// busy answers a request for which there is no room. A tools/call has its row
// all the same.
func (c *conn) busy(ctx context.Context, who inspect.Caller, m jsonrpc.Message, connFull bool) []byte {
	text := fmt.Sprintf("busy: %d requests or %d bytes are under way; wait for answers", MaxInFlight, MaxHeld)
	if connFull {
		text = fmt.Sprintf("busy: %d requests are in flight on this connection; wait for answers", MaxInFlightConn)
	}
	failure := &event.Error{Code: jsonrpc.CodeTimeout, Message: text}
	msg := inspect.Message{Method: m.Method, ID: m.ID, Params: m.Params, Origin: event.OriginMCP, Transport: "vsock"}
	if m.Method == "tools/call" {
		tc, err := inspect.ParseToolCall(m.Params)
		if err != nil {
			tc.Arguments = nil
		}
		msg.Call = &tc
	}
	ev := who.MCP(msg)
	_, out := c.e.opts.Gate.Do(ctx, ev, func(ctx context.Context) event.Outcome { return failed(ctx, failure, false) })
	return reply(m.ID, ev, out)
}

// call takes a tools/call to the server that has the tool.
func (c *conn) call(ctx context.Context, who inspect.Caller, m jsonrpc.Message) []byte {
	tc, parseErr := inspect.ParseToolCall(m.Params)
	msg := inspect.Message{
		Method: m.Method, ID: m.ID, Params: m.Params, Origin: event.OriginMCP, Transport: "vsock", Call: &tc,
	}
	var entry route.Entry
	var failure error
	if parseErr != nil {
		failure = &event.Error{Code: jsonrpc.CodeInvalidParams, Message: parseErr.Error()}
	} else {
		if entry, failure = c.e.opts.Catalog.Resolve(ctx, tc.Name); failure == nil {
			msg.Target = inspect.Target{Server: entry.Server, Tool: entry.Tool, ReadOnly: entry.ReadOnly, Digest: entry.Digest}
			if entry.Server == "builtin" {
				msg.Origin = event.OriginBuiltin
			}
		}
	}
	ev := who.MCP(msg)
	_, out := c.e.opts.Gate.Do(ctx, ev, func(ctx context.Context) event.Outcome {
		if failure != nil {
			return failed(ctx, asEventError(failure), false)
		}
		return c.forward(inspect.WithTrace(ctx, ev), m, entry)
	})
	return reply(m.ID, ev, out)
}

// ErrUnknownTool answers for a tool that does not exist, and in the same words
// for one that must not be seen.
var ErrUnknownTool = &event.Error{Code: jsonrpc.CodeInvalidParams, Message: "unknown tool"}

// forward sends the params on, with the server's own name for the tool.
func (c *conn) forward(ctx context.Context, m jsonrpc.Message, entry route.Entry) event.Outcome {
	start, end, ok := jsonrpc.Find(m.Params, "name")
	if !ok {
		return failed(ctx, &event.Error{Code: jsonrpc.CodeInvalidParams, Message: "params.name is missing"}, false)
	}
	params := jsonrpc.Splice(m.Params, jsonrpc.Edit{Start: start, End: end, With: jsonrpc.Quote(entry.Tool)})
	answer, err := c.e.opts.Catalog.Call(ctx, entry.Server, m.Method, params)
	if err != nil {
		out := failed(ctx, asEventError(err), true)
		out.BytesSent = int64(len(params))
		return out
	}
	out := c.received(ctx, entry.Server, answer)
	out.BytesSent, out.BytesReceived = int64(len(params)), int64(len(answer))
	return out
}

// received reads a server's answer as strictly as a guest's message: what two
// parsers could read differently is kept from the guest.
func (c *conn) received(ctx context.Context, server string, answer json.RawMessage) event.Outcome {
	m, err := jsonrpc.Parse(answer)
	if err == nil && m.Kind != jsonrpc.Response {
		err = &jsonrpc.Error{Detail: "no_response"}
	}
	if err != nil {
		var bad *jsonrpc.Error
		detail := "unreadable"
		if errors.As(err, &bad) {
			detail = string(bad.Detail)
		}
		c.refuse(ctx, Refused{ToClient: true, Server: server, Code: jsonrpc.CodeInternal, Detail: "answer: " + detail})
		return failed(ctx, &event.Error{Code: jsonrpc.CodeInternal, Message: fmt.Sprintf("server %s sent an answer that is malformed (%s)", server, detail)}, true)
	}
	out := event.Outcome{Status: event.Done, CarriedOut: true, MCP: &event.MCPResponse{Message: m.Raw, Result: m.Result}}
	if m.Error != nil {
		object, ok := jsonrpc.ParseError(m.Error)
		if !ok {
			return failed(ctx, &event.Error{Code: jsonrpc.CodeInternal, Message: fmt.Sprintf("server %s sent an error that is malformed", server)}, true)
		}
		out.Status = event.Failed
		out.Error = &event.Error{Code: int(object.Code), Message: object.Message, Data: object.Data}
		return out
	}
	if v, ok := jsonrpc.Member(m.Result, "isError"); ok {
		out.MCP.IsError = bytes.Equal(v, []byte("true"))
	}
	return out
}

// failed is an outcome without an answer. What ended ctx is the cause, where it
// ended.
func failed(ctx context.Context, e *event.Error, carriedOut bool) event.Outcome {
	out := event.Outcome{Status: event.Failed, CarriedOut: carriedOut, Error: e}
	switch cause := context.Cause(ctx); {
	case cause == nil:
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		out.Status, out.Error = event.Timeout, &event.Error{Code: jsonrpc.CodeTimeout, Message: "timeout: " + cause.Error()}
	default:
		out.Status, out.Error = event.Cancelled, &event.Error{Code: jsonrpc.CodeTimeout, Message: "cancelled: " + cause.Error()}
	}
	return out
}

func asEventError(err error) *event.Error {
	var e *event.Error
	if errors.As(err, &e) {
		return e
	}
	return &event.Error{Code: jsonrpc.CodeInternal, Message: err.Error()}
}

// reply is the answer to a request. A server's own goes out as the bytes that
// came, but for the id.
func reply(id json.RawMessage, ev *event.Event, out event.Outcome) []byte {
	if out.MCP != nil {
		if m, err := jsonrpc.Parse(out.MCP.Message); err == nil {
			return m.WithID(id)
		}
	}
	e := out.Error
	if e == nil {
		e = &event.Error{Message: "no answer"}
	}
	if out.Status == event.Blocked {
		return jsonrpc.AppendError(nil, id, jsonrpc.CodeInvalidRequest, e.Message, blockData(ev, out))
	}
	code := e.Code
	if code == 0 {
		code = jsonrpc.CodeInternal
	}
	return jsonrpc.AppendError(nil, id, code, e.Message, e.Data)
}

// notification takes a message that nobody answers.
func (c *conn) notification(ctx context.Context, who inspect.Caller, payload []byte) {
	m, err := jsonrpc.Parse(payload)
	var bad *jsonrpc.Error
	switch {
	case errors.As(err, &bad):
		c.refuse(ctx, Refused{Method: bad.Method, ID: bad.ID, Detail: string(bad.Detail)})
		return
	case err != nil:
		c.refuse(ctx, Refused{Detail: err.Error()})
		return
	case m.Kind != jsonrpc.Notification:
		c.refuse(ctx, Refused{Method: m.Method, ID: m.ID, Detail: "notification: it has an id"})
		return
	}
	ev := who.MCP(inspect.Message{Method: m.Method, Params: m.Params, Origin: event.OriginMCP, Transport: "vsock"})
	c.e.opts.Gate.Do(ctx, ev, func(context.Context) event.Outcome {
		switch m.Method {
		case "notifications/initialized":
			c.mu.Lock()
			c.initialized = true
			c.mu.Unlock()
		case "notifications/cancelled":
			c.cancelRequest(m.Params)
		}
		return event.Outcome{Status: event.Done, CarriedOut: true}
	})
}

// cancelRequest ends the request that a notifications/cancelled names.
func (c *conn) cancelRequest(params json.RawMessage) {
	id, ok := jsonrpc.Member(params, "requestId")
	if !ok {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.requests {
		if bytes.Equal(r.id, id) {
			r.cancel(errCancelled)
		}
	}
}

// initialize negotiates the version: the client's where we speak it, else our
// newest.
func (c *conn) initialize(params json.RawMessage) (json.RawMessage, *event.Error) {
	raw, _ := jsonrpc.Member(params, "protocolVersion")
	version, ok := jsonrpc.String(raw)
	if !ok {
		return nil, &event.Error{Code: jsonrpc.CodeInvalidParams, Message: "params.protocolVersion must be a string"}
	}
	if !slices.Contains(versions, version) {
		version = versions[0]
	}
	return json.RawMessage(fmt.Sprintf(
		`{"protocolVersion":%q,"capabilities":{"tools":{"listChanged":true}},"serverInfo":{"name":"capsem","title":"Capsem","version":%s},`+
			`"instructions":"Tools of several servers, named server__tool. Calls are judged by the sandbox's policy and recorded."}`,
		version, jsonrpc.Quote(c.e.opts.Version))), nil
}

// list is one page of tools, each as its server lists it but for the name.
func (c *conn) list(ctx context.Context, params json.RawMessage) (json.RawMessage, *event.Error) {
	wait, cancel := context.WithTimeout(ctx, ListWait)
	defer cancel()
	table := c.e.opts.Catalog.Table(wait)
	tools := table.Tools()
	from, err := readCursor(params, tools)
	if err != nil {
		return nil, &event.Error{Code: jsonrpc.CodeInvalidParams, Message: err.Error()}
	}
	c.mu.Lock()
	c.listed = table
	c.mu.Unlock()
	page := []byte(`{"tools":[`)
	next := from
	for ; next < len(tools); next++ {
		def := tools[next].Definition
		start, end, ok := jsonrpc.Find(def, "name")
		if !ok {
			continue
		}
		if next > from && len(page)+len(def) > ListPage {
			break
		}
		if page[len(page)-1] != '[' {
			page = append(page, ',')
		}
		page = append(page, jsonrpc.Splice(def, jsonrpc.Edit{Start: start, End: end, With: jsonrpc.Quote(tools[next].Name)})...)
	}
	page = append(page, ']')
	if next < len(tools) {
		page = append(append(page, `,"nextCursor":`...), jsonrpc.Quote(cursor(next, tools))...)
	}
	return append(page, '}'), nil
}

// cursor names a place in a list by the tool that stands there, so that a list
// that changed in between is noticed.
func cursor(at int, tools []route.Entry) string {
	return base64.RawURLEncoding.EncodeToString([]byte(strconv.Itoa(at) + ":" + tools[at].Name))
}

var errCursor = errors.New("params.cursor is not one of this list; list again from the start")

func readCursor(params json.RawMessage, tools []route.Entry) (int, error) {
	raw, ok := jsonrpc.Member(params, "cursor")
	if !ok {
		return 0, nil
	}
	s, ok := jsonrpc.String(raw)
	if !ok {
		return 0, errCursor
	}
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err != nil {
		return 0, errCursor
	}
	n, name, ok := strings.Cut(string(b), ":")
	at, err := strconv.Atoi(n)
	if !ok || err != nil || at < 0 || at >= len(tools) || tools[at].Name != name {
		return 0, errCursor
	}
	return at, nil
}

func blockData(ev *event.Event, out event.Outcome) json.RawMessage {
	return json.RawMessage(fmt.Sprintf(`{"capsem":{"decision":"block","rule":%s,"event":%s}}`,
		jsonrpc.Quote(out.Error.Rule), jsonrpc.Quote(ev.ID)))
}
