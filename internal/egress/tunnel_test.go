package egress_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/capsem/capsem/internal/egress"
	"github.com/capsem/capsem/internal/event"
)

// hello is the message with which TLS to a host begins.
func hello(t *testing.T, host string) string {
	t.Helper()
	ours, theirs := net.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		// It ends with an error when the pipe is closed.
		_ = tls.Client(ours, &tls.Config{ServerName: host, InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}).HandshakeContext(context.WithoutCancel(t.Context()))
	}()
	b := make([]byte, 16<<10)
	n, err := theirs.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	if err := theirs.Close(); err != nil {
		t.Fatal(err)
	}
	<-done
	return string(b[:n])
}

// far is a server on TCP that does with each connection what serve does.
func far(t *testing.T, serve func(net.Conn)) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				serve(conn)
				_ = conn.Close() // serve may have
			})
		}
	})
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		wg.Wait()
	})
	return l.Addr().String()
}

const stands = "HTTP/1.1 200 Connection established\r\n\r\n"

// tunnel asks for one and waits until it stands.
func (j *jail) tunnel(t *testing.T, at string) net.Conn {
	t.Helper()
	conn := j.dial(t)
	if _, err := fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", at, at); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, len(stands))
	if _, err := io.ReadFull(conn, b); err != nil || string(b) != stands {
		t.Fatalf("got %q, %v", b, err)
	}
	return conn
}

func TestATunnelIsOneRowWithItsBytes(t *testing.T) {
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(w, r.Body) // the comparison sees it
	}))
	defer srv.Close()
	j := newJail(t, newBook(), address(srv))
	client := j.client(t, srv)
	for range 3 { // on one connection, and so through one tunnel
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, srv.URL, strings.NewReader(strings.Repeat("x", 1000)))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(resp.Body); err != nil || len(b) != 1000 {
			t.Fatalf("got %d bytes, %v", len(b), err)
		}
		resp.Body.Close()
	}
	client.CloseIdleConnections()
	r := j.book.finished(t, 1)[0]
	if h := r.event.HTTP; h.Method != http.MethodConnect || h.Scheme != "https" || h.Host != "127.0.0.1" || h.Path != "" || h.Via != "files" {
		t.Errorf("the rule saw %+v", h)
	}
	if r.out.Status != event.Done || r.out.HTTP != nil || r.out.BytesSent < 3000 || r.out.BytesReceived < 3000 {
		t.Errorf("recorded %+v", r.out)
	}
}

