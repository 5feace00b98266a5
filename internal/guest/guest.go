// Package guest is our side of one guest: it hears the guest's agent announce
// itself, knows whether it is alive, runs commands in it and moves files.
//
// The guest is hostile. Everything that comes from it is checked against the
// protocol and bounded before it is used; a guest that lies about lengths,
// confirms what was not sent or talks after its last word is answered by closing
// the connection, and whoever waits gets a *ProtocolError. What a guest says
// about itself (an exit code, a file's size, a message) is a claim and is handed
// on as one.
//
// The agent dials us, never the other way round, so that nobody waits on a guest
// that does not listen yet. Its connection is one epoch; a lost one is followed
// by the next. Commands and files have connections of their own, which begin
// only after the agent has said that it is ready.
package guest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/capsem/capsem/internal/guestproto"
)

// Machine is what is needed of a virtual machine: its vsock.
type Machine interface {
	Listen(port uint32) (net.Listener, error)
	Dial(ctx context.Context, port uint32) (net.Conn, error)
}

// Options say who the guest is to be.
type Options struct {
	Hostname  string
	MachineID string
	// Env is the base environment of every command, `name=value` each.
	Env [][]byte
	// Files are written before the guest is ready. Together with the rest they
	// fit in one message (guestproto.MaxMessage).
	Files []guestproto.File
	// More offers the guest MCP messages in several frames.
	More bool
	// OnShutdownRequest, if set, is called when the guest wishes to end. It
	// must not block.
	OnShutdownRequest func()
	Log               *slog.Logger
}

// The times of a guest.
const (
	// handshakeTimeout is how long a control connection may take from its first
	// byte to Ready: an emulated guest on a busy host applies Boot slowly.
	handshakeTimeout = 30 * time.Second
	// pingEvery is the heartbeat; a guest of which nothing was heard for
	// LostAfter is unreachable.
	pingEvery = 5 * time.Second
	// LostAfter is how long a guest may be silent.
	LostAfter = 15 * time.Second
	// writeTimeout is how long a guest may take to read a control message.
	writeTimeout = 10 * time.Second
	// hostGrace is what a command's timeout is exceeded by, beside the guest's
	// own grace, before we end the wait ourselves.
	hostGrace = 3 * time.Second
	// redialAfter is how long a refused connection waits for news of the agent.
	redialAfter = 200 * time.Millisecond
	// lingerTime is how long an attached client may take to close after the last
	// word.
	lingerTime = 2 * time.Second
	// answerTimeout is how long the guest may take for the next message about a
	// file.
	answerTimeout = 60 * time.Second
)

// dialAttempts is how often a connection to the agent is tried.
const dialAttempts = 3

// Bounds of what a guest may claim.
const (
	// maxHandshakes is the number of control connections that may be in their
	// handshake at once; one more is closed.
	maxHandshakes = 8
	// maxTimings is the number of boot stages that are kept.
	maxTimings = 64
	// maxWord and maxText bound names and messages, in bytes; what is longer is
	// cut.
	maxWord = 128
	maxText = 4096
	// maxUnsized is how much is read of a file whose size the guest gives as 0
	// (in /proc), when the caller sets no limit.
	maxUnsized = 64 << 20
)

// ErrUnreachable means that nothing was heard of the guest's agent for
// LostAfter. The machine may still run.
var ErrUnreachable = fmt.Errorf("agent_unreachable: the guest's agent has not been heard of for %v", LostAfter)

// ErrClosed means that the Guest was closed.
var ErrClosed = errors.New("the guest is not served any more")

// VersionError means that the guest's agent speaks a protocol that we do not.
type VersionError struct {
	// Guest is the guest's version.
	Guest int
	// Agent is its agent's version, as it says.
	Agent string
}

// Error implements error.
func (e *VersionError) Error() string {
	return fmt.Sprintf("the guest's agent (%s) speaks protocol version %d and this host speaks %d: rebuild the image or use the Capsem that built it", e.Agent, e.Guest, guestproto.ProtocolVersion)
}

// ProtocolError means that the guest broke the protocol. Its connection is
// closed.
type ProtocolError struct{ What string }

// Error implements error.
func (e *ProtocolError) Error() string { return "the guest broke the protocol: " + e.What }

// Error is a failure that the guest reports, in its words.
type Error struct{ Code, Message string }

// Error implements error.
func (e *Error) Error() string { return "the guest says: " + e.Message + " (" + e.Code + ")" }

// Announcement is what the agent said of itself: claims.
type Announcement struct {
	AgentVersion, BootID string
	Epoch                uint64
	Timings              []guestproto.Timing
}

// Guest is one guest. Its methods may be called from any goroutine.
type Guest struct {
	machine  Machine
	opts     Options
	listener net.Listener

	closed chan struct{} // closed by Close
	stop   context.CancelFunc
	tasks  sync.WaitGroup

	// lastHeard is when the guest last said something, in nanoseconds since
	// began, which is monotonic.
	lastHeard atomic.Int64
	began     time.Time

	mu sync.Mutex // guards what follows
	// current is the control connection that is ready, nil while there is none.
	current   *control
	epoch     uint64 // the highest that was ready
	announced Announcement
	// refused is why the last agent that came was turned away, nil once one was
	// not.
	refused *VersionError
	// changed is closed and replaced at each change of the above.
	changed chan struct{}
	// calls are the commands and transfers under way; alive says whether new
	// ones may begin.
	calls map[*call]struct{}
	alive bool
}

