package guest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/capsem/capsem/internal/guestproto"
)

// entropyBytes is how much randomness a guest is given at each epoch.
const entropyBytes = 64

// control is one control connection.
type control struct {
	conn net.Conn
	c    *guestproto.ControlConn
	// pings is the number of the last Ping that was sent.
	pings atomic.Uint64
	// ended is closed when nothing serves the connection any more.
	ended chan struct{}
	once  sync.Once
}

// close ends the connection. It may be called often and by anybody.
func (c *control) close() {
	c.once.Do(func() {
		_ = c.conn.Close() // unblocks the reader, which has the reason
	})
}

// send writes one message, unless the guest does not read.
func (c *control) send(m *guestproto.Control) error {
	if err := c.conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return fmt.Errorf("setting a deadline: %w", err)
	}
	return c.c.Write(m)
}

// accept takes control connections until the listener is closed.
func (g *Guest) accept(ctx context.Context) {
	slots := make(chan struct{}, maxHandshakes)
	for {
		conn, err := g.listener.Accept()
		if err != nil {
			if !g.isClosed() {
				g.opts.Log.Info("no more control connections", "error", err)
			}
			return
		}
		select {
		case slots <- struct{}{}:
			g.tasks.Go(func() { g.serve(ctx, conn, func() { <-slots }) })
		default:
			g.opts.Log.Warn("too many control connections in their handshake", "limit", maxHandshakes)
			_ = conn.Close() // refused, nothing was said on it
		}
	}
}

// serve is the life of one control connection. shaken is called once, when its
// handshake is over.
func (g *Guest) serve(ctx context.Context, conn net.Conn, shaken func()) {
	c := &control{conn: conn, c: guestproto.NewControlConn(conn), ended: make(chan struct{})}
	defer close(c.ended)
	defer c.close()
	stop := context.AfterFunc(ctx, c.close)
	defer stop()

	a, err := g.handshake(c)
	shaken()
	if err == nil && !g.adopt(c, a) {
		err = &ProtocolError{fmt.Sprintf("epoch %d is not above %d", a.Epoch, g.Announced().Epoch)}
	}
	if err != nil {
		// A probe that connects and leaves is nothing to speak of.
		if !g.isClosed() && !errors.Is(err, io.EOF) {
			g.opts.Log.Warn("handshake with a guest's agent failed", "error", err)
		}
		return
	}
	g.opts.Log.Info("the guest's agent is ready", "epoch", a.Epoch)
	err = g.converse(c)
	g.mu.Lock()
	if g.current == c {
		g.current = nil
		g.change()
	}
	g.mu.Unlock()
	if !g.isClosed() {
		g.opts.Log.Info("control connection ended", "epoch", a.Epoch, "error", err)
	}
}

// handshake hears Hello, answers Boot and hears Ready.
func (g *Guest) handshake(c *control) (Announcement, error) {
	var a Announcement
	if err := c.conn.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return a, fmt.Errorf("setting a deadline: %w", err)
	}
	m, err := c.c.Read()
	if err != nil {
		return a, fmt.Errorf("waiting for hello: %w", err)
	}
	hello := m.Hello
	if hello == nil {
		return a, &ProtocolError{"a control connection begins with hello"}
	}
	a = Announcement{AgentVersion: clean(hello.AgentVersion, maxWord), BootID: clean(hello.BootID, maxWord), Epoch: hello.Epoch}
	if err := g.checkHello(c, hello, a); err != nil {
		return a, err
	}
	if err := c.send(&guestproto.Control{Boot: g.boot(hello.Epoch)}); err != nil {
		return a, fmt.Errorf("sending boot: %w", err)
	}
	m, err = c.c.Read()
	switch {
	case err != nil:
		return a, fmt.Errorf("waiting for ready: %w", err)
	case m.Error != nil:
		return a, reported(m.Error)
	case m.Ready == nil:
		return a, &ProtocolError{"boot is answered with ready"}
	}
	for _, t := range m.Ready.Timings[:min(len(m.Ready.Timings), maxTimings)] {
		a.Timings = append(a.Timings, guestproto.Timing{Stage: clean(t.Stage, maxWord), NS: t.NS})
	}
	if err := c.conn.SetDeadline(time.Time{}); err != nil {
		return a, fmt.Errorf("clearing a deadline: %w", err)
	}
	return a, nil
}

