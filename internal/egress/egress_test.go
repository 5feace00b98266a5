package egress_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/capsem/capsem/internal/egress"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/gate"
	"github.com/capsem/capsem/internal/inspect"
)

// rules is a judge and a recorder: it blocks what its function names.
type rules struct {
	mu     sync.Mutex
	events []*event.Event
	ends   []event.Outcome
	block  func(*event.HTTPRequest, *event.HTTPResponse) string
}

func (r *rules) Judge(_ context.Context, ev *event.Event, p event.Phase, out *event.Outcome) event.Verdict {
	var answer *event.HTTPResponse
	if p == event.Response {
		answer = out.HTTP
	}
	if r.block != nil {
		if rule := r.block(ev.HTTP, answer); rule != "" {
			return event.Verdict{Decision: event.Block, Rule: rule}
		}
	}
	return event.Verdict{Decision: event.Allow}
}

func (r *rules) Begin(_ context.Context, ev *event.Event, _ event.Verdict) (gate.Receipt, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, ev)
	return nil, nil
}

func (r *rules) End(_ context.Context, _ gate.Receipt, out event.Outcome, _ event.Verdict) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ends = append(r.ends, out)
	return nil
}

// client reaches the loopback servers that it is told, and nothing else.
func client(t *testing.T, r *rules, names map[string]string, servers ...*httptest.Server) *egress.Client {
	t.Helper()
	o := egress.Options{Gate: gate.New(r, r), Via: "test"}
	for _, s := range servers {
		o.Allow = append(o.Allow, s.Listener.Addr().String())
		if s.Certificate() != nil {
			o.Roots = s.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
		}
	}
	o.Resolve = func(_ context.Context, host string) ([]netip.Addr, error) {
		if a, ok := names[host]; ok {
			return []netip.Addr{netip.MustParseAddr(a)}, nil
		}
		return nil, fmt.Errorf("no such name")
	}
	c := egress.New(o)
	t.Cleanup(c.Close)
	return c
}

func get(ctx context.Context, c *egress.Client, u string) (egress.Response, error) {
	return c.Do(ctx, inspect.Caller{}, egress.Request{Method: http.MethodGet, URL: u})
}

func TestARuleSeesWhatIsSentAndTheServerGetsWhatWasJudged(t *testing.T) {
	var got string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body) // a short body shows in the comparison
		got = r.Method + " " + r.URL.String() + " " + r.Header.Get("X-Token") + " " + string(body)
		w.Header().Set("X-Answer", "yes")
		w.WriteHeader(http.StatusTeapot)
		_, _ = w.Write([]byte("short")) // the client checks what arrives
	}))
	defer srv.Close()
	r := &rules{}
	resp, err := client(t, r, nil, srv).Do(t.Context(), inspect.Caller{TraceID: "trace"}, egress.Request{
		Method: http.MethodPost, URL: srv.URL + "/a%2Fb?q=1", Headers: http.Header{"X-Token": {"t"}}, Body: []byte("payload"),
	})
	if err != nil || resp.Status != http.StatusTeapot || string(resp.Body) != "short" || resp.Headers.Get("X-Answer") != "yes" {
		t.Fatalf("got %+v, %v", resp, err)
	}
	if got != "POST /a%2Fb?q=1 t payload" {
		t.Errorf("the server saw %q", got)
	}
	ev := r.events[0]
	if ev.HTTP.Path != "/a%2Fb" || ev.HTTP.Query != "q=1" || ev.HTTP.Headers["x-token"] != "t" ||
		string(ev.HTTP.Body) != "payload" || ev.TraceID != "trace" || ev.HTTP.Via != "test" {
		t.Errorf("the rule saw %+v", ev.HTTP)
	}
	if len(r.ends) != 1 || r.ends[0].HTTP.Status != http.StatusTeapot {
		t.Errorf("recorded %+v", r.ends)
	}
}

