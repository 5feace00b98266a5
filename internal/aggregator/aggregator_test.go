package aggregator_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/aggregator"
	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/toolproto"
)

// rig is the supervisor's end of a program under test.
type rig struct {
	t    *testing.T
	conn *toolproto.Conn
	hang func() // closes the program's stdin

	ready    chan []byte
	notified chan toolproto.Notify
	asked    chan toolproto.ServerRequest
	done     chan error // what Run returned
	drained  chan struct{}

	mu      sync.Mutex
	results map[uint64]chan toolproto.Result
	events  []toolproto.Event
	last    uint64
}

func newRig(t *testing.T, server toolproto.Server) *rig {
	t.Helper()
	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	r := &rig{
		t: t, conn: toolproto.NewConn(outR, inW), hang: func() { _ = inW.Close() }, // a pipe in memory
		ready: make(chan []byte, 1), notified: make(chan toolproto.Notify, 100), asked: make(chan toolproto.ServerRequest, 100),
		done: make(chan error, 1), drained: make(chan struct{}), results: make(map[uint64]chan toolproto.Result),
	}
	go func() {
		err := aggregator.Run(context.Background(), inR, outW, slog.New(slog.DiscardHandler))
		r.done <- errors.Join(err, outW.Close())
	}()
	go func() {
		defer close(r.drained)
		r.read()
	}()
	t.Cleanup(func() {
		r.hang()
		<-r.drained
	})
	if server.Name == "" {
		server.Name = "chaos"
	}
	r.write(&toolproto.Message{Configure: &toolproto.Configure{Version: toolproto.Version, Server: server}})
	return r
}

// chaosRig is a rig with a server in the given mode.
func chaosRig(t *testing.T, mode string) *rig {
	t.Helper()
	return newRig(t, toolproto.Server{Command: "/proc/self/exe", Args: []string{"chaos", mode}})
}

func (r *rig) write(m *toolproto.Message) {
	r.t.Helper()
	if err := r.conn.Write(m); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) read() {
	for {
		m, err := r.conn.Read()
		if err != nil {
			return
		}
		switch {
		case m.Ready != nil:
			r.ready <- m.Ready.InitializeResult
		case m.Notify != nil:
			r.notified <- *m.Notify
		case m.ServerRequest != nil:
			r.asked <- *m.ServerRequest
		case m.Event != nil:
			r.mu.Lock()
			r.events = append(r.events, *m.Event)
			r.mu.Unlock()
		case m.Result != nil:
			r.mu.Lock()
			c := r.results[m.Result.ID]
			r.mu.Unlock()
			c <- *m.Result
		}
	}
}

// awaitReady returns the server's answer to initialize.
func (r *rig) awaitReady() string {
	r.t.Helper()
	select {
	case result := <-r.ready:
		return string(result)
	case err := <-r.done:
		r.t.Fatalf("the program ended: %v; events %+v", err, r.eventList())
	case <-time.After(30 * time.Second):
		r.t.Fatal("not ready")
	}
	return ""
}

// begin makes a call of a tool.
func (r *rig) begin(tool, arguments string, timeout time.Duration) (id uint64, result chan toolproto.Result) {
	r.t.Helper()
	r.mu.Lock()
	r.last++
	id, result = r.last, make(chan toolproto.Result, 2)
	r.results[id] = result
	r.mu.Unlock()
	params := fmt.Appendf(nil, `{"name":%q,"arguments":%s}`, tool, arguments)
	r.write(&toolproto.Message{Call: &toolproto.Call{ID: id, Method: "tools/call", Params: params, TimeoutMS: timeout.Milliseconds()}})
	return id, result
}

func (r *rig) await(result chan toolproto.Result) toolproto.Result {
	r.t.Helper()
	select {
	case got := <-result:
		return got
	case <-time.After(30 * time.Second):
		r.t.Fatal("no result")
		return toolproto.Result{}
	}
}

func (r *rig) call(tool, arguments string) toolproto.Result {
	r.t.Helper()
	_, result := r.begin(tool, arguments, 0)
	return r.await(result)
}

func (r *rig) eventList() []toolproto.Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]toolproto.Event(nil), r.events...)
}

func (r *rig) hasEvent(kind toolproto.EventKind, text string) bool {
	for _, e := range r.eventList() {
		if e.Kind == kind && strings.Contains(e.Text, text) {
			return true
		}
	}
	return false
}

