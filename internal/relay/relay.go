//go:build linux

// Package relay is the guest's side of everything that crosses vsock: the agent
// that announces the guest on port 5000, the commands and files of port 5005,
// and the stdio MCP server whose lines travel as frames on port 5002.
//
// It knows its host only through a Network and changes the guest only through a
// System, so that the same code runs as the first program of a real guest and,
// without either privilege, inside a test or a fake machine on a host.
//
// The host is trusted with the guest: it may run anything as anybody. What the
// host sends is still checked against the protocol, because a connection that
// has lost its place must end rather than run half a command.
//
// Run ends commands it has started when their connection breaks, when their
// time is over and when it returns. Nothing that it starts outlives it, but for
// what a command left behind on purpose before it ended.
package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/capsem/capsem/internal/guestproto"
	"github.com/capsem/capsem/internal/relay/command"
)

// Network is the guest's side of its machine's vsock.
type Network interface {
	// Listen accepts the host's connections to port, and nobody else's.
	Listen(port uint32) (net.Listener, error)
	// Dial connects to the host's port.
	Dial(ctx context.Context, port uint32) (net.Conn, error)
}

// System is the operating system around the agent, as far as the host may have
// it changed.
type System interface {
	// Apply makes the guest what the host says it is. It runs before the guest
	// is ready, once for each epoch.
	Apply(boot *guestproto.Boot) error
	// SyncClock sets the wall clock if it is off by more than a moment.
	SyncClock(now time.Time) error
	// PowerOff begins to end every process within grace, and then the guest. It
	// returns at once.
	PowerOff(grace time.Duration) error
}

// Options are what Run needs to know.
type Options struct {
	// Version is the agent's version, for the host's records.
	Version string
	// BootID is the kernel's random boot id.
	BootID string
	// Epoch is the number of the last control connection that an earlier agent
	// of the same boot had, 0 for the first agent.
	Epoch uint64
	// OnEpoch, if set, is called with each epoch before it is announced.
	OnEpoch func(uint64)
	// System is nil where nothing but the commands themselves may change
	// anything: in a fake machine.
	System System
	// Cgroups is nil where the kernel has none to give; commands are then ended
	// by way of the process table.
	Cgroups *command.Cgroups
	// Stop, when closed, ends the guest as a host's Shutdown with DefaultGrace
	// does. It may be nil.
	Stop <-chan struct{}
	// Stages are the stages of the boot before the agent.
	Stages []guestproto.Timing
	Log    *slog.Logger
}

// The times of a control connection.
const (
	// handshakeTimeout is how long the host may take to answer Hello, in a
	// machine that may be emulated on a busy host.
	handshakeTimeout = 30 * time.Second
	// pingEvery and lostAfter are the heartbeat: a host that has said nothing
	// for lostAfter is gone, and is dialled again.
	pingEvery = 5 * time.Second
	lostAfter = 15 * time.Second
	// redialFirst doubles up to redialMost while the host cannot be reached.
	redialFirst = 20 * time.Millisecond
	redialMost  = 2 * time.Second
)

// DefaultGrace is how long commands have to end after TERM where nobody said.
const DefaultGrace = 2 * time.Second

// ErrVersion means that the host does not speak this agent's protocol.
var ErrVersion = errors.New("the host does not know this guest's protocol version")

// Run announces the guest, serves its host and returns when the host or Stop has
// asked for the guest to end (nil), when the host knows no common version
// (ErrVersion), or when ctx ends.
func Run(ctx context.Context, network Network, o Options) error {
	ctx, cancel := context.WithCancel(ctx)
	// Listening comes before the first Hello, so it comes before Ready: whoever
	// dials a guest that is ready finds it listening.
	listener, err := network.Listen(guestproto.PortStreams)
	if err != nil {
		cancel()
		return fmt.Errorf("listening for streams: %w", err)
	}
	a := &agent{network: network, opts: o, epoch: o.Epoch}
	s := newStreams(o, &a.env)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { s.serve(ctx, listener) })

	announced, stopAnnouncing := context.WithCancel(ctx)
	wg.Go(func() {
		defer stopAnnouncing()
		select {
		case <-o.Stop:
		case <-announced.Done():
		}
	})
	grace, err := a.run(announced)
	if errors.Is(err, context.Canceled) && ctx.Err() == nil {
		grace, err = DefaultGrace, nil // Stop was closed
	}
	stopAnnouncing()
	if err == nil {
		s.shutDown(ctx, grace)
	}
	return err
}
