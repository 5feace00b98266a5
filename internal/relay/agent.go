//go:build linux

package relay

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/guestproto"
)

// agent holds the control connection to the host, one epoch after the other.
type agent struct {
	network Network
	opts    Options
	epoch   uint64
	// env is the base environment of commands, from the last Boot.
	env atomic.Pointer[[]string]
}

// errShutdown ends a session because the host asked for it.
var errShutdown = errors.New("the host shuts the guest down")

// run keeps a control connection until the host shuts the guest down, and
// returns the grace that processes have.
func (a *agent) run(ctx context.Context) (grace time.Duration, err error) {
	wait := redialFirst
	for {
		grace, ready, err := a.connect(ctx)
		switch {
		case errors.Is(err, errShutdown):
			return grace, nil
		case ctx.Err() != nil:
			return 0, ctx.Err()
		case errors.Is(err, ErrVersion):
			return 0, err
		}
		a.opts.Log.Warn("control connection lost", "epoch", a.epoch, "error", err)
		if ready {
			wait = redialFirst
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return 0, ctx.Err()
		}
		wait = min(2*wait, redialMost)
	}
}

// connect is one epoch. ready says that the handshake was completed.
func (a *agent) connect(ctx context.Context) (grace time.Duration, ready bool, err error) {
	conn, err := a.network.Dial(ctx, guestproto.PortControl)
	if err != nil {
		return 0, false, fmt.Errorf("dialling the host: %w", err)
	}
	stop := context.AfterFunc(ctx, func() {
		_ = conn.Close() // unblocks the reader, which has the error
	})
	defer stop()
	defer conn.Close()

	c := guestproto.NewControlConn(conn)
	if err := a.handshake(conn, c); err != nil {
		return 0, false, err
	}
	grace, err = a.converse(conn, c)
	return grace, true, err
}

// handshake says who we are, hears who we are to be, and becomes it.
func (a *agent) handshake(conn net.Conn, c *guestproto.ControlConn) error {
	if err := conn.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return fmt.Errorf("setting a deadline: %w", err)
	}
	a.epoch++
	if a.opts.OnEpoch != nil {
		a.opts.OnEpoch(a.epoch)
	}
	err := c.Write(&guestproto.Control{Hello: &guestproto.Hello{
		Protocol:     guestproto.ProtocolVersion,
		AgentVersion: a.opts.Version,
		BootID:       a.opts.BootID,
		Epoch:        a.epoch,
	}})
	if err != nil {
		return fmt.Errorf("sending hello: %w", err)
	}
	m, err := c.Read()
	if err != nil {
		return fmt.Errorf("waiting for boot: %w", err)
	}
	switch {
	case m.Error != nil && m.Error.Code == "version":
		return fmt.Errorf("%w: %s", ErrVersion, m.Error.Message)
	case m.Error != nil:
		return fmt.Errorf("the host refused hello: %s: %s", m.Error.Code, m.Error.Message)
	case m.Boot == nil:
		return errors.New("the host answered hello with something other than boot")
	}
	if err := a.apply(m.Boot); err != nil {
		werr := c.Write(&guestproto.Control{Error: &guestproto.Error{Code: "io", Message: err.Error()}})
		return errors.Join(err, werr)
	}
	ready := &guestproto.Ready{Timings: append(a.opts.Stages[:len(a.opts.Stages):len(a.opts.Stages)],
		guestproto.Timing{Stage: "ready", NS: sinceBoot()})}
	if err := c.Write(&guestproto.Control{Ready: ready}); err != nil {
		return fmt.Errorf("sending ready: %w", err)
	}
	return nil
}

func (a *agent) apply(b *guestproto.Boot) error {
	env := make([]string, len(b.Env))
	for i, e := range b.Env {
		env[i] = string(e)
	}
	if a.opts.System != nil {
		if err := a.opts.System.Apply(b); err != nil {
			return fmt.Errorf("applying boot: %w", err)
		}
	}
	a.env.Store(&env)
	return nil
}

// sinceBoot is how long the kernel has run.
func sinceBoot() int64 {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) != nil {
		return 0 // a kernel before 2.6.39
	}
	return ts.Nano()
}

// converse answers the host and pings it until one of both ends it.
func (a *agent) converse(conn net.Conn, c *guestproto.ControlConn) (time.Duration, error) {
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return 0, fmt.Errorf("clearing a deadline: %w", err)
	}
	done := make(chan struct{})
	pinged := make(chan struct{})
	go func() {
		defer close(pinged)
		ping(c, conn, done)
	}()
	defer func() {
		close(done)
		_ = conn.Close() // a ping that is being written must not hold us up
		<-pinged
	}()
	for {
		if err := conn.SetReadDeadline(time.Now().Add(lostAfter)); err != nil {
			return 0, fmt.Errorf("setting a deadline: %w", err)
		}
		m, err := c.Read()
		if err != nil {
			return 0, fmt.Errorf("reading from the host: %w", err)
		}
		switch {
		case m.Ping != nil:
			if err := a.answer(c, m.Ping); err != nil {
				return 0, err
			}
		case m.Pong != nil:
			// That it came is all that it says.
		case m.Shutdown != nil:
			return a.shutDown(m.Shutdown)
		case m.Error != nil:
			return 0, fmt.Errorf("the host reports: %s: %s", m.Error.Code, m.Error.Message)
		default:
			return 0, errors.New("the host sent a message that only a guest sends")
		}
	}
}

func (a *agent) answer(c *guestproto.ControlConn, p *guestproto.Ping) error {
	if a.opts.System != nil && p.TimeNS > 0 {
		if err := a.opts.System.SyncClock(time.Unix(0, p.TimeNS)); err != nil {
			a.opts.Log.Warn("setting the clock", "error", err)
		}
	}
	if err := c.Write(&guestproto.Control{Pong: &guestproto.Pong{Seq: p.Seq}}); err != nil {
		return fmt.Errorf("answering a ping: %w", err)
	}
	return nil
}

func (a *agent) shutDown(m *guestproto.Shutdown) (time.Duration, error) {
	grace := max(0, time.Duration(min(m.GraceMS, int64(time.Hour/time.Millisecond)))*time.Millisecond)
	if a.opts.System != nil {
		if err := a.opts.System.PowerOff(grace); err != nil {
			return 0, fmt.Errorf("asking for power-off: %w", err)
		}
	}
	return grace, errShutdown
}

// ping asks the host for a sign of life until done is closed. The reader's
// deadline judges the answers.
func ping(c *guestproto.ControlConn, conn net.Conn, done <-chan struct{}) {
	tick := time.NewTicker(pingEvery)
	defer tick.Stop()
	for seq := uint64(1); ; seq++ {
		select {
		case <-done:
			return
		case <-tick.C:
		}
		err := c.Write(&guestproto.Control{Ping: &guestproto.Ping{Seq: seq, TimeNS: time.Now().UnixNano()}})
		if err != nil {
			_ = conn.Close() // the reader reports that the connection is gone
			return
		}
	}
}
