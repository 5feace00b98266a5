package guestproto

import (
	"fmt"
	"io"
	"strings"
	"sync"

	"github.com/capsem/capsem/internal/frame"
	"github.com/capsem/capsem/internal/msgpack"
)

// keepBuffer is the size of the largest encoding buffer that is kept for reuse.
const keepBuffer = 128 << 10

// ControlConn reads and writes the messages of port 5000. One goroutine may read
// while any number write. It does not close what is beneath it; deadlines are
// set there too.
type ControlConn struct{ conn messages[Control] }

// NewControlConn returns a ControlConn over rw, which belongs to it: it reads
// ahead.
func NewControlConn(rw io.ReadWriter) *ControlConn {
	return &ControlConn{newMessages[Control](rw)}
}

// Read returns the next message, which shares no memory with the connection. The
// error is io.EOF at the end of the stream between two messages. After any error
// the connection is of no use.
func (c *ControlConn) Read() (*Control, error) { return c.conn.read() }

// Write sends one message. A message that the peer would refuse (none or several
// members set, over MaxMessage, text that is not UTF-8) is an error and leaves the
// connection as it was; any other error ends it.
func (c *ControlConn) Write(m *Control) error {
	if m.Error != nil {
		text := *m
		text.Error = m.Error.text()
		m = &text
	}
	return c.conn.write(m)
}

// StreamConn reads and writes the messages of port 5005. One goroutine may read
// while any number write. It does not close what is beneath it; deadlines are
// set there too.
type StreamConn struct{ conn messages[Stream] }

// NewStreamConn returns a StreamConn over rw, which belongs to it: it reads ahead.
func NewStreamConn(rw io.ReadWriter) *StreamConn {
	return &StreamConn{newMessages[Stream](rw)}
}

// Read returns the next message, which shares no memory with the connection. The
// error is io.EOF at the end of the stream between two messages. After any error
// the connection is of no use.
func (c *StreamConn) Read() (*Stream, error) { return c.conn.read() }

// Write sends one message. It keeps none of it. A message that the peer would
// refuse (none or several members set, over MaxMessage, text that is not UTF-8) is
// an error and leaves the connection as it was; any other error ends it.
func (c *StreamConn) Write(m *Stream) error {
	switch {
	case m.Error != nil:
		text := *m
		text.Error = m.Error.text()
		m = &text
	case m.Exit != nil:
		text, exit := *m, *m.Exit
		exit.Message = strings.ToValidUTF8(exit.Message, "\ufffd")
		text.Exit = &exit
		m = &text
	}
	return c.conn.write(m)
}

// text returns e with a message that is UTF-8: the text of a system's error may
// hold any file's name.
func (e *Error) text() *Error {
	return &Error{Code: e.Code, Message: strings.ToValidUTF8(e.Message, "\ufffd")}
}

// messages carries one union's messages in frames.
type messages[M any] struct {
	r    *frame.Reader
	w    *frame.Writer
	bufs *sync.Pool // of *[]byte
}

func newMessages[M any](rw io.ReadWriter) messages[M] {
	return messages[M]{
		r: frame.NewReader(rw, MaxMessage), w: frame.NewWriter(rw, MaxMessage),
		bufs: &sync.Pool{New: func() any { return new([]byte) }},
	}
}

func (c *messages[M]) read() (*M, error) {
	b, err := c.r.Next()
	if err != nil {
		return nil, err
	}
	m := new(M)
	if err := msgpack.Unmarshal(b, m); err != nil {
		return nil, err
	}
	if _, err := msgpack.Member(m); err != nil {
		return nil, err
	}
	return m, nil
}

func (c *messages[M]) write(m *M) error {
	if _, err := msgpack.Member(m); err != nil {
		return err
	}
	buf := c.bufs.Get().(*[]byte)
	defer func() {
		if cap(*buf) <= keepBuffer {
			c.bufs.Put(buf)
		}
	}()
	b, err := msgpack.MarshalAppend((*buf)[:0], m)
	if err != nil {
		return err
	}
	*buf = b
	if err := c.w.WriteFrame(b); err != nil {
		return fmt.Errorf("writing a message: %w", err)
	}
	return nil
}
