package aggregator_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/toolproto"
)

// web is a streamable HTTP server that misbehaves.
type web struct {
	t   *testing.T
	srv *httptest.Server

	mu       sync.Mutex
	sessions int
	session  string   // the one that is known
	seen     []string // method, session and version of each request
	pushed   chan string
	resumed  chan string // Last-Event-ID of streams that were resumed
}

func newWeb(t *testing.T) *web {
	t.Helper()
	w := &web{t: t, pushed: make(chan string), resumed: make(chan string, 10)}
	w.srv = httptest.NewServer(w)
	t.Cleanup(w.srv.Close)
	return w
}

func (w *web) rig() *rig {
	w.t.Helper()
	return newRig(w.t, toolproto.Server{Name: "web", URL: w.srv.URL, Headers: []toolproto.Header{{Name: "Authorization", Value: []byte("Bearer s3cret")}}})
}

func (w *web) expire() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.session = "nobody's"
}

func (w *web) log() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.seen...)
}

func (w *web) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Authorization") != "Bearer s3cret" {
		http.Error(rw, "who are you", http.StatusUnauthorized)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	m, _ := jsonrpc.Parse(body) // GET and DELETE have none
	w.mu.Lock()
	w.seen = append(w.seen, strings.TrimSpace(fmt.Sprintf("%s %s %s %s", r.Method, m.Method, r.Header.Get("Mcp-Session-Id"), r.Header.Get("MCP-Protocol-Version"))))
	if m.Method == "initialize" {
		w.sessions++
		w.session = fmt.Sprintf("session-%d", w.sessions)
		rw.Header().Set("Mcp-Session-Id", w.session)
	} else if r.Header.Get("Mcp-Session-Id") != w.session {
		w.mu.Unlock()
		http.NotFound(rw, r)
		return
	}
	w.mu.Unlock()
	switch {
	case r.Method == http.MethodGet:
		w.get(rw, r)
	case r.Method == http.MethodDelete:
		rw.WriteHeader(http.StatusNoContent)
	case m.Method == "initialize":
		answerJSON(rw, fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2025-06-18","capabilities":{}}}`, m.ID))
	case m.Kind != jsonrpc.Request:
		rw.WriteHeader(http.StatusAccepted)
	default:
		name, _ := jsonrpc.Member(m.Params, "name")
		text, _ := jsonrpc.String(name)
		w.tool(rw, r, text, &m)
	}
}

func (w *web) get(rw http.ResponseWriter, r *http.Request) {
	if last := r.Header.Get("Last-Event-ID"); last != "" {
		w.resumed <- last
		rw.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(rw, "id: 8\ndata: {\"jsonrpc\":\"2.0\",\"id\":%s,\"result\":{\"resumed\":true}}\n\n", strings.TrimPrefix(last, "call-"))
		return
	}
	rw.Header().Set("Content-Type", "text/event-stream")
	rw.(http.Flusher).Flush()
	for {
		select {
		case text := <-w.pushed:
			fmt.Fprintf(rw, ": comment\r\ndata: %s\r\n\r\n", text)
			rw.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

func answerJSON(rw http.ResponseWriter, text string) {
	rw.Header().Set("Content-Type", "application/json; charset=utf-8")
	fmt.Fprint(rw, text)
}

func (w *web) tool(rw http.ResponseWriter, r *http.Request, name string, m *jsonrpc.Message) {
	stream := func(format string, args ...any) {
		rw.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(rw, format, args...)
		rw.(http.Flusher).Flush()
	}
	switch name {
	case "json":
		answerJSON(rw, fmt.Sprintf(`{"jsonrpc":"2.0", "id":%s, "result":%s}`, m.ID, m.Params))
	case "sse":
		stream("event: message\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/message\",\"params\":{\"x\":1.0}}\n\n")
		stream("event: ping\ndata: not for us\n\ndata: {\"jsonrpc\":\"2.0\",\ndata: \"id\":%s,\"result\":{}}\n\n", m.ID)
	case "resume":
		stream("id: call-%s\nretry: 1\ndata:\n\n", m.ID)
	case "cut":
		stream("data: {\"jsonrpc\":\"2.0\",\"id\":%s,\"result\":{}}", m.ID)
	case "stranger":
		answerJSON(rw, `{"jsonrpc":"2.0","id":4711,"result":{}}`)
	case "error":
		rw.Header().Set("Content-Type", "application/json")
		rw.WriteHeader(http.StatusBadRequest)
		fmt.Fprintf(rw, `{"jsonrpc":"2.0","id":%s,"error":{"code":-32602,"message":"mine"}}`, m.ID)
	case "fails":
		http.Error(rw, "stack trace with secrets", http.StatusInternalServerError)
	case "html":
		fmt.Fprint(rw, "<html>")
	case "accepted":
		rw.WriteHeader(http.StatusAccepted)
	case "huge-json":
		rw.Header().Set("Content-Type", "application/json")
		_, _ = rw.Write(bytes.Repeat([]byte(" "), 17<<20)) // the client hangs up
	case "huge-sse":
		stream("data: %s", strings.Repeat("x", 17<<20))
	case "elsewhere":
		other := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			w.t.Errorf("another host was asked, with %v", r.Header)
		}))
		defer other.Close()
		http.Redirect(rw, r, other.URL, http.StatusTemporaryRedirect)
	case "never":
		<-r.Context().Done()
	}
}

