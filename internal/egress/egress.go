// Package egress lets HTTP out for those who have no network of their own, and
// nothing that was not judged.
//
// A [Client] makes requests for the built-in tools. A request goes through the
// gate whole: method, URL, headers and body are what a rule sees and what is
// sent. A redirect is a new request: each hop is judged and recorded by itself,
// and credentials do not cross from one host to another.
//
// A [Proxy] is the only network of a jail. It serves the listener that the jail
// has on its loopback, reaches what the server's list in the profile names, and
// passes plain requests through the gate as a Client does. Of a tunnel it knows
// where it leads and how much went through: rules see method CONNECT, scheme
// https, host and port, and neither path nor header nor body. So that this is
// true, a tunnel has to begin as TLS does, for the host that it was asked for.
//
// Both resolve names here, check every address after resolution, and connect to
// the address that was checked, so a name that changes its mind between check
// and use gains nothing. Addresses that are not on the public internet are
// refused unless the profile names exactly that address and port.
package egress

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/inspect"
)

// Bounds of one request, over all of its hops unless it says otherwise.
const (
	// MaxHops is how many redirects are followed.
	MaxHops = 10
	// MaxRequestBody is the size of a request's body, in bytes.
	MaxRequestBody = 8 << 20
	// MaxResponseBody is the most that is kept of an answer's body, in bytes,
	// whatever the caller asks for, and DefaultResponseBody what it gets when
	// it asks for nothing.
	MaxResponseBody     = 8 << 20
	DefaultResponseBody = 1 << 20
	// MaxHeaders is the size of an answer's header, in bytes.
	MaxHeaders = 256 << 10
	// MaxTime bounds a request, and DefaultTime is what it gets when the caller
	// asks for nothing.
	MaxTime     = 2 * time.Minute
	DefaultTime = 30 * time.Second
)

// Gate judges and records: see package gate.
type Gate interface {
	Do(ctx context.Context, ev *event.Event, act func(context.Context) event.Outcome) (event.Verdict, event.Outcome)
}

// Options are what a Client is made of.
type Options struct {
	Gate Gate
	// Allow names the addresses outside the public internet that may be
	// reached, as "address:port" or "name:port".
	Allow []string
	// Via is recorded as the one who asked.
	Via string
	// Roots are the certificates that servers are checked against, nil for the
	// system's.
	Roots *x509.CertPool
	// Resolve looks a name up, nil for the system's resolver.
	Resolve func(ctx context.Context, host string) ([]netip.Addr, error)
}

// Client makes requests. It is safe for concurrent use; Close it when done.
type Client struct {
	gate      Gate
	via       string
	transport *http.Transport
}

// New returns a client.
func New(o Options) *Client {
	d := &dialer{allowed: either(o.Allow), key: "http_allow", resolve: o.Resolve}
	if d.resolve == nil {
		d.resolve = system
	}
	return &Client{
		gate: o.Gate, via: o.Via,
		transport: &http.Transport{
			// No Proxy: a variable in the supervisor's environment must not
			// send requests past the address check.
			DialContext:            d.dial,
			TLSClientConfig:        &tls.Config{RootCAs: o.Roots, MinVersion: tls.VersionTLS12},
			ForceAttemptHTTP2:      true,
			MaxResponseHeaderBytes: MaxHeaders,
			MaxIdleConns:           16,
			IdleConnTimeout:        30 * time.Second,
			TLSHandshakeTimeout:    10 * time.Second,
		},
	}
}

// Close ends the connections that are kept for reuse.
func (c *Client) Close() { c.transport.CloseIdleConnections() }

// Request is what is to be sent.
type Request struct {
	Method, URL string
	Headers     http.Header
	Body        []byte
	// Timeout and MaxBytes are what the caller wants, 0 for the defaults; more
	// than the bounds is cut to them.
	Timeout  time.Duration
	MaxBytes int64
}

// Response is the answer of the last hop.
type Response struct {
	Status int
	// URL is that of the last hop.
	URL       string
	Headers   http.Header
	Body      []byte
	Truncated bool
}

// BlockedError says that a rule, or the check of addresses, refused a request.
type BlockedError struct {
	// Rule is the id of the rule, "" for the address check.
	Rule    string
	Message string
}

