package vhostvsock

// minBuffer is what a receive buffer starts with; it doubles from there.
const minBuffer = 4 << 10

// buffer is a queue of bytes in a ring that grows up to BufferSize. Whoever
// writes has checked that the bytes fit.
type buffer struct {
	ring []byte // its length is 0 or a power of two
	head int    // where the first byte is
	size int    // how many there are
}

// write appends b, which leaves size at most BufferSize.
func (q *buffer) write(b []byte) {
	q.grow(q.size + len(b))
	for len(b) > 0 {
		tail := (q.head + q.size) & (len(q.ring) - 1)
		n := copy(q.ring[tail:min(tail+len(q.ring)-q.size, len(q.ring))], b)
		q.size += n
		b = b[n:]
	}
}

// grow makes room for n bytes in all.
func (q *buffer) grow(n int) {
	if n <= len(q.ring) {
		return
	}
	length := max(len(q.ring), minBuffer)
	for length < n {
		length *= 2
	}
	ring := make([]byte, length)
	size := q.read(ring)
	q.ring, q.head, q.size = ring, 0, size
}

// read moves as many bytes as there are, and fit, to b.
func (q *buffer) read(b []byte) int {
	total := 0
	for q.size > 0 && total < len(b) {
		n := copy(b[total:], q.ring[q.head:min(q.head+q.size, len(q.ring))])
		q.head = (q.head + n) & (len(q.ring) - 1)
		q.size -= n
		total += n
	}
	return total
}

// drop forgets all bytes and gives the memory back.
func (q *buffer) drop() {
	*q = buffer{}
}
