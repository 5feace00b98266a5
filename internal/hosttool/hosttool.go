// Package hosttool records the tools that a host agent calls through
// capsem-mcp.
//
// capsem-mcp turns each tool into requests to the service and names the tool in
// their headers. The process that serves such a request takes the whole call
// through its gate before it serves it, so that a call of a host tool is judged
// and has its row like any other; what the request does in turn (a command, a
// file) is judged and recorded as well, under the same trace.
//
// The answer is held back until it is judged. Of an answer that is a stream of
// progress the steps are not: they are the host's own words, and a caller that
// waits for a boot wants to see them while it waits.
package hosttool

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"net/http"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/inspect"
	"github.com/capsem/capsem/internal/jsonrpc"
)

// Gate judges and records: see package gate.
type Gate interface {
	Do(ctx context.Context, ev *event.Event, act func(context.Context) event.Outcome) (event.Verdict, event.Outcome)
}

// Caller says who makes a request.
type Caller func(*http.Request) inspect.Caller

// Record serves requests that are made for a host tool through the gate, and
// others as they are.
func Record(g Gate, caller Caller, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := r.Header.Get(api.HeaderTool)
		if name == "" {
			next.ServeHTTP(w, r)
			return
		}
		ev, err := call(caller(r), r, name)
		if err != nil {
			api.WriteError(w, err)
			return
		}
		held := &answer{header: http.Header{}, steps: w}
		verdict, out := g.Do(r.Context(), ev, func(ctx context.Context) event.Outcome {
			inner := r.Clone(ctx)
			for _, name := range []string{api.HeaderTool, api.HeaderToolArguments, api.HeaderToolCall} {
				inner.Header.Del(name) // what is done in turn is no call of a tool
			}
			inner.Header.Set(api.HeaderTrace, ev.TraceID)
			next.ServeHTTP(held, inner)
			return held.outcome(ctx)
		})
		if verdict.Decision != event.Allow {
			held.fail(w, &api.Error{Code: api.CodeBlocked, Message: out.Error.Message, Rule: verdict.Rule})
			return
		}
		held.release(w)
	})
}

// call is the event of a call as the headers have it. Arguments that two readers
// could understand differently are refused, as they are on the wire.
func call(c inspect.Caller, r *http.Request, name string) (*event.Event, error) {
	invalid := func(problem string) error {
		return &api.Error{Code: api.CodeInvalid, Message: "the headers of a tool call: " + problem}
	}
	arguments, err := base64.StdEncoding.DecodeString(r.Header.Get(api.HeaderToolArguments))
	if err != nil || !json.Valid(arguments) {
		return nil, invalid("the arguments are not base64 of JSON")
	}
	params, err := json.Marshal(map[string]any{"name": name, "arguments": json.RawMessage(arguments)})
	if err != nil {
		return nil, invalid(err.Error())
	}
	id := jsonrpc.Quote(r.Header.Get(api.HeaderToolCall))
	m, err := jsonrpc.Parse(jsonrpc.AppendRequest(nil, id, "tools/call", params))
	if err != nil {
		return nil, invalid(err.Error())
	}
	tool, err := inspect.ParseToolCall(m.Params)
	if err != nil {
		return nil, invalid(err.Error())
	}
	return c.MCP(inspect.Message{
		Method: "tools/call", ID: m.ID, Params: m.Params,
		Origin: event.OriginHost, Transport: "host",
		Call:   &tool,
		Target: inspect.Target{Server: "capsem", Tool: name, ReadOnly: r.Method == http.MethodGet},
	}), nil
}
