// Package upstream is the supervisor's side of a jailed tool process: an external
// MCP server behind capsem-aggregator, or the built-in tools.
//
// An [Upstream] keeps one such process running. It starts it, tells it which
// server it holds, sends it calls, and starts it again, later and later, when it
// ends. What was in flight then fails at once and is never tried again: whether
// the server has acted is not known. Ids of calls are not used twice, in no life
// of the process.
//
// The process may be an attacker's. It gets no more than its calls; what it says
// is bounded in size, number and pace, and one that breaks the protocol, floods,
// or does not read is killed and treated like one that died. What it answers is
// handed on as the bytes that came, unjudged: that is the gate's.
package upstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/toolproto"
)

// Bounds of one upstream.
const (
	// StartWait is how long a process may take from its start to Ready where
	// its server definition does not say.
	StartWait = 30 * time.Second
	// Ceiling is how long a call may take in all, whatever progress it makes.
	Ceiling = time.Hour
	// MaxCalls is how many calls may be in flight.
	MaxCalls = 1024
	// MaxBytes is how many bytes of params may be in flight, and MaxQueued how
	// many of everything may wait to be read by the process.
	MaxBytes  = 64 << 20
	MaxQueued = 64 << 20
	// MaxRequests is how many requests of the process may be unanswered, of
	// HTTP and of the server's own each.
	MaxRequests = 64
	// FirstDelay doubles up to LastDelay between starts.
	FirstDelay = 200 * time.Millisecond
	LastDelay  = 30 * time.Second
)

// State is where an upstream is between two calls.
type State string

// The states. Failed is final: what stands in the way does not change by itself.
const (
	Starting State = "starting"
	Ready    State = "ready"
	Backoff  State = "backoff"
	Failed   State = "failed"
)

// Process is a tool process as its starter hands it out.
type Process interface {
	// Wait blocks until it has ended and says how.
	Wait() error
	// Kill ends it at once, with everything below it.
	Kill() error
}

// Options say what an upstream runs and who listens to it. The functions On* are
// called on the goroutine that reads from the process, so that their order is
// that of its messages and of the answers: they must not block, and must not call
// the upstream. All functions but StartProcess may be nil.
type Options struct {
	// Server is the definition that the process is given, secrets included.
	Server toolproto.Server
	// Command is the program. Its Stdin, Stdout and Stderr are set here.
	Command child.Command
	// StartProcess starts it in its jail. An error that matches fs.ErrNotExist or
	// fs.ErrPermission is final.
	StartProcess func(ctx context.Context, cmd child.Command) (Process, error)
	Log          *slog.Logger

	// OnState is told each change of state, and for Backoff and Failed why. It is
	// called on the upstream's own goroutine and may call the upstream.
	OnState func(state State, reason error)
	// OnNotify gets the server's notifications, OnEvent what the process reports.
	OnNotify func(toolproto.Notify)
	OnEvent  func(toolproto.Event)

	// ServerRequest answers a request of the server: message is the request as it
	// came, unparsed, and what it returns the whole response. It runs in a
	// goroutine of its own; ctx ends with the process. Without it, ping is
	// answered and everything else is refused.
	ServerRequest func(ctx context.Context, message []byte) []byte
	// HTTP makes a request for a built-in tool. ctx is that of the Call on whose
	// behalf it is made, and ends with it. Without it, requests are refused.
	HTTP func(ctx context.Context, req toolproto.HTTPRequest) toolproto.HTTPResult
}

// Upstream is one tool process, kept running. Its methods may be called from any
// goroutine.
type Upstream struct {
	opts   Options
	stop   context.CancelFunc
	done   chan struct{}
	lastID atomic.Uint64

	mu      sync.Mutex
	state   State
	reason  error         // of Backoff and Failed
	life    *life         // while Ready
	changed chan struct{} // closed at the next change
	closed  bool
}

// Start begins to keep a process running and returns at once. The upstream lives
// until Close, also when ctx ends before; ctx gives its values.
func Start(ctx context.Context, opts Options) *Upstream {
	ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	u := &Upstream{opts: opts, stop: stop, done: make(chan struct{}), state: Starting, changed: make(chan struct{})}
	go func() {
		defer close(u.done)
		u.run(ctx)
	}()
	return u
}

// Name is the server's name.
func (u *Upstream) Name() string { return u.opts.Server.Name }

// State returns where the upstream is, and for Backoff and Failed why.
func (u *Upstream) State() (State, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.state, u.reason
}

// InitializeResult is what the server answered to initialize, nil while it is not
// ready. Nobody may change it.
func (u *Upstream) InitializeResult() json.RawMessage {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.life == nil {
		return nil
	}
	return u.life.initializeResult
}

// Close stops the process: it is asked to end its server in order, and killed
// with everything below it after 6 s. It returns when nothing is left running.
// Calls fail. It is idempotent.
func (u *Upstream) Close() {
	u.mu.Lock()
	u.closed = true
	u.mu.Unlock()
	u.stop()
	<-u.done
}

// WaitReady blocks while the process is starting. It returns nil when the
// upstream is ready.
func (u *Upstream) WaitReady(ctx context.Context) error {
	_, err := u.ready(ctx)
	return err
}

// ready returns the process's current life, waiting for its start to succeed or
// to fail.
func (u *Upstream) ready(ctx context.Context) (*life, error) {
	for {
		u.mu.Lock()
		state, reason, l, changed, closed := u.state, u.reason, u.life, u.changed, u.closed
		u.mu.Unlock()
		switch {
		case closed:
			return nil, u.failure(jsonrpc.CodeInternal, "server %s is shut down", u.Name())
		case state == Ready:
			return l, nil
		case state != Starting:
			return nil, u.exited(reason)
		}
		select {
		case <-changed:
		case <-u.done:
			return nil, u.failure(jsonrpc.CodeInternal, "server %s is shut down", u.Name())
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// set changes the state and tells everybody.
func (u *Upstream) set(state State, l *life, reason error) {
	u.mu.Lock()
	u.state, u.life, u.reason = state, l, reason
	close(u.changed)
	u.changed = make(chan struct{})
	u.mu.Unlock()
	if u.opts.OnState != nil {
		u.opts.OnState(state, reason)
	}
}

func (u *Upstream) failure(code int, format string, args ...any) *event.Error {
	return &event.Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// exited is the error of calls to a process that is not there.
func (u *Upstream) exited(reason error) *event.Error {
	return u.failure(jsonrpc.CodeInternal, "server %s exited: %v", u.Name(), reason)
}

// errClosed is why the last life ended.
var errClosed = errors.New("it was shut down")
