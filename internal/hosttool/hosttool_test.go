package hosttool_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/gate"
	"github.com/capsem/capsem/internal/hosttool"
	"github.com/capsem/capsem/internal/inspect"
)

// judge decides as a function does.
type judge func(ev *event.Event, phase event.Phase, out *event.Outcome) event.Verdict

func (j judge) Judge(_ context.Context, ev *event.Event, p event.Phase, out *event.Outcome) event.Verdict {
	return j(ev, p, out)
}

func allow(*event.Event, event.Phase, *event.Outcome) event.Verdict {
	return event.Verdict{Decision: event.Allow}
}

func blockIn(phase event.Phase) judge {
	return func(ev *event.Event, p event.Phase, out *event.Outcome) event.Verdict {
		if p != phase {
			return allow(ev, p, out)
		}
		return event.Verdict{Decision: event.Block, Rule: "profile/no_evil", Reason: "evil"}
	}
}

// tape keeps what was recorded.
type tape struct {
	began    []*event.Event
	outcomes []event.Outcome
}

func (t *tape) Begin(_ context.Context, ev *event.Event, _ event.Verdict) (gate.Receipt, error) {
	t.began = append(t.began, ev)
	return nil, nil
}

func (t *tape) End(_ context.Context, _ gate.Receipt, out event.Outcome, _ event.Verdict) error {
	t.outcomes = append(t.outcomes, out)
	return nil
}

// serve puts next behind the real gate with judge j, on a socket, and returns a
// caller of it.
func serve(t *testing.T, j judge, next http.HandlerFunc) (*caller, *tape) {
	t.Helper()
	rec := &tape{}
	who := func(r *http.Request) inspect.Caller {
		return inspect.Caller{Initiator: event.Initiator{Kind: event.HostAgent, ID: r.Header.Get(api.HeaderClient)}}
	}
	srv := httptest.NewServer(hosttool.Record(gate.New(j, rec), who, next))
	t.Cleanup(srv.Close)
	return &caller{url: srv.URL}, rec
}

// caller makes requests as capsem-mcp does, with the headers of a call or without.
type caller struct {
	url    string
	header http.Header
}

func asTool(c *caller, arguments string) *caller {
	return &caller{url: c.url, header: http.Header{
		api.HeaderTool: {"capsem_exec"}, api.HeaderToolCall: {"7"}, api.HeaderClient: {"editor/1"},
		api.HeaderToolArguments: {base64.StdEncoding.EncodeToString([]byte(arguments))},
	}}
}

// send makes a request; an answer that is a failure is the error.
func (c *caller) send(ctx context.Context, method, path string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.url+path, nil)
	if err != nil {
		return nil, err
	}
	if c.header != nil {
		req.Header = c.header
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil || resp.StatusCode < http.StatusBadRequest {
		return resp, err
	}
	defer resp.Body.Close()
	var failed api.ErrorBody
	if err := json.NewDecoder(resp.Body).Decode(&failed); err != nil {
		return nil, err
	}
	return nil, failed.Error
}

