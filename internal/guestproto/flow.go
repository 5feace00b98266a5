package guestproto

import (
	"errors"
	"fmt"
	"sync"
)

// Credit is the sending half of a stream's flow control: how much of Window is
// free. Its methods may be called from any goroutine.
type Credit struct {
	mu     sync.Mutex
	free   *sync.Cond
	used   int64
	closed bool
}

// NewCredit returns a credit of a whole Window.
func NewCredit() *Credit {
	c := &Credit{}
	c.free = sync.NewCond(&c.mu)
	return c
}

// Take waits for room and takes up to most bytes of it, at least one. It
// returns 0 once the credit is closed.
func (c *Credit) Take(most int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.used >= Window && !c.closed {
		c.free.Wait()
	}
	if c.closed {
		return 0
	}
	n := min(most, int(Window-c.used))
	c.used += int64(n)
	return n
}

// Return gives back what was taken and not sent.
func (c *Credit) Return(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.used -= int64(n)
	c.free.Signal()
}

// Confirm takes in an Ack. Confirming more than is under way is an error: the
// peer lies or has lost count.
func (c *Credit) Confirm(ack Ack) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ack.Bytes <= 0 || ack.Bytes > c.used {
		return fmt.Errorf("an ack of %d bytes where %d are under way", ack.Bytes, c.used)
	}
	c.used -= ack.Bytes
	c.free.Signal()
	return nil
}

// Close wakes whoever waits for room; no more is given.
func (c *Credit) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.free.Broadcast()
}

// ackEvery is how much is consumed before it is confirmed: a quarter of the
// window keeps the sender going without an ack for every message.
const ackEvery = Window / 4

// Intake is the receiving half of a stream's flow control: it holds what has
// arrived until it is consumed, at most a Window, so that the goroutine that
// reads the connection never waits for the one that uses the bytes. Its methods
// may be called from any goroutine, Next and Consume from one at a time.
type Intake struct {
	mu      sync.Mutex
	arrived *sync.Cond
	queue   []Data
	ended   bool
	held    int64 // received, not consumed
	unacked int64 // consumed, not confirmed
}

// NewIntake returns an empty intake.
func NewIntake() *Intake {
	i := &Intake{}
	i.arrived = sync.NewCond(&i.mu)
	return i
}

// Receive queues a Data message, whose bytes then are the intake's. Bytes for which the sender had no
// credit, empty messages and data after the end are errors.
func (i *Intake) Receive(d *Data) error {
	n := int64(len(d.Bytes))
	if n == 0 || n > MaxData {
		return fmt.Errorf("a data message of %d bytes, where 1 to %d are allowed", n, MaxData)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.ended {
		return errors.New("data after the end of the stream")
	}
	if i.held+i.unacked+n > Window {
		return fmt.Errorf("more than %d bytes unconfirmed", Window)
	}
	i.held += n
	// Small messages are joined: a window of single bytes must not cost a slice
	// for each.
	if k := len(i.queue) - 1; k >= 0 && i.queue[k].Stream == d.Stream && len(i.queue[k].Bytes)+len(d.Bytes) <= MaxData {
		i.queue[k].Bytes = append(i.queue[k].Bytes, d.Bytes...)
	} else {
		i.queue = append(i.queue, *d)
	}
	i.arrived.Signal()
	return nil
}

// End says that nothing more will arrive. Next still gives what has.
func (i *Intake) End() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.ended = true
	i.arrived.Broadcast()
}

// Next waits for bytes of one stream and hands them over. ok is false when all
// that came before End is consumed.
func (i *Intake) Next() (d Data, ok bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for len(i.queue) == 0 && !i.ended {
		i.arrived.Wait()
	}
	if len(i.queue) == 0 {
		return Data{}, false
	}
	d = i.queue[0]
	i.queue = i.queue[1:]
	return d, true
}

// Consume notes that n bytes from Next went where they belong, and returns the
// ack to send for them, nil while it can wait.
func (i *Intake) Consume(n int) *Ack {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.held -= int64(n)
	i.unacked += int64(n)
	if i.unacked < ackEvery {
		return nil
	}
	ack := &Ack{Bytes: i.unacked}
	i.unacked = 0
	return ack
}
