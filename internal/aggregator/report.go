package aggregator

import (
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/capsem/capsem/internal/toolproto"
)

// Bounds of what a server can make this process report.
const (
	// eventBurst events of a kind pass at once, and eventRate a second after.
	eventBurst = 100
	eventRate  = 20
	// maxErrorText is how much of a server's words goes into an error, in bytes.
	maxErrorText = 256
)

// reporter sends events to the supervisor, few enough that a server cannot fill
// anything with them. What is left out is counted in the next one of its kind.
type reporter struct {
	send func(*toolproto.Message)

	mu    sync.Mutex
	kinds map[toolproto.EventKind]*budget
}

type budget struct {
	tokens  float64
	filled  time.Time
	skipped int
}

func newReporter(send func(*toolproto.Message)) *reporter {
	return &reporter{send: send, kinds: make(map[toolproto.EventKind]*budget)}
}

// report sends an event, or counts it.
func (r *reporter) report(kind toolproto.EventKind, text string) {
	now := time.Now()
	r.mu.Lock()
	b := r.kinds[kind]
	if b == nil {
		b = &budget{tokens: eventBurst, filled: now}
		r.kinds[kind] = b
	}
	b.tokens = min(eventBurst, b.tokens+eventRate*now.Sub(b.filled).Seconds())
	b.filled = now
	if b.tokens < 1 {
		b.skipped++
		r.mu.Unlock()
		return
	}
	b.tokens--
	count := b.skipped
	b.skipped = 0
	r.mu.Unlock()
	r.emit(kind, text, count)
}

// exit says what is still uncounted, and then that the server is gone.
func (r *reporter) exit(text string) {
	r.mu.Lock()
	skipped := make(map[toolproto.EventKind]int)
	for kind, b := range r.kinds {
		if b.skipped > 0 {
			skipped[kind] = b.skipped
			b.skipped = 0
		}
	}
	r.mu.Unlock()
	for kind, n := range skipped {
		r.emit(kind, "", n)
	}
	r.emit(toolproto.EventExit, text, 0)
}

func (r *reporter) emit(kind toolproto.EventKind, text string, count int) {
	r.send(&toolproto.Message{Event: &toolproto.Event{Kind: kind, Text: cut(text, toolproto.MaxEventText), Count: count}})
}

// cut returns at most n bytes of s, as valid UTF-8.
func cut(s string, n int) string {
	if len(s) > n {
		for n > 0 && !utf8.RuneStart(s[n]) {
			n--
		}
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
