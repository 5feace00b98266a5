package upstream_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/toolproto"
	"github.com/capsem/capsem/internal/upstream"
)

// process is a tool process in this one: a function on the other ends of real
// pipes.
type process struct {
	conn   *toolproto.Conn
	in     *os.File
	out    *os.File
	killed chan struct{}
	once   sync.Once
	done   chan struct{}
	err    error
}

func (p *process) Wait() error {
	<-p.done
	return p.err
}

// Kill does what the death of a process does to its pipes.
func (p *process) Kill() error {
	p.once.Do(func() {
		close(p.killed)
		_ = p.in.Close()
		_ = p.out.Close()
	})
	return nil
}

// serve makes a StartProcess of what each life of a process does, the first one
// first; the last one is that of all further lives.
func serve(t *testing.T, lives ...func(p *process) error) func(context.Context, child.Command) (upstream.Process, error) {
	t.Helper()
	n := 0
	return func(_ context.Context, cmd child.Command) (upstream.Process, error) {
		live := lives[min(n, len(lives)-1)]
		n++
		p := &process{in: reopen(t, cmd.Stdin), out: reopen(t, cmd.Stdout), killed: make(chan struct{}), done: make(chan struct{})}
		p.conn = toolproto.NewConn(p.in, p.out)
		go func() {
			p.err = live(p)
			_ = p.Kill()
			close(p.done)
		}()
		return p, nil
	}
}

func reopen(t *testing.T, f *os.File) *os.File {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		t.Error(err)
	}
	return os.NewFile(uintptr(fd), f.Name())
}

const initialized = `{ "protocolVersion":"2025-11-25" }`

// greet is the start of an orderly process.
func (p *process) greet() error {
	if err := p.conn.Write(&toolproto.Message{Hello: &toolproto.Hello{Version: toolproto.Version}}); err != nil {
		return err
	}
	m, err := p.conn.Read()
	if err != nil {
		return err
	}
	if m.Configure == nil || m.Configure.Server.Name != "fake" {
		return fmt.Errorf("configured with %+v", m)
	}
	return p.conn.Write(&toolproto.Message{Ready: &toolproto.Ready{InitializeResult: []byte(initialized)}})
}

func (p *process) say(m toolproto.Message) error { return p.conn.Write(&m) }

// orderly is a process that does handle for every message.
func orderly(handle func(p *process, m *toolproto.Message) error) func(*process) error {
	return func(p *process) error {
		if err := p.greet(); err != nil {
			return err
		}
		for {
			m, err := p.conn.Read()
			if err != nil || m.Shutdown != nil {
				return nil
			}
			if err := handle(p, m); err != nil {
				return err
			}
		}
	}
}

// echo answers every call with its own params.
func echo(p *process, m *toolproto.Message) error {
	if m.Call == nil {
		return nil
	}
	return p.say(toolproto.Message{Result: &toolproto.Result{ID: m.Call.ID, Message: fmt.Appendf(nil, `{"jsonrpc":"2.0","id":%d,"result":%s}`, m.Call.ID, m.Call.Params)}})
}

// mute answers nothing.
func mute(*process, *toolproto.Message) error { return nil }

func start(t *testing.T, opts upstream.Options) *upstream.Upstream {
	t.Helper()
	opts.Server.Name = "fake"
	opts.Log = slog.New(slog.DiscardHandler)
	u := upstream.Start(t.Context(), opts)
	t.Cleanup(u.Close)
	return u
}

func wantError(t *testing.T, err error, code int, text string) {
	t.Helper()
	var e *event.Error
	if !errors.As(err, &e) || e.Code != code || !strings.Contains(e.Message, text) {
		t.Errorf("got %v, want code %d and %q", err, code, text)
	}
}