func TestEitherEndOfATunnelMayFinishFirst(t *testing.T) {
	at := far(t, func(conn net.Conn) {
		b, err := io.ReadAll(conn) // to the end of what the client sends
		if err != nil {
			t.Error(err)
		}
		_, _ = fmt.Fprintf(conn, "%d bytes", len(b)) // the comparison sees it
	})
	j := newJail(t, newBook(), at)
	conn := j.tunnel(t, at)
	begin := hello(t, "")
	if _, err := io.WriteString(conn, begin+"more"); err != nil {
		t.Fatal(err)
	}
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(conn)
	if want := fmt.Sprintf("%d bytes", len(begin)+4); err != nil || string(got) != want {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
	r := j.book.finished(t, 1)[0]
	if r.out.Status != event.Done || r.out.BytesSent != int64(len(begin)+4) || r.out.BytesReceived != int64(len(got)) {
		t.Errorf("recorded %+v", r.out)
	}

	early := far(t, func(conn net.Conn) {
		_, _ = io.WriteString(conn, "bye") // the client reads it
		if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
			t.Error(err)
		}
		if _, err := io.Copy(io.Discard, conn); err != nil {
			t.Error(err)
		}
	})
	j = newJail(t, newBook(), early)
	conn = j.tunnel(t, early)
	if _, err := io.WriteString(conn, begin); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(conn); err != nil || string(got) != "bye" {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := io.WriteString(conn, "still here"); err != nil {
		t.Errorf("after the server's end: %v", err)
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	if r := j.book.finished(t, 1)[0]; r.out.BytesSent != int64(len(begin)+len("still here")) {
		t.Errorf("recorded %+v", r.out)
	}
}

func TestBytesSentBeforeTheTunnelStandsAreOfTheTunnel(t *testing.T) {
	begin := hello(t, "")
	got := make(chan string, 1)
	at := far(t, func(conn net.Conn) {
		b := make([]byte, len(begin))
		_, _ = io.ReadFull(conn, b) // the comparison sees it
		got <- string(b)
	})
	j := newJail(t, newBook(), at)
	conn := j.dial(t)
	if _, err := fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n%s", at, at, begin); err != nil {
		t.Fatal(err)
	}
	if <-got != begin {
		t.Error("the server got something else")
	}
}

func TestATunnelMustBeginAsTLSForItsHost(t *testing.T) {
	var heard atomic.Int64
	at := far(t, func(conn net.Conn) {
		n, _ := io.Copy(io.Discard, conn) // nothing may come
		heard.Add(n)
	})
	_, port, err := net.SplitHostPort(at)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ host, begin, want string }{
		"plain HTTP":           {"127.0.0.1", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "a tunnel carries TLS only"},
		"another protocol":     {"127.0.0.1", "SSH-2.0-x\r\n", "a tunnel carries TLS only"},
		"another host's TLS":   {"a.test", hello(t, "b.test"), "b.test"},
		"TLS that hides where": {"a.test", hello(t, ""), `""`},
		"a name at an address": {"127.0.0.1", hello(t, "b.test"), "b.test"},
		"half a beginning":     {"127.0.0.1", hello(t, "")[:40], "no beginning of TLS"},
		"nothing":              {"127.0.0.1", "", "before it sent anything"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBook()
			o := options(t, b, "a.test:"+port, at)
			o.Resolve = func(context.Context, string) ([]netip.Addr, error) {
				return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, nil
			}
			j := open(t, b, egress.NewProxy(o))
			conn := j.tunnel(t, c.host+":"+port)
			if _, err := io.WriteString(conn, c.begin); err != nil {
				t.Fatal(err)
			}
			if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			answer, _ := io.ReadAll(conn) // it may be reset: nothing is to come
			if name == "plain HTTP" && status(string(answer)) != "403" {
				t.Errorf("the client got %q", answer)
			}
			if r := b.finished(t, 1)[0]; r.out.Status != event.Blocked || r.out.BytesSent != 0 || !strings.Contains(r.out.Error.Message, c.want) {
				t.Errorf("recorded %+v, %v", r.out, r.out.Error)
			}
		})
	}
	if n := heard.Load(); n > 0 {
		t.Errorf("the server heard %d bytes", n)
	}
}

func TestATunnelEndsWithItsServersLife(t *testing.T) {
	gone := make(chan struct{})
	at := far(t, func(conn net.Conn) {
		_, _ = io.Copy(io.Discard, conn) // until it is cut
		close(gone)
	})
	j := newJail(t, newBook(), at)
	conn := j.tunnel(t, at)
	begin := hello(t, "")
	if _, err := io.WriteString(conn, begin); err != nil {
		t.Fatal(err)
	}
	if err := j.stop(); err != nil {
		t.Error(err)
	}
	<-gone
	if r := j.book.finished(t, 1)[0]; r.out.Status != event.Cancelled && r.out.Status != event.Blocked {
		t.Errorf("recorded %+v", r.out)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("the client's end is open")
	}
}

func TestATunnelThatStandsStillIsEnded(t *testing.T) {
	at := far(t, func(conn net.Conn) {
		_, _ = io.Copy(io.Discard, conn) // until it is cut
	})
	b := newBook()
	j := open(t, b, egress.Tight(options(t, b, at), 4, 5*time.Second, 50*time.Millisecond, 1<<20))
	conn := j.tunnel(t, at)
	if _, err := io.WriteString(conn, hello(t, "")); err != nil {
		t.Fatal(err)
	}
	if r := b.finished(t, 1)[0]; r.out.Status != event.Timeout || !strings.Contains(r.out.Error.Message, "nothing moved") {
		t.Errorf("recorded %+v", r.out)
	}
}

func TestATunnelMovesNoMoreThanItMay(t *testing.T) {
	const most = 4096
	at := far(t, func(conn net.Conn) {
		_, _ = io.Copy(io.Discard, conn) // until it is cut
	})
	b := newBook()
	j := open(t, b, egress.Tight(options(t, b, at), 4, 5*time.Second, time.Minute, most))
	conn := j.tunnel(t, at)
	begin := hello(t, "")
	if _, err := io.WriteString(conn, begin+strings.Repeat("x", most+1-len(begin))); err != nil {
		t.Fatal(err)
	}
	if r := b.finished(t, 1)[0]; r.out.Status != event.Failed || r.out.BytesSent > most {
		t.Errorf("recorded %+v", r.out)
	}
}

