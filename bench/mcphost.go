package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/endpoint"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/gate"
	"github.com/capsem/capsem/internal/guestproto"
	"github.com/capsem/capsem/internal/inspect"
	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/launch"
	"github.com/capsem/capsem/internal/ledger"
	"github.com/capsem/capsem/internal/policy"
	"github.com/capsem/capsem/internal/route"
	"github.com/capsem/capsem/internal/toolproto"
	"github.com/capsem/capsem/internal/upstream"
	"github.com/capsem/capsem/internal/vm"
	"github.com/capsem/capsem/internal/vm/fakevm"
)

func mcpHostBenchmark() benchmark {
	return benchmark{
		name: "mcp-host",
		about: "calls of builtin__echo with 1 KiB over 4 connections of a fake machine (Unix sockets): endpoint, 20 rules, ledger, launcher and jailed built-in, " +
			"wall time per call; the floor is the same bytes from the same client through the same sockets, a process that only copies, and the same " +
			"SQL in two batches a call, each as large as what arrived meanwhile",
		run: benchMCPHost,
	}
}

// loadConns is over how many connections the calls are spread.
const loadConns = 4

func benchMCPHost(ctx context.Context, l *lab) (rows []row, err error) {
	h, err := l.openHost(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.close(context.WithoutCancel(ctx))) }()
	f, err := l.openFloorHost(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	for _, c := range []struct{ flight, calls int }{{1, 400}, {10, 2000}, {50, 4000}, {200, 6000}} {
		var ours, floor series
		err := l.turn(ctx, 7, func(count bool) error {
			o, err := drive(ctx, h.dial, c.flight, c.calls)
			if err != nil {
				return err
			}
			g, err := drive(ctx, f.dial, c.flight, c.calls)
			if err == nil && count {
				ours, floor = append(ours, o), append(floor, g)
			}
			return errors.Join(err, f.failure())
		})
		if err != nil {
			return nil, fmt.Errorf("%d in flight: %w", c.flight, err)
		}
		note := fmt.Sprintf("%.0f calls/s, floor %.0f", 1e6/ours.median(), 1e6/floor.median())
		rows = append(rows, compare(fmt.Sprintf("MCP host side, %d in flight, per call", c.flight), "µs", ours, floor, atMost(1.6), note))
	}
	return rows, nil
}

// turn runs a round that warms up and then the others.
func (l *lab) turn(ctx context.Context, n int, round func(count bool) error) error {
	for i := -1; i < l.rounds(n); i++ {
		if err := errors.Join(ctx.Err(), round(i >= 0)); err != nil {
			return err
		}
	}
	return nil
}

// host is what a VM's process has between a guest's MCP connections and the
// built-in tools, put together as package session does.
type host struct {
	ledger   *ledger.Ledger
	launcher *launch.Client
	up       *upstream.Upstream
	machine  vm.Machine
	guest    chan *fakevm.Guest
	serving  errgroup.Group
	unserve  context.CancelFunc
	table    *route.Table
}

func (l *lab) openHost(ctx context.Context) (h *host, err error) {
	h = &host{guest: make(chan *fakevm.Guest, 1)}
	defer func() {
		if err != nil {
			err = errors.Join(err, h.close(context.WithoutCancel(ctx)))
		}
	}()
	rules, err := policy.Load(l.home.Profile(profileName))
	if err != nil {
		return h, err
	}
	if h.ledger, err = ledger.Open(ctx, filepath.Join(l.dir, "host.db"), ledger.Options{Log: l.log}); err != nil {
		return h, err
	}
	if h.launcher, err = launch.Start(ctx, l.program("capsemd")); err != nil {
		return h, err
	}
	if err := h.startTools(ctx, l); err != nil {
		return h, err
	}
	backend := fakevm.New(func(ctx context.Context, g *fakevm.Guest) error {
		h.guest <- g
		<-ctx.Done()
		return nil
	})
	if h.machine, err = backend.Create(ctx, vm.Spec{Name: "load"}); err != nil {
		return h, err
	}
	mcp, err := h.machine.Listen(guestproto.PortMCP)
	if err != nil {
		return h, err
	}
	e := endpoint.New(endpoint.Options{
		Caller: inspect.Caller{VM: event.VM{ID: "load", Name: "load", Profile: profileName}, Initiator: event.Initiator{Kind: event.GuestAgent}},
		Gate:   gate.New(rules, h.ledger), Catalog: h, More: true, Version: "bench", Log: l.log,
		Refuse: func(_ context.Context, r endpoint.Refused) error { return fmt.Errorf("refused: %s", r.Detail) },
	})
	serve, unserve := context.WithCancel(ctx)
	h.unserve = unserve
	h.serving.Go(func() error { return e.Serve(serve, mcp) })
	return h, h.machine.Start(ctx)
}