func TestEveryRedirectHopIsJudged(t *testing.T) {
	reached := false
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/start" {
			http.Redirect(w, r, "/forbidden", http.StatusFound)
			return
		}
		reached = true
	}))
	defer srv.Close()
	r := &rules{block: func(q *event.HTTPRequest, _ *event.HTTPResponse) string {
		if q.Path == "/forbidden" && strings.HasSuffix(q.RedirectedFrom, "/start") {
			return "profile.no"
		}
		return ""
	}}
	_, err := get(t.Context(), client(t, r, nil, srv), srv.URL+"/start")
	var blocked *egress.BlockedError
	if !errors.As(err, &blocked) || blocked.Rule != "profile.no" || reached {
		t.Errorf("got %v, reached %v", err, reached)
	}
	if len(r.events) != 2 {
		t.Errorf("%d events, want one a hop", len(r.events))
	}
}

func TestABlockedAnswerIsWithheld(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("classified")) // the client checks what arrives
	}))
	defer srv.Close()
	r := &rules{block: func(_ *event.HTTPRequest, a *event.HTTPResponse) string {
		if a != nil && strings.Contains(string(a.Body), "classified") {
			return "profile.out"
		}
		return ""
	}}
	resp, err := get(t.Context(), client(t, r, nil, srv), srv.URL)
	if err == nil || resp.Body != nil || strings.Contains(err.Error(), "classified") {
		t.Errorf("got %+v, %v", resp, err)
	}
}

func TestAddressesInsideAreRefusedInEverySpelling(t *testing.T) {
	srv := httptest.NewServer(http.NotFoundHandler())
	defer srv.Close()
	names := map[string]string{
		"rebind.test": "127.0.0.1", "meta.test": "169.254.169.254", "lan.test": "10.1.2.3",
		"mapped.test": "::ffff:127.0.0.1", "nat64.test": "64:ff9b::7f00:1", "cgn.test": "100.100.100.200",
	}
	other := httptest.NewServer(http.NotFoundHandler()) // its port alone is allowed
	defer other.Close()
	r := &rules{}
	c := client(t, r, names, other)
	port := srv.Listener.Addr().(interface{ AddrPort() netip.AddrPort }).AddrPort().Port()
	for _, host := range []string{
		"127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "[::]", "2130706433", "0x7f000001", "0177.0.0.1",
		"127.1", "0x7f.1", "127.0.0.1.", "169.254.169.254", "[fe80::1]", "[fd00::1]", "[::7f00:1]", "224.0.0.1",
		"255.255.255.255", "rebind.test", "meta.test", "lan.test", "mapped.test", "nat64.test", "cgn.test",
	} {
		_, err := get(t.Context(), c, fmt.Sprintf("http://%s:%d/", host, port))
		var blocked *egress.BlockedError
		if !errors.As(err, &blocked) {
			t.Errorf("%s: got %v", host, err)
		}
	}
	for i, out := range r.ends {
		if out.Status != event.Blocked || out.CarriedOut {
			t.Errorf("%s recorded as %+v", r.events[i].HTTP.Host, out)
		}
	}
}

func TestARedirectInsideIsRefused(t *testing.T) {
	inside := httptest.NewServer(http.NotFoundHandler())
	defer inside.Close()
	outside := httptest.NewServer(http.RedirectHandler(inside.URL, http.StatusFound))
	defer outside.Close()
	_, err := get(t.Context(), client(t, &rules{}, nil, outside), outside.URL)
	var blocked *egress.BlockedError
	if !errors.As(err, &blocked) || !strings.Contains(err.Error(), "http_allow") {
		t.Errorf("got %v", err)
	}
}

func TestCredentialsDoNotCrossToAnotherHost(t *testing.T) {
	var seen http.Header
	second := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { seen = r.Header.Clone() }))
	defer second.Close()
	first := httptest.NewServer(http.RedirectHandler(second.URL, http.StatusTemporaryRedirect))
	defer first.Close()
	_, err := client(t, &rules{}, nil, first, second).Do(t.Context(), inspect.Caller{}, egress.Request{
		Method: http.MethodGet, URL: first.URL,
		Headers: http.Header{"Authorization": {"Bearer x"}, "Cookie": {"a=b"}, "X-Api-Key": {"k"}, "Accept": {"text/plain"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"Authorization", "Cookie", "X-Api-Key"} {
		if seen.Get(name) != "" {
			t.Errorf("%s went along", name)
		}
	}
	if seen.Get("Accept") != "text/plain" {
		t.Error("Accept was lost")
	}
}

func TestRedirectsKeepOrDropTheBodyAsTheStandardSays(t *testing.T) {
	for status, want := range map[int]string{301: "GET ", 302: "GET ", 303: "GET ", 307: "PUT b", 308: "PUT b"} {
		var got string
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/" {
				http.Redirect(w, r, "/to", status)
				return
			}
			body, _ := io.ReadAll(r.Body) // a short body shows in the comparison
			got = r.Method + " " + string(body)
		}))
		_, err := client(t, &rules{}, nil, srv).Do(t.Context(), inspect.Caller{},
			egress.Request{Method: http.MethodPut, URL: srv.URL, Body: []byte("b")})
		srv.Close()
		if err != nil || got != want {
			t.Errorf("%d: got %q, %v; want %q", status, got, err, want)
		}
	}
}

