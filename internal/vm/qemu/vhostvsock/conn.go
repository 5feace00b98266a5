package vhostvsock

import (
	"container/list"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// defaultLinger is how long a connection that was closed here waits for the guest
// to confirm, before it is reset.
const defaultLinger = 2 * time.Second

// state is where a connection is in its life.
type state uint8

const (
	stateConnecting  state = iota // called by Dial, not answered
	stateEstablished              // open
	stateClosing                  // closed here, the guest has not confirmed
	stateGone                     // unknown to the device; received data may be left
)

// Conn is one connection with the guest. It is a net.Conn with CloseWrite.
//
// Write returns when the guest's kernel has the bytes, so a guest that does not
// read blocks it; deadlines and Close unblock it.
type Conn struct {
	device *Device
	key    connKey

	// All of the rest is guarded by device.mu.

	state     state
	byGuest   bool  // the guest opened it, so it counts as one of MaxGuestConns
	announced bool  // the guest knows it
	closed    bool  // Close was called
	writeDone bool  // CloseWrite was called
	err       error // why it is gone, nil if the guest ended it in order
	peerDone  uint32
	linger    *time.Timer

	received buffer
	taken    uint32 // bytes that the reader has taken, modulo 2³²
	reported uint32 // taken, as the guest was last told
	readable *sync.Cond
	readBy   deadline

	pending   []byte // what is left of the writer's bytes
	writing   bool   // a Write is under way; others wait
	sent      uint32 // bytes, modulo 2³²
	peerAlloc uint32 // the guest's buffer size, as it says
	peerTaken uint32 // of sent, what its reader has taken, as it says
	writable  *sync.Cond
	writeBy   deadline

	notes         note
	noteElement   *list.Element // in outbox.notes
	writerElement *list.Element // in outbox.writers
}

// newConn enters a connection into the table.
func (d *Device) newConn(key connKey, s state) *Conn {
	c := &Conn{device: d, key: key, state: s, readable: sync.NewCond(&d.mu), writable: sync.NewCond(&d.mu)}
	d.conns[key] = c
	return c
}

// finish takes the connection out of the table; nothing more is sent for it.
// What was received can still be read; then err, or io.EOF if it is nil.
func (c *Conn) finish(err error) {
	if c.state == stateGone {
		return
	}
	d := c.device
	delete(d.conns, c.key)
	if c.byGuest {
		d.guestConns--
	}
	if c.noteElement != nil {
		d.out.notes.Remove(c.noteElement)
		c.noteElement, c.notes = nil, 0
	}
	c.unschedule()
	if c.linger != nil {
		c.linger.Stop()
	}
	c.state, c.err = stateGone, err
	c.readable.Broadcast()
	c.writable.Broadcast()
}

// abort is finish, and resets the connection in the guest.
func (c *Conn) abort(err error) {
	if c.state == stateGone {
		return
	}
	if c.announced {
		c.device.reset(c.stamp(opReset))
	}
	c.finish(err)
}

// setCredit takes the credit fields of a packet from the guest. Linux stamps
// and queues packets under different locks, so a packet can overtake one that
// was stamped before it; what the reader has taken only ever grows. Believing the
// older figure would hold back credit that the guest never repeats.
func (c *Conn) setCredit(h *header) {
	c.peerAlloc = h.bufAlloc
	if int32(h.fwdCnt-c.peerTaken) > 0 {
		c.peerTaken = h.fwdCnt
	}
	c.schedule()
}

// credit is how many bytes the guest has room for. A guest that says that it has
// taken what was not sent has none.
func (c *Conn) credit() uint32 {
	inFlight := c.sent - c.peerTaken
	if inFlight > c.peerAlloc {
		return 0
	}
	return c.peerAlloc - inFlight
}

// schedule enters the connection among the writers if it has something to write.
func (c *Conn) schedule() {
	done := c.writeDone || c.peerDone&shutdownReceive != 0
	if c.writerElement == nil && !done && len(c.pending) > 0 && c.credit() > 0 {
		c.writerElement = c.device.out.writers.PushBack(c)
	}
}

func (c *Conn) unschedule() {
	if c.writerElement != nil {
		c.device.out.writers.Remove(c.writerElement)
		c.writerElement = nil
	}
}

// Read waits for bytes and reads what is there. The end is io.EOF when the guest
// has ended its side in order.
func (c *Conn) Read(b []byte) (int, error) {
	c.device.mu.Lock()
	defer c.device.mu.Unlock()
	for {
		if err := c.readErr(len(b) == 0); err != nil {
			if err == io.EOF { //nolint:errorlint // readErr returns it bare, as Read must
				return 0, err
			}
			return 0, c.opError("read", err)
		}
		if c.received.size > 0 || len(b) == 0 {
			break
		}
		c.readable.Wait()
	}
	n := c.received.read(b)
	c.taken += uint32(n)
	if c.received.size > 0 {
		c.readable.Signal() // another reader
	}
	if c.updateDue() {
		c.send(noteCredit)
		c.device.flush()
	}
	return n, nil
}

// readErr says why nothing can be read. Data that was received comes before all
// but the caller's own doing.
func (c *Conn) readErr(empty bool) error {
	switch {
	case c.closed:
		return net.ErrClosed
	case c.readBy.expired:
		return os.ErrDeadlineExceeded
	case c.received.size > 0 || empty:
		return nil
	case c.state == stateGone && c.err != nil:
		return c.err
	case c.peerDone&shutdownSend != 0:
		return io.EOF
	}
	return nil
}

// updateDue reports whether the guest must be told how much was taken. Linux
// sends no more than its own buffer size without being told, whatever it was
// offered: an update that waits for half of a larger buffer never comes.
func (c *Conn) updateDue() bool {
	return c.state == stateEstablished && c.taken-c.reported >= max(1, min(BufferSize, c.peerAlloc)/2)
}

// Write writes all of b, in packets that other connections' alternate with.
func (c *Conn) Write(b []byte) (int, error) {
	c.device.mu.Lock()
	defer c.device.mu.Unlock()
	for c.writing && c.writeErr() == nil {
		c.writable.Wait()
	}
	if err := c.writeErr(); err != nil {
		return 0, c.opError("write", err)
	}
	c.writing, c.pending = true, b
	c.schedule()
	c.device.flush()
	for len(c.pending) > 0 && c.writeErr() == nil {
		c.writable.Wait()
	}
	n := len(b) - len(c.pending)
	c.writing, c.pending = false, nil
	c.unschedule()
	c.writable.Broadcast() // another writer
	if n < len(b) {
		return n, c.opError("write", c.writeErr())
	}
	return n, nil
}

// writeErr says why nothing can be written.
func (c *Conn) writeErr() error {
	switch {
	case c.closed:
		return net.ErrClosed
	case c.writeBy.expired:
		return os.ErrDeadlineExceeded
	case c.state == stateGone && c.err != nil:
		return c.err
	case c.writeDone || c.peerDone&shutdownReceive != 0:
		return syscall.EPIPE
	}
	return nil
}

// CloseWrite tells the guest that nothing more comes; reading goes on.
func (c *Conn) CloseWrite() error {
	c.device.mu.Lock()
	defer c.device.mu.Unlock()
	if c.closed {
		return c.opError("close", net.ErrClosed)
	}
	if c.state == stateGone && c.err != nil {
		return c.opError("close", c.err)
	}
	if c.writeDone {
		return nil
	}
	c.writeDone = true
	c.unschedule()
	c.writable.Broadcast()
	if c.state == stateEstablished {
		c.send(noteShutdown)
		c.device.flush()
	}
	return nil
}

// Close ends the connection in both directions and forgets what was not read.
// What was written reaches the guest's reader. It is idempotent and does not
// wait for the guest.
func (c *Conn) Close() error {
	c.device.mu.Lock()
	defer c.device.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	c.received.drop()
	c.readBy.stop()
	c.writeBy.stop()
	c.unschedule()
	c.readable.Broadcast()
	c.writable.Broadcast()
	if c.state == stateEstablished {
		c.state = stateClosing
		c.linger = time.AfterFunc(c.device.lingerTime, c.lingered)
		c.send(noteShutdown)
		c.device.flush()
	}
	return nil
}

// lingered resets a connection whose end the guest has not confirmed.
func (c *Conn) lingered() {
	c.device.mu.Lock()
	defer c.device.mu.Unlock()
	c.abort(nil)
	c.device.flush()
}

// LocalAddr is the host's end.
func (c *Conn) LocalAddr() net.Addr { return c.device.hostAddr(c.key.hostPort) }

// RemoteAddr is the guest's end.
func (c *Conn) RemoteAddr() net.Addr { return Addr{CID: c.device.cid, Port: c.key.guestPort} }

// SetDeadline sets both deadlines.
func (c *Conn) SetDeadline(t time.Time) error {
	return c.setDeadlines(t, &c.readBy, &c.writeBy)
}

// SetReadDeadline is until when Read waits; the zero time is for ever.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.setDeadlines(t, &c.readBy) }

// SetWriteDeadline is until when Write waits; the zero time is for ever.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.setDeadlines(t, &c.writeBy) }

func (c *Conn) setDeadlines(t time.Time, deadlines ...*deadline) error {
	c.device.mu.Lock()
	defer c.device.mu.Unlock()
	if c.closed {
		return c.opError("set", net.ErrClosed)
	}
	for _, d := range deadlines {
		d.set(t, c)
	}
	c.readable.Broadcast()
	c.writable.Broadcast()
	return nil
}

func (c *Conn) opError(op string, err error) error {
	return opError(op, c.LocalAddr(), c.RemoteAddr(), err)
}

// deadline is one of a connection's deadlines.
type deadline struct {
	timer   *time.Timer // nil if there is none, or it has passed
	expired bool
}

// set replaces the deadline.
func (d *deadline) set(t time.Time, c *Conn) {
	d.stop()
	d.expired = false
	if t.IsZero() {
		return
	}
	left := time.Until(t)
	if d.expired = left <= 0; d.expired {
		return
	}
	var timer *time.Timer
	timer = time.AfterFunc(left, func() {
		c.device.mu.Lock()
		defer c.device.mu.Unlock()
		if d.timer != timer {
			return // replaced while it fired
		}
		d.timer, d.expired = nil, true
		c.readable.Broadcast()
		c.writable.Broadcast()
	})
	d.timer = timer
}

func (d *deadline) stop() {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
}