// ended waits for the program, and for all that it wrote, and returns what Run
// did.
func (r *rig) ended(limit time.Duration) error {
	r.t.Helper()
	select {
	case err := <-r.done:
		<-r.drained
		return err
	case <-time.After(limit):
		r.t.Fatalf("the program did not end within %s", limit)
		return nil
	}
}

// works checks that the server still answers.
func (r *rig) works() {
	r.t.Helper()
	got := r.call("params", `{"still":"alive"}`)
	if !strings.Contains(string(got.Message), `"alive"`) {
		r.t.Errorf("it does not answer any more: %+v", got)
	}
}

func TestAnswersAndParamsPassByteForByte(t *testing.T) {
	r := chaosRig(t, "normal")
	want := `{ "protocolVersion":"2025-11-25", "capabilities":{"tools":{}}, "x":1.50}`
	if diff := cmp.Diff(want, r.awaitReady()); diff != "" {
		t.Errorf("initialize result: %s", diff)
	}
	arguments := `{ "n":9007199254740993, "f":1.0, "e":1e3, "s":"\u00e9\/", "":"" , "deep":[[ ]]}`
	got := r.call("params", arguments)
	if diff := cmp.Diff(`{"jsonrpc":"2.0","id":1,"result":{"name":"params","arguments":`+arguments+`}}`, string(got.Message)); diff != "" {
		t.Error(diff)
	}
	got = r.call("no such", `{}`)
	if diff := cmp.Diff(`{"jsonrpc":"2.0","id":2,"error":{"code":-32602,"message":"unknown tool","data":{"n":9007199254740993}}}`, string(got.Message)); diff != "" {
		t.Errorf("the server's own error: %s", diff)
	}
	got = r.call("bytewise", `{}`)
	if !strings.Contains(string(got.Message), "日本") {
		t.Errorf("an answer in single bytes: %s", got.Message)
	}
}

func TestParamsWithLineBreaksStayOneMessage(t *testing.T) {
	r := chaosRig(t, "normal")
	r.awaitReady()
	got := r.call("params", "{\"a\":1,\r\n \"b\":[\n]}")
	if diff := cmp.Diff(`{"jsonrpc":"2.0","id":1,"result":{"name":"params","arguments":{"a":1,   "b":[ ]}}}`, string(got.Message)); diff != "" {
		t.Error(diff)
	}
}

func TestServersThatDoNotStartSayWhy(t *testing.T) {
	for name, test := range map[string]struct {
		server toolproto.Server
		want   string
	}{
		"exits":           {toolproto.Server{Command: "/proc/self/exe", Args: []string{"chaos", "exit"}}, "exit status 3: missing API key"},
		"missing":         {toolproto.Server{Command: "no-such-server", Env: []toolproto.EnvVar{{Name: "PATH", Value: []byte("/bin")}}}, `starting no-such-server: no such program in PATH "/bin"`},
		"unknown version": {toolproto.Server{Command: "/proc/self/exe", Args: []string{"chaos", "unknown-version"}}, `it speaks MCP version "1999-01-01"`},
		"refuses":         {toolproto.Server{Command: "/proc/self/exe", Args: []string{"chaos", "refuses"}}, "it refused initialize: licence expired"},
		"silent":          {toolproto.Server{Command: "/proc/self/exe", Args: []string{"chaos", "silent"}, StartTimeout: 200 * time.Millisecond}, "it did not answer initialize within 200ms"},
		"only noise":      {toolproto.Server{Command: "/proc/self/exe", Args: []string{"chaos", "junk"}}, "it writes no MCP to its stdout"},
		"undefined":       {toolproto.Server{}, "neither a command nor a URL"},
		"both":            {toolproto.Server{Command: "x", URL: "http://127.0.0.1/"}, "both a command and a URL"},
		"no URL":          {toolproto.Server{URL: "ftp://127.0.0.1/"}, "no http or https address"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, test.server)
			if err := r.ended(20 * time.Second); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q in it", err, test.want)
			}
			r.hang()
			if !r.hasEvent(toolproto.EventExit, test.want) {
				t.Errorf("no exit event with %q: %+v", test.want, r.eventList())
			}
		})
	}
}

func TestOlderVersionsAreSpoken(t *testing.T) {
	r := chaosRig(t, "old")
	if got := r.awaitReady(); !strings.Contains(got, "2024-11-05") {
		t.Error(got)
	}
	r.works()
}