func TestASlowClientLosesItsPlace(t *testing.T) {
	for name, raw := range map[string]string{
		"a head":  "GET http://127.0.0.1:1/ HTTP/1.1\r\nX-",
		"a body":  "POST http://127.0.0.1:1/ HTTP/1.1\r\nHost: 127.0.0.1:1\r\nContent-Length: 5\r\n\r\nab",
		"a chunk": "POST http://127.0.0.1:1/ HTTP/1.1\r\nHost: 127.0.0.1:1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
	} {
		b := newBook()
		j := open(t, b, egress.Tight(options(t, b, "127.0.0.1:1"), 4, 50*time.Millisecond, time.Minute, 1<<20))
		if answer := j.say(t, raw); status(answer) != "408" {
			t.Errorf("%s that does not come: %q", name, answer)
		}
		b.finished(t, 1)
	}
	at := far(t, func(conn net.Conn) {
		_, _ = io.Copy(io.Discard, conn) // until it is cut
	})
	b := newBook()
	j := open(t, b, egress.Tight(options(t, b, at), 4, 50*time.Millisecond, time.Minute, 1<<20))
	j.tunnel(t, at)
	if r := b.finished(t, 1)[0]; !strings.Contains(r.out.Error.Message, "in time") {
		t.Errorf("a tunnel in which nothing begins: %v", r.out.Error)
	}
}

func TestConnectionsBeyondTheBoundWait(t *testing.T) {
	at := far(t, func(conn net.Conn) {
		_, _ = io.Copy(io.Discard, conn) // until it is closed
	})
	b := newBook()
	j := open(t, b, egress.Tight(options(t, b, at), 2, 20*time.Second, time.Minute, 1<<20))
	first, second := j.tunnel(t, at), j.tunnel(t, at)
	third := j.dial(t)
	if _, err := fmt.Fprintf(third, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", at, at); err != nil {
		t.Fatal(err)
	}
	if err := third.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := third.Read(make([]byte, 1)); err == nil {
		t.Error("a third connection is served beside two")
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if err := third.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(stands))
	if _, err := io.ReadFull(third, got); err != nil || string(got) != stands {
		t.Errorf("when there is room: %q, %v", got, err)
	}
	for _, c := range []net.Conn{second, third} {
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	b.finished(t, 3)
}

func TestManyAtOnceHaveARowEach(t *testing.T) {
	plain := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.URL.Query().Get("n")) // the comparison sees it
	}))
	defer plain.Close()
	secure := httptest.NewTLSServer(plain.Config.Handler)
	defer secure.Close()
	j := newJail(t, newBook(), address(plain), address(secure))
	const n = 40
	var wg sync.WaitGroup
	for i := range n {
		for _, srv := range []*httptest.Server{plain, secure} {
			wg.Go(func() {
				client := j.client(t, srv)
				defer client.CloseIdleConnections()
				want := fmt.Sprint(i)
				req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, srv.URL+"/?n="+url.QueryEscape(want), http.NoBody)
				if err != nil {
					t.Error(err)
					return
				}
				resp, err := client.Do(req)
				if err != nil {
					t.Error(err)
					return
				}
				defer resp.Body.Close()
				if got, err := io.ReadAll(resp.Body); err != nil || string(got) != want {
					t.Errorf("got %q, %v, want %q", got, err, want)
				}
			})
		}
	}
	wg.Wait()
	j.book.finished(t, 2*n)
}

func FuzzReadHead(f *testing.F) {
	f.Add([]byte("GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n"))
	f.Add([]byte("CONNECT a.test:443 HTTP/1.1\r\nHost:a.test:443 \r\nX: \r\n\r\n"))
	f.Add([]byte("POST http://a.test/ HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		once, err := egress.ReadHead(b)
		if err != nil {
			return
		}
		twice, err := egress.ReadHead(once)
		if err != nil || !bytes.Equal(once, twice) {
			t.Errorf("%q was read as %q, and that as %q, %v", b, once, twice, err)
		}
	})
}
