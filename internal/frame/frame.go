// Package frame carries byte strings over a stream: each is preceded by its
// length, a big-endian u32, and none is longer than a bound that both ends
// state.
//
// A declared length is a claim. [Reader] lets memory grow with the bytes that
// arrive, by doubling: a peer that declares the largest frame and sends nothing
// costs [firstRead] bytes. [Writer] hands each frame to the operating system in
// one call where it can, so that a frame wakes its reader once, and keeps frames
// of concurrent writers apart.
//
// Neither allocates once its buffer has the size that its traffic needs.
package frame

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"sync"
)

// HeaderSize is the size of the length before a frame, in bytes.
const HeaderSize = 4

// Bounds of what a Reader and a Writer hold.
const (
	// firstRead is what a Reader begins with, in bytes.
	firstRead = 4 << 10
	// keepFrames is how many frames in a row must have needed less than a
	// quarter of a Reader's buffer before it is replaced by a small one.
	keepFrames = 64
	// coalesce is how much a Writer copies together into one write, in bytes: 64
	// KiB of data and an envelope.
	coalesce = 72 << 10
	// emptyReads is how many reads in a row may return neither bytes nor an
	// error.
	emptyReads = 100
)

// TooLargeError says that a frame is longer than its bound. A stream on which a
// Reader has returned it cannot be read further.
type TooLargeError struct {
	// Size is the frame's length, as declared or as it was to be sent; Max the
	// bound.
	Size, Max int64
}

// Error implements error.
func (e *TooLargeError) Error() string {
	return fmt.Sprintf("frame of %d bytes exceeds the limit of %d", e.Size, e.Max)
}

// Reader reads frames. It is used by one goroutine at a time. It reads ahead: the
// stream beneath it belongs to it.
type Reader struct {
	src io.Reader
	max int64
	err error // what ended the stream, returned by every later Next

	buf        []byte // buf[start:end] is what was read and not yet returned
	start, end int
	small      int // frames in a row that left most of buf unused
}

// NewReader returns a Reader of the frames in src, none longer than limit bytes.
func NewReader(src io.Reader, limit int) *Reader {
	return &Reader{src: src, max: bound(limit)}
}

// bound returns limit as far as a header can express it.
func bound(limit int) int64 {
	return min(int64(limit), math.MaxUint32)
}

// Next returns the next frame, which may be empty. The slice is the Reader's: it
// is valid until the following call of Next, and may be changed until then.
//
// The error is io.EOF at the end of the stream between two frames,
// io.ErrUnexpectedEOF inside one, a *[TooLargeError] for a declared length over
// the bound, else what the stream returned. It is returned again by every later
// call.
func (r *Reader) Next() ([]byte, error) {
	if r.err != nil {
		return nil, r.err
	}
	r.shrink()
	if err := r.fill(HeaderSize); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) && r.start == r.end {
			err = io.EOF
		}
		return nil, r.fail(err)
	}
	size := int64(binary.BigEndian.Uint32(r.buf[r.start:]))
	if size > r.max {
		return nil, r.fail(&TooLargeError{Size: size, Max: r.max})
	}
	r.start += HeaderSize
	if err := r.fill(int(size)); err != nil {
		return nil, r.fail(err)
	}
	b := r.buf[r.start : r.start+int(size) : r.start+int(size)]
	r.start += int(size)
	if len(b) < len(r.buf)/4 {
		r.small++
	} else {
		r.small = 0
	}
	return b, nil
}

// fail ends the stream and lets go of its buffer.
func (r *Reader) fail(err error) error {
	r.err, r.buf = err, nil
	return err
}

// fill reads until n unreturned bytes are in the buffer. It returns
// io.ErrUnexpectedEOF if the stream ends before.
func (r *Reader) fill(n int) error {
	for empty := 0; r.end-r.start < n; {
		r.room(n)
		got, err := r.src.Read(r.buf[r.end:])
		if got < 0 || got > len(r.buf)-r.end {
			return fmt.Errorf("reader returned a count of %d for %d bytes", got, len(r.buf)-r.end)
		}
		r.end += got
		if r.end-r.start >= n {
			return nil // the error comes again when there is nothing left
		}
		if errors.Is(err, io.EOF) {
			return io.ErrUnexpectedEOF
		}
		if err != nil {
			return err
		}
		if got > 0 {
			empty = 0
		} else if empty++; empty == emptyReads {
			return io.ErrNoProgress
		}
	}
	return nil
}