func TestNoiseOnStdoutIsReportedAndSkipped(t *testing.T) {
	r := chaosRig(t, "banner")
	r.awaitReady()
	r.works()
	if !r.hasEvent(toolproto.EventJunk, "Welcome to Chaos") || !r.hasEvent(toolproto.EventJunk, "{not json}") {
		t.Errorf("%+v", r.eventList())
	}
}

func TestADyingServerFailsWhatIsInFlight(t *testing.T) {
	for tool, want := range map[string]string{
		"crash":  "server chaos exited: exit status 7: panic: out of cheese",
		"killed": "server chaos exited: killed by signal 9 (killed)",
	} {
		r := chaosRig(t, "normal")
		r.awaitReady()
		_, waiting := r.begin("never", `{}`, 0)
		got := r.call(tool, `{}`)
		for _, result := range []toolproto.Result{got, r.await(waiting)} {
			if diff := cmp.Diff(&toolproto.Error{Code: jsonrpc.CodeInternal, Message: want}, result.Error); diff != "" {
				t.Errorf("%s: %s", tool, diff)
			}
		}
		if err := r.ended(5 * time.Second); err == nil {
			t.Errorf("%s: the program ended without an error", tool)
		}
		if !r.hasEvent(toolproto.EventExit, strings.TrimPrefix(want, "server chaos exited: ")) {
			t.Errorf("%s: %+v", tool, r.eventList())
		}
	}
}

func TestAnAnswerOverTheLimitFailsOnlyItsCall(t *testing.T) {
	r := chaosRig(t, "normal")
	r.awaitReady()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for _, tool := range []string{"huge-first", "huge-last"} {
		got := r.call(tool, `{}`)
		if got.Error == nil || got.Error.Code != jsonrpc.CodeTransport || !strings.Contains(got.Error.Message, "over the limit of 16777216") {
			t.Errorf("%s: %+v", tool, got.Error)
		}
		r.works()
	}
	runtime.ReadMemStats(&after)
	if kept := int64(after.HeapAlloc) - int64(before.HeapAlloc); kept > 48<<20 {
		t.Errorf("%d bytes of it are kept", kept)
	}
	if got := r.call("large", `{}`); got.Error != nil || len(got.Message) != toolproto.MaxPayload {
		t.Errorf("an answer at the limit: %d bytes, %+v", len(got.Message), got.Error)
	}
}

func TestAnAmbiguousAnswerIsWithheld(t *testing.T) {
	r := chaosRig(t, "normal")
	r.awaitReady()
	for tool, detail := range map[string]string{"duplicate": "duplicate_member", "surrogate": "lone_surrogate", "case": "case_variant"} {
		got := r.call(tool, `{}`)
		want := &toolproto.Error{Code: jsonrpc.CodeInternal, Message: "server chaos: its answer is invalid: " + detail}
		if diff := cmp.Diff(want, got.Error); diff != "" || got.Message != nil {
			t.Errorf("%s: %s %s", tool, diff, got.Message)
		}
	}
	r.works()
}

func TestAnAnswerOverSeveralLinesTimesOut(t *testing.T) {
	r := chaosRig(t, "normal")
	r.awaitReady()
	_, result := r.begin("pretty", `{}`, 300*time.Millisecond)
	want := &toolproto.Error{Code: jsonrpc.CodeTimeout, Message: "server chaos did not answer within 300ms"}
	if diff := cmp.Diff(want, r.await(result).Error); diff != "" {
		t.Error(diff)
	}
	r.works()
}

func TestStrangeAnswersDoNotEndTheSession(t *testing.T) {
	r := chaosRig(t, "normal")
	r.awaitReady()
	if got := r.call("strangers", `{}`); !strings.Contains(string(got.Message), `"real":true`) {
		t.Errorf("%+v", got)
	}
	r.works()
}

func TestNotificationsGoUpInOrderWithAnswers(t *testing.T) {
	r := chaosRig(t, "normal")
	r.awaitReady()
	_, result := r.begin("notify", `{}`, 0)
	want := toolproto.Notify{Method: "notifications/progress", Params: []byte(`{"progressToken" : 1.0,"progress":50}`)}
	if diff := cmp.Diff(want, <-r.notified); diff != "" {
		t.Error(diff)
	}
	r.await(result)
}