// do decodes the answer into out.
func (c *caller) do(ctx context.Context, method, path string, out any) error {
	resp, err := c.send(ctx, method, path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(out)
}

// follow reads a stream of progress.
func (c *caller) follow(ctx context.Context, step func(string), out any) error {
	resp, err := c.send(ctx, http.MethodPost, "/v1/vms")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	for lines := json.NewDecoder(resp.Body); ; {
		var p api.Progress
		if err := lines.Decode(&p); err != nil {
			return err
		}
		switch {
		case p.Error != nil:
			return p.Error
		case p.Step != "":
			step(p.Step)
		default:
			return json.Unmarshal(p.Result, out)
		}
	}
}

func apiError(t *testing.T, err error) *api.Error {
	t.Helper()
	if err == nil {
		t.Fatal("there is no error")
	}
	return api.AsError(err)
}

func TestACallIsRecordedAsTheClientMadeIt(t *testing.T) {
	c, rec := serve(t, allow, func(w http.ResponseWriter, _ *http.Request) { api.WriteJSON(w, http.StatusOK, api.ServiceInfo{PID: 3}) })
	var got api.ServiceInfo
	if err := asTool(c, `{"id":"box","argv":["ls"]}`).do(t.Context(), "POST", "/v1/exec", &got); err != nil {
		t.Fatal(err)
	}
	if got.PID != 3 {
		t.Errorf("the answer is %+v", got)
	}
	ev := rec.began[0]
	type row struct{ Method, Server, Tool, ID, Arguments, Client string }
	want := row{"tools/call", "capsem", "capsem_exec", `"7"`, `{"id":"box","argv":["ls"]}`, "editor/1"}
	have := row{ev.MCP.Method, ev.MCP.Server, ev.MCP.Tool.Name, string(ev.MCP.RequestID), string(ev.MCP.Arguments), ev.Initiator.ID}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Error(diff)
	}
	if ev.MCP.Tool.Effect != event.Write {
		t.Errorf("a POST is recorded as %q", ev.MCP.Tool.Effect)
	}
	if out := rec.outcomes[0]; out.Status != event.Done || out.MCP == nil {
		t.Errorf("the outcome is %+v", out)
	}
}

func TestARequestThatIsNoToolCallPassesAsItIs(t *testing.T) {
	c, rec := serve(t, blockIn(event.Request), func(w http.ResponseWriter, _ *http.Request) { api.WriteJSON(w, http.StatusOK, api.VMList{}) })
	if err := c.do(t.Context(), "GET", "/v1/vms", &struct{}{}); err != nil {
		t.Error(err)
	}
	if len(rec.began) != 0 {
		t.Errorf("%d calls are recorded", len(rec.began))
	}
}

func TestABlockedCallIsNotServedAndNamesItsRule(t *testing.T) {
	c, rec := serve(t, blockIn(event.Request), func(http.ResponseWriter, *http.Request) { t.Error("the request was served") })
	e := apiError(t, asTool(c, `{}`).do(t.Context(), "POST", "/v1/exec", &struct{}{}))
	if e.Code != api.CodeBlocked || e.Rule != "profile/no_evil" || !strings.Contains(e.Message, "evil") {
		t.Errorf("got %+v", e)
	}
	if len(rec.began) != 1 || len(rec.outcomes) != 0 {
		t.Errorf("recorded %d beginnings and %d outcomes", len(rec.began), len(rec.outcomes))
	}
}

func TestNothingOfABlockedAnswerIsSent(t *testing.T) {
	for name, next := range map[string]http.HandlerFunc{
		"a value": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Secret", "swordfish")
			api.WriteJSON(w, http.StatusOK, map[string]string{"stdout": "swordfish"})
		},
		"a file": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/octet-stream")
			w.Header().Set(api.HeaderFile, `{"path":"swordfish"}`)
			io.WriteString(w, "swordfish")
		},
		"an error": func(w http.ResponseWriter, _ *http.Request) {
			api.WriteError(w, &api.Error{Code: api.CodeNotFound, Message: "swordfish"})
		},
		"a stream of progress": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", api.ProgressType)
			io.WriteString(w, `{"step":"booting"}`+"\n"+`{"result":{"x":"swordfish"}}`+"\n")
		},
	} {
		t.Run(name, func(t *testing.T) {
			rec := &tape{}
			h := hosttool.Record(gate.New(blockIn(event.Response), rec), func(*http.Request) inspect.Caller { return inspect.Caller{} }, next)
			r := httptest.NewRequest("POST", "/v1/exec", nil)
			r.Header.Set(api.HeaderTool, "capsem_exec")
			r.Header.Set(api.HeaderToolArguments, base64.StdEncoding.EncodeToString([]byte(`{}`)))
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			all := w.Body.String()
			for k, v := range w.Header() {
				all += k + strings.Join(v, "")
			}
			if strings.Contains(all, "swordfish") {
				t.Errorf("the answer has the data: %s", all)
			}
			if !strings.Contains(all, "profile/no_evil") {
				t.Errorf("the answer does not name the rule: %s", all)
			}
			if len(rec.outcomes) != 1 || rec.outcomes[0].Status != event.Blocked {
				t.Errorf("recorded %+v", rec.outcomes)
			}
		})
	}
}

