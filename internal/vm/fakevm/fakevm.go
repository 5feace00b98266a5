// Package fakevm runs a guest as a function in this process.
//
// It is for tests of everything that stands on a machine: the function is the
// real agent, and its connections are pairs of Unix sockets, so that half-close,
// deadlines and blocking are the kernel's. There is no memory, processor or
// kernel to speak of; a Spec's are not looked at.
package fakevm

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"

	"github.com/capsem/capsem/internal/vm"
)

// guestCID is the guest's address.
const guestCID = 3

// Backend is a vm.Backend whose guests are calls of a function.
type Backend struct {
	run func(ctx context.Context, g *Guest) error
}

// New returns a backend whose machines run run. The guest has powered itself off
// when run returns nil, and has crashed when it returns an error. When the
// machine is stopped ctx ends and every connection and listener of the guest is
// closed; run must return then.
func New(run func(ctx context.Context, g *Guest) error) *Backend {
	return &Backend{run: run}
}

// Create prepares a machine.
func (b *Backend) Create(_ context.Context, spec vm.Spec) (vm.Machine, error) {
	if spec.Console == nil {
		spec.Console = io.Discard
	}
	m := &Machine{run: b.run, name: spec.Name, ended: make(chan struct{}), pairs: make(map[*pair]struct{})}
	m.host.ports, m.inside.ports = make(map[uint32]*listener), make(map[uint32]*listener)
	m.guest = &Guest{machine: m, console: spec.Console}
	return m, nil
}

// Guest is a machine as seen from inside.
type Guest struct {
	machine *Machine
	console io.Writer
}

// Listen accepts the host's connections to port.
func (g *Guest) Listen(port uint32) (net.Listener, error) {
	return g.machine.listen(&g.machine.inside, Addr{guestCID, port})
}

// Dial connects to the host's port. A port without a listener is an error that
// matches syscall.ECONNRESET.
func (g *Guest) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	p, err := g.machine.connect(ctx, &g.machine.host, Addr{vm.HostCID, port}, guestCID)
	if err != nil {
		return nil, err
	}
	return p.guest, nil
}

// Console is the guest's serial console.
func (g *Guest) Console() io.Writer { return g.console }

// Machine is one guest.
type Machine struct {
	run   func(ctx context.Context, g *Guest) error
	guest *Guest
	name  string
	ended chan struct{} // closed when nothing is left running

	mu       sync.Mutex
	cancel   context.CancelFunc // ends run; nil before Start
	host     side
	inside   side
	pairs    map[*pair]struct{}
	nextPort uint32
	stopping bool // Stop was called
	over     bool // nothing connects any more
	err      error
}

var (
	_ vm.Machine   = (*Machine)(nil)
	_ vm.Inspector = (*Machine)(nil)
)

// side holds the listeners of the host or of the guest.
type side struct {
	ports map[uint32]*listener
}

// Listen accepts the guest's connections to port.
func (m *Machine) Listen(port uint32) (net.Listener, error) {
	return m.listen(&m.host, Addr{vm.HostCID, port})
}

// Dial connects to a port of the guest.
func (m *Machine) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	p, err := m.connect(ctx, &m.inside, Addr{guestCID, port}, vm.HostCID)
	if err != nil {
		return nil, err
	}
	return p.host, nil
}

// Accelerator is "none".
func (m *Machine) Accelerator() string { return "none" }

// PID is 0: there is no process.
func (m *Machine) PID() int { return 0 }

// Start calls the guest's function.
func (m *Machine) Start(ctx context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stopping {
		return fmt.Errorf("starting machine %s: %w", m.name, vm.ErrStopped)
	}
	if m.cancel != nil {
		return fmt.Errorf("starting machine %s: it was started before", m.name)
	}
	ctx, m.cancel = context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer close(m.ended)
		m.finish(m.run(ctx, m.guest))
	}()
	return nil
}

// finish ends the machine after its function has returned err.
func (m *Machine) finish(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.cancel()
	switch {
	case m.stopping:
		m.err = fmt.Errorf("machine %s: %w", m.name, vm.ErrStopped)
	case err != nil:
		m.err = fmt.Errorf("machine %s: the guest ended: %w", m.name, err)
	}
	m.disconnect()
}