func TestAnswersOverHTTPPassByteForByte(t *testing.T) {
	w := newWeb(t)
	r := w.rig()
	r.awaitReady()
	got := r.call("json", `{"n":1.0}`)
	if diff := cmp.Diff(`{"jsonrpc":"2.0", "id":1, "result":{"name":"json","arguments":{"n":1.0}}}`, string(got.Message)); diff != "" {
		t.Error(diff)
	}
	got = r.call("sse", `{}`)
	if diff := cmp.Diff("{\"jsonrpc\":\"2.0\",\n\"id\":2,\"result\":{}}", string(got.Message)); diff != "" {
		t.Error(diff)
	}
	want := toolproto.Notify{Method: "notifications/message", Params: []byte(`{"x":1.0}`)}
	if diff := cmp.Diff(want, <-r.notified); diff != "" {
		t.Error(diff)
	}
}

func TestAServerIsReachedThroughTheProxyThatIsConfigured(t *testing.T) {
	w := newWeb(t)
	// The name leads nowhere: only the proxy, which is the server itself, is asked.
	r := newRig(t, toolproto.Server{
		Name: "web", URL: "http://mcp.invalid/mcp", Proxy: w.srv.URL,
		Headers: []toolproto.Header{{Name: "Authorization", Value: []byte("Bearer s3cret")}},
	})
	r.awaitReady()
	if got := r.call("json", `{}`); got.Message == nil {
		t.Errorf("got %+v", got)
	}
}

func TestAnHTTPSessionIsOpenedNamedAndEnded(t *testing.T) {
	w := newWeb(t)
	r := w.rig()
	r.awaitReady()
	r.call("json", `{}`)
	w.pushed <- `{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}`
	if got := <-r.notified; got.Method != "notifications/tools/list_changed" {
		t.Errorf("%+v", got)
	}
	r.hang()
	if err := r.ended(5 * time.Second); err != nil {
		t.Error(err)
	}
	log := w.log()
	if diff := cmp.Diff([]string{"POST initialize", "POST notifications/initialized session-1 2025-06-18"}, log[:2]); diff != "" {
		t.Error(diff)
	}
	rest := strings.Join(log[2:], "\n")
	for _, want := range []string{"GET  session-1 2025-06-18", "POST tools/call session-1 2025-06-18"} {
		if !strings.Contains(rest, want) {
			t.Errorf("no %q in %s", want, rest)
		}
	}
	if diff := cmp.Diff("DELETE  session-1 2025-06-18", log[len(log)-1]); diff != "" {
		t.Error(diff)
	}
}

