package aggregator

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
)

const (
	// lineEnds is how much of an over-long line's beginning and of its end is
	// kept, in bytes.
	lineEnds = 256
	// keepLine is the size up to which the buffer of a line is used again.
	keepLine = 256 << 10
)

// tooLongError says that a line was over the limit and was skipped.
type tooLongError struct {
	// size is the line's length without its end.
	size int64
	// head and tail are its first and last bytes.
	head, tail []byte
}

func (e *tooLongError) Error() string {
	return fmt.Sprintf("a line of %d bytes", e.size)
}

// lineReader reads lines that end in LF, with a bound. A line over the bound is
// skipped without being kept. It is used by one goroutine.
type lineReader struct {
	r   *bufio.Reader
	max int
	buf []byte
}

func newLineReader(r io.Reader, limit int) *lineReader {
	return &lineReader{r: bufio.NewReaderSize(r, 64<<10), max: limit}
}

// next returns the next line without its LF, valid until the next call. The
// error is a *tooLongError for a line that was skipped, after which reading goes
// on, else what the reader returned. What follows the last LF is a line too.
func (l *lineReader) next() ([]byte, error) {
	if cap(l.buf) > keepLine {
		l.buf = nil
	}
	l.buf = l.buf[:0]
	for {
		chunk, err := l.r.ReadSlice('\n')
		ended := err == nil
		if ended {
			chunk = chunk[:len(chunk)-1]
		}
		if len(l.buf)+len(chunk) > l.max {
			return nil, l.skip(chunk, err)
		}
		if ended && len(l.buf) == 0 {
			return chunk, nil // in the reader's own buffer
		}
		l.buf = append(l.buf, chunk...)
		switch {
		case ended:
			return l.buf, nil
		case errors.Is(err, bufio.ErrBufferFull):
		case len(l.buf) > 0:
			return l.buf, nil // the error comes again
		default:
			return nil, err
		}
	}
}

// skip reads to the end of a line that is over the limit.
func (l *lineReader) skip(chunk []byte, err error) error {
	long := &tooLongError{size: int64(len(l.buf) + len(chunk))}
	long.head = append(long.head, l.buf[:min(len(l.buf), lineEnds)]...)
	long.head = append(long.head, chunk[:min(len(chunk), lineEnds-len(long.head))]...)
	long.keep(l.buf)
	long.keep(chunk)
	l.buf = nil
	for errors.Is(err, bufio.ErrBufferFull) {
		chunk, err = l.r.ReadSlice('\n')
		if err == nil {
			chunk = chunk[:len(chunk)-1]
		}
		long.size += int64(len(chunk))
		long.keep(chunk)
	}
	return long // a read error comes again
}

// keep appends b to what is kept of the line's end.
func (e *tooLongError) keep(b []byte) {
	e.tail = append(e.tail, b[max(0, len(b)-lineEnds):]...)
	e.tail = e.tail[max(0, len(e.tail)-lineEnds):]
}

// answers returns the call that a line answers which was too long to be read,
// as far as its first and last bytes tell. Servers write the id first or last.
// The id is a claim like any other of the server: the worst that a wrong one
// does is to fail one of its own calls.
func (e *tooLongError) answers() (id uint64, ok bool) {
	if id, ok := numberAfter(e.head, `"id":`); ok && !bytes.Contains(e.head, []byte(`"method"`)) {
		return id, true
	}
	last := bytes.LastIndex(e.tail, []byte(`"id"`))
	if last < 0 {
		return 0, false
	}
	return numberAfter(e.tail[last:], `"id":`)
}

// numberAfter returns the whole number that follows key in b. White space is
// allowed around the colon that key ends in.
func numberAfter(b []byte, key string) (n uint64, ok bool) {
	name := key[:len(key)-1]
	i := bytes.Index(b, []byte(name))
	if i < 0 {
		return 0, false
	}
	rest, found := bytes.CutPrefix(bytes.TrimLeft(b[i+len(name):], " \t"), []byte(":"))
	if !found {
		return 0, false
	}
	rest = bytes.TrimLeft(rest, " \t")
	digits := 0
	for digits < len(rest) && digits < 19 && rest[digits] >= '0' && rest[digits] <= '9' {
		n = n*10 + uint64(rest[digits]-'0')
		digits++
	}
	// Without anything after it, the number may have been cut.
	return n, digits > 0 && digits < len(rest)
}
