package qemu

import (
	"strings"
	"sync"
)

// tailSize is how much of QEMU's own output is kept.
const tailSize = 4 << 10

// tail is a writer that keeps the end of what was written. It is safe for
// concurrent use.
type tail struct {
	mu   sync.Mutex
	kept []byte
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = append(t.kept, b...)
	if over := len(t.kept) - tailSize; over > 0 {
		t.kept = append(t.kept[:0], t.kept[over:]...)
	}
	return len(b), nil
}

// String is what was kept, without the line that was cut at its beginning.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := string(t.kept)
	if len(s) == tailSize {
		if _, rest, ok := strings.Cut(s, "\n"); ok {
			s = rest
		}
	}
	return strings.TrimSpace(strings.ToValidUTF8(s, "�"))
}