// Error returns the refusal.
func (e *BlockedError) Error() string { return e.Message }

// Do sends a request on behalf of caller and follows its redirects. An answer
// of any status is no error.
func (c *Client) Do(ctx context.Context, caller inspect.Caller, r Request) (Response, error) {
	if len(r.Body) > MaxRequestBody {
		return Response{}, fmt.Errorf("the request's body has %d bytes, the limit is %d", len(r.Body), MaxRequestBody)
	}
	limit := within(r.MaxBytes, DefaultResponseBody, MaxResponseBody)
	ctx, cancel := context.WithTimeout(ctx, within(r.Timeout, DefaultTime, MaxTime))
	defer cancel()
	h, err := firstHop(r)
	if err != nil {
		return Response{}, err
	}
	for n := 0; ; n++ {
		resp, err := c.hop(ctx, caller, h, limit)
		if err != nil {
			return Response{}, err
		}
		next, more, err := h.redirect(resp)
		if err != nil || !more {
			return resp, err
		}
		if n == MaxHops {
			return Response{}, fmt.Errorf("more than %d redirects, the last to %s", MaxHops, next.url.Redacted())
		}
		h = next
	}
}

func within[T int64 | time.Duration](asked, byDefault, bound T) T {
	if asked <= 0 {
		return byDefault
	}
	return min(asked, bound)
}

// hop takes one request through the gate.
func (c *Client) hop(ctx context.Context, caller inspect.Caller, h hop, limit int64) (Response, error) {
	var resp Response
	var failure error
	ev := caller.HTTP(h.event(c.via))
	verdict, out := c.gate.Do(ctx, ev, func(ctx context.Context) event.Outcome {
		resp, failure = c.roundTrip(ctx, h, limit)
		return outcome(h, resp, failure)
	})
	if verdict.Decision != event.Allow {
		return Response{}, &BlockedError{Rule: verdict.Rule, Message: out.Error.Message}
	}
	return resp, failure
}

func outcome(h hop, resp Response, err error) event.Outcome {
	var blocked *BlockedError
	switch {
	case errors.As(err, &blocked):
		return event.Outcome{Status: event.Blocked, Error: &event.Error{Message: err.Error()}}
	case errors.Is(err, context.DeadlineExceeded):
		return event.Outcome{Status: event.Timeout, CarriedOut: true, Error: &event.Error{Message: err.Error()}}
	case errors.Is(err, context.Canceled):
		return event.Outcome{Status: event.Cancelled, CarriedOut: true, Error: &event.Error{Message: err.Error()}}
	case err != nil:
		return event.Outcome{Status: event.Failed, CarriedOut: true, Error: &event.Error{Message: err.Error()}}
	}
	return event.Outcome{
		Status: event.Done, CarriedOut: true,
		HTTP:      &event.HTTPResponse{Status: resp.Status, Headers: flatten(resp.Headers), Body: resp.Body, Truncated: resp.Truncated},
		BytesSent: int64(len(h.body)), BytesReceived: int64(len(resp.Body)),
	}
}

func (c *Client) roundTrip(ctx context.Context, h hop, limit int64) (resp Response, err error) {
	req, err := http.NewRequestWithContext(ctx, h.method, h.url.String(), bytes.NewReader(h.body))
	if err != nil {
		return Response{}, fmt.Errorf("making the request: %w", err)
	}
	req.Header = h.header.Clone()
	answer, err := c.transport.RoundTrip(req)
	if err != nil {
		return Response{}, fmt.Errorf("requesting %s://%s: %w", h.url.Scheme, h.url.Host, withoutOwn(err))
	}
	defer func() { err = errors.Join(err, answer.Body.Close()) }()
	body, err := io.ReadAll(io.LimitReader(answer.Body, limit+1))
	if err != nil {
		return Response{}, fmt.Errorf("reading the answer of %s: %w", h.url.Host, withoutOwn(err))
	}
	resp = Response{Status: answer.StatusCode, URL: h.url.String(), Headers: answer.Header, Body: body}
	if int64(len(body)) > limit {
		resp.Body, resp.Truncated = body[:limit], true
	}
	return resp, nil
}

