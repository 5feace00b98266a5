package vhostvsock

import (
	"errors"
	"io"
	"os"
	"runtime"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/capsem/capsem/internal/vm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fromGuestPort is a packet of a well-behaved guest.
func fromGuestPort(port uint32, op opcode) header {
	return header{srcCID: guestCID, dstCID: vm.HostCID, srcPort: port, dstPort: 1, typ: typeStream, op: op, bufAlloc: guestBuffer}
}

func TestTheGuestHasAtMostMaxGuestConns(t *testing.T) {
	d, g := startGuest(t)
	l, err := d.Listen(1)
	if err != nil {
		t.Fatal(err)
	}
	for i := range MaxGuestConns {
		if _, err := g.dial(1); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
	if _, err := g.dial(1); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("one more: got %v, want a reset", err)
	}
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	for { // until the guest has confirmed
		d.mu.Lock()
		n := d.guestConns
		d.mu.Unlock()
		if n < MaxGuestConns {
			break
		}
	}
	if _, err := g.dial(1); err != nil {
		t.Errorf("after one has ended: %v", err)
	}
}

func TestAFloodOfRequestsThatNobodyReadsTheAnswersOfIsBounded(t *testing.T) {
	d, socket := startDevice(t)
	g := newDriver(t, socket)
	g.tell(reqSetFeatures, u64(features), nil)
	for _, r := range g.regions() {
		g.ask(reqAddMemReg, flagNeedReply, r.encode(), g.memory)
	}
	g.startRings() // without receive buffers
	for i := range uint32(2 * maxRefusals) {
		g.transmit(fromGuestPort(i, opRequest), nil)
	}
	d.await(t, func() bool { return d.dropped.refusals == maxRefusals })
	if n := len(d.out.refusals); n != maxRefusals {
		t.Errorf("%d resets wait, want %d", n, maxRefusals)
	}
	// The device lives: what was kept is delivered once there are buffers.
	g.postAll()
	g.rx.ring()
	for i := range uint32(maxRefusals) {
		if h, _, ok := g.receive(); !ok || h.op != opReset || h.dstPort != i {
			t.Fatalf("packet %d is %+v, %v", i, h, ok)
		}
	}
}

// await waits for a state of the device, which cond reads.
func (d *Device) await(t *testing.T, cond func() bool) {
	t.Helper()
	limit := time.Now().Add(20 * time.Second)
	for time.Now().Before(limit) {
		d.mu.Lock()
		ok := cond()
		d.mu.Unlock()
		if ok {
			return
		}
		runtime.Gosched()
	}
	t.Fatal("the state was not reached")
}

func TestConnectionsThatComeAndGoUnreadLeaveNothing(t *testing.T) {
	d, socket := startDevice(t)
	if _, err := d.Listen(1); err != nil {
		t.Fatal(err)
	}
	g := newDriver(t, socket)
	g.tell(reqSetFeatures, u64(features), nil)
	for _, r := range g.regions() {
		g.ask(reqAddMemReg, flagNeedReply, r.encode(), g.memory)
	}
	g.startRings() // without receive buffers: the answers stay
	const rounds = 5000
	for i := range uint32(rounds) {
		g.transmit(fromGuestPort(i, opRequest), nil)
		g.transmit(fromGuestPort(i, opReset), nil)
	}
	g.transmit(fromGuestPort(rounds, opReset), nil)
	d.await(t, func() bool { return uint16(2*rounds+1) == d.queues[fromGuest].usedIdx })
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.conns) != 0 || d.guestConns != 0 || d.out.notes.Len() != 0 {
		t.Errorf("left: %d connections, %d counted, %d notes", len(d.conns), d.guestConns, d.out.notes.Len())
	}
	if n := d.listeners[1].waiting.Len(); n > MaxGuestConns {
		t.Errorf("%d connections wait to be accepted, more than %d", n, MaxGuestConns)
	}
}

