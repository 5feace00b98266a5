package endpoint_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/capsem/capsem/internal/endpoint"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/gate"
	"github.com/capsem/capsem/internal/guestproto"
	"github.com/capsem/capsem/internal/inspect"
	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/route"
)

// world is what is around an endpoint: rules, a record of what happened, and
// servers that are functions.
type world struct {
	mu       sync.Mutex
	begun    []*event.Event
	verdicts []event.Verdict
	ends     []event.Outcome
	refused  []endpoint.Refused
	// rule blocks what it returns a name for.
	rule func(*event.Event, event.Phase, *event.Outcome) string
	// call answers for the servers.
	call func(ctx context.Context, server string, params json.RawMessage) (json.RawMessage, error)
	// sent counts the calls that reached a server.
	sent  []string
	table *route.Table
}

func (w *world) Judge(_ context.Context, ev *event.Event, p event.Phase, out *event.Outcome) event.Verdict {
	if w.rule != nil {
		if id := w.rule(ev, p, out); id != "" {
			return event.Verdict{Decision: event.Block, Rule: id, Reason: "Because."}
		}
	}
	return event.Verdict{Decision: event.Allow}
}

func (w *world) Begin(_ context.Context, ev *event.Event, v event.Verdict) (gate.Receipt, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.begun, w.verdicts = append(w.begun, ev), append(w.verdicts, v)
	return nil, nil
}

func (w *world) End(_ context.Context, _ gate.Receipt, out event.Outcome, _ event.Verdict) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ends = append(w.ends, out)
	return nil
}

func (w *world) Table(context.Context) *route.Table { return w.table }

func (w *world) Resolve(_ context.Context, name string) (route.Entry, error) {
	if e, ok := w.table.Tool(name); ok {
		return e, nil
	}
	if strings.HasPrefix(name, "down__") {
		return route.Entry{}, &event.Error{Code: jsonrpc.CodeInternal, Message: "server down is not up (backoff)"}
	}
	return route.Entry{}, endpoint.ErrUnknownTool
}

func (w *world) Call(ctx context.Context, server, _ string, params json.RawMessage) (json.RawMessage, error) {
	w.mu.Lock()
	w.sent = append(w.sent, server+" "+string(params))
	w.mu.Unlock()
	if w.call == nil {
		return jsonrpc.AppendResult(nil, json.RawMessage("77"), json.RawMessage(`{"content":[]}`)), nil
	}
	return w.call(ctx, server, params)
}

// toolCalls are the events of tools/call.
func (w *world) toolCalls() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, ev := range w.begun {
		if ev.Type == event.MCPToolCall {
			n++
		}
	}
	return n
}

func (w *world) details() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []string
	for _, r := range w.refused {
		all = append(all, r.Detail)
	}
	return all
}

// tool is a definition as a server lists it, with a member that we do not know.
func tool(name string) route.Tool {
	return route.Tool{Name: name, Definition: json.RawMessage(`{"name":"` + name + `","inputSchema":{"type":"object"},"x-unknown":[1,2]}`)}
}

// guest is a guest's connection to an endpoint.
type guest struct {
	t    *testing.T
	conn net.Conn
	in   *guestproto.MCPReader
	next uint32
	// closed is closed when the endpoint has let go of the connection.
	closed chan struct{}
}

func newWorld() *world {
	w := &world{}
	w.table, _ = route.New([]route.Server{{Name: "srv", Tools: []route.Tool{tool("echo"), tool("a__b")}}})
	return w
}

func (w *world) endpoint() *endpoint.Endpoint {
	return endpoint.New(endpoint.Options{
		Caller: inspect.Caller{VM: event.VM{ID: "vm-1"}, Initiator: event.Initiator{Kind: event.GuestAgent}},
		Gate:   gate.New(w, w), Catalog: w, Version: "1", More: true, Log: slog.New(slog.DiscardHandler),
		Refuse: func(_ context.Context, r endpoint.Refused) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.refused = append(w.refused, r)
			return nil
		},
	})
}

// connect joins a guest to an endpoint, and says the metadata line.
func connect(t *testing.T, e *endpoint.Endpoint, more bool) *guest {
	t.Helper()
	g := dial(t, e)
	g.write(guestproto.AppendMeta(nil, guestproto.Meta{Process: "agent", More: more}))
	g.in = guestproto.NewMCPReader(bufio.NewReader(g.conn), more)
	return g
}

func dial(t *testing.T, e *endpoint.Endpoint) *guest {
	t.Helper()
	ours, theirs := net.Pipe()
	g := &guest{t: t, conn: ours, closed: make(chan struct{})}
	go func() {
		defer close(g.closed)
		e.ServeConn(context.WithoutCancel(t.Context()), theirs)
	}()
	t.Cleanup(func() {
		if err := ours.Close(); err != nil {
			t.Error(err)
		}
		<-g.closed
	})
	// Nothing here takes long; this only keeps a broken test from hanging.
	if err := ours.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return g
}

// write sends bytes. The endpoint may hang up in the middle of them.
func (g *guest) write(b []byte) {
	g.t.Helper()
	if _, err := g.conn.Write(b); err != nil && !errors.Is(err, io.ErrClosedPipe) {
		g.t.Fatal(err)
	}
}

// send sends one message on a stream of its own and returns the stream.
func (g *guest) send(message string) uint32 {
	g.t.Helper()
	g.next++
	g.sendOn(g.next, message)
	return g.next
}

func (g *guest) sendOn(stream uint32, message string) {
	g.t.Helper()
	b, err := guestproto.AppendMCP(nil, guestproto.MCPFrame{Stream: stream, Process: "agent", Payload: []byte(message)}, true)
	if err != nil {
		g.t.Fatal(err)
	}
	g.write(b)
}

func (g *guest) notify(message string) {
	g.t.Helper()
	b, err := guestproto.AppendMCP(nil, guestproto.MCPFrame{Notification: true, Process: "agent", Payload: []byte(message)}, false)
	if err != nil {
		g.t.Fatal(err)
	}
	g.write(b)
}

// read returns the next message of the endpoint.
func (g *guest) read() (uint32, string) {
	g.t.Helper()
	f, err := g.in.Read()
	if err != nil {
		g.t.Fatalf("reading an answer: %v", err)
	}
	return f.Stream, string(f.Payload)
}

// ask sends a request and returns the answer to it, which must be the next.
func (g *guest) ask(message string) string {
	g.t.Helper()
	stream := g.send(message)
	got, answer := g.read()
	if got != stream {
		g.t.Fatalf("an answer on stream %d, want %d: %s", got, stream, answer)
	}
	return answer
}

// gone waits for the endpoint to let go of the connection.
func (g *guest) gone() {
	g.t.Helper()
	if f, err := g.in.Read(); err == nil {
		g.t.Fatalf("the connection lives: %s", f.Payload)
	}
	<-g.closed
}

// alive shows that the connection still works.
func (g *guest) alive() {
	g.t.Helper()
	if got, want := g.ask(`{"jsonrpc":"2.0","id":"ping","method":"ping"}`), `{"jsonrpc":"2.0","id":"ping","result":{}}`; got != want {
		g.t.Fatalf("after that, ping gave %s", got)
	}
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }
