// Package hosttool records the tools that a host agent calls through
// capsem-mcp.
//
// capsem-mcp turns each tool into requests to the service and names the tool in
// their headers. The process that serves such a request takes the whole call
// through its gate before it serves it, so that a call of a host tool is judged
// and has its row like any other; what the request does in turn (a command, a
// file) is judged and recorded as well, under the same trace.
package hosttool

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/inspect"
)

// maxAnswer is how large the answer to a host tool can be, in bytes: it is held
// back until it is judged.
const maxAnswer = api.MaxBody

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
		arguments, err := base64.StdEncoding.DecodeString(r.Header.Get(api.HeaderToolArguments))
		if err != nil || !json.Valid(arguments) {
			api.WriteError(w, &api.Error{Code: api.CodeInvalid, Message: "the tool's arguments are not base64 of JSON"})
			return
		}
		ev := call(caller(r), r, name, arguments)
		held := &answer{header: http.Header{}}
		verdict, out := g.Do(r.Context(), ev, func(ctx context.Context) event.Outcome {
			inner := r.Clone(ctx)
			inner.Header.Del(api.HeaderTool)
			inner.Header.Set(api.HeaderTrace, ev.TraceID)
			next.ServeHTTP(held, inner)
			return held.outcome()
		})
		if verdict.Decision != event.Allow {
			api.WriteError(w, &api.Error{Code: api.CodeBlocked, Message: out.Error.Message, Rule: verdict.Rule})
			return
		}
		held.release(w)
	})
}

func call(c inspect.Caller, r *http.Request, name string, arguments json.RawMessage) *event.Event {
	id, err := json.Marshal(r.Header.Get(api.HeaderToolCall))
	if err != nil {
		id = nil // a string always encodes
	}
	params, err := json.Marshal(map[string]any{"name": name, "arguments": arguments})
	if err != nil {
		params = arguments // valid JSON always encodes
	}
	return c.MCP(inspect.Message{
		Method: "tools/call", ID: id, Params: params,
		Origin: event.OriginHost, Transport: "host",
		Call:   &inspect.ToolCall{Name: name, Arguments: arguments},
		Target: inspect.Target{Server: "capsem", Tool: name, ReadOnly: r.Method == http.MethodGet},
	})
}

// answer holds a response until it is judged.
type answer struct {
	header http.Header
	status int
	body   bytes.Buffer
	over   bool
}

func (a *answer) Header() http.Header { return a.header }

func (a *answer) WriteHeader(status int) {
	if a.status == 0 {
		a.status = status
	}
}

func (a *answer) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	if a.body.Len()+len(p) > maxAnswer {
		a.over = true
		return 0, fmt.Errorf("the answer has more than %d bytes", maxAnswer)
	}
	return a.body.Write(p)
}

func (a *answer) outcome() event.Outcome {
	out := event.Outcome{Status: event.Done, CarriedOut: true, BytesReceived: int64(a.body.Len())}
	if a.over {
		a.header, a.status = http.Header{}, http.StatusRequestEntityTooLarge
		a.body.Reset()
		return event.Outcome{Status: event.Failed, CarriedOut: true, Error: &event.Error{Message: "the answer is too large"}}
	}
	if strings.HasPrefix(a.header.Get("Content-Type"), "application/json") {
		out.MCP = &event.MCPResponse{Message: a.body.Bytes(), Result: a.body.Bytes()}
	}
	if a.status >= http.StatusBadRequest {
		out.Status, out.Error = event.Failed, &event.Error{Message: http.StatusText(a.status)}
		var body api.ErrorBody
		if err := json.Unmarshal(a.body.Bytes(), &body); err == nil && body.Error != nil {
			out.Error.Message = body.Error.Message
		}
	}
	return out
}

func (a *answer) release(w http.ResponseWriter) {
	if a.over {
		api.WriteError(w, &api.Error{Code: api.CodeTooLarge, Message: fmt.Sprintf("the answer has more than %d bytes", maxAnswer)})
		return
	}
	for name, values := range a.header {
		w.Header()[name] = values
	}
	w.WriteHeader(max(a.status, http.StatusOK))
	if _, err := w.Write(a.body.Bytes()); err != nil {
		return // the caller is gone; the call is recorded all the same
	}
}