// checkHello refuses an agent of another protocol, by name, and one whose epoch
// is over.
func (g *Guest) checkHello(c *control, hello *guestproto.Hello, a Announcement) error {
	g.mu.Lock()
	epoch := g.epoch
	g.mu.Unlock()
	if hello.Protocol != guestproto.ProtocolVersion {
		refused := &VersionError{Guest: hello.Protocol, Agent: a.AgentVersion}
		err := c.send(&guestproto.Control{Error: &guestproto.Error{Code: "version", Message: refused.Error()}})
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.current == nil {
			g.refused = refused
			g.change()
		}
		return errors.Join(refused, err)
	}
	if hello.Epoch <= epoch {
		stale := &ProtocolError{fmt.Sprintf("epoch %d is not above %d", hello.Epoch, epoch)}
		return errors.Join(stale, c.send(&guestproto.Control{Error: &guestproto.Error{Code: "invalid", Message: stale.What}}))
	}
	return nil
}

// boot is what the guest is told at an epoch.
func (g *Guest) boot(epoch uint64) *guestproto.Boot {
	entropy := make([]byte, entropyBytes)
	_, _ = rand.Read(entropy) // never fails (crypto/rand since Go 1.24)
	return &guestproto.Boot{
		TimeNS:    time.Now().UnixNano(),
		Hostname:  g.opts.Hostname,
		MachineID: g.opts.MachineID,
		Env:       g.opts.Env,
		Files:     g.opts.Files,
		Entropy:   entropy,
		Epoch:     epoch,
		More:      g.opts.More,
	}
}

// adopt makes c the guest's control connection, in place of an older one.
func (g *Guest) adopt(c *control, a Announcement) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if a.Epoch <= g.epoch || g.isClosed() {
		return false
	}
	if g.current != nil {
		g.current.close()
	}
	g.current, g.epoch, g.announced = c, a.Epoch, a
	g.refused, g.alive = nil, true
	g.heard()
	g.change()
	return true
}

// converse hears the agent and pings it, until the connection ends.
func (g *Guest) converse(c *control) error {
	done := make(chan struct{})
	var pinger sync.WaitGroup
	pinger.Go(func() { c.ping(done) })
	defer pinger.Wait()
	defer c.close() // a ping that is being written must not hold us up
	defer close(done)
	for {
		m, err := c.c.Read()
		if err != nil {
			return fmt.Errorf("hearing the guest's agent: %w", err)
		}
		g.heard()
		switch {
		case m.Ping != nil:
			if err := c.send(&guestproto.Control{Pong: &guestproto.Pong{Seq: m.Ping.Seq}}); err != nil {
				return fmt.Errorf("answering a ping: %w", err)
			}
		case m.Pong != nil:
			if m.Pong.Seq == 0 || m.Pong.Seq > c.pings.Load() {
				return &ProtocolError{"a pong to a ping that was not sent"}
			}
		case m.ShutdownRequest != nil:
			if g.opts.OnShutdownRequest != nil {
				g.opts.OnShutdownRequest()
			}
		case m.Error != nil:
			g.opts.Log.Warn("the guest's agent reports an error", "error", reported(m.Error))
		default:
			return &ProtocolError{"a control message that only a host sends, or a second hello"}
		}
	}
}

// ping asks for a sign of life until done is closed.
func (c *control) ping(done <-chan struct{}) {
	tick := time.NewTicker(pingEvery)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case <-tick.C:
		}
		m := &guestproto.Ping{Seq: c.pings.Add(1), TimeNS: time.Now().UnixNano()}
		if err := c.send(&guestproto.Control{Ping: m}); err != nil {
			c.close() // the reader reports that the connection is gone
			return
		}
	}
}

// Shutdown asks the guest to end: its processes get grace between TERM and KILL,
// then it syncs and powers off. Shutdown returns when the agent has let go of its
// connection, which is before the machine has ended, or with an error when there
// is no agent to ask or ctx ends first.
func (g *Guest) Shutdown(ctx context.Context, grace time.Duration) error {
	g.mu.Lock()
	c := g.current
	g.mu.Unlock()
	if c == nil {
		return ErrUnreachable
	}
	if err := c.send(&guestproto.Control{Shutdown: &guestproto.Shutdown{GraceMS: grace.Milliseconds()}}); err != nil {
		return fmt.Errorf("asking the guest to end: %w", err)
	}
	select {
	case <-c.ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for the guest to end: %w", context.Cause(ctx))
	}
}