func TestAGuestThatExceedsItsCreditLosesThatConnection(t *testing.T) {
	d, g := startGuest(t)
	c, s := open(t, d, g, 1)
	other, s2 := open(t, d, g, 2)
	h := s.header(opData)
	chunk := make([]byte, 64<<10)
	h.length = uint32(len(chunk))
	for range BufferSize/len(chunk) + 1 {
		g.transmit(h, chunk)
	}
	d.await(t, func() bool { return c.(*Conn).state == stateGone })
	n, err := io.Copy(io.Discard, c)
	if n != BufferSize || !errors.Is(err, errCredit) {
		t.Errorf("read %d bytes, %v; want %d and %v", n, err, BufferSize, errCredit)
	}
	exchange(t, other, s2)
}

func TestAGuestThatLiesAboutItsCreditBlocksOnlyItself(t *testing.T) {
	for name, lie := range map[string]func(*header){
		"no buffer at all":              func(h *header) { h.bufAlloc = 0 },
		"more taken than was ever sent": func(h *header) { h.fwdCnt = 1000 },
	} {
		t.Run(name, func(t *testing.T) {
			d, g := startGuest(t)
			c, s := open(t, d, g, 1)
			h := s.header(opCreditUpdate)
			lie(&h)
			g.transmit(h, nil)
			d.await(t, func() bool { return c.(*Conn).credit() == 0 })
			if err := c.SetWriteDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
				t.Fatal(err)
			}
			if n, err := c.Write(make([]byte, 10)); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("wrote %d, %v; want a timeout", n, err)
			}
			other, s2 := open(t, d, g, 2)
			exchange(t, other, s2)
		})
	}
	t.Run("a buffer without end, and no room in the queue", func(t *testing.T) {
		d, socket := startDevice(t)
		l, err := d.Listen(1)
		if err != nil {
			t.Fatal(err)
		}
		g := newDriver(t, socket)
		g.realize()
		g.start() // nobody takes what is received
		h := fromGuestPort(7, opRequest)
		h.bufAlloc = 1<<32 - 1
		g.transmit(h, nil)
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.SetWriteDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		n, err := io.Copy(c, endless{})
		if want := int64((slots - 1) * rxPayload); n != want || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("wrote %d, %v; want the %d bytes that were posted", n, err, want)
		}
	})
}

func TestCreditIsReportedAfterHalfOfTheSmallerBuffer(t *testing.T) {
	d, g := startGuest(t)
	g.record = true
	c, s := open(t, d, g, 1)
	s.alloc = 1000 // as SO_VM_SOCKETS_BUFFER_SIZE would make it
	for range 20 {
		if _, err := s.Write(make([]byte, 500)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 500)); err != nil {
			t.Fatal(err)
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for s.peerTaken != 10_000 {
		g.changed.Wait()
	}
}

func TestACreditFigureThatWasOvertakenIsNotBelieved(t *testing.T) {
	c := &Conn{device: &Device{}, sent: 300}
	c.setCredit(&header{bufAlloc: 1000, fwdCnt: 200})
	c.setCredit(&header{bufAlloc: 1000, fwdCnt: 100})
	if got := c.credit(); got != 900 {
		t.Errorf("credit is %d, want 900", got)
	}
}

func TestCreditCountsModulo32Bits(t *testing.T) {
	c := &Conn{device: &Device{}, sent: 5, peerTaken: 1<<32 - 20}
	c.setCredit(&header{bufAlloc: 100, fwdCnt: 1<<32 - 10})
	if got := c.credit(); got != 85 {
		t.Errorf("credit is %d, want 85", got)
	}
}

func TestPacketsOfNoConnectionAreAnsweredByReset(t *testing.T) {
	_, g := startDriver(t)
	for name, change := range map[string]func(*header){
		"data":             func(h *header) { h.op = opData },
		"a response":       func(h *header) { h.op = opResponse },
		"an unknown op":    func(h *header) { h.op = 77 },
		"another type":     func(h *header) { h.typ = 2 },
		"another host":     func(h *header) { h.dstCID = 9 },
		"a credit request": func(h *header) { h.op = opCreditRequest },
	} {
		t.Run(name, func(t *testing.T) {
			h := fromGuestPort(5, opRequest)
			change(&h)
			g.transmit(h, nil)
			got, _, _ := g.receive()
			if got.op != opReset || got.dstPort != 5 || got.srcPort != 1 || got.srcCID != h.dstCID || got.typ != h.typ {
				t.Errorf("got %+v", got)
			}
		})
	}
}

func TestResetsAndForeignPacketsAreNotAnswered(t *testing.T) {
	d, g := startDriver(t)
	g.transmit(fromGuestPort(5, opReset), nil)
	h := fromGuestPort(6, opData)
	h.srcCID = 4
	g.transmit(h, nil)
	g.transmit(fromGuestPort(7, opData), nil)
	if got, _, _ := g.receive(); got.op != opReset || got.dstPort != 7 {
		t.Errorf("got %+v, want the reset for port 7 first", got)
	}
	d.await(t, func() bool { return d.dropped.foreign == 1 })
}

func TestNonsenseOnAConnectionResetsIt(t *testing.T) {
	d, g := startGuest(t)
	for name, op := range map[string]opcode{"a second request": opRequest, "a response": opResponse, "an unknown op": 99} {
		t.Run(name, func(t *testing.T) {
			c, s := open(t, d, g, 1)
			g.transmit(s.header(op), nil)
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the host: got %v, want a reset", err)
			}
			if _, err := s.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the guest: got %v, want a reset", err)
			}
		})
	}
	t.Run("data after its end", func(t *testing.T) {
		c, s := open(t, d, g, 1)
		s.shutdown(shutdownSend)
		h := s.header(opData)
		h.length = 1
		g.transmit(h, []byte("x"))
		if _, err := s.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the guest: got %v, want a reset", err)
		}
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Errorf("the host read %d bytes", n)
		}
	})
}

