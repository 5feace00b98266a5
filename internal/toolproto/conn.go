package toolproto

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

// Conn reads and writes Messages. One goroutine may read while any number write.
// It does not close what is beneath it.
type Conn struct {
	r    *frame.Reader
	w    *frame.Writer
	bufs sync.Pool // of *[]byte
}

// NewConn returns a Conn that reads from in and writes to out. Both belong to it:
// it reads ahead.
func NewConn(in io.Reader, out io.Writer) *Conn {
	return &Conn{
		r: frame.NewReader(in, MaxMessage), w: frame.NewWriter(out, MaxMessage),
		bufs: sync.Pool{New: func() any { return new([]byte) }},
	}
}

// Read returns the next message, which shares no memory with the connection. The
// error is io.EOF at the end of the stream between two messages. After any error
// the connection is of no use.
func (c *Conn) Read() (*Message, error) {
	b, err := c.r.Next()
	if err != nil {
		return nil, err
	}
	m := new(Message)
	if err := msgpack.Unmarshal(b, m); err != nil {
		return nil, err
	}
	if _, err := msgpack.Member(m); err != nil {
		return nil, err
	}
	return m, nil
}

// Write sends one message. It keeps none of it. A message that the peer would
// refuse (none or several members set, over MaxMessage, text that is not UTF-8) is
// an error and leaves the connection as it was; any other error ends it.
func (c *Conn) Write(m *Message) error {
	m = m.text()
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

// text returns m with the texts that are meant for people made UTF-8: what a
// server writes to its stderr, or a system's error names, may be any bytes.
func (m *Message) text() *Message {
	valid := func(s string) string { return strings.ToValidUTF8(s, "\ufffd") }
	out := *m
	switch {
	case m.Event != nil:
		e := *m.Event
		e.Text, out.Event = valid(e.Text), &e
	case m.Result != nil && m.Result.Error != nil:
		r, e := *m.Result, *m.Result.Error
		e.Message, r.Error, out.Result = valid(e.Message), &e, &r
	case m.HTTPResult != nil:
		r := *m.HTTPResult
		r.Error, out.HTTPResult = valid(r.Error), &r
	default:
		return m
	}
	return &out
}
