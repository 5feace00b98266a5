package aggregator

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/toolproto"
)

// Bounds of a server on HTTP.
const (
	dialTimeout = 10 * time.Second
	// maxHeaderBytes bounds the headers of a response.
	maxHeaderBytes = 64 << 10
	// maxConns bounds connections, and with them requests, at a time.
	maxConns = 256
	// maxRedirects is how many redirects a request follows, on one host.
	maxRedirects = 5
	// maxResumes is how often in a row a stream is resumed that brings nothing.
	maxResumes = 5
	// firstPause doubles up to lastPause between attempts to open a stream.
	firstPause = time.Second
	lastPause  = 30 * time.Second
	// goodbye bounds the request that ends a session.
	goodbye = 2 * time.Second
	// maxSessionID is the longest session id that is accepted, in bytes.
	maxSessionID = 4 << 10
)

// statusError is an answer that is no success. What the server says beside the
// status is not repeated.
type statusError int

func (e statusError) Error() string {
	return fmt.Sprintf("it answered HTTP %d %s", int(e), http.StatusText(int(e)))
}

// httpTransport speaks MCP's streamable HTTP (specification 2025-11-25,
// basic/transports). Every message is a POST in a goroutine of its own.
type httpTransport struct {
	server  toolproto.Server
	session *session
	client  *http.Client
	tasks   sync.WaitGroup

	// renewing is held while an expired session is replaced.
	renewing sync.Mutex

	mu        sync.Mutex
	closed    bool
	last      uint64                        // the last task's number
	running   map[uint64]context.CancelFunc // tasks by number
	calls     map[uint64]uint64             // tasks by the call that they make
	listening bool
	as        identity
}

// identity is what a request says of the session that it belongs to.
type identity struct {
	sessionID string // Mcp-Session-Id, "" for none
	version   string // MCP-Protocol-Version, "" before initialize is answered
}

func newHTTP(server toolproto.Server, s *session) (*httpTransport, error) {
	u, err := url.Parse(server.URL)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, errors.New("its URL is no http or https address")
	}
	// The environment's proxy is nobody's: the definition has ours.
	var proxy func(*http.Request) (*url.URL, error)
	if server.Proxy != "" {
		at, err := url.Parse(server.Proxy)
		if err != nil || at.Host == "" {
			return nil, errors.New("its proxy has no http address")
		}
		proxy = http.ProxyURL(at)
	}
	dialer := &net.Dialer{Timeout: dialTimeout}
	return &httpTransport{
		server: server, session: s,
		running: make(map[uint64]context.CancelFunc), calls: make(map[uint64]uint64),
		client: &http.Client{
			CheckRedirect: sameHost,
			Transport: &http.Transport{
				Proxy:       proxy,
				DialContext: dialer.DialContext, TLSHandshakeTimeout: dialTimeout,
				MaxConnsPerHost: maxConns, MaxIdleConnsPerHost: 16, IdleConnTimeout: 90 * time.Second,
				MaxResponseHeaderBytes: maxHeaderBytes, ForceAttemptHTTP2: true,
				// A small answer must not unpack to a large one.
				DisableCompression: true,
			},
		},
	}, nil
}

// sameHost refuses redirects that would carry the server's headers, secrets among
// them, to somebody else.
func sameHost(next *http.Request, via []*http.Request) error {
	first := via[0].URL
	switch {
	case next.URL.Host != first.Host || next.URL.Scheme != first.Scheme:
		return errors.New("it redirects to another host")
	case len(via) > maxRedirects:
		return errors.New("it redirects too often")
	}
	return nil
}

func (t *httpTransport) start(context.Context) error { return nil }

func (t *httpTransport) opened(ctx context.Context, version string, initialized []byte) error {
	t.mu.Lock()
	t.as.version = version
	t.mu.Unlock()
	if err := t.tell(ctx, initialized); err != nil {
		return fmt.Errorf("sending notifications/initialized: %w", err)
	}
	t.listen()
	return nil
}

func (t *httpTransport) request(id uint64, message []byte) *toolproto.Error {
	return t.spawn(&id, func(ctx context.Context) { t.deliver(ctx, id, message) })
}

func (t *httpTransport) notify(message []byte) *toolproto.Error {
	return t.spawn(nil, func(ctx context.Context) {
		if err := t.tell(ctx, message); err != nil && ctx.Err() == nil {
			t.session.events.report(toolproto.EventJunk, "a message could not be sent: "+err.Error())
		}
	})
}

// spawn runs f with a context that ends with the transport, or with the call
// that f makes.
func (t *httpTransport) spawn(call *uint64, f func(ctx context.Context)) *toolproto.Error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
		return &toolproto.Error{Code: jsonrpc.CodeTransport, Message: "server " + t.server.Name + ": the connection is closed"}
	case len(t.running) >= maxCalls:
		return &toolproto.Error{Code: jsonrpc.CodeTimeout, Message: fmt.Sprintf("busy: %d requests are in flight", maxCalls)}
	}
	t.last++
	task := t.last
	ctx, cancel := context.WithCancel(context.Background())
	t.running[task] = cancel
	if call != nil {
		t.calls[*call] = task
	}
	t.tasks.Go(func() {
		f(ctx)
		cancel()
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.running, task)
		if call != nil {
			delete(t.calls, *call)
		}
	})
	return nil
}

func (t *httpTransport) abandon(id uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if cancel := t.running[t.calls[id]]; cancel != nil {
		cancel()
	}
}

func (t *httpTransport) close() {
	t.mu.Lock()
	t.closed = true
	for _, cancel := range t.running {
		cancel()
	}
	t.mu.Unlock()
	t.tasks.Wait()

	ctx, cancel := context.WithTimeout(context.Background(), goodbye)
	defer cancel()
	if as := t.identity(); as.sessionID != "" {
		// A courtesy: the server may not support it, and may be gone.
		if resp, err := t.do(ctx, as, http.MethodDelete, nil, ""); err == nil {
			discard(resp)
		}
	}
	t.client.CloseIdleConnections()
}

func (t *httpTransport) identity() identity {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.as
}

// adopt takes the session id of the first answer to initialize.
func (t *httpTransport) adopt(resp *http.Response) error {
	id, err := sessionID(resp)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.as.sessionID = id
	return nil
}

// sessionID returns the session id of an answer to initialize, "" for none.
func sessionID(resp *http.Response) (string, error) {
	id := resp.Header.Get("Mcp-Session-Id")
	if len(id) > maxSessionID {
		return "", fmt.Errorf("its session id has %d bytes, limit %d", len(id), maxSessionID)
	}
	return id, nil
}

// renew replaces the session that the server does not know any more. Of several
// requests that find out, one does it, and nothing is sent in the new session
// before it is open.
func (t *httpTransport) renew(ctx context.Context, expired identity) error {
	t.renewing.Lock()
	defer t.renewing.Unlock()
	if t.identity() != expired {
		return nil
	}
	resp, err := t.do(ctx, identity{}, http.MethodPost, initializeRequest(), "")
	if err != nil {
		return err
	}
	answer, err := t.firstAnswer(resp)
	if err != nil {
		return err
	}
	var fresh identity
	if _, fresh.version, err = initializeResult(answer); err != nil {
		return err
	}
	if fresh.sessionID, err = sessionID(resp); err != nil {
		return err
	}
	if resp, err = t.do(ctx, fresh, http.MethodPost, initializedNotification(), ""); err != nil {
		return err
	}
	if err := accepted(resp); err != nil {
		return err
	}
	t.mu.Lock()
	t.as = fresh
	t.mu.Unlock()
	t.listen()
	return nil
}