// A judge that is slow shows that nothing is sent before it has decided, and
// steps of progress are.
func TestStepsAreSentAtOnceAndTheResultWhenItIsJudged(t *testing.T) {
	judging, decide := make(chan struct{}), make(chan struct{})
	slow := func(ev *event.Event, p event.Phase, out *event.Outcome) event.Verdict {
		if p == event.Response {
			close(judging)
			<-decide
		}
		return allow(ev, p, out)
	}
	c, rec := serve(t, slow, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", api.ProgressType)
		lines := json.NewEncoder(w)
		lines.Encode(api.Progress{Step: "booting"})
		lines.Encode(api.Progress{Step: "waiting for the guest"})
		lines.Encode(api.Progress{Result: json.RawMessage(`{"pid":4}`)})
	})
	var steps []string
	step := func(s string) {
		if steps = append(steps, s); len(steps) == 2 {
			<-judging // both arrived while the result is held back
			close(decide)
		}
	}
	var got api.ServiceInfo
	if err := asTool(c, `{}`).follow(t.Context(), step, &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"booting", "waiting for the guest"}, steps); diff != "" || got.PID != 4 {
		t.Errorf("got %+v, steps %s", got, diff)
	}
	if out := rec.outcomes[0]; out.Status != event.Done || !strings.Contains(string(out.MCP.Result), `{"pid":4}`) {
		t.Errorf("recorded %+v", out)
	}
}

// What a command wrote and a file holds reach the agent as text, so rules on text
// must see it, in whatever form it travels.
func TestRulesSeeTheTextThatAnAgentGets(t *testing.T) {
	secret := func(ev *event.Event, p event.Phase, out *event.Outcome) event.Verdict {
		if p == event.Response && out.MCP != nil && strings.Contains(string(out.MCP.Result), "swordfish") {
			return event.Verdict{Decision: event.Block, Rule: "no_secret"}
		}
		return allow(ev, p, out)
	}
	written := api.ExecResult{Stderr: []byte("\xffswordfish\n")}
	for name, next := range map[string]http.HandlerFunc{
		"a command's output": func(w http.ResponseWriter, _ *http.Request) { api.WriteJSON(w, http.StatusOK, written) },
		"the output of a run": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", api.ProgressType)
			result, err := json.Marshal(api.RunResult{Exec: written})
			if err != nil {
				panic(err)
			}
			json.NewEncoder(w).Encode(api.Progress{Step: "booting"})
			json.NewEncoder(w).Encode(api.Progress{Result: result})
		},
		"a file": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/octet-stream")
			w.Write(written.Stderr)
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, _ := serve(t, secret, next)
			e := apiError(t, asTool(c, `{}`).follow(t.Context(), func(string) {}, &struct{}{}))
			if e.Code != api.CodeBlocked || e.Rule != "no_secret" {
				t.Errorf("got %+v", e)
			}
		})
	}
}

func TestAFailureIsRecordedAsOneWhateverFormItHas(t *testing.T) {
	taken := &api.Error{Code: api.CodeExists, Message: "the name is taken"}
	for name, next := range map[string]http.HandlerFunc{
		"by status": func(w http.ResponseWriter, _ *http.Request) { api.WriteError(w, taken) },
		"in a stream": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", api.ProgressType)
			json.NewEncoder(w).Encode(api.Progress{Error: taken})
		},
		"in a stream, after steps": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", api.ProgressType)
			json.NewEncoder(w).Encode(api.Progress{Step: "booting"})
			json.NewEncoder(w).Encode(api.Progress{Error: taken})
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, rec := serve(t, allow, next)
			e := apiError(t, asTool(c, `{}`).follow(t.Context(), func(string) {}, &struct{}{}))
			if diff := cmp.Diff(taken, e); diff != "" {
				t.Error(diff)
			}
			if out := rec.outcomes[0]; out.Status != event.Failed || out.Error == nil || out.Error.Message != taken.Message {
				t.Errorf("recorded %+v", out)
			}
		})
	}
}

