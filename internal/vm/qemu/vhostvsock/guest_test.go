package vhostvsock

import (
	"io"
	"sync"
	"syscall"
	"testing"

	"github.com/capsem/capsem/internal/vm"
)

// guestBuffer is a guest socket's buffer, as Linux has it by default.
const guestBuffer = 256 << 10

// guest is a guest kernel's socket layer on top of the driver, as far as the
// tests need it, with Linux's habits: it never sends more than its own buffer
// size unconfirmed, and tells of what was read when less than a packet's room
// is left.
type guest struct {
	*driver
	done chan struct{} // closed when its receiver has ended

	mu        sync.Mutex
	changed   *sync.Cond
	sockets   map[connKey]*guestSocket
	listening map[uint32]chan *guestSocket
	nextPort  uint32
	seen      []header // every packet, if record
	record    bool
}

// startGuest starts a device and a guest that uses it.
func startGuest(t testing.TB) (*Device, *guest) {
	t.Helper()
	return startGuestWith(t, features)
}

// startGuestWith is startGuest with some of the features only.
func startGuestWith(t testing.TB, some uint64) (*Device, *guest) {
	t.Helper()
	d, driver := startDriverWith(t, some)
	g := &guest{
		driver: driver, done: make(chan struct{}), nextPort: 1000,
		sockets: make(map[connKey]*guestSocket), listening: make(map[uint32]chan *guestSocket),
	}
	g.changed = sync.NewCond(&g.mu)
	go g.run()
	t.Cleanup(func() {
		g.close()
		<-g.done
	})
	return d, g
}

func (g *guest) run() {
	defer close(g.done)
	for {
		h, payload, ok := g.receive()
		if !ok {
			g.fail()
			return
		}
		if reply := g.handle(h, payload); reply != nil {
			g.transmit(*reply, nil)
		}
	}
}

func (g *guest) fail() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, s := range g.sockets {
		s.err = syscall.ENODEV
	}
	g.changed.Broadcast()
}

func (g *guest) handle(h header, payload []byte) *header {
	g.mu.Lock()
	defer g.mu.Unlock()
	defer g.changed.Broadcast()
	if g.record {
		g.seen = append(g.seen, h)
	}
	key := connKey{guestPort: h.dstPort, hostPort: h.srcPort}
	s := g.sockets[key]
	if s == nil && h.op == opRequest && g.listening[h.dstPort] != nil {
		s = g.newSocket(key)
		s.open, s.peerAlloc = true, h.bufAlloc
		g.listening[h.dstPort] <- s
		reply := s.header(opResponse)
		return &reply
	}
	if s == nil {
		if h.op == opReset {
			return nil
		}
		return &header{srcCID: guestCID, dstCID: vm.HostCID, srcPort: h.dstPort, dstPort: h.srcPort, typ: typeStream, op: opReset}
	}
	s.peerAlloc, s.peerTaken = h.bufAlloc, h.fwdCnt
	switch h.op {
	case opResponse:
		s.open = true
	case opReset:
		s.err = syscall.ECONNRESET
		delete(g.sockets, key)
	case opData:
		s.received.write(payload)
	case opShutdown:
		s.peerDone |= h.flags
		if s.peerDone == shutdownBoth && s.received.size == 0 {
			delete(g.sockets, key)
			reply := s.header(opReset)
			return &reply
		}
	}
	return nil
}

// guestSocket is one of the guest's sockets.
type guestSocket struct {
	g   *guest
	key connKey

	// Guarded by g.mu.
	open, closed               bool
	err                        error
	received                   buffer
	taken, reported            uint32
	sent, peerAlloc, peerTaken uint32
	peerDone                   uint32
	alloc                      uint32
}

func (g *guest) newSocket(key connKey) *guestSocket {
	s := &guestSocket{g: g, key: key, alloc: guestBuffer}
	g.sockets[key] = s
	return s
}

// header stamps a packet; g.mu is held.
func (s *guestSocket) header(op opcode) header {
	s.reported = s.taken
	return header{
		srcCID: guestCID, dstCID: vm.HostCID, srcPort: s.key.guestPort, dstPort: s.key.hostPort,
		typ: typeStream, op: op, bufAlloc: s.alloc, fwdCnt: s.taken,
	}
}

// listen accepts the host's connections to port.
func (g *guest) listen(port uint32) <-chan *guestSocket {
	g.mu.Lock()
	defer g.mu.Unlock()
	c := make(chan *guestSocket, MaxHostConns)
	g.listening[port] = c
	return c
}

// request sends a request for a connection and does not wait for the answer.
func (g *guest) request(port uint32) *guestSocket {
	g.mu.Lock()
	g.nextPort++
	s := g.newSocket(connKey{guestPort: g.nextPort, hostPort: port})
	h := s.header(opRequest)
	g.mu.Unlock()
	g.transmit(h, nil)
	return s
}

// answered waits for the answer to a request.
func (s *guestSocket) answered() error {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	for !s.open && s.err == nil {
		s.g.changed.Wait()
	}
	return s.err
}

// dial connects to a port of the host.
func (g *guest) dial(port uint32) (*guestSocket, error) {
	s := g.request(port)
	return s, s.answered()
}

func (s *guestSocket) Read(b []byte) (int, error) {
	s.g.mu.Lock()
	for s.received.size == 0 {
		if s.err != nil || s.peerDone&shutdownSend != 0 || s.closed {
			defer s.g.mu.Unlock()
			if s.err != nil && s.peerDone&shutdownSend == 0 {
				return 0, s.err
			}
			return 0, io.EOF
		}
		s.g.changed.Wait()
	}
	n := s.received.read(b)
	s.taken += uint32(n)
	if s.alloc-(s.taken-s.reported) >= maxPacket {
		s.g.mu.Unlock()
		return n, nil
	}
	h := s.header(opCreditUpdate)
	s.g.mu.Unlock()
	s.g.transmit(h, nil)
	return n, nil
}

func (s *guestSocket) Write(b []byte) (int, error) {
	total := 0
	for len(b) > 0 {
		s.g.mu.Lock()
		var room uint32
		for {
			if s.err != nil || s.closed || s.peerDone&shutdownReceive != 0 {
				defer s.g.mu.Unlock()
				return total, syscall.EPIPE
			}
			if room = min(s.peerAlloc, guestBuffer) - (s.sent - s.peerTaken); room > 0 {
				break
			}
			s.g.changed.Wait()
		}
		n := min(len(b), int(room), maxPacket)
		s.sent += uint32(n)
		h := s.header(opData)
		h.length = uint32(n)
		s.g.mu.Unlock()
		if !s.g.transmit(h, b[:n]) {
			return total, syscall.ENODEV
		}
		total += n
		b = b[n:]
	}
	return total, nil
}

// shutdown says what the guest will no longer do.
func (s *guestSocket) shutdown(flags uint32) {
	s.g.mu.Lock()
	h := s.header(opShutdown)
	h.flags = flags
	s.g.mu.Unlock()
	s.g.transmit(h, nil)
}

func (s *guestSocket) CloseWrite() error {
	s.shutdown(shutdownSend)
	return nil
}

func (s *guestSocket) Close() error {
	s.g.mu.Lock()
	again := s.closed
	s.closed = true
	s.g.changed.Broadcast()
	s.g.mu.Unlock()
	if !again {
		s.shutdown(shutdownBoth)
	}
	return nil
}

// reset tears the connection down at once.
func (s *guestSocket) reset() {
	s.g.mu.Lock()
	h := s.header(opReset)
	delete(s.g.sockets, s.key)
	s.g.mu.Unlock()
	s.g.transmit(h, nil)
}
