package egress

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/capsem/capsem/internal/event"
)

// tunnel carries out a CONNECT. Its row is pending as long as the tunnel lasts.
func (p *Proxy) tunnel(ctx context.Context, c *client, req event.HTTPRequest) *refusal {
	at := net.JoinHostPort(req.Host, strconv.Itoa(req.Port))
	var far net.Conn
	act := func(ctx context.Context) event.Outcome {
		conn, err := p.dial(ctx, "tcp", at)
		if err != nil {
			return failed(err)
		}
		far = conn
		return event.Outcome{Status: event.Done, CarriedOut: true}
	}
	established := false
	var plain *refusal
	rest := func(ctx context.Context, out *event.Outcome) {
		established = true
		plain = p.join(ctx, c, far, req.Host, out)
	}
	v, out := p.opts.Gate.Stream(ctx, p.opts.Caller.HTTP(req), act, rest)
	if far != nil {
		_ = far.Close() // both directions have ended, or were never begun
	}
	if established {
		return plain
	}
	return p.told(v, out, at)
}

// join says that the tunnel stands, looks at how it begins, and moves bytes both
// ways until both directions have ended.
func (p *Proxy) join(ctx context.Context, c *client, far net.Conn, host string, out *event.Outcome) *refusal {
	c.deadline(p.limits.head)
	if _, err := io.WriteString(c.conn, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		out.Status, out.Error = event.Cancelled, &event.Error{Message: "the client went away"}
		return nil
	}
	begun, err := clientHello(ctx, c.in, host)
	if err != nil {
		out.Status, out.CarriedOut = event.Blocked, false
		out.Error = &event.Error{Message: err.Error()}
		if errors.Is(err, errNotTLS) {
			// Most likely a client that sends plain HTTP through tunnels: it
			// understands the answer.
			return &refusal{http.StatusForbidden, err.Error()}
		}
		return nil
	}
	c.deadline(0)
	end := func() {
		c.close()
		_ = far.Close() // what was not moved by now is not wanted any more
	}
	stop := context.AfterFunc(ctx, end)
	defer stop()
	f := p.watch(end)
	defer f.stop()

	var wg sync.WaitGroup
	var down error
	wg.Go(func() { down = f.direction(c.conn, far, &out.BytesReceived, end) })
	up := f.direction(far, io.MultiReader(bytes.NewReader(begun), c.in), &out.BytesSent, end)
	wg.Wait()
	// A connection that either side resets is how tunnels end as well.
	f.end(ctx, out, errors.Join(up, down))
	return nil
}

// direction moves one direction of a tunnel and passes its end on. What fails
// ends both.
func (f *flow) direction(to net.Conn, from io.Reader, count *int64, end func()) error {
	err := f.move(to, from, count, func() error { return nil })
	if err == nil {
		err = closeWrite(to)
	}
	if err != nil {
		end()
	}
	return err
}

// errNotTLS is a tunnel in which something else than TLS begins.
var errNotTLS = errors.New("a tunnel carries TLS only: send plain HTTP to the proxy as GET http://…, where rules can see it")

// errSeen ends a handshake that was only to be looked at.
var errSeen = errors.New("seen")

// clientHello reads the message with which TLS begins and returns all that was
// read. The name in it must be the host's: on an address that many share it
// decides who is spoken to.
func clientHello(ctx context.Context, from io.Reader, host string) ([]byte, error) {
	heard := &listener{from: from}
	var hello *tls.ClientHelloInfo
	err := tls.Server(heard, &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			hello = h
			return nil, errSeen
		},
	}).HandshakeContext(ctx)
	var record tls.RecordHeaderError
	switch {
	case hello != nil && isAddress(host) && hello.ServerName == "":
	case hello != nil && strings.EqualFold(hello.ServerName, host):
	case hello != nil:
		return nil, fmt.Errorf("the tunnel was asked for %s, and TLS in it for %q", host, hello.ServerName)
	case errors.As(err, &record):
		return nil, errNotTLS
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, errors.New("nothing came through the tunnel in time")
	case heard.all.Len() == 0:
		return nil, errors.New("the client closed the tunnel before it sent anything")
	default:
		return nil, errors.New("what came through the tunnel is no beginning of TLS")
	}
	return heard.all.Bytes(), nil
}

// listener is a connection that is only listened to. It keeps what it hears.
type listener struct {
	net.Conn // nil: nothing else is called
	from     io.Reader
	all      bytes.Buffer
}

func (l *listener) Read(b []byte) (int, error) {
	n, err := l.from.Read(b)
	l.all.Write(b[:n])
	return n, err
}

func (l *listener) Write(b []byte) (int, error)      { return len(b), nil } // alerts
func (l *listener) Close() error                     { return nil }
func (l *listener) SetDeadline(time.Time) error      { return nil }
func (l *listener) SetReadDeadline(time.Time) error  { return nil }
func (l *listener) SetWriteDeadline(time.Time) error { return nil }
