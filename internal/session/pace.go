package session

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// pace lets something be done over again that a peer may ask for at any rate: one
// at a time, with a pause between two, and many requests while it waits are one.
// The zero value is ready.
type pace struct {
	asked atomic.Bool // somebody has asked and has not begun
	turn  sync.Mutex  // held by whoever waits to begin, or does it
	last  time.Time   // when it was last done; guarded by turn
}

// ask reports whether the caller is to call do: false where somebody is about to,
// who will see whatever the caller wants seen.
func (p *pace) ask() bool { return p.asked.CompareAndSwap(false, true) }

// do calls f when it is time, unless ctx ends first. It follows an ask that was
// true.
func (p *pace) do(ctx context.Context, pause time.Duration, f func()) {
	p.turn.Lock()
	defer p.turn.Unlock()
	if wait := pause - time.Since(p.last); !p.last.IsZero() && wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	p.asked.Store(false)
	if ctx.Err() == nil {
		f()
	}
	p.last = time.Now()
}