// room makes space for at least one further byte of a run of n. It moves what is
// there to the front before it grows the buffer, and it grows a buffer only when
// that is full, by doubling, up to the run and the header of the next frame.
func (r *Reader) room(n int) {
	if r.start == r.end {
		r.start, r.end = 0, 0
	}
	if r.start+n <= len(r.buf) {
		return
	}
	to := r.buf
	if have := r.end - r.start; have == len(r.buf) {
		to = make([]byte, max(firstRead, min(2*len(r.buf), n+HeaderSize)))
	}
	r.end = copy(to, r.buf[r.start:r.end])
	r.buf, r.start = to, 0
}

// shrink replaces a large buffer that the traffic no longer needs.
func (r *Reader) shrink() {
	have := r.end - r.start
	if r.small < keepFrames || len(r.buf) <= firstRead || have > firstRead {
		return
	}
	kept := make([]byte, firstRead)
	copy(kept, r.buf[r.start:r.end])
	r.buf, r.start, r.end, r.small = kept, 0, have, 0
}

// Writer writes frames. It may be used by several goroutines at once.
type Writer struct {
	dst io.Writer
	max int64
	// gather says that dst takes several slices in one system call.
	gather bool

	mu     sync.Mutex // guards what follows, and the order of writes
	err    error      // what ended the stream, returned by every later WriteFrame
	header [HeaderSize]byte
	vec    [][]byte    // gathering: the header and the parts
	out    net.Buffers // gathering: what of vec is not yet written
	buf    []byte      // else: what goes out in one write
}

// NewWriter returns a Writer of frames to dst, none longer than limit bytes. On
// TCP and Unix sockets a frame is one writev. On everything else a
// frame of up to 72 KiB is one Write; of a longer one, parts that are longer than
// that go out by themselves, uncopied.
func NewWriter(dst io.Writer, limit int) *Writer {
	w := &Writer{dst: dst, max: bound(limit)}
	switch dst.(type) {
	case *net.TCPConn, *net.UnixConn:
		w.gather = true
	}
	return w
}

// WriteFrame writes one frame, made of the parts in order. It keeps none of them.
//
// A frame over the bound is a *[TooLargeError] and changes nothing. Any other
// error ends the stream, because part of the frame may have been sent: every
// later call returns it too.
func (w *Writer) WriteFrame(parts ...[]byte) error {
	var size int64
	for _, p := range parts {
		size += int64(len(p))
	}
	if size > w.max {
		return &TooLargeError{Size: size, Max: w.max}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return w.err
	}
	binary.BigEndian.PutUint32(w.header[:], uint32(size))
	if w.gather {
		w.err = w.writeGathered(parts)
	} else {
		w.err = w.writeCoalesced(parts)
	}
	return w.err
}

// writeGathered sends the header and the parts as they are. w.mu is held.
func (w *Writer) writeGathered(parts [][]byte) error {
	w.vec = append(append(w.vec[:0], w.header[:]), parts...)
	w.out = w.vec
	_, err := w.out.WriteTo(w.dst)
	clear(w.vec)
	return err
}

// writeCoalesced copies the header and the parts together and writes that, except
// that a part which does not fit is written as it is, whole: splitting it would
// leave its rest at an odd address, and copying from there into a pipe takes twice
// as long. w.mu is held.
func (w *Writer) writeCoalesced(parts [][]byte) error {
	w.buf = append(w.buf[:0], w.header[:]...)
	for _, p := range parts {
		if len(w.buf)+len(p) <= coalesce {
			w.buf = append(w.buf, p...)
			continue
		}
		if err := w.write(w.buf); err != nil {
			return err
		}
		w.buf = w.buf[:0]
		if len(p) <= coalesce {
			w.buf = append(w.buf, p...)
		} else if err := w.write(p); err != nil {
			return err
		}
	}
	return w.write(w.buf)
}

// write writes all of b.
func (w *Writer) write(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	n, err := w.dst.Write(b)
	if err == nil && n != len(b) {
		err = io.ErrShortWrite
	}
	return err
}