func TestAnExpiredSessionIsRenewedOnceForAllCalls(t *testing.T) {
	w := newWeb(t)
	r := w.rig()
	r.awaitReady()
	w.expire()
	var wait sync.WaitGroup
	for range 10 {
		_, result := r.begin("json", `{}`, 0)
		wait.Go(func() {
			if got := r.await(result); got.Error != nil {
				t.Errorf("%+v", got.Error)
			}
		})
	}
	wait.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.sessions != 2 {
		t.Errorf("%d sessions", w.sessions)
	}
}

func TestAStreamThatEndsIsResumed(t *testing.T) {
	w := newWeb(t)
	r := w.rig()
	r.awaitReady()
	got := r.call("resume", `{}`)
	if !strings.Contains(string(got.Message), `"resumed":true`) {
		t.Errorf("%+v", got)
	}
	if last := <-w.resumed; last != "call-1" {
		t.Errorf("resumed after %q", last)
	}
}

func TestHTTPFailuresAreThatCallsAlone(t *testing.T) {
	w := newWeb(t)
	r := w.rig()
	r.awaitReady()
	for tool, want := range map[string]toolproto.Error{
		"cut":       {Code: jsonrpc.CodeInternal, Message: "server web: it ended its answer without a response to the request"},
		"stranger":  {Code: jsonrpc.CodeInternal, Message: "server web: it ended its answer without a response to the request"},
		"accepted":  {Code: jsonrpc.CodeInternal, Message: "server web: it ended its answer without a response to the request"},
		"fails":     {Code: jsonrpc.CodeInternal, Message: "server web: it answered HTTP 500 Internal Server Error"},
		"html":      {Code: jsonrpc.CodeTransport, Message: "server web: its answer is neither application/json nor text/event-stream"},
		"huge-json": {Code: jsonrpc.CodeTransport, Message: "server web: its answer is over the limit of 16777216 bytes"},
		"huge-sse":  {Code: jsonrpc.CodeTransport, Message: "server web: reading its stream: an event over the limit"},
		"elsewhere": {Code: jsonrpc.CodeTransport, Message: "server web: it cannot be reached: it redirects to another host"},
	} {
		got := r.call(tool, `{}`)
		if diff := cmp.Diff(&want, got.Error); diff != "" {
			t.Errorf("%s: %s", tool, diff)
		}
	}
	if got := r.call("error", `{}`); !strings.Contains(string(got.Message), `"mine"`) {
		t.Errorf("the server's own error: %+v", got)
	}
	if got := r.call("json", `{}`); got.Error != nil {
		t.Errorf("after all that: %+v", got.Error)
	}
}

func TestACancelledHTTPCallIsHungUp(t *testing.T) {
	w := newWeb(t)
	r := w.rig()
	r.awaitReady()
	id, _ := r.begin("never", `{}`, 0)
	r.write(&toolproto.Message{Cancel: &toolproto.Cancel{ID: id}})
	r.hang()
	if err := r.ended(5 * time.Second); err != nil {
		t.Error(err)
	}
}

func TestAnHTTPServerThatIsNotThereSaysSoWithoutSecrets(t *testing.T) {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, toolproto.Server{Name: "web", URL: "http://" + addr + "/?key=s3cret", Headers: []toolproto.Header{{Name: "X-Key", Value: []byte("s3cret")}}})
	err = r.ended(10 * time.Second)
	if err == nil || !strings.Contains(err.Error(), "it cannot be reached") || strings.Contains(err.Error(), "s3cret") {
		t.Errorf("got %v", err)
	}
}

func TestAServerThatRefusesTheKeySaysSo(t *testing.T) {
	w := newWeb(t)
	r := newRig(t, toolproto.Server{Name: "web", URL: w.srv.URL})
	if err := r.ended(10 * time.Second); err == nil || !strings.Contains(err.Error(), "HTTP 401 Unauthorized") {
		t.Errorf("got %v", err)
	}
}
