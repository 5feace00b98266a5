package egress

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"sync"
	"time"
)

// maxLeft is how much a client may still send when all was said, in bytes,
// before its connection is reset.
const maxLeft = 256 << 10

// client is one connection of the jail's.
type client struct {
	conn net.Conn
	in   *bufio.Reader
	log  *slog.Logger
	once sync.Once
	// chunks says that the client understands them.
	chunks bool
}

func (c *client) close() {
	c.once.Do(func() {
		// What was not passed on by now is not wanted any more.
		_ = c.conn.Close()
	})
}

// deadline bounds what is read and written from now on, 0 takes the bound away.
func (c *client) deadline(d time.Duration) {
	var at time.Time
	if d > 0 {
		at = time.Now().Add(d)
	}
	// It fails on a closed connection alone, where reading says so.
	_ = c.conn.SetDeadline(at)
}

// refuse tells the client why it does not get what it asked for.
func (c *client) refuse(r *refusal, farewell time.Duration) {
	text := "capsem: " + r.text + "\n"
	c.deadline(farewell)
	_, err := fmt.Fprintf(c.conn, "HTTP/1.1 %d %s\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s",
		r.status, http.StatusText(r.status), len(text), text)
	if err != nil {
		c.log.Debug("a refused client does not listen", "error", err)
		return
	}
	c.leave(farewell)
}

// leave ends a connection on which all was said. Closing it with something
// unread would reset it, and the answer would be lost on its way.
func (c *client) leave(farewell time.Duration) {
	c.deadline(farewell)
	err := closeWrite(c.conn)
	if err == nil {
		_, err = io.CopyN(io.Discard, c.in, maxLeft)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		c.log.Debug("a client does not close its connection", "error", err)
	}
}

// closeWrite ends one direction of a connection.
func closeWrite(conn net.Conn) error {
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return conn.Close()
}

// readBody reads the body of a request whole. release gives back the place that
// it takes in memory; it is nil where there is an error.
func (p *Proxy) readBody(ctx context.Context, c *client, h *head) (body []byte, release func(), err error) {
	length, chunked, err := h.framing()
	if err != nil {
		return nil, nil, err
	}
	c.deadline(p.limits.body)
	if len(h.values("Expect")) > 0 {
		if _, err := io.WriteString(c.conn, "HTTP/1.1 100 Continue\r\n\r\n"); err != nil {
			return nil, nil, fmt.Errorf("asking for the body: %w", err)
		}
	}
	from := io.LimitReader(c.in, length)
	if chunked {
		// Trailers are left unread: nothing of this connection is read again.
		from = httputil.NewChunkedReader(c.in)
	}
	small, large := int64(p.limits.smallBody), func() {}
	body, err = io.ReadAll(io.LimitReader(from, small))
	if err == nil && int64(len(body)) == small {
		if large, err = p.largeBody(ctx); err != nil {
			return nil, nil, err
		}
		c.deadline(p.limits.body)
		var more []byte
		more, err = io.ReadAll(io.LimitReader(from, MaxRequestBody+1-small))
		body = append(body, more...)
	}
	switch {
	case err != nil:
		err = fmt.Errorf("reading the body: %w", err)
	case len(body) > MaxRequestBody:
		err = &headError{http.StatusRequestEntityTooLarge, fmt.Sprintf("the request's body has more than %d bytes", MaxRequestBody)}
	case !chunked && int64(len(body)) != length:
		err = fmt.Errorf("reading the body: %w", io.ErrUnexpectedEOF)
	default:
		return body, large, nil
	}
	large()
	return nil, nil, err
}

// largeBody waits for a place.
func (p *Proxy) largeBody(ctx context.Context) (release func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, p.limits.body)
	defer cancel()
	select {
	case p.bodies <- struct{}{}:
		return func() { <-p.bodies }, nil
	case <-ctx.Done():
		return nil, &headError{http.StatusServiceUnavailable, "too many large requests at once"}
	}
}