// New begins to listen for the guest's agent. It is called before the machine
// starts. The caller closes the Guest.
func New(m Machine, o Options) (*Guest, error) {
	l, err := m.Listen(guestproto.PortControl)
	if err != nil {
		return nil, fmt.Errorf("listening for the guest's agent: %w", err)
	}
	ctx, stop := context.WithCancel(context.Background())
	g := &Guest{
		machine: m, opts: o, listener: l, closed: make(chan struct{}), stop: stop, began: time.Now(),
		changed: make(chan struct{}), calls: make(map[*call]struct{}),
	}
	g.tasks.Go(func() { g.accept(ctx) })
	g.tasks.Go(g.watch)
	return g, nil
}

// Close ends all that is under way, with ErrClosed, and returns when nothing is
// left running. It does not end the guest. It is idempotent.
func (g *Guest) Close() error {
	g.mu.Lock()
	if !g.isClosed() {
		close(g.closed)
		g.drop(ErrClosed)
	}
	g.mu.Unlock()
	g.stop()
	err := g.listener.Close()
	g.tasks.Wait()
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("closing the agent's listener: %w", err)
	}
	return nil
}

// isClosed reports whether Close was called.
func (g *Guest) isClosed() bool {
	select {
	case <-g.closed:
		return true
	default:
		return false
	}
}

// drop ends all calls, and no new one begins until an agent is ready again. It is
// called with mu held.
func (g *Guest) drop(why error) {
	g.alive = false
	for c := range g.calls {
		c.cancel(why)
	}
	g.change()
}

// change tells all who wait that something is different. It is called with mu
// held.
func (g *Guest) change() {
	close(g.changed)
	g.changed = make(chan struct{})
}

// Ready returns nil when the agent is connected and has said that a command
// would succeed. It waits for that as long as ctx lives; an agent of another
// protocol version ends the wait with a *VersionError.
func (g *Guest) Ready(ctx context.Context) error {
	_, err := g.await(ctx, false)
	return err
}

// await waits for a control connection that is ready. lost says that a guest which
// was given up is an error, and not to be waited for.
func (g *Guest) await(ctx context.Context, lost bool) (*control, error) {
	for {
		g.mu.Lock()
		current, refused, changed := g.current, g.refused, g.changed
		lost := lost && g.epoch > 0 && !g.alive
		g.mu.Unlock()
		switch {
		case g.isClosed():
			return nil, ErrClosed
		case current != nil:
			return current, nil
		case refused != nil:
			return nil, refused
		case lost:
			return nil, ErrUnreachable
		}
		select {
		case <-changed:
		case <-g.closed:
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for the guest's agent: %w", context.Cause(ctx))
		}
	}
}

// Announced is what the agent last said of itself; zero before the first Ready.
func (g *Guest) Announced() Announcement {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.announced
}

// heard notes a sign of life.
func (g *Guest) heard() { g.lastHeard.Store(int64(time.Since(g.began))) }

// watch ends what is under way when the guest falls silent.
func (g *Guest) watch() {
	timer := time.NewTimer(LostAfter)
	defer timer.Stop()
	for {
		select {
		case <-g.closed:
			return
		case <-timer.C:
		}
		silent := time.Since(g.began) - time.Duration(g.lastHeard.Load())
		if silent < LostAfter {
			timer.Reset(LostAfter - silent)
			continue
		}
		g.lose()
		timer.Reset(LostAfter)
	}
}

// lose gives the guest up until its agent comes again.
func (g *Guest) lose() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.alive {
		return
	}
	g.opts.Log.Warn("the guest's agent is unreachable", "epoch", g.epoch)
	if g.current != nil {
		g.current.close()
	}
	g.drop(ErrUnreachable)
}

// call is one command or transfer.
type call struct{ cancel context.CancelCauseFunc }

// enter begins a call: it waits until the agent is ready, unless it is known to
// be lost. The context ends with ctx, with Close and when the guest is lost; its
// cause says which. The caller calls leave.
func (g *Guest) enter(ctx context.Context) (_ context.Context, leave func(), err error) {
	if _, err := g.await(ctx, true); err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	c := &call{cancel: cancel}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.alive {
		cancel(nil)
		if g.isClosed() {
			return nil, nil, ErrClosed
		}
		return nil, nil, ErrUnreachable
	}
	g.calls[c] = struct{}{}
	return ctx, func() {
		cancel(nil)
		g.mu.Lock()
		defer g.mu.Unlock()
		delete(g.calls, c)
	}, nil
}

// dial connects to the agent's port for commands and files. An agent that was
// started anew refuses for a moment, before its loss and its return are heard of:
// nothing was said yet, so another attempt follows when there is news, or when
// none comes.
func (g *Guest) dial(ctx context.Context) (net.Conn, error) {
	for attempt := 1; ; attempt++ {
		current, err := g.await(ctx, true)
		if err != nil {
			return nil, err
		}
		conn, err := g.machine.Dial(ctx, guestproto.PortStreams)
		if err == nil || attempt == dialAttempts || !errors.Is(err, syscall.ECONNRESET) {
			return conn, err
		}
		timer := time.NewTimer(redialAfter)
		select {
		case <-current.ended:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}