// startTools starts the built-in tools in their jail and lists them.
func (h *host) startTools(ctx context.Context, l *lab) error {
	h.up = upstream.Start(ctx, upstream.Options{
		Server:  toolproto.Server{Name: config.BuiltinServer},
		Command: child.Command{Path: l.program("capsem-builtin"), Dir: "/"},
		StartProcess: func(ctx context.Context, cmd child.Command) (upstream.Process, error) {
			return h.launcher.Start(ctx, launch.Jail{Profile: launch.Builtin}, cmd)
		},
		Log: slog.New(slog.DiscardHandler),
	})
	raw, err := h.up.ListTools(ctx)
	if err != nil {
		return err
	}
	var tools []route.Tool
	for _, def := range raw {
		name, _ := jsonrpc.Member(def, "name")
		text, ok := jsonrpc.String(name)
		if !ok {
			return fmt.Errorf("a tool without a name: %s", def)
		}
		tools = append(tools, route.Tool{Name: text, Definition: def})
	}
	h.table, _ = route.New([]route.Server{{Name: config.BuiltinServer, Tools: tools}})
	return nil
}

// Table, Resolve and Call make the host the endpoint's catalogue.
func (h *host) Table(context.Context) *route.Table { return h.table }

// Resolve finds a tool.
func (h *host) Resolve(_ context.Context, name string) (route.Entry, error) {
	if e, ok := h.table.Tool(name); ok {
		return e, nil
	}
	return route.Entry{}, endpoint.ErrUnknownTool
}

// Call asks the built-in tools.
func (h *host) Call(ctx context.Context, _, method string, params json.RawMessage) (json.RawMessage, error) {
	return h.up.Call(ctx, method, params, endpoint.CallTimeout)
}

// dial opens a guest's connection.
func (h *host) dial(ctx context.Context) (net.Conn, error) {
	g := <-h.guest
	h.guest <- g
	return g.Dial(ctx, guestproto.PortMCP)
}

func (h *host) close(ctx context.Context) error {
	var errs []error
	if h.unserve != nil {
		h.unserve()
		errs = append(errs, h.serving.Wait())
	}
	if h.machine != nil {
		errs = append(errs, h.machine.Stop(ctx))
	}
	if h.up != nil {
		h.up.Close()
	}
	if h.launcher != nil {
		errs = append(errs, h.launcher.Close())
	}
	if h.ledger != nil {
		errs = append(errs, h.ledger.Close())
	}
	return errors.Join(errs...)
}

// drive makes calls over connections that it opens, inFlight at a time, and
// returns the wall time per call in microseconds.
func drive(ctx context.Context, dial func(context.Context) (net.Conn, error), inFlight, calls int) (_ float64, err error) {
	conns := make([]*loadConn, min(loadConns, inFlight))
	defer func() {
		for _, c := range conns {
			if c != nil {
				err = errors.Join(err, c.conn.Close())
			}
		}
	}()
	for i := range conns {
		conn, err := dial(ctx)
		if err != nil {
			return 0, err
		}
		conns[i] = &loadConn{conn: conn}
		if _, err := conn.Write(guestproto.AppendMeta(nil, guestproto.Meta{Process: "bench"})); err != nil {
			return 0, err
		}
	}
	began := time.Now()
	var all errgroup.Group
	for i, c := range conns {
		window := inFlight/len(conns) + btoi(i < inFlight%len(conns))
		all.Go(func() error { return c.drive(window, calls/len(conns)) })
	}
	if err := all.Wait(); err != nil {
		return 0, err
	}
	return micros(time.Since(began)) / float64(calls/len(conns)*len(conns)), nil
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// loadConn is one of the client's connections.
type loadConn struct{ conn net.Conn }

// drive keeps window calls under way until all are answered: what is answered is
// replaced, with as few writes as answers arrive at a time.
func (c *loadConn) drive(window, calls int) error {
	src := bufio.NewReaderSize(c.conn, 64<<10)
	in := guestproto.NewMCPReader(src, false)
	defer in.Close()
	text := loadText()
	sent, answered := 0, 0
	for answered < calls {
		var out []byte
		for ; sent < calls && sent-answered < window; sent++ {
			var err error
			if out, err = guestproto.AppendMCP(out, guestproto.MCPFrame{Stream: uint32(sent + 1), Process: "bench", Payload: loadCall(sent, text)}, false); err != nil {
				return err
			}
		}
		if len(out) > 0 {
			if _, err := c.conn.Write(out); err != nil {
				return fmt.Errorf("sending calls: %w", err)
			}
		}
		for first := true; answered < calls && (first || src.Buffered() > 0); first = false {
			f, err := in.Read()
			if err != nil {
				return fmt.Errorf("reading an answer: %w", err)
			}
			if _, bad := jsonrpc.Member(f.Payload, "error"); bad {
				return fmt.Errorf("a call failed: %.300s", f.Payload)
			}
			answered++
		}
	}
	return nil
}

// loadText is what is echoed.
func loadText() string {
	const line = "a line that a tool might see; "
	return strings.Repeat(line, echoBytes/len(line)+1)[:echoBytes]
}

func loadCall(n int, text string) []byte {
	return fmt.Appendf(nil, `{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"builtin__echo","arguments":{"text":"%d %s"}}}`, n+1, n, text)
}
