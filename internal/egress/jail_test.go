package egress_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/egress"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/gate"
	"github.com/capsem/capsem/internal/inspect"
)

// row is an event and what came of it, as a recorder keeps it.
type row struct {
	event   *event.Event
	verdict event.Verdict
	out     *event.Outcome // nil while the event is pending, or was never begun
}

// book judges by its function, and keeps rows.
type book struct {
	block func(*event.HTTPRequest, *event.Outcome) string

	mu      sync.Mutex
	rows    []*row
	changed chan struct{}
}

func newBook() *book { return &book{changed: make(chan struct{})} }

func (b *book) Judge(_ context.Context, ev *event.Event, _ event.Phase, out *event.Outcome) event.Verdict {
	if b.block != nil {
		if rule := b.block(ev.HTTP, out); rule != "" {
			return event.Verdict{Rule: rule}
		}
	}
	return event.Verdict{Decision: event.Allow}
}

func (b *book) Begin(_ context.Context, ev *event.Event, v event.Verdict) (gate.Receipt, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := &row{event: ev, verdict: v}
	b.rows = append(b.rows, r)
	b.change()
	return r, nil
}

func (b *book) End(_ context.Context, r gate.Receipt, out event.Outcome, _ event.Verdict) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	r.(*row).out = &out
	b.change()
	return nil
}

func (b *book) change() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// finished returns the rows once there are n of them and none is pending.
func (b *book) finished(t *testing.T, n int) []row {
	t.Helper()
	limit := time.NewTimer(20 * time.Second)
	defer limit.Stop()
	for {
		b.mu.Lock()
		var done []row
		for _, r := range b.rows {
			if r.out != nil || r.verdict.Decision == event.Block {
				done = append(done, *r)
			}
		}
		all, changed := len(b.rows), b.changed
		b.mu.Unlock()
		if len(done) == n && all == n {
			return done
		}
		if all > n {
			t.Fatalf("%d rows, want %d", all, n)
		}
		select {
		case <-changed:
		case <-limit.C:
			t.Fatalf("%d of %d rows are finished, want %d", len(done), all, n)
		}
	}
}

// jail is the loopback of a jail in which the proxy listens.
type jail struct {
	addr string
	book *book
	stop func() error
}

func options(t *testing.T, b *book, allow ...string) egress.ProxyOptions {
	t.Helper()
	o := egress.ProxyOptions{
		Gate: gate.New(b, b), Server: "files", Log: slog.New(slog.DiscardHandler),
		Caller: inspect.Caller{Initiator: event.Initiator{Kind: event.Deployment, ID: "server:files"}},
		Resolve: func(_ context.Context, host string) ([]netip.Addr, error) {
			return nil, fmt.Errorf("there is no name %s here", host)
		},
	}
	for _, s := range allow {
		at, err := config.ParseHostPort(s)
		if err != nil {
			t.Fatal(err)
		}
		o.Allow = append(o.Allow, at)
	}
	return o
}

func open(t *testing.T, b *book, p *egress.Proxy) *jail {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	served := make(chan error, 1)
	go func() { served <- p.Serve(ctx, l) }()
	j := &jail{addr: l.Addr().String(), book: b}
	j.stop = sync.OnceValue(func() error {
		cancel()
		return <-served
	})
	t.Cleanup(func() {
		if err := j.stop(); err != nil {
			t.Error(err)
		}
	})
	return j
}

func newJail(t *testing.T, b *book, allow ...string) *jail {
	t.Helper()
	return open(t, b, egress.NewProxy(options(t, b, allow...)))
}

func (j *jail) dial(t *testing.T) net.Conn {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", j.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() }) // closed twice by some tests
	if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// say sends bytes as they are and returns all that comes back.
func (j *jail) say(t *testing.T, raw string) string {
	t.Helper()
	conn := j.dial(t)
	go func() {
		_, _ = io.WriteString(conn, raw) // the proxy may hang up in the middle
	}()
	answer, err := io.ReadAll(conn)
	_ = conn.Close() // all was said
	if err != nil && len(answer) == 0 {
		t.Fatalf("no answer to %.80q: %v", raw, err)
	}
	return string(answer)
}

// client is an HTTP client in the jail.
func (j *jail) client(t *testing.T, srv *httptest.Server) *http.Client {
	t.Helper()
	tr := &http.Transport{Proxy: http.ProxyURL(&url.URL{Scheme: "http", Host: j.addr})}
	if srv != nil && srv.Certificate() != nil {
		tr.TLSClientConfig = &tls.Config{RootCAs: srv.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs}
	}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func address(s *httptest.Server) string { return s.Listener.Addr().String() }

func status(answer string) string {
	_, rest, _ := strings.Cut(answer, " ")
	code, _, _ := strings.Cut(rest, " ")
	return code
}