func TestACallWaitsForTheStartAndGetsTheAnswerAsItCame(t *testing.T) {
	u := start(t, upstream.Options{StartProcess: serve(t, orderly(echo))})
	got, err := u.Call(t.Context(), "tools/call", []byte(`{ "n":1.0 }`), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(`{"jsonrpc":"2.0","id":1,"result":{ "n":1.0 }}`, string(got)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(initialized, string(u.InitializeResult())); diff != "" {
		t.Error(diff)
	}
}

func TestTheServersFailureIsTheCalls(t *testing.T) {
	u := start(t, upstream.Options{StartProcess: serve(t, orderly(func(p *process, m *toolproto.Message) error {
		return p.say(toolproto.Message{Result: &toolproto.Result{ID: m.Call.ID, Error: &toolproto.Error{Code: -32001, Message: "lost"}}})
	}))})
	_, err := u.Call(t.Context(), "x", nil, time.Minute)
	if diff := cmp.Diff(error(&event.Error{Code: -32001, Message: "lost"}), err); diff != "" {
		t.Error(diff)
	}
}

func TestDeathFailsCallsAtOnceAndNothingIsRetried(t *testing.T) {
	var mu sync.Mutex
	var ids []uint64
	dying := func(p *process) error {
		if err := p.greet(); err != nil {
			return err
		}
		m, err := p.conn.Read()
		if err != nil {
			return err
		}
		mu.Lock()
		ids = append(ids, m.Call.ID)
		mu.Unlock()
		return p.say(toolproto.Message{Event: &toolproto.Event{Kind: toolproto.EventExit, Text: "exit status 7: out of cheese"}})
	}
	var states []upstream.State
	ready := make(chan struct{}, 2)
	u := start(t, upstream.Options{
		StartProcess: serve(t, dying, orderly(func(p *process, m *toolproto.Message) error {
			mu.Lock()
			ids = append(ids, m.Call.ID)
			mu.Unlock()
			return echo(p, m)
		})),
		OnState: func(s upstream.State, _ error) {
			mu.Lock()
			defer mu.Unlock()
			states = append(states, s)
			if s == upstream.Ready {
				ready <- struct{}{}
			}
		},
	})
	_, err := u.Call(t.Context(), "x", []byte(`{}`), time.Minute)
	wantError(t, err, jsonrpc.CodeInternal, "server fake exited: exit status 7: out of cheese")
	_, err = u.Call(t.Context(), "x", []byte(`{}`), time.Minute)
	wantError(t, err, jsonrpc.CodeInternal, "server fake exited: exit status 7: out of cheese")
	<-ready
	<-ready
	if _, err = u.Call(t.Context(), "x", []byte(`{}`), time.Minute); err != nil {
		t.Error(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(ids) != 2 || ids[0] >= ids[1] {
		t.Errorf("ids of the calls that reached it: %d", ids)
	}
	if diff := cmp.Diff([]upstream.State{upstream.Starting, upstream.Ready, upstream.Backoff, upstream.Starting, upstream.Ready}, states); diff != "" {
		t.Error(diff)
	}
}

func TestADeathWithoutWordsIsExplainedByItsStatus(t *testing.T) {
	u := start(t, upstream.Options{StartProcess: serve(t, func(p *process) error {
		if err := p.greet(); err != nil {
			return err
		}
		if _, err := p.conn.Read(); err != nil {
			return err
		}
		return &child.ExitError{Program: "/opt/host/tool", Code: -1, Signal: 9}
	})})
	_, err := u.Call(t.Context(), "x", nil, time.Minute)
	wantError(t, err, jsonrpc.CodeInternal, "server fake exited: its process ended: killed by signal 9")
}

func TestStartsAreRepeatedLaterAndLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var waits []time.Duration
		var last time.Time
		enough := make(chan struct{})
		u := upstream.Start(t.Context(), upstream.Options{
			Log: slog.New(slog.DiscardHandler),
			StartProcess: func(context.Context, child.Command) (upstream.Process, error) {
				if !last.IsZero() {
					waits = append(waits, time.Since(last))
				}
				last = time.Now()
				if len(waits) == 10 {
					close(enough)
				}
				return nil, errors.New("no memory")
			},
		})
		<-enough
		u.Close()
		want := []time.Duration{
			200 * time.Millisecond, 400 * time.Millisecond, 800 * time.Millisecond, 1600 * time.Millisecond, 3200 * time.Millisecond,
			6400 * time.Millisecond, 12800 * time.Millisecond, 25600 * time.Millisecond, 30 * time.Second, 30 * time.Second,
		}
		if diff := cmp.Diff(want, waits); diff != "" {
			t.Error(diff)
		}
	})
}

func TestWhatCannotEverStartIsNotTriedAgain(t *testing.T) {
	for name, opts := range map[string]upstream.Options{
		"program is missing": {StartProcess: func(context.Context, child.Command) (upstream.Process, error) {
			return nil, fmt.Errorf("starting capsem-aggregator: %w", fs.ErrNotExist)
		}},
		"another version": {StartProcess: serve(t, func(p *process) error {
			if err := p.say(toolproto.Message{Hello: &toolproto.Hello{Version: 99}}); err != nil {
				return err
			}
			<-p.killed
			return nil
		})},
	} {
		u := start(t, opts)
		_, err := u.Call(t.Context(), "x", nil, time.Minute)
		wantError(t, err, jsonrpc.CodeInternal, "server fake exited:")
		if state, _ := u.State(); state != upstream.Failed {
			t.Errorf("%s: %s", name, state)
		}
	}
}

func TestAProcessThatBreaksTheProtocolIsKilled(t *testing.T) {
	result := func(id uint64) toolproto.Message {
		return toolproto.Message{Result: &toolproto.Result{ID: id, Message: []byte("{}")}}
	}
	after := func(messages ...toolproto.Message) func(*process) error {
		return func(p *process) error {
			if err := p.greet(); err != nil {
				return err
			}
			for _, m := range messages {
				if err := p.say(m); err != nil {
					break // it was killed
				}
			}
			<-p.killed
			return nil
		}
	}
	for name, test := range map[string]struct {
		live func(*process) error
		want string
	}{
		"an answer to nothing": {after(result(1000)), "answered a call that was never made"},
		"ready twice":          {after(toolproto.Message{Ready: &toolproto.Ready{InitializeResult: []byte("{}")}}), "was ready twice"},
		"hello twice":          {after(toolproto.Message{Hello: &toolproto.Hello{Version: 1}}), "said hello twice"},
		"our own messages":     {after(toolproto.Message{Shutdown: &toolproto.Shutdown{}}), "sent what only the supervisor sends"},
		"no hello": {func(p *process) error {
			if err := p.say(toolproto.Message{Ready: &toolproto.Ready{}}); err != nil {
				return err
			}
			<-p.killed
			return nil
		}, "did not say hello first"},
		"no MessagePack": {func(p *process) error {
			if _, err := p.out.WriteString("\x00\x00\x00\x05\xdd\xff\xff\xff\xff"); err != nil {
				return err
			}
			<-p.killed
			return nil
		}, "broke the protocol"},
		"a frame without end": {func(p *process) error {
			if _, err := p.out.WriteString("\xff\xff\xff\xff"); err != nil {
				return err
			}
			<-p.killed
			return nil
		}, "broke the protocol"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			reasons := make(chan error, 100)
			start(t, upstream.Options{StartProcess: serve(t, test.live, orderly(mute)), OnState: func(s upstream.State, reason error) {
				if s == upstream.Backoff || s == upstream.Failed {
					reasons <- reason
				}
			}})
			if err := <-reasons; err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

func TestAProcessThatDoesNotReadHoldsNobodyUp(t *testing.T) {
	u := start(t, upstream.Options{StartProcess: serve(t, func(p *process) error {
		if err := p.greet(); err != nil {
			return err
		}
		<-p.killed
		return nil
	})})
	if err := u.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	params := []byte(`"` + strings.Repeat("x", 8<<20) + `"`)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	busy := make(chan error, 20)
	for range 20 {
		go func() {
			_, err := u.Call(ctx, "x", params, time.Minute)
			busy <- err
		}()
	}
	for range 20 - upstream.MaxBytes/len(params) {
		wantError(t, <-busy, jsonrpc.CodeTimeout, "server fake is busy")
	}
}

func TestAMessageOverTheLimitIsRefusedWithTheSizes(t *testing.T) {
	u := start(t, upstream.Options{StartProcess: serve(t, orderly(echo))})
	_, err := u.Call(t.Context(), "x", make([]byte, toolproto.MaxPayload+1), time.Minute)
	wantError(t, err, jsonrpc.CodeTransport, "a message of 16777217 bytes for server fake is over the limit of 16777216")
	if _, err := u.Call(t.Context(), "x", []byte(`{}`), time.Minute); err != nil {
		t.Errorf("after that: %v", err)
	}
}

func TestTheServerIsToldOfACallThatNobodyWaitsFor(t *testing.T) {
	cancels := make(chan toolproto.Cancel, 2)
	called := make(chan struct{}, 2)
	u := start(t, upstream.Options{StartProcess: serve(t, orderly(func(_ *process, m *toolproto.Message) error {
		if m.Call != nil {
			called <- struct{}{}
		}
		if m.Cancel != nil {
			cancels <- *m.Cancel
		}
		return nil
	}))})
	_, err := u.Call(t.Context(), "x", nil, 50*time.Millisecond)
	wantError(t, err, jsonrpc.CodeTimeout, "server fake did not answer within 50ms")
	if diff := cmp.Diff(toolproto.Cancel{ID: 1, Reason: "timed out"}, <-cancels); diff != "" {
		t.Error(diff)
	}
	<-called
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("the guest has gone")
	go func() {
		<-called
		cancel(why)
	}()
	if _, err := u.Call(ctx, "x", nil, time.Minute); !errors.Is(err, why) {
		t.Errorf("got %v", err)
	}
	if diff := cmp.Diff(toolproto.Cancel{ID: 2, Reason: "cancelled"}, <-cancels); diff != "" {
		t.Error(diff)
	}
}

func TestProgressGivesACallMoreTime(t *testing.T) {
	u := start(t, upstream.Options{StartProcess: serve(t, orderly(func(p *process, m *toolproto.Message) error {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for range 6 {
			<-tick.C
			if err := p.say(toolproto.Message{Notify: &toolproto.Notify{Method: "notifications/progress", Params: []byte(`{"progressToken":"t","progress":1}`)}}); err != nil {
				return err
			}
		}
		return echo(p, m)
	}))})
	if _, err := u.Call(t.Context(), "x", []byte(`{"_meta":{"progressToken":"t"}}`), 400*time.Millisecond); err != nil {
		t.Error(err)
	}
	_, err := u.Call(t.Context(), "x", []byte(`{"_meta":{"progressToken":"other"}}`), 400*time.Millisecond)
	wantError(t, err, jsonrpc.CodeTimeout, "did not answer within 400ms")
}

type traceKey struct{}

func TestAnHTTPRequestIsMadeInTheContextOfItsCall(t *testing.T) {
	ended := make(chan struct{})
	u := start(t, upstream.Options{
		StartProcess: serve(t, orderly(func(p *process, m *toolproto.Message) error {
			switch {
			case m.Call != nil && m.Call.Method == "fetch":
				return p.say(toolproto.Message{HTTPRequest: &toolproto.HTTPRequest{ID: 7, CallID: m.Call.ID, Method: "GET", URL: "http://x/"}})
			case m.Call != nil && m.Call.Method == "stray":
				return p.say(toolproto.Message{HTTPRequest: &toolproto.HTTPRequest{ID: 8, CallID: m.Call.ID + 1}})
			case m.HTTPResult != nil:
				id := m.HTTPResult.ID - 6
				return p.say(toolproto.Message{Result: &toolproto.Result{ID: id, Message: []byte(string(m.HTTPResult.Body) + m.HTTPResult.Error)}})
			}
			return nil
		})),
		HTTP: func(ctx context.Context, req toolproto.HTTPRequest) toolproto.HTTPResult {
			trace, _ := ctx.Value(traceKey{}).(string)
			if trace == "slow" {
				<-ctx.Done()
				close(ended)
			}
			return toolproto.HTTPResult{Body: []byte(trace + " " + req.URL)}
		},
	})
	got, err := u.Call(context.WithValue(t.Context(), traceKey{}, "trace-1"), "fetch", nil, time.Minute)
	if err != nil || string(got) != "trace-1 http://x/" {
		t.Errorf("%s, %v", got, err)
	}
	got, err = u.Call(t.Context(), "stray", nil, time.Minute)
	if err != nil || string(got) != "it belongs to no call that is in flight" {
		t.Errorf("%s, %v", got, err)
	}
	_, err = u.Call(context.WithValue(t.Context(), traceKey{}, "slow"), "fetch", nil, 50*time.Millisecond)
	wantError(t, err, jsonrpc.CodeTimeout, "did not answer")
	<-ended
}

func TestRequestsOfTheServerAreAnswered(t *testing.T) {
	asking := func(requests ...string) func(*process) error {
		answers := make([]string, 0, len(requests))
		return orderly(func(p *process, m *toolproto.Message) error {
			switch {
			case m.Call != nil:
				return p.say(toolproto.Message{ServerRequest: &toolproto.ServerRequest{ID: 1, Message: []byte(requests[0])}})
			case m.ServerResult != nil:
				answers = append(answers, string(m.ServerResult.Message))
				if n := len(answers); n < len(requests) {
					return p.say(toolproto.Message{ServerRequest: &toolproto.ServerRequest{ID: uint64(n + 1), Message: []byte(requests[n])}})
				}
				return p.say(toolproto.Message{Result: &toolproto.Result{ID: 1, Message: []byte(strings.Join(answers, "\n"))}})
			}
			return nil
		})
	}
	u := start(t, upstream.Options{StartProcess: serve(t, asking(`{"jsonrpc":"2.0","id":"a","method":"ping"}`, `{"jsonrpc":"2.0","id":2.50,"method":"roots/list"}`, `nonsense`))})
	got, err := u.Call(t.Context(), "x", nil, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"jsonrpc":"2.0","id":"a","result":{}}
{"jsonrpc":"2.0","id":2.50,"error":{"code":-32601,"message":"not supported"}}
{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"Parse error: not valid JSON"}}`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Error(diff)
	}
	u = start(t, upstream.Options{
		StartProcess:  serve(t, asking(`{"jsonrpc":"2.0","id":1,"method":"ping"}`)),
		ServerRequest: func(_ context.Context, message []byte) []byte { return append([]byte("judged: "), message...) },
	})
	if got, err = u.Call(t.Context(), "x", nil, time.Minute); err != nil || !strings.HasPrefix(string(got), "judged: ") {
		t.Errorf("%s, %v", got, err)
	}
}

func TestCloseAsksTheProcessToEndAndFailsCalls(t *testing.T) {
	asked := make(chan struct{})
	called := make(chan struct{})
	u := start(t, upstream.Options{StartProcess: serve(t, func(p *process) error {
		if err := p.greet(); err != nil {
			return err
		}
		for {
			m, err := p.conn.Read()
			if err != nil {
				return err
			}
			if m.Call != nil {
				close(called)
			}
			if m.Shutdown != nil {
				close(asked)
				return nil
			}
		}
	})})
	failed := make(chan error, 1)
	go func() {
		_, err := u.Call(context.Background(), "x", nil, time.Minute)
		failed <- err
	}()
	<-called
	u.Close()
	<-asked
	wantError(t, <-failed, jsonrpc.CodeInternal, "server fake exited")
	_, err := u.Call(t.Context(), "x", nil, time.Minute)
	wantError(t, err, jsonrpc.CodeInternal, "server fake is shut down")
	u.Close()
}

func TestNotificationsAndEventsAreHandedOnInOrder(t *testing.T) {
	var mu sync.Mutex
	var got []string
	add := func(s string) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, s)
	}
	u := start(t, upstream.Options{
		StartProcess: serve(t, orderly(func(p *process, m *toolproto.Message) error {
			if m.Notify != nil {
				return p.say(toolproto.Message{Notify: &toolproto.Notify{Method: "heard " + m.Notify.Method, Params: m.Notify.Params}})
			}
			if err := p.say(toolproto.Message{Event: &toolproto.Event{Kind: toolproto.EventStderr, Text: "line", Count: 3}}); err != nil {
				return err
			}
			return echo(p, m)
		})),
		OnNotify: func(n toolproto.Notify) { add(n.Method + string(n.Params)) },
		OnEvent:  func(e toolproto.Event) { add(fmt.Sprint(e)) },
	})
	if err := u.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := u.Notify("notifications/x", []byte(`[]`)); err != nil {
		t.Fatal(err)
	}
	if _, err := u.Call(t.Context(), "x", []byte(`{}`), time.Minute); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if diff := cmp.Diff([]string{"heard notifications/x[]", "{stderr line 3}"}, got); diff != "" {
		t.Error(diff)
	}
}