func TestAnAnswerOverTheBoundIsRefusedAndOneAtItIsNot(t *testing.T) {
	for _, over := range []int{-1, 0, 1} {
		c, rec := serve(t, allow, func(w http.ResponseWriter, _ *http.Request) {
			part := make([]byte, 1<<20)
			for left := api.MaxBody + over; left > 0; {
				n, err := w.Write(part[:min(left, len(part))])
				if left -= n; err != nil {
					return
				}
			}
		})
		resp, err := asTool(c, `{}`).send(t.Context(), "GET", "/v1/files")
		if over > 0 {
			if e := apiError(t, err); e.Code != api.CodeTooLarge {
				t.Errorf("%+d: got %v", over, e)
			}
			if out := rec.outcomes[0]; out.Status != event.Failed {
				t.Errorf("%+d: recorded %+v", over, out)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		n, err := io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if err != nil || n != int64(api.MaxBody+over) {
			t.Errorf("%+d: %d bytes arrived, %v", over, n, err)
		}
	}
}

func TestWhatIsServedIsNoToolCallAndHasTheTrace(t *testing.T) {
	var inner http.Header
	c, rec := serve(t, allow, func(w http.ResponseWriter, r *http.Request) {
		inner = r.Header.Clone()
		api.WriteJSON(w, http.StatusOK, struct{}{})
	})
	if err := asTool(c, `{}`).do(t.Context(), "GET", "/v1/vms", &struct{}{}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{api.HeaderTool, api.HeaderToolArguments, api.HeaderToolCall} {
		if inner.Get(name) != "" {
			t.Errorf("%s is still there", name)
		}
	}
	if got, want := inner.Get(api.HeaderTrace), rec.began[0].TraceID; got != want || want == "" {
		t.Errorf("the trace is %q, want %q", got, want)
	}
	if rec.began[0].MCP.Tool.Effect != event.Read {
		t.Errorf("a GET is recorded as %q", rec.began[0].MCP.Tool.Effect)
	}
}

func TestArgumentsThatCanBeReadInTwoWaysAreRefused(t *testing.T) {
	for name, header := range map[string]string{
		"no base64":                  "*",
		"no JSON":                    base64.StdEncoding.EncodeToString([]byte(`{`)),
		"no object":                  base64.StdEncoding.EncodeToString([]byte(`[]`)),
		"nothing":                    "",
		"a name that is there twice": base64.StdEncoding.EncodeToString([]byte(`{"a":1,"a":2}`)),
	} {
		t.Run(name, func(t *testing.T) {
			rec := &tape{}
			h := hosttool.Record(gate.New(judge(allow), rec), func(*http.Request) inspect.Caller { return inspect.Caller{} },
				http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the request was served") }))
			r := httptest.NewRequest("GET", "/v1/vms", nil)
			r.Header.Set(api.HeaderTool, "capsem_list")
			r.Header.Set(api.HeaderToolArguments, header)
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			if w.Code != http.StatusBadRequest {
				t.Errorf("the status is %d", w.Code)
			}
		})
	}
}

func TestACallerThatLeavesIsRecordedAsCancelled(t *testing.T) {
	served, recorded := make(chan struct{}), make(chan struct{})
	rec := &tape{}
	who := func(*http.Request) inspect.Caller { return inspect.Caller{} }
	h := hosttool.Record(gate.New(judge(allow), rec), who, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		close(served)
		<-r.Context().Done()
		api.WriteError(w, r.Context().Err())
	}))
	ctx, leave := context.WithCancel(t.Context())
	r := httptest.NewRequest("POST", "/v1/exec", nil).WithContext(ctx)
	r.Header.Set(api.HeaderTool, "capsem_exec")
	r.Header.Set(api.HeaderToolArguments, base64.StdEncoding.EncodeToString([]byte(`{}`)))
	go func() {
		defer close(recorded)
		h.ServeHTTP(httptest.NewRecorder(), r)
	}()
	<-served
	leave()
	<-recorded
	if got := rec.outcomes[0].Status; got != event.Cancelled {
		t.Errorf("recorded %q", got)
	}
}
