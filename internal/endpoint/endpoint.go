// Package endpoint is the guest's MCP server: what answers on port 5002.
//
// To a guest it is one server that has the tools of all. Each connection is
// read by one goroutine that never waits for an answer, so that a cancellation
// is seen however many requests are open; each request is served by a goroutine
// of its own and answered through one bounded queue. A message is parsed once,
// strictly; what policy judges, what the ledger keeps and what the server gets
// are slices of those bytes, in which only the tool's name and the id are
// exchanged.
//
// Input that is no message is answered as the table in WIRE says and recorded,
// never forwarded. Whatever else arrives passes through the gate.
package endpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/inspect"
	"github.com/capsem/capsem/internal/route"
)

// Bounds of what one guest can have under way.
const (
	// MaxInFlightConn and MaxInFlight are how many requests are served at a
	// time, of one connection and of all of them; more are answered "busy".
	MaxInFlightConn = 256
	MaxInFlight     = 1024
	// MaxHeld is how many bytes of requests and queued answers are held for a
	// guest.
	MaxHeld = 256 << 20
	// MaxQueued is how many bytes of answers wait for one connection to take
	// them; over it, or when they do not move for StuckAfter, it is closed.
	MaxQueued  = 32 << 20
	StuckAfter = 30 * time.Second
	// ListWait is how long a list waits for servers in their first start.
	ListWait = 5 * time.Second
	// CallTimeout bounds a tools/call, RequestTimeout any other request.
	CallTimeout    = 300 * time.Second
	RequestTimeout = 60 * time.Second
	// ListPage is how many bytes of tool definitions one page of a list has, so
	// that it fits a frame.
	ListPage = 512 << 10
)

// Gate judges and records: see package gate.
type Gate interface {
	Do(ctx context.Context, ev *event.Event, act func(context.Context) event.Outcome) (event.Verdict, event.Outcome)
}

// Catalog is the tools behind the endpoint. It is safe for concurrent use.
type Catalog interface {
	// Table is what can be called. It waits for servers in their first start
	// until ctx ends, and then has what there is.
	Table(ctx context.Context) *route.Table
	// Resolve finds a tool by the guest's name for it. For a server that is
	// starting it waits within that server's start deadline. The error is an
	// *event.Error: ErrUnknownTool, or why a server that could have the tool is
	// not up.
	Resolve(ctx context.Context, name string) (route.Entry, error)
	// Call sends a request to a server and returns its whole answer. A failure
	// of ours is an *event.Error with a JSON-RPC code.
	Call(ctx context.Context, server, method string, params json.RawMessage) (json.RawMessage, error)
}

// Refused is input that the protocol refuses.
type Refused struct {
	Caller inspect.Caller
	// ToClient says that it is a server's answer rather than a guest's message.
	ToClient bool
	Server   string
	Method   string
	ID       json.RawMessage
	// Code is what it was answered with, 0 for nothing.
	Code int
	// Detail names the rule that was broken, in our words.
	Detail string
}

// Options are what an Endpoint is made of.
type Options struct {
	// Caller is what is known of the guest; each connection adds the claim of
	// its process.
	Caller  inspect.Caller
	Gate    Gate
	Catalog Catalog
	// Refuse records refused input before it is answered.
	Refuse  func(context.Context, Refused) error
	Version string
	// More says that messages in several frames were offered to the guest.
	More bool
	Log  *slog.Logger
}

// Endpoint serves all connections of one guest.
type Endpoint struct {
	opts   Options
	budget budget

	mu    sync.Mutex
	conns map[*conn]struct{}
}

// New returns an endpoint that serves nothing yet.
func New(o Options) *Endpoint {
	return &Endpoint{opts: o, conns: map[*conn]struct{}{}}
}

// Serve accepts connections until the listener closes or ctx ends, and returns
// when all of them are done.
func (e *Endpoint) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			e.opts.Log.Warn("closing the MCP port", "error", err)
		}
	})
	defer stop()
	for {
		nc, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return fmt.Errorf("accepting MCP connections: %w", err)
		}
		wg.Go(func() { e.ServeConn(ctx, nc) })
	}
}

// ServeConn serves one connection to its end, and closes it.
func (e *Endpoint) ServeConn(ctx context.Context, nc net.Conn) {
	ctx, cancel := context.WithCancelCause(ctx)
	c := &conn{e: e, net: nc, caller: e.opts.Caller, cancel: cancel, requests: map[uint32]*request{}, out: newQueue(nc, &e.budget)}
	e.mu.Lock()
	e.conns[c] = struct{}{}
	e.mu.Unlock()
	c.serve(ctx)
	e.mu.Lock()
	delete(e.conns, c)
	e.mu.Unlock()
}

// Changed tells guests that the catalogue is another one, those to which it
// makes a difference.
func (e *Endpoint) Changed(table *route.Table) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for c := range e.conns {
		c.listChanged(table)
	}
}
