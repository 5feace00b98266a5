package egress

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/inspect"
)

// MaxConns is how many connections of one jail are served at a time; more wait
// unaccepted.
const MaxConns = 128

// limits bound one proxy.
type limits struct {
	// conns is MaxConns.
	conns int
	// head bounds the time until a request's head has come, and body until its
	// body has.
	head, body time.Duration
	// idle is how long nothing may move, and total how long a connection may
	// last, whatever moves.
	idle, total time.Duration
	// bytes is how much may go through one connection in one direction.
	bytes int64
	// smallBody is what a body may have without waiting for one of largeBodies
	// places; with them, bodies take at most conns × smallBody + largeBodies ×
	// MaxRequestBody bytes of memory.
	smallBody, largeBodies int
	// penance is how long the place of a refused connection stays taken, so that
	// refusals fill the ledger at a bounded pace.
	penance time.Duration
	// farewell is how long a refused client may take to read why.
	farewell time.Duration
}

func defaultLimits() limits {
	return limits{
		conns: MaxConns,
		head:  10 * time.Second, body: time.Minute,
		idle: 15 * time.Minute, total: 4 * time.Hour,
		bytes:     16 << 30,
		smallBody: 64 << 10, largeBodies: 4,
		penance: time.Second, farewell: time.Second,
	}
}

// StreamGate is a Gate for what is too long to be judged whole, and for what is
// refused before any rule: see package gate.
type StreamGate interface {
	Stream(ctx context.Context, ev *event.Event, act func(context.Context) event.Outcome,
		rest func(context.Context, *event.Outcome)) (event.Verdict, event.Outcome)
	Refuse(ctx context.Context, ev *event.Event, reason string) (event.Verdict, event.Outcome)
}

// ProxyOptions are what a Proxy is made of.
type ProxyOptions struct {
	Gate StreamGate
	// Caller is who is recorded as the cause of the jail's requests.
	Caller inspect.Caller
	// Server is the name of the MCP server in the jail, recorded as the one who
	// asked.
	Server string
	// Allow lists what may be reached, names and addresses, exactly; nothing if
	// it is empty. A name in it does not allow a private address that the name
	// stands for: that address has to be in it too.
	Allow []config.HostPort
	// Roots are the certificates that servers are checked against where the
	// proxy does the TLS itself, nil for the system's.
	Roots *x509.CertPool
	// Resolve looks a name up, nil for the system's resolver.
	Resolve func(ctx context.Context, host string) ([]netip.Addr, error)
	Log     *slog.Logger
}

// Proxy is the way out of one jail. It speaks HTTP/1.1 and takes one request a
// connection: what follows a request on its connection is never read as another.
type Proxy struct {
	opts      ProxyOptions
	limits    limits
	dialer    *dialer
	transport *http.Transport
	// places has one token for each connection that is being served, bodies one
	// for each large body.
	places, bodies chan struct{}
}

// NewProxy returns a proxy that serves nothing yet.
func NewProxy(o ProxyOptions) *Proxy { return newProxy(o, defaultLimits()) }

func newProxy(o ProxyOptions, l limits) *Proxy {
	p := &Proxy{
		opts: o, limits: l,
		places: make(chan struct{}, l.conns), bodies: make(chan struct{}, l.largeBodies),
	}
	p.dialer = &dialer{
		key: "egress of server " + o.Server, resolve: o.Resolve,
		allowed: func(_ string, a netip.Addr, port string) bool {
			at, err := config.ParseHostPort(net.JoinHostPort(a.Unmap().String(), port))
			return err == nil && slices.Contains(o.Allow, at)
		},
	}
	if p.dialer.resolve == nil {
		p.dialer.resolve = system
	}
	p.transport = &http.Transport{
		// No Proxy: there is none behind this one. No connection is used twice:
		// each request's address is checked for itself.
		DialContext: p.dial, DisableKeepAlives: true,
		// What the server sends is what the client gets.
		DisableCompression:     true,
		TLSClientConfig:        &tls.Config{RootCAs: o.Roots, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}},
		TLSHandshakeTimeout:    connectTimeout,
		MaxResponseHeaderBytes: MaxHeaders,
		ResponseHeaderTimeout:  l.idle,
	}
	return p
}

// dialTime bounds connecting, over all addresses of a name.
const dialTime = 30 * time.Second

func (p *Proxy) dial(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	return p.dialer.dial(ctx, network, address)
}

// Serve takes connections from l until ctx ends or l fails, ends those that are
// open, and returns when none is left; then l is closed. A listener that ends
// because ctx did, or because somebody closed it, is no error. Several listeners
// may be served, one after another or at once: the bounds are for all of them
// together.
func (p *Proxy) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	closeListener := sync.OnceValue(l.Close)
	stop := context.AfterFunc(ctx, func() {
		_ = closeListener() // only unblocks Accept; Serve has the error
	})
	defer stop()
	var wg sync.WaitGroup
	accepting := p.accept(ctx, l, &wg)
	cancel()
	wg.Wait()
	closing := closeListener()
	switch {
	case accepting != nil:
		return errors.Join(fmt.Errorf("accepting a connection of server %s: %w", p.opts.Server, accepting), closing)
	case errors.Is(closing, net.ErrClosed):
		return nil
	}
	return closing
}