func TestHopsAreCounted(t *testing.T) {
	for n, ok := range map[int]bool{egress.MaxHops: true, egress.MaxHops + 1: false} {
		left := n
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if left == 0 {
				return
			}
			left--
			http.Redirect(w, r, "/", http.StatusFound)
		}))
		_, err := get(t.Context(), client(t, &rules{}, nil, srv), srv.URL)
		srv.Close()
		if (err == nil) != ok {
			t.Errorf("%d redirects: %v", n, err)
		}
	}
}

func TestAnAnswerIsCutAtTheLimitAndSaysSo(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(strings.Repeat("x", 100))) // the client checks what arrives
	}))
	defer srv.Close()
	c := client(t, &rules{}, nil, srv)
	for limit, cut := range map[int64]bool{99: true, 100: false, 101: false} {
		resp, err := c.Do(t.Context(), inspect.Caller{}, egress.Request{Method: http.MethodGet, URL: srv.URL, MaxBytes: limit})
		if err != nil || resp.Truncated != cut || len(resp.Body) != int(min(limit, 100)) {
			t.Errorf("limit %d: %d bytes, truncated %v, %v", limit, len(resp.Body), resp.Truncated, err)
		}
	}
}

func TestASlowServerTimesOut(t *testing.T) {
	stop := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-stop }))
	defer srv.Close()
	defer close(stop)
	r := &rules{}
	_, err := client(t, r, nil, srv).Do(t.Context(), inspect.Caller{},
		egress.Request{Method: http.MethodGet, URL: srv.URL, Timeout: 50 * time.Millisecond})
	if !errors.Is(err, context.DeadlineExceeded) || r.ends[0].Status != event.Timeout {
		t.Errorf("got %v, recorded %+v", err, r.ends)
	}
}

func TestTLSServersAreChecked(t *testing.T) {
	srv := httptest.NewTLSServer(http.NotFoundHandler())
	defer srv.Close()
	if resp, err := get(t.Context(), client(t, &rules{}, nil, srv), srv.URL); err != nil || resp.Status != http.StatusNotFound {
		t.Errorf("a known certificate: %+v, %v", resp, err)
	}
	u, err := url.Parse(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	c := client(t, &rules{}, map[string]string{"wrong.test": "127.0.0.1"}, srv)
	if _, err := get(t.Context(), c, "https://wrong.test:"+u.Port()); err == nil {
		t.Error("a certificate for another name was taken")
	}
}

func TestRequestsThatCannotBeJudgedAreRefused(t *testing.T) {
	c := client(t, &rules{}, nil)
	for _, q := range []egress.Request{
		{Method: "GET", URL: "ftp://a.test/"},
		{Method: "GET", URL: "file:///etc/passwd"},
		{Method: "GET", URL: "http:///x"},
		{Method: "GET", URL: "http://u:p@a.test/"},
		{Method: "GET", URL: "http://a.test/", Headers: http.Header{"Host": {"b.test"}}},
		{Method: "GET", URL: "http://a.test/", Headers: http.Header{"Proxy-Authorization": {"x"}}},
		{Method: "GET", URL: "http://a.test/", Headers: http.Header{"Transfer-Encoding": {"chunked"}}},
		{Method: "POST", URL: "http://a.test/", Body: make([]byte, egress.MaxRequestBody+1)},
	} {
		if _, err := c.Do(t.Context(), inspect.Caller{}, q); err == nil {
			t.Errorf("%s %s %v was sent", q.Method, q.URL, q.Headers)
		}
	}
}
