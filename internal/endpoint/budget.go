package endpoint

import "sync"

// budget is what one guest holds of this process.
type budget struct {
	mu       sync.Mutex
	requests int
	bytes    int64
}

// begin takes a place for a request of that many bytes.
func (b *budget) begin(bytes int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.requests >= MaxInFlight || b.bytes+int64(bytes) > MaxHeld {
		return false
	}
	b.requests++
	b.bytes += int64(bytes)
	return true
}

func (b *budget) end(bytes int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.requests--
	b.bytes -= int64(bytes)
}

// reserve takes room for parts of messages, or with a negative n gives it back.
func (b *budget) reserve(n int) bool {
	if n < 0 {
		b.release(-n)
		return true
	}
	return b.hold(n)
}

// hold takes room for an answer that waits to be written.
func (b *budget) hold(bytes int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.bytes+int64(bytes) > MaxHeld {
		return false
	}
	b.bytes += int64(bytes)
	return true
}

func (b *budget) release(bytes int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.bytes -= int64(bytes)
}