func TestACloseThatTheGuestDoesNotConfirmEndsWithAReset(t *testing.T) {
	d, g := startDriver(t)
	d.lingerTime = 10 * time.Millisecond
	l, err := d.Listen(1)
	if err != nil {
		t.Fatal(err)
	}
	g.transmit(fromGuestPort(5, opRequest), nil)
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	for _, want := range []opcode{opResponse, opShutdown, opReset} {
		if h, _, _ := g.receive(); h.op != want {
			t.Errorf("got packet %d, want %d", h.op, want)
		}
	}
	d.await(t, func() bool { return len(d.conns) == 0 && d.guestConns == 0 })
}

func TestConnectionsSurviveAPauseOfTheGuest(t *testing.T) {
	d, g := startGuest(t)
	c, s := open(t, d, g, 1)
	exchange(t, c, s)
	g.stop()
	written := make(chan error, 1)
	go func() {
		_, err := io.WriteString(c, "while it was paused")
		written <- err
	}()
	d.await(t, func() bool { return !d.out.empty() })
	g.resume()
	got := make([]byte, 19)
	if _, err := io.ReadFull(s, got); err != nil || string(got) != "while it was paused" {
		t.Errorf("got %q, %v", got, err)
	}
	if err := <-written; err != nil {
		t.Error(err)
	}
	exchange(t, c, s)
}

func TestConnectionsEndWhenTheGuestsDriverStartsAnew(t *testing.T) {
	d, g := startDriver(t)
	l, err := d.Listen(1)
	if err != nil {
		t.Fatal(err)
	}
	g.transmit(fromGuestPort(5, opRequest), nil)
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	g.stop()
	clear(g.data[:2*ringBytes])
	for _, r := range []*driverRing{&g.rx, &g.tx} {
		r.availIdx, r.usedIdx, r.base, r.free = 0, 0, 0, nil
		for i := range slots {
			r.free = append(r.free, i)
		}
	}
	g.startRings()
	g.postAll()
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v, want a reset", err)
	}
	g.transmit(fromGuestPort(5, opRequest), nil)
	if h, _, _ := g.receive(); h.op != opResponse {
		t.Errorf("a new connection: got packet %d, want a response", h.op)
	}
}

func TestMemoryMayBeRemovedAndAddedWhileTheGuestRuns(t *testing.T) {
	d, g := startGuest(t)
	c, s := open(t, d, g, 1)
	for range 10 {
		exchange(t, c, s)
		for _, r := range g.regions() {
			g.ask(reqRemMemReg, flagNeedReply, r.encode(), nil)
		}
		for _, r := range g.regions() {
			g.ask(reqAddMemReg, flagNeedReply, r.encode(), g.memory)
		}
	}
}
