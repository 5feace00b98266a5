package hosttool

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/event"
)

// maxAnswer is how large the answer to a host tool can be, in bytes: it is held
// back until it is judged.
const maxAnswer = api.MaxBody

// answer holds a response until it is judged. It is used by one goroutine.
type answer struct {
	header http.Header
	status int
	body   bytes.Buffer
	over   bool
	// steps is where steps of a stream of progress go at once; begun says that
	// some went, so that a failure can no longer be told by a status.
	steps http.ResponseWriter
	begun bool
}

func (a *answer) Header() http.Header { return a.header }

func (a *answer) WriteHeader(status int) {
	if a.status == 0 {
		a.status = status
	}
}

func (a *answer) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	if a.over || a.body.Len()+len(p) > maxAnswer {
		a.over = true
		return 0, tooLarge()
	}
	n, err := a.body.Write(p)
	if a.is(api.ProgressType) {
		a.passSteps()
	}
	return n, err
}

func tooLarge() *api.Error {
	return &api.Error{Code: api.CodeTooLarge, Message: fmt.Sprintf("the answer has more than %d bytes", maxAnswer)}
}

// is reports whether the response has a content type.
func (a *answer) is(contentType string) bool {
	return strings.HasPrefix(a.header.Get("Content-Type"), contentType)
}

// passSteps sends the steps at the beginning of what is held, and nothing else.
func (a *answer) passSteps() {
	for {
		line, _, whole := bytes.Cut(a.body.Bytes(), []byte("\n"))
		var p api.Progress
		if !whole || json.Unmarshal(line, &p) != nil || p.Step == "" || p.Result != nil || p.Error != nil {
			return
		}
		a.body.Next(len(line) + 1)
		if !a.begun {
			a.begun = true
			a.steps.Header().Set("Content-Type", api.ProgressType)
			a.steps.WriteHeader(http.StatusOK)
		}
		a.writeLine(api.Progress{Step: p.Step})
	}
}

// writeLine sends one line of progress.
func (a *answer) writeLine(p api.Progress) {
	if err := json.NewEncoder(a.steps).Encode(p); err != nil {
		return // the caller is gone, and the request's context says so too
	}
	if err := http.NewResponseController(a.steps).Flush(); err != nil {
		return // the line is sent with the next one
	}
}

// outcome is what came of the request, for the judge and the record. One that
// failed after its caller had left was cancelled.
func (a *answer) outcome(ctx context.Context) event.Outcome {
	out := event.Outcome{Status: event.Done, CarriedOut: true, BytesReceived: int64(a.body.Len())}
	if a.over {
		return event.Outcome{Status: event.Failed, CarriedOut: true, Error: &event.Error{Message: tooLarge().Message}}
	}
	body := a.body.Bytes()
	var failed api.ErrorBody
	switch {
	case a.is(api.ProgressType):
		var p api.Progress
		if err := json.Unmarshal(body, &p); err != nil {
			failed.Error = &api.Error{Message: "the answer ended before its result"}
		}
		if p.Error != nil {
			failed.Error = p.Error
		}
		if p.Result != nil {
			out.MCP = toolResult(p.Result)
		}
	case a.is("application/json"):
		out.MCP = toolResult(body)
	case a.is("application/octet-stream"):
		out.MCP = textResult(nil, body)
	}
	if a.status >= http.StatusBadRequest {
		failed.Error = &api.Error{Message: http.StatusText(a.status)}
		var told api.ErrorBody
		if err := json.Unmarshal(body, &told); err == nil && told.Error != nil {
			failed.Error = told.Error
		}
	}
	if failed.Error != nil {
		out.Status, out.Error = event.Failed, &event.Error{Message: failed.Error.Message}
		if ctx.Err() != nil {
			out.Status = event.Cancelled
		}
	}
	return out
}

// toolResult is a JSON answer as the result of a tool, which rules know how to
// read. What a command wrote is base64 in the answer; they see it as text.
func toolResult(body []byte) *event.MCPResponse {
	type output struct{ Stdout, Stderr []byte }
	var command struct {
		output
		Exec output
	}
	if err := json.Unmarshal(body, &command); err != nil {
		return textResult(body) // no command's answer
	}
	return textResult(body, command.Stdout, command.Stderr, command.Exec.Stdout, command.Exec.Stderr)
}

// textResult is the result of a tool with structured content, where that is not
// nil, and texts. Bytes that are no UTF-8 are replaced: this is for rules and the
// record, and not what is sent.
func textResult(structured json.RawMessage, texts ...[]byte) *event.MCPResponse {
	type text struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	var result struct {
		Content    []text          `json:"content"`
		Structured json.RawMessage `json:"structuredContent,omitempty"`
	}
	result.Content, result.Structured = []text{}, structured
	for _, t := range texts {
		if len(t) > 0 {
			result.Content = append(result.Content, text{"text", string(t)})
		}
	}
	raw, err := json.Marshal(result)
	if err != nil {
		raw = structured // no JSON; rules then cannot read it, and block
	}
	return &event.MCPResponse{Message: raw, Result: raw}
}

// release sends what was held.
func (a *answer) release(w http.ResponseWriter) {
	if a.over {
		a.fail(w, tooLarge())
		return
	}
	if !a.begun {
		for name, values := range a.header {
			w.Header()[name] = values
		}
		w.WriteHeader(max(a.status, http.StatusOK))
	}
	if _, err := w.Write(a.body.Bytes()); err != nil {
		return // the caller is gone; the call is recorded all the same
	}
}

// fail answers with e, and with nothing of what was held.
func (a *answer) fail(w http.ResponseWriter, e *api.Error) {
	if a.begun {
		a.writeLine(api.Progress{Error: e})
		return
	}
	api.WriteError(w, e)
}
