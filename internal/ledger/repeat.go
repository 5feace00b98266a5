package ledger

import (
	"sync"
	"time"

	"github.com/capsem/capsem/internal/event"
)

// repeatWindow is how long equal messages are counted after the first of them.
const repeatWindow = time.Second

// maxRepeats bounds the kinds that are counted at once. Beyond it, messages of
// different kinds are counted together.
const maxRepeats = 64

// maxRepeatText bounds, in bytes, what of each text tells kinds apart.
const maxRepeatText = 256

// repeat is what equal messages have in common.
type repeat struct {
	eventType                     event.Type
	direction                     Direction
	method, server, subject       string
	detail, rule, process, policy string
	code                          int
	decision                      event.Decision
	status                        event.Status
	initiator                     event.Initiator
}

// manyKinds stands for the messages beyond maxRepeats.
func manyKinds(status event.Status) repeat {
	return repeat{eventType: event.MCPOther, detail: "further messages, of too many kinds to tell apart", status: status, decision: event.Allow}
}

// repeats counts messages that are equal to one that was just written, so that
// a peer cannot fill the disk by repeating itself. There is one timer, which
// runs only while something is counted.
type repeats struct {
	write func(repeat, int64, time.Time) error

	mu      sync.Mutex
	kinds   map[repeat]*counter
	order   []*counter // by age
	timer   *time.Timer
	running sync.WaitGroup // the timer's function
	closed  bool
}

type counter struct {
	kind        repeat
	since, last time.Time
	count       int64
}

func newRepeats(write func(kind repeat, count int64, last time.Time) error) *repeats {
	return &repeats{write: write, kinds: map[repeat]*counter{}}
}

// first reports whether a message is the first of its kind, and to be written
// at once. Otherwise it is counted.
func (r *repeats) first(kind repeat) bool {
	kind = kind.bounded()
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return true
	}
	c := r.kinds[kind]
	fresh := c == nil
	if fresh {
		if len(r.kinds) >= maxRepeats {
			kind = manyKinds(kind.status)
			c = r.kinds[kind]
		}
		if c == nil {
			c = &counter{kind: kind, since: now}
			r.kinds[kind] = c
			r.order = append(r.order, c)
			r.arm(now)
			if kind != manyKinds(kind.status) {
				return true
			}
		}
	}
	c.count++
	c.last = now
	return false
}

// arm starts the timer for the oldest kind. The caller holds mu.
func (r *repeats) arm(now time.Time) {
	if r.timer != nil || len(r.order) == 0 || r.closed {
		return
	}
	r.running.Add(1)
	r.timer = time.AfterFunc(r.order[0].since.Add(repeatWindow).Sub(now), func() {
		defer r.running.Done()
		r.flush()
	})
}

// flush writes the kinds whose time is over. What cannot be written is counted
// on, and tried again when another window has passed.
func (r *repeats) flush() {
	now := time.Now()
	for _, c := range r.due(now) {
		if c.count == 0 || r.write(c.kind, c.count, c.last) == nil {
			continue
		}
		r.mu.Lock()
		if again := r.kinds[c.kind]; again != nil {
			again.count += c.count
		} else if !r.closed {
			c.since = now
			r.kinds[c.kind] = c
			r.order = append(r.order, c)
		}
		r.mu.Unlock()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.timer = nil
	r.arm(time.Now())
}

// due takes the kinds whose time is over: all of them once r is closed.
func (r *repeats) due(now time.Time) []*counter {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for n < len(r.order) && (r.closed || now.Sub(r.order[n].since) >= repeatWindow) {
		delete(r.kinds, r.order[n].kind)
		n++
	}
	due := r.order[:n:n]
	r.order = r.order[n:]
	return due
}

// close writes what is counted and waits for the timer's function. From then
// on every message is the first of its kind.
func (r *repeats) close() {
	r.mu.Lock()
	r.closed = true
	if r.timer != nil && r.timer.Stop() {
		r.running.Done()
	}
	r.mu.Unlock()
	r.running.Wait()
	r.flush()
}

// bounded keeps the memory of a kind small whatever the peer sends.
func (k repeat) bounded() repeat {
	for _, s := range []*string{&k.method, &k.server, &k.subject, &k.detail, &k.process, &k.initiator.ID} {
		if len(*s) > maxRepeatText {
			*s = string([]byte((*s)[:maxRepeatText])) // a copy: the message must not be held
		}
	}
	return k
}
