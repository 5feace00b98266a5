package guestproto

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// MCPReader reads framed MCP and puts messages that came in several frames together.
// It is used by one goroutine at a time.
//
// Memory grows with the bytes that arrive, never with a length that is declared.
type MCPReader struct {
	// Reserve, where it is set, is asked before the reader holds n more bytes of
	// messages that are not complete, and told with a negative n when it holds
	// them no longer. If it says no, the message is refused as busy. It may be
	// set before the first Read.
	Reserve func(n int) bool

	src     *bufio.Reader
	more    bool
	partial map[uint32]*partial
	head    [mcpLength + MCPHeader]byte
	name    [MaxProcess]byte
}

// partial is a message that has not all arrived.
type partial struct {
	process string
	buf     []byte
	held    int  // bytes reserved
	refused bool // its bytes are gone; what is left of it is passed over
}

// NewMCPReader returns a MCPReader of the frames in src, which follow the metadata
// line that [ReadMeta] reads. more says that messages in several frames are
// allowed.
func NewMCPReader(src *bufio.Reader, more bool) *MCPReader {
	return &MCPReader{src: src, more: more, partial: make(map[uint32]*partial)}
}

// Read returns the next message. Its payload belongs to the caller.
//
// The error is io.EOF at the end of the stream between two frames. A *[FrameError]
// says that a frame or message was refused; unless it is Fatal, the next Read goes
// on behind it. Any other error is the stream's. Read must not be called again
// after an error that ends the stream.
func (r *MCPReader) Read() (MCPFrame, error) {
	for {
		f, done, err := r.frame()
		if done || err != nil {
			return f, err
		}
	}
}

// Close gives back what is reserved. It does not close the stream.
func (r *MCPReader) Close() {
	for id, p := range r.partial {
		r.release(p)
		delete(r.partial, id)
	}
}

// frame reads one frame. done says that f is a whole message.
func (r *MCPReader) frame() (f MCPFrame, done bool, err error) {
	b := &r.head
	if n, err := io.ReadFull(r.src, b[:mcpLength]); err != nil {
		if n == 0 && errors.Is(err, io.EOF) {
			return f, false, io.EOF
		}
		return f, false, inside(err)
	}
	if total := binary.BigEndian.Uint32(b[:]); total < MCPHeader || total > MaxMCPFrame {
		return f, false, &FrameError{Fatal: true, Detail: "length out of bounds"}
	}
	if _, err := io.ReadFull(r.src, b[mcpLength:]); err != nil {
		return f, false, inside(err)
	}
	h, detail := parseHeader(b[:], r.more)
	left := int(h.total) - MCPHeader
	if detail != "" {
		return f, false, r.drop(h, left, &FrameError{Stream: h.stream, Detail: detail})
	}
	if _, open := r.partial[0]; open && h.stream != 0 {
		return f, false, &FrameError{Fatal: true, Detail: "another stream between the pieces of stream 0"}
	}
	if _, err := io.ReadFull(r.src, r.name[:h.name]); err != nil {
		return f, false, inside(err)
	}
	process, detail := parseName(r.name[:h.name])
	if detail != "" {
		if h.flags&flagMore != 0 && len(r.partial) < MaxPartial && r.partial[h.stream] == nil {
			r.partial[h.stream] = &partial{} // so that its other pieces go the same way
		}
		return f, false, r.drop(h, int(h.payload), &FrameError{Stream: h.stream, Detail: detail})
	}
	return r.piece(h, process)
}

// piece reads the payload of a frame whose header is in order.
func (r *MCPReader) piece(h header, process string) (f MCPFrame, done bool, err error) {
	last := h.flags&flagMore == 0
	p := r.partial[h.stream]
	switch {
	case p != nil && p.refused:
		return f, false, r.drop(h, int(h.payload), nil)
	case p == nil && !last && len(r.partial) == MaxPartial:
		return f, false, &FrameError{Fatal: true, Detail: "too many partial messages"}
	case p == nil:
		p = &partial{process: process}
	}
	if size := len(p.buf) + int(h.payload); size > MaxMCPMessage {
		r.partial[h.stream] = p
		return f, false, r.drop(h, int(h.payload), &FrameError{
			Stream: h.stream, Oversize: true, Size: size, Max: MaxMCPMessage, Detail: "message too large",
		})
	}
	read, err := r.fill(p, int(h.payload), last)
	switch {
	case errors.Is(err, errNoRoom):
		r.partial[h.stream] = p
		return f, false, r.drop(h, int(h.payload)-read, &FrameError{Stream: h.stream, Busy: true, Detail: "too many bytes are held"})
	case err != nil:
		r.release(p)
		return f, false, inside(err)
	case !last:
		r.partial[h.stream] = p
		return f, false, nil
	}
	delete(r.partial, h.stream)
	r.release(p)
	return MCPFrame{
		Stream: h.stream, Notification: h.flags&flagNotify != 0, Process: p.process, Payload: p.buf,
	}, true, nil
}

// drop passes over the rest of a frame that was refused and returns why. A partial
// message that it belongs to is refused with it: what is left of that is passed
// over too, without another word.
func (r *MCPReader) drop(h header, left int, why *FrameError) error {
	if p := r.partial[h.stream]; p != nil {
		r.release(p)
		p.buf, p.refused = nil, true
		if h.flags&flagMore == 0 {
			delete(r.partial, h.stream)
		}
	}
	if _, err := r.src.Discard(left); err != nil {
		return inside(err)
	}
	if why == nil {
		return nil
	}
	return why
}

// errNoRoom is Reserve's no.
var errNoRoom = errors.New("no room")

// fill reads n bytes into p, the last of the message if last is set, and returns
// how many it has read.
func (r *MCPReader) fill(p *partial, n int, last bool) (read int, err error) {
	for read < n {
		if len(p.buf) == cap(p.buf) {
			size := min(max(2*cap(p.buf), firstFrameRead), MaxMCPMessage)
			if whole := len(p.buf) + n - read; last && size > whole {
				size = whole
			}
			if r.Reserve != nil && !r.Reserve(size-p.held) {
				return read, errNoRoom
			}
			p.held = size
			p.buf = append(make([]byte, 0, size), p.buf...)
		}
		room := p.buf[len(p.buf):min(cap(p.buf), len(p.buf)+n-read)]
		got, err := io.ReadFull(r.src, room)
		p.buf = p.buf[:len(p.buf)+got]
		read += got
		if err != nil {
			return read, err
		}
	}
	return read, nil
}

// release gives back what is reserved for p.
func (r *MCPReader) release(p *partial) {
	if r.Reserve != nil && p.held > 0 {
		r.Reserve(-p.held)
	}
	p.held = 0
}

// inside is the error of a stream that ended, or failed, inside a frame.
func inside(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return &FrameError{Fatal: true, Detail: "the stream ends inside a frame"}
	}
	return fmt.Errorf("reading an MCP frame: %w", err)
}