func TestRequestsOfTheServerAreAnsweredWithItsId(t *testing.T) {
	r := chaosRig(t, "normal")
	r.awaitReady()
	_, _ = r.begin("ask", `{}`, 0)
	asked := <-r.asked
	if diff := cmp.Diff(`{"jsonrpc":"2.0","id":"s-1","method":"roots/list"}`, string(asked.Message)); diff != "" {
		t.Error(diff)
	}
	r.write(&toolproto.Message{ServerResult: &toolproto.ServerResult{ID: asked.ID, Message: []byte(`{"jsonrpc":"2.0","id":"s-1","result":{"roots":[]}}`)}})
	r.works()
}

func TestACancelledCallIsToldToTheServerAndItsAnswerDropped(t *testing.T) {
	r := chaosRig(t, "normal")
	r.awaitReady()
	id, result := r.begin("never", `{}`, 0)
	r.write(&toolproto.Message{Cancel: &toolproto.Cancel{ID: id, Reason: `"why"`}})
	r.works()
	select {
	case got := <-result:
		t.Errorf("a result: %+v", got)
	default:
	}
	r.hang()
	if err := r.ended(10 * time.Second); err != nil {
		t.Error(err)
	}
	if want := fmt.Sprintf(`cancelled {"requestId":%d,"reason":"\"why\""}`, id); !r.hasEvent(toolproto.EventStderr, want) {
		t.Errorf("%+v", r.eventList())
	}
}

func TestTheServersEnvironmentIsWhatWasConfigured(t *testing.T) {
	t.Setenv("CAPSEM_AGGREGATOR_SECRET", "leak")
	r := newRig(t, toolproto.Server{Command: "/proc/self/exe", Args: []string{"chaos", "normal"}, Env: []toolproto.EnvVar{{Name: "TOKEN", Value: []byte("t0p=x")}}})
	r.awaitReady()
	got := r.call("environ", `{}`)
	m, err := jsonrpc.Parse(got.Message)
	if err != nil {
		t.Fatal(err)
	}
	var env []string
	if err := json.Unmarshal(m.Result, &env); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"TOKEN=t0p=x"}, env); diff != "" {
		t.Error(diff)
	}
}

func TestAFloodOfStderrDoesNotBlockTheServer(t *testing.T) {
	for _, mode := range []string{"stderr-long", "stderr-cr"} {
		begin := time.Now()
		r := chaosRig(t, mode)
		r.awaitReady()
		r.works()
		// 100 at once and 20 a second after that.
		if n, limit := len(r.eventList()), 101+20*time.Since(begin).Seconds(); float64(n) > limit {
			t.Errorf("%s: %d events, limit %f", mode, n, limit)
		}
		for _, e := range r.eventList() {
			if len(e.Text) > toolproto.MaxEventText {
				t.Errorf("%s: an event of %d bytes", mode, len(e.Text))
			}
		}
	}
}

func TestShutdownEndsTheServer(t *testing.T) {
	r := chaosRig(t, "normal")
	r.awaitReady()
	begin := time.Now()
	r.write(&toolproto.Message{Shutdown: &toolproto.Shutdown{}})
	if err := r.ended(10 * time.Second); err != nil {
		t.Error(err)
	}
	// It ends by itself: nothing is waited for. (The race detector makes every
	// exit take a second.)
	if took := time.Since(begin); took > 1800*time.Millisecond {
		t.Errorf("it took %s", took)
	}
}

func TestAServerThatIgnoresEverythingIsKilled(t *testing.T) {
	r := chaosRig(t, "stubborn")
	r.awaitReady()
	begin := time.Now()
	r.hang()
	if err := r.ended(10 * time.Second); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
}

func TestASlowCallHoldsUpNoOther(t *testing.T) {
	r := chaosRig(t, "normal")
	r.awaitReady()
	_, slow := r.begin("never", `{}`, 0)
	var wait sync.WaitGroup
	for i := range 200 {
		arguments := fmt.Sprintf(`{"i":%d,"pad":%q}`, i, strings.Repeat("p", i*100))
		_, result := r.begin("params", arguments, 0)
		wait.Go(func() {
			if got := r.await(result); !strings.Contains(string(got.Message), arguments) {
				t.Errorf("call %d got another's answer", i)
			}
		})
	}
	wait.Wait()
	select {
	case got := <-slow:
		t.Errorf("the slow call has an answer: %+v", got)
	default:
	}
}