// disconnect ends all connections and listeners.
func (m *Machine) disconnect() {
	m.over = true
	for _, s := range []*side{&m.host, &m.inside} {
		for _, l := range s.ports {
			l.shut(vm.ErrStopped)
		}
	}
	for p := range m.pairs {
		p.stop()
	}
	clear(m.pairs)
}

// Wait blocks until the guest's function has returned and says how.
func (m *Machine) Wait() error {
	<-m.ended
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

// Stop ends the guest's function and waits for it to return.
func (m *Machine) Stop(ctx context.Context) error {
	m.mu.Lock()
	first := !m.stopping
	m.stopping = true
	m.disconnect()
	switch {
	case m.cancel != nil:
		m.cancel()
	case first:
		m.err = fmt.Errorf("machine %s: %w", m.name, vm.ErrStopped)
		close(m.ended)
	}
	m.mu.Unlock()
	select {
	case <-m.ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stopping machine %s: waiting for its guest: %w", m.name, ctx.Err())
	}
}

// listen enters a listener on one side.
func (m *Machine) listen(s *side, addr Addr) (net.Listener, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.over {
		return nil, opError("listen", addr, vm.ErrStopped)
	}
	if s.ports[addr.Port] != nil {
		return nil, opError("listen", addr, syscall.EADDRINUSE)
	}
	l := &listener{machine: m, side: s, addr: addr, ready: sync.NewCond(&m.mu)}
	s.ports[addr.Port] = l
	return l, nil
}

// connect makes a connection to a listener of one side.
func (m *Machine) connect(ctx context.Context, to *side, addr Addr, from uint32) (*pair, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, opError("dial", addr, err)
	}
	if m.over || (from == vm.HostCID && m.stopping) {
		return nil, opError("dial", addr, vm.ErrStopped)
	}
	l := to.ports[addr.Port]
	if l == nil || len(l.waiting) == maxWaiting {
		return nil, opError("dial", addr, syscall.ECONNRESET)
	}
	m.nextPort++
	p, err := newPair(m, addr, Addr{from, firstPort + m.nextPort})
	if err != nil {
		return nil, opError("dial", addr, err)
	}
	m.pairs[p] = struct{}{}
	l.waiting = append(l.waiting, p)
	l.ready.Signal()
	return p, nil
}

// maxWaiting is how many connections a listener holds that were not accepted.
const maxWaiting = 1024

// firstPort is below the ports that connections are made from.
const firstPort = 1 << 30

// listener is one port of one side. Its fields are guarded by the machine's mu.
type listener struct {
	machine *Machine
	side    *side
	addr    Addr
	ready   *sync.Cond
	waiting []*pair
	err     error // why it is closed
}

// Accept waits for a connection from the other side.
func (l *listener) Accept() (net.Conn, error) {
	l.machine.mu.Lock()
	defer l.machine.mu.Unlock()
	for len(l.waiting) == 0 && l.err == nil {
		l.ready.Wait()
	}
	if l.err != nil {
		return nil, opError("accept", l.addr, l.err)
	}
	p := l.waiting[0]
	l.waiting = l.waiting[1:]
	if l.addr.CID == guestCID {
		return p.guest, nil
	}
	return p.host, nil
}

// Close refuses the port from now on and ends what was not accepted.
func (l *listener) Close() error {
	l.machine.mu.Lock()
	defer l.machine.mu.Unlock()
	l.shut(net.ErrClosed)
	return nil
}

func (l *listener) shut(err error) {
	if l.err != nil {
		return
	}
	l.err = err
	delete(l.side.ports, l.addr.Port)
	for _, p := range l.waiting {
		delete(l.machine.pairs, p)
		p.stop()
		if l.addr.CID == vm.HostCID {
			_ = p.host.Conn.Close() // nobody else has it, and nothing was written
		}
	}
	l.waiting = nil
	l.ready.Broadcast()
}

// Addr is the port.
func (l *listener) Addr() net.Addr { return l.addr }

// Addr is one end of a connection.
type Addr struct {
	CID, Port uint32
}

// Network is "vsock".
func (a Addr) Network() string { return "vsock" }

func (a Addr) String() string { return fmt.Sprintf("vsock(%d):%d", a.CID, a.Port) }

func opError(op string, addr net.Addr, err error) error {
	return &net.OpError{Op: op, Net: "vsock", Addr: addr, Err: err}
}
