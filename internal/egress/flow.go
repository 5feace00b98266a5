package egress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/capsem/capsem/internal/event"
)

// copyBuffer is how much is moved at a time, in bytes.
const copyBuffer = 32 << 10

// errTooMuch ends what has moved as much as it may.
var errTooMuch = errors.New("more bytes than one connection may move")

// flow is what moves through one connection, watched for standing still.
type flow struct {
	idle   time.Duration
	limit  int64
	timer  *time.Timer
	idling atomic.Bool
}

// watch calls end when nothing has moved for as long as it may. The flow must be
// stopped.
func (p *Proxy) watch(end func()) *flow {
	f := &flow{idle: p.limits.idle, limit: p.limits.bytes}
	f.timer = time.AfterFunc(f.idle, func() {
		f.idling.Store(true)
		end()
	})
	return f
}

func (f *flow) stop() { f.timer.Stop() }

// writeError is an error of the end that is written to.
type writeError struct{ err error }

func (e *writeError) Error() string { return e.err.Error() }
func (e *writeError) Unwrap() error { return e.err }

// move copies from one end to the other and calls after for each piece, until
// the end of from or an error; count is exact whatever happens.
func (f *flow) move(to io.Writer, from io.Reader, count *int64, after func() error) error {
	buf := make([]byte, copyBuffer)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if *count+int64(n) > f.limit {
				return errTooMuch
			}
			if _, err := to.Write(buf[:n]); err != nil {
				return &writeError{err}
			}
			if err := after(); err != nil {
				return &writeError{err}
			}
			*count += int64(n)
			f.timer.Reset(f.idle)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// end says in an outcome why a flow ended before its end, and reports whether it
// did so by a bound.
func (f *flow) end(ctx context.Context, out *event.Outcome, err error) bool {
	switch {
	case f.idling.Load():
		out.Status, out.Error = event.Timeout, &event.Error{Message: fmt.Sprintf("nothing moved for %s", f.idle)}
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		out.Status, out.Error = event.Timeout, &event.Error{Message: "the connection lasted as long as one may"}
	case ctx.Err() != nil:
		out.Status, out.Error = event.Cancelled, &event.Error{Message: "the server's life ended"}
	case errors.Is(err, errTooMuch):
		out.Status, out.Error = event.Failed, &event.Error{Message: fmt.Sprintf("%v (%d)", errTooMuch, f.limit)}
	default:
		return false
	}
	return true
}