// hop is one request on the way to an answer.
type hop struct {
	method string
	url    *url.URL
	header http.Header
	body   []byte
	from   string
}

// ownHeaders are set by us and by nobody else: they say where a request goes
// and where it ends.
var ownHeaders = []string{"Host", "Connection", "Content-Length", "Transfer-Encoding", "Upgrade", "Te", "Trailer", "Keep-Alive"}

func firstHop(r Request) (hop, error) {
	u, err := url.Parse(r.URL)
	if err != nil {
		return hop{}, fmt.Errorf("reading the URL: %w", err)
	}
	if u, err = canonical(u); err != nil {
		return hop{}, err
	}
	header := r.Headers.Clone()
	if header == nil {
		header = http.Header{}
	}
	for _, name := range ownHeaders {
		if _, set := header[name]; set {
			return hop{}, fmt.Errorf("the header %s cannot be set: it follows from the URL and the body", name)
		}
	}
	for name := range header {
		if strings.HasPrefix(name, "Proxy-") {
			return hop{}, fmt.Errorf("the header %s cannot be set: there is no proxy", name)
		}
	}
	if header.Get("User-Agent") == "" {
		header.Set("User-Agent", "capsem")
	}
	return hop{method: r.Method, url: u, header: header, body: r.Body}, nil
}

func checkURL(u *url.URL) error {
	switch {
	case u.Scheme != "http" && u.Scheme != "https":
		return fmt.Errorf("the URL's scheme is %q; only http and https are supported", u.Scheme)
	case u.Hostname() == "":
		return errors.New("the URL names no host")
	case u.User != nil:
		return errors.New("the URL holds a user name; send an Authorization header instead")
	}
	return nil
}

// event is what rules see: exactly what will be sent.
func (h hop) event(via string) event.HTTPRequest {
	return event.HTTPRequest{
		Method: h.method, Scheme: h.url.Scheme, Host: h.url.Hostname(), Port: port(h.url),
		Path: h.url.EscapedPath(), Query: h.url.RawQuery, Headers: flatten(h.header), Body: h.body,
		RedirectedFrom: h.from, Via: via,
	}
}

func port(u *url.URL) int {
	if p, err := strconv.Atoi(u.Port()); err == nil {
		return p
	}
	if u.Scheme == "https" {
		return 443
	}
	return 80
}

func flatten(h http.Header) map[string]string {
	flat := make(map[string]string, len(h))
	for name, values := range h {
		flat[strings.ToLower(name)] = strings.Join(values, ", ")
	}
	return flat
}

// redirect is the request that an answer leads to, if it leads to one
// (RFC 9110 section 15.4).
func (h hop) redirect(resp Response) (hop, bool, error) {
	location := resp.Headers.Get("Location")
	switch resp.Status {
	case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther,
		http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
	default:
		return hop{}, false, nil
	}
	if location == "" {
		return hop{}, false, nil
	}
	to, err := h.url.Parse(location)
	if err != nil {
		return hop{}, false, fmt.Errorf("following a redirect of %s: %w", h.url.Host, err)
	}
	if to, err = canonical(to); err != nil {
		return hop{}, false, fmt.Errorf("following a redirect of %s: %w", h.url.Host, err)
	}
	next := hop{method: h.method, url: to, header: h.header.Clone(), body: h.body, from: h.url.String()}
	keep := resp.Status == http.StatusTemporaryRedirect || resp.Status == http.StatusPermanentRedirect
	if !keep && h.method != http.MethodHead && h.method != http.MethodGet {
		next.method, next.body = http.MethodGet, nil
		next.header.Del("Content-Type")
	}
	if to.Host != h.url.Host || to.Scheme != h.url.Scheme {
		// A caller's headers were meant for the host it named.
		next.header = http.Header{"User-Agent": next.header["User-Agent"], "Accept": next.header["Accept"]}
		if len(next.header["Accept"]) == 0 {
			next.header.Del("Accept")
		}
		if t := h.header.Get("Content-Type"); t != "" && next.body != nil {
			next.header.Set("Content-Type", t)
		}
	}
	return next, true, nil
}
