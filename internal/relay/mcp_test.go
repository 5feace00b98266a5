//go:build linux

package relay

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/capsem/capsem/internal/guestproto"
)

// patience bounds every wait of a test.
const patience = 20 * time.Second

// socketPair is both ends of a connection with half-close.
func socketPair(t testing.TB) (a, b net.Conn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		if conns[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(f.Close(), conns[i].SetDeadline(time.Now().Add(patience))); err != nil {
			t.Fatal(err)
		}
	}
	return conns[0], conns[1]
}

// client is what drives a relay in a test, and its host.
type client struct {
	t     testing.TB
	in    *io.PipeWriter // to the relay's stdin
	out   *bufio.Reader  // from its stdout
	outR  *io.PipeReader
	hosts chan *host
	ended chan error
	// refuse makes dialling fail while it is set.
	mu     sync.Mutex
	refuse error
}

// host is one connection to the host.
type host struct {
	t    testing.TB
	conn net.Conn
	meta guestproto.Meta
	r    *guestproto.MCPReader
	w    *guestproto.MCPWriter
}

func startRelay(t testing.TB, more bool) *client {
	inR, in := io.Pipe()
	outR, outW := io.Pipe()
	c := &client{t: t, in: in, out: bufio.NewReaderSize(outR, 1<<20), outR: outR, hosts: make(chan *host, 8), ended: make(chan error, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() {
		cancel()
		in.Close()
		outR.Close()
	})
	go func() {
		err := MCP(ctx, inR, outW, MCPOptions{
			Dial: c.dial, Process: "the client", More: func() bool { return more }, Log: slog.New(slog.DiscardHandler),
		})
		outW.Close()
		c.ended <- err
	}()
	return c
}

func (c *client) dial(context.Context) (net.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.refuse != nil {
		return nil, c.refuse
	}
	guest, conn := socketPair(c.t)
	c.hosts <- &host{t: c.t, conn: conn}
	return guest, nil
}

// host is the relay's next connection.
func (c *client) host() *host {
	c.t.Helper()
	select {
	case h := <-c.hosts:
		src := bufio.NewReader(h.conn)
		var err error
		if h.meta, err = guestproto.ReadMeta(src); err != nil {
			c.t.Fatal(err)
		}
		h.r, h.w = guestproto.NewMCPReader(src, h.meta.More), guestproto.NewMCPWriter(h.conn, h.meta.More)
		c.t.Cleanup(func() { h.conn.Close() })
		return h
	case <-time.After(patience):
		c.t.Fatal("the relay does not connect")
		return nil
	}
}

func (c *client) say(line string) {
	c.t.Helper()
	if _, err := io.WriteString(c.in, line+"\n"); err != nil {
		c.t.Fatal(err)
	}
}

func (c *client) hear() string {
	c.t.Helper()
	line, err := c.out.ReadString('\n')
	if err != nil {
		c.t.Fatalf("after %q: %v", line, err)
	}
	return strings.TrimSuffix(line, "\n")
}

// fault reads an error of the relay's own.
func (c *client) fault() (id string, code int, message string) {
	c.t.Helper()
	line := c.hear()
	var m struct {
		ID    json.RawMessage
		Error struct {
			Code    int
			Message string
		}
	}
	if err := json.Unmarshal([]byte(line), &m); err != nil {
		c.t.Fatalf("%s: %v", line, err)
	}
	return string(m.ID), m.Error.Code, m.Error.Message
}

func (h *host) hear() guestproto.MCPFrame {
	h.t.Helper()
	f, err := h.r.Read()
	if err != nil {
		h.t.Fatal(err)
	}
	return f
}

func (h *host) say(stream uint32, payload string) {
	h.t.Helper()
	if err := h.w.Write(guestproto.MCPFrame{Stream: stream, Notification: stream == 0, Process: "p", Payload: []byte(payload)}); err != nil {
		h.t.Fatal(err)
	}
}

func (c *client) end() {
	c.t.Helper()
	select {
	case err := <-c.ended:
		if err != nil {
			c.t.Errorf("the relay ended with %v", err)
		}
	case <-time.After(patience):
		c.t.Fatal("the relay does not end")
	}
}

func TestLinesBecomeFramesAndBack(t *testing.T) {
	c := startRelay(t, false)
	c.say(`{"jsonrpc":"2.0","id":"a","method":"initialize"}`)
	h := c.host()
	if h.meta != (guestproto.Meta{Process: "the_client"}) {
		t.Errorf("metadata %+v", h.meta)
	}
	if f := h.hear(); f.Stream != 1 || f.Notification || string(f.Payload) != `{"jsonrpc":"2.0","id":"a","method":"initialize"}` {
		t.Errorf("got %+v %s", f, f.Payload)
	}
	h.say(1, `{"jsonrpc":"2.0","id":"a","result":{}}`)
	if got := c.hear(); got != `{"jsonrpc":"2.0","id":"a","result":{}}` {
		t.Errorf("got %s", got)
	}
	c.say("\r\n" + `{"jsonrpc":"2.0","method":"notifications/initialized"}` + "\r")
	if f := h.hear(); f.Stream != 0 || !f.Notification {
		t.Errorf("got %+v %s", f, f.Payload)
	}
	c.say(`not json`)
	if f := h.hear(); f.Stream != 2 || f.Notification || string(f.Payload) != "not json" {
		t.Errorf("got %+v %s", f, f.Payload)
	}
	h.say(0, "{\"jsonrpc\":\"2.0\",\n\"method\":\"x\"}")
	if got := c.hear(); got != `{"jsonrpc":"2.0", "method":"x"}` {
		t.Errorf("a message with a line break became %q", got)
	}
}

func TestAnswersComeInTheOrderOfTheHost(t *testing.T) {
	c := startRelay(t, false)
	for i := range 3 {
		c.say(fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"m"}`, i))
	}
	h := c.host()
	for range 3 {
		h.hear()
	}
	for _, stream := range []uint32{3, 1, 2} {
		h.say(stream, fmt.Sprintf(`{"id":%d}`, stream-1))
		if got := c.hear(); got != fmt.Sprintf(`{"id":%d}`, stream-1) {
			t.Errorf("got %s", got)
		}
	}
}

func TestTheHostsRequestsAreAnsweredOnTheirStream(t *testing.T) {
	c := startRelay(t, false)
	c.say(`{"jsonrpc":"2.0","id":1,"method":"tools/call"}`)
	h := c.host()
	h.hear()
	first := guestproto.FirstHostStream
	h.say(first, `{"jsonrpc":"2.0","id":"h\u0061","method":"sampling/createMessage"}`)
	h.say(first+1, `{"jsonrpc":"2.0","id":1,"method":"roots/list"}`)
	c.hear()
	c.hear()
	c.say(`{"jsonrpc":"2.0","id":1,"result":{"roots":[]}}`)
	if f := h.hear(); f.Stream != first+1 || !strings.Contains(string(f.Payload), "roots") {
		t.Errorf("got %+v %s", f, f.Payload)
	}
	c.say(`{"jsonrpc":"2.0","id":"ha","error":{"code":-1,"message":"no"}}`)
	if f := h.hear(); f.Stream != first {
		t.Errorf("got %+v %s", f, f.Payload)
	}
	// An answer to nothing goes nowhere, a second answer neither.
	c.say(`{"jsonrpc":"2.0","id":"ha","result":{}}`)
	c.say(`{"jsonrpc":"2.0","id":99,"result":{}}`)
	c.say(`{"jsonrpc":"2.0","id":2,"method":"ping"}`)
	if f := h.hear(); f.Stream != 2 || !strings.Contains(string(f.Payload), "ping") {
		t.Errorf("got %+v %s", f, f.Payload)
	}
}

func TestAtTheEndOfInputTheAnswersUnderWayAreWritten(t *testing.T) {
	c := startRelay(t, false)
	c.say(`{"jsonrpc":"2.0","id":1,"method":"slow"}`)
	c.say(`{"jsonrpc":"2.0","id":2,"method":"slow"}`)
	h := c.host()
	h.hear()
	h.hear()
	if err := c.in.Close(); err != nil {
		t.Fatal(err)
	}
	// A request of the host can have no answer any more, and gets one at once.
	h.say(guestproto.FirstHostStream, `{"jsonrpc":"2.0","id":"q","method":"roots/list"}`)
	if f := h.hear(); f.Stream != guestproto.FirstHostStream || !strings.Contains(string(f.Payload), "-32001") {
		t.Errorf("got %+v %s", f, f.Payload)
	}
	h.say(2, `{"id":2,"result":{}}`)
	h.say(1, `{"id":1,"result":{}}`)
	var got []string
	for len(got) < 2 {
		// The client may have been asked just before its end was noticed.
		if line := c.hear(); !strings.Contains(line, "roots/list") {
			got = append(got, line)
		}
	}
	if want := []string{`{"id":2,"result":{}}`, `{"id":1,"result":{}}`}; !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	c.end()
}

func TestWithoutInputNobodyIsDialled(t *testing.T) {
	c := startRelay(t, false)
	if err := c.in.Close(); err != nil {
		t.Fatal(err)
	}
	c.end()
	if len(c.hosts) > 0 {
		t.Error("the host was dialled for nothing")
	}
}

func TestALostTransportAnswersAllThatIsUnderWayAndReconnects(t *testing.T) {
	c := startRelay(t, false)
	c.say(`{"jsonrpc":"2.0","id":1,"method":"tools/call"}`)
	c.say(`{"jsonrpc":"2.0","id":"two","method":"ping"}`)
	h := c.host()
	h.hear()
	h.hear()
	if err := h.conn.Close(); err != nil {
		t.Fatal(err)
	}
	methods := map[string]string{"1": "tools/call", `"two"`: "ping"}
	for range 2 {
		id, code, message := c.fault()
		if want := "MCP transport disconnected before " + methods[id] + " response: "; code != -32001 || !strings.HasPrefix(message, want) {
			t.Errorf("id %s: %d %q", id, code, message)
		}
		delete(methods, id)
	}
	c.say(`{"jsonrpc":"2.0","id":3,"method":"ping"}`)
	h = c.host()
	if f := h.hear(); f.Stream != 1 || !strings.Contains(string(f.Payload), `"id":3`) {
		t.Errorf("after the reconnect: %+v %s", f, f.Payload)
	}
}

func TestAHostThatCannotBeReachedIsSaid(t *testing.T) {
	c := startRelay(t, false)
	c.mu.Lock()
	c.refuse = errors.New("no such device")
	c.mu.Unlock()
	c.say(`{"jsonrpc":"2.0","method":"notifications/x"}`)
	c.say(`{"jsonrpc":"2.0","id":1,"method":"ping"}`)
	if id, code, message := c.fault(); id != "1" || code != -32001 || !strings.Contains(message, "no such device") {
		t.Errorf("got %s %d %q", id, code, message)
	}
	c.mu.Lock()
	c.refuse = nil
	c.mu.Unlock()
	c.say(`{"jsonrpc":"2.0","id":2,"method":"ping"}`)
	c.host().hear()
}

// message is a request of exactly n bytes.
func message(n int) string {
	const start, end = `{"jsonrpc":"2.0","method":"m","params":{"a":"`, `"},"id":7}`
	return start + strings.Repeat("x", n-len(start)-len(end)) + end
}

func TestMessagesAtTheLimits(t *testing.T) {
	single := guestproto.MaxMCPFrame - guestproto.MCPHeader - len("the_client")
	for _, tt := range []struct {
		size int
		more bool
		fits bool
	}{
		{single, false, true},
		{single + 1, false, false},
		{single + 1, true, true},
		{guestproto.MaxMCPMessage, true, true},
		{guestproto.MaxMCPMessage + 1, true, false},
		{guestproto.MaxMCPMessage + 1, false, false},
	} {
		c := startRelay(t, tt.more)
		go c.say(message(tt.size))
		if tt.fits {
			h := c.host()
			if f := h.hear(); len(f.Payload) != tt.size {
				t.Errorf("%d bytes became %d", tt.size, len(f.Payload))
			}
			continue
		}
		if id, code, message := c.fault(); id != "7" || code != -32001 || !strings.Contains(message, fmt.Sprint(tt.size)) {
			t.Errorf("%d bytes (more %t): id %s, %d %q", tt.size, tt.more, id, code, message)
		}
		c.say(`{"jsonrpc":"2.0","id":8,"method":"ping"}`)
		h := c.host()
		if f := h.hear(); !strings.Contains(string(f.Payload), "ping") {
			t.Errorf("the connection does not survive: %s", f.Payload)
		}
	}
}

// TestBigMessagesPassEachOther is full duplex: neither side reads before it has
// written.
func TestBigMessagesPassEachOther(t *testing.T) {
	c := startRelay(t, true)
	c.say(`{"jsonrpc":"2.0","id":1,"method":"first"}`)
	h := c.host()
	h.hear()
	const size = 10 << 20
	var wg sync.WaitGroup
	wg.Go(func() { c.say(message(size)) })
	wg.Go(func() { h.say(1, `{"id":1,"result":"`+strings.Repeat("y", size)+`"}`) })
	wg.Go(func() {
		if f := h.hear(); len(f.Payload) != size {
			t.Errorf("arguments: %d bytes", len(f.Payload))
		}
	})
	if got := c.hear(); len(got) < size {
		t.Errorf("result: %d bytes", len(got))
	}
	wg.Wait()
}

func TestAClosedOutputEndsTheRelay(t *testing.T) {
	c := startRelay(t, false)
	c.say(`{"jsonrpc":"2.0","id":1,"method":"ping"}`)
	h := c.host()
	h.hear()
	if err := c.outR.Close(); err != nil {
		t.Fatal(err)
	}
	h.say(1, `{"id":1,"result":{}}`)
	select {
	case err := <-c.ended:
		if !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("ended with %v", err)
		}
	case <-time.After(patience):
		t.Fatal("the relay does not end")
	}
	if _, err := h.r.Read(); err == nil {
		t.Error("the host's connection is still open")
	}
}

func TestUsedUpStreamsAreReplacedByANewConnection(t *testing.T) {
	guest, far := socketPair(t)
	defer far.Close()
	go io.Copy(io.Discard, far)
	var out bytes.Buffer
	r := &mcpRelay{opts: MCPOptions{Log: slog.New(slog.DiscardHandler)}, out: &lineWriter{dst: &out, fail: func(error) {}}}
	l := newMCPLink(r, guest, false)
	defer l.close()
	l.next = lastGuestStream
	if !l.usable() {
		t.Error("the last stream cannot be used")
	}
	l.request([]byte(`{}`), members{})
	if l.usable() {
		t.Error("a stream of the host's would be used")
	}
}

func TestManyRequestsAtOnceKeepTheirAnswersApart(t *testing.T) {
	c := startRelay(t, false)
	const n = 500
	go func() {
		for i := range n {
			c.say(fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"echo","params":{"n":%d}}`, i, i))
		}
	}()
	h := c.host()
	go func() {
		for range n {
			f, err := h.r.Read()
			if err != nil {
				t.Error(err)
				return
			}
			go h.say(f.Stream, string(f.Payload))
		}
	}()
	seen := make(map[int]bool)
	for range n {
		var m struct {
			ID     int
			Params struct{ N int }
		}
		if err := json.Unmarshal([]byte(c.hear()), &m); err != nil {
			t.Fatal(err)
		}
		if m.ID != m.Params.N || seen[m.ID] {
			t.Errorf("answer %+v", m)
		}
		seen[m.ID] = true
	}
}

func TestProcessNameIsThatOfTheProgram(t *testing.T) {
	if name := ProcessName(os.Getpid()); !strings.HasSuffix(name, ".test") {
		t.Errorf("we are %q", name)
	}
	if name := ProcessName(1 << 30); name != "unknown" {
		t.Errorf("nobody is %q", name)
	}
}
