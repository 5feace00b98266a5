package endpoint

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// errStuck closes a connection whose guest does not take its answers.
var errStuck = errors.New("the guest does not take its answers")

// queue writes frames to a connection in the order in which they were put in.
// Whoever puts one in never waits for the guest.
type queue struct {
	conn   net.Conn
	budget *budget

	mu     sync.Mutex
	frames [][]byte
	bytes  int
	err    error
	// wake has room for one: there is something to write, or the end.
	wake   chan struct{}
	closed bool
	done   chan struct{}
}

func newQueue(c net.Conn, b *budget) *queue {
	q := &queue{conn: c, budget: b, wake: make(chan struct{}, 1), done: make(chan struct{})}
	go q.write()
	return q
}

// put queues a frame. It fails when the connection did, and when the guest is
// too far behind; then the connection is of no more use.
func (q *queue) put(frame []byte) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err != nil {
		return q.err
	}
	if q.closed {
		return net.ErrClosed
	}
	if q.bytes+len(frame) > MaxQueued || !q.budget.hold(len(frame)) {
		q.err = fmt.Errorf("%w: %d bytes wait for it", errStuck, q.bytes)
		return q.err
	}
	q.frames = append(q.frames, frame)
	q.bytes += len(frame)
	q.signal()
	return nil
}

func (q *queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// close lets what is queued be written, and returns when the writer is done.
func (q *queue) close() {
	q.mu.Lock()
	q.closed = true
	q.signal()
	q.mu.Unlock()
	<-q.done
}

func (q *queue) write() {
	defer close(q.done)
	for range q.wake {
		for {
			frames, size, last := q.take()
			if len(frames) == 0 {
				if last {
					return
				}
				break
			}
			if err := q.send(frames); err != nil {
				q.fail(err)
				return
			}
			q.sent(size)
		}
	}
}

// take empties the queue. Its bytes count until they are written.
func (q *queue) take() (frames [][]byte, size int, last bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	frames, q.frames = q.frames, nil
	return frames, q.bytes, q.closed || q.err != nil
}

func (q *queue) sent(size int) {
	q.mu.Lock()
	q.bytes -= size
	q.mu.Unlock()
	q.budget.release(size)
}

func (q *queue) send(frames [][]byte) error {
	for _, f := range frames {
		for len(f) > 0 {
			if err := q.conn.SetWriteDeadline(time.Now().Add(StuckAfter)); err != nil {
				return err
			}
			n, err := q.conn.Write(f[:min(len(f), writePiece)])
			if err != nil {
				return err
			}
			f = f[n:]
		}
	}
	return nil
}

// writePiece is how much must move within StuckAfter, in bytes.
const writePiece = 256 << 10

// fail drops what is left and ends the connection's reader too.
func (q *queue) fail(err error) {
	q.mu.Lock()
	if q.err == nil {
		q.err = err
	}
	left := q.bytes
	q.frames, q.bytes = nil, 0
	q.mu.Unlock()
	q.budget.release(left)
	if err := q.conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return // the connection is lost either way
	}
}
