package vhostvsock

import (
	"fmt"
	"syscall"

	"github.com/capsem/capsem/internal/vm"
)

// receiveBatch is how many packets are received before the lock is given up.
const receiveBatch = 16

// errCredit ends a connection whose guest ignores what it was told.
var errCredit = fmt.Errorf("the guest sent more than its credit allows: %w", syscall.ECONNRESET)

// moveFromGuest is called when the guest has sent packets.
func (d *Device) moveFromGuest() {
	for d.receiveSome() {
	}
}

// receiveSome receives a batch of packets and sends what they call for. It
// reports whether there are more. It never waits for room in the other queue,
// whose room may depend on this one's progress.
func (d *Device) receiveSome() (more bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	q := &d.queues[fromGuest]
	if d.stopped || !q.running() {
		return false
	}
	q.ignore()
	found := true
	for i := 0; i < receiveBatch && found; i++ {
		c, ok, err := q.next(&d.memory)
		if err == nil && ok {
			err = d.receive(c)
		}
		if err != nil {
			d.stopLocked(fmt.Errorf("receiving from the guest: %w", err))
			return false
		}
		if found = ok; found {
			q.push(c.head, 0)
		}
	}
	d.flush()
	if d.stopped {
		return false
	}
	d.interrupt(q)
	return !d.stopped && (found || q.listen())
}

// receive handles one packet. An error means that the ring is misused; what is
// wrong with a connection is answered on it.
func (d *Device) receive(c chain) error {
	var head [headerSize]byte
	payload, ok := gather(c, &head)
	if !ok {
		return fmt.Errorf("a packet has only %d bytes", c.size)
	}
	h := decodeHeader(&head)
	if uint64(h.length) > c.size-headerSize {
		return fmt.Errorf("a packet of %d bytes says that it has %d bytes of data", c.size, h.length)
	}
	if h.srcCID != uint64(d.cid) {
		d.dropped.foreignPacket(d.log, &h)
		return nil
	}
	conn := d.conns[connKey{guestPort: h.srcPort, hostPort: h.dstPort}]
	switch {
	case h.dstCID != vm.HostCID || h.typ != typeStream || (conn == nil && h.op != opRequest):
		if h.op != opReset {
			d.refuse(&h)
		}
	case conn == nil:
		d.connect(&h)
	default:
		conn.receive(&h, payload)
	}
	return nil
}

// gather copies the header out of a chain and returns the segments behind it.
func gather(c chain, head *[headerSize]byte) (payload [][]byte, ok bool) {
	n := 0
	for i, segment := range c.segments {
		k := copy(head[n:], segment)
		if n += k; n == headerSize {
			c.segments[i] = segment[k:]
			return c.segments[i:], true
		}
	}
	return nil, false
}

// connect answers a request for a new connection.
func (d *Device) connect(h *header) {
	l := d.listeners[h.dstPort]
	if l == nil || d.guestConns >= MaxGuestConns || l.waiting.Len() >= MaxGuestConns {
		d.refuse(h)
		return
	}
	c := d.newConn(connKey{guestPort: h.srcPort, hostPort: h.dstPort}, stateEstablished)
	c.byGuest, c.announced = true, true
	d.guestConns++
	c.setCredit(h)
	c.send(noteResponse)
	l.waiting.PushBack(c)
	l.ready.Signal()
}

// receive handles a packet of a connection that exists.
func (c *Conn) receive(h *header, payload [][]byte) {
	c.setCredit(h)
	switch {
	case h.op == opReset:
		c.finish(errReset)
	case c.state == stateConnecting && h.op == opResponse && c.announced:
		c.state = stateEstablished
		c.readable.Broadcast()
	case c.state == stateConnecting:
		c.abort(errReset)
	case h.op == opData && h.length > 0:
		c.receiveData(int(h.length), payload)
	case h.op == opData, h.op == opCreditUpdate:
	case h.op == opCreditRequest:
		c.send(noteCredit)
	case h.op == opShutdown:
		c.receiveShutdown(h.flags)
	default:
		c.abort(errReset)
	}
}

// receiveData keeps n bytes for the reader.
func (c *Conn) receiveData(n int, payload [][]byte) {
	if c.state == stateClosing || c.peerDone&shutdownSend != 0 {
		c.abort(errReset)
		return
	}
	if n > BufferSize-c.received.size {
		c.abort(errCredit)
		return
	}
	for _, segment := range payload {
		segment = segment[:min(n, len(segment))]
		c.received.write(segment)
		if n -= len(segment); n == 0 {
			break
		}
	}
	c.readable.Signal()
}

// receiveShutdown notes what the guest will no longer do. When it will do
// nothing any more the connection is confirmed as ended; what was received
// stays readable.
func (c *Conn) receiveShutdown(flags uint32) {
	c.peerDone |= flags & shutdownBoth
	if c.peerDone == shutdownBoth {
		c.abort(nil)
		return
	}
	if c.peerDone&shutdownReceive != 0 {
		c.unschedule()
	}
	c.readable.Broadcast()
	c.writable.Broadcast()
}