func (p *Proxy) accept(ctx context.Context, l net.Listener, wg *sync.WaitGroup) error {
	for {
		select {
		case p.places <- struct{}{}:
		case <-ctx.Done():
			return nil
		}
		conn, err := l.Accept()
		if err != nil {
			<-p.places
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return err
		}
		wg.Go(func() {
			defer func() { <-p.places }()
			p.serve(ctx, conn)
		})
	}
}

// serve takes the one request of a connection.
func (p *Proxy) serve(ctx context.Context, conn net.Conn) {
	ctx, cancel := context.WithTimeout(ctx, p.limits.total)
	defer cancel()
	c := &client{conn: conn, in: bufio.NewReaderSize(conn, maxHead), log: p.opts.Log}
	// Everything that reads or writes ends with ctx.
	stop := context.AfterFunc(ctx, c.close)
	defer stop()
	defer c.close()
	refusal := p.request(ctx, c)
	if refusal == nil {
		return
	}
	c.refuse(refusal, p.limits.farewell)
	pause := time.NewTimer(p.limits.penance)
	defer pause.Stop()
	select {
	case <-pause.C:
	case <-ctx.Done():
	}
}

// refusal is an answer of the proxy's own.
type refusal struct {
	status int
	text   string
}

// request reads a request, has it judged and carries it out. It returns what the
// client is to be told where nothing else was.
func (p *Proxy) request(ctx context.Context, c *client) *refusal {
	c.deadline(p.limits.head)
	h, err := readHead(c.in)
	if errors.Is(err, io.EOF) {
		return nil // opened and closed again: nothing was asked
	}
	if err != nil {
		return p.unreadable(ctx, event.HTTPRequest{}, err)
	}
	t, err := readTarget(&h)
	if err != nil {
		return p.unreadable(ctx, event.HTTPRequest{Method: h.method}, err)
	}
	c.chunks = h.minor == 1
	req := event.HTTPRequest{
		Method: h.method, Scheme: "https", Host: t.at.Host, Port: t.at.Port, Via: p.opts.Server,
	}
	if t.url != nil {
		header := h.endToEnd()
		req.Scheme, req.Path, req.Query, req.Headers = t.url.Scheme, t.url.EscapedPath(), t.url.RawQuery, flatten(header)
	}
	if !slices.Contains(p.opts.Allow, t.at) {
		_, out := p.opts.Gate.Refuse(ctx, p.opts.Caller.HTTP(req), fmt.Sprintf(
			"server %q may not reach %s: its egress in the profile does not list %q", p.opts.Server, t.at, t.at))
		return &refusal{http.StatusForbidden, out.Error.Message}
	}
	if t.url == nil {
		c.deadline(0)
		return p.tunnel(ctx, c, req)
	}
	body, release, err := p.readBody(ctx, c, &h)
	if err != nil {
		return p.unreadable(ctx, req, err)
	}
	defer release()
	c.deadline(0)
	req.Body = body
	return p.forward(ctx, c, t.url, h.endToEnd(), req)
}

// unreadable records a request that cannot be judged, with what is known of it.
func (p *Proxy) unreadable(ctx context.Context, req event.HTTPRequest, err error) *refusal {
	r := &refusal{http.StatusBadRequest, "the request cannot be read to its end"}
	var bad *headError
	switch {
	case errors.As(err, &bad):
		r.status, r.text = bad.status, bad.text
	case errors.Is(err, os.ErrDeadlineExceeded):
		r.status, r.text = http.StatusRequestTimeout, "the request did not come in time"
	}
	req.Via = p.opts.Server
	_, out := p.opts.Gate.Refuse(ctx, p.opts.Caller.HTTP(req), r.text)
	r.text = out.Error.Message
	return r
}

// failed is the outcome of an act that did not come to an answer, and what the
// client is told: no address of the host's network, and no name of its resolver.
func failed(err error) event.Outcome {
	out := event.Outcome{Status: event.Failed, CarriedOut: true, Error: &event.Error{Message: err.Error()}}
	var blocked *BlockedError
	var timeout net.Error
	switch {
	case errors.As(err, &blocked):
		out.Status, out.CarriedOut = event.Blocked, false
	case errors.Is(err, context.Canceled):
		out.Status = event.Cancelled
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		out.Status = event.Timeout
	}
	return out
}

// told is the client's side of failed.
func (p *Proxy) told(v event.Verdict, out event.Outcome, at string) *refusal {
	switch {
	case v.Decision != event.Allow:
		return &refusal{http.StatusForbidden, out.Error.Message}
	case out.Status == event.Blocked:
		return &refusal{http.StatusForbidden, fmt.Sprintf(
			"%s does not lead to the public internet, and the egress of server %q in the profile does not list the address that it leads to", at, p.opts.Server)}
	case out.Status == event.Timeout:
		return &refusal{http.StatusGatewayTimeout, at + " did not answer in time"}
	}
	return &refusal{http.StatusBadGateway, at + " cannot be reached, or its answer cannot be read"}
}
