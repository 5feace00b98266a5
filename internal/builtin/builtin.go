// Package builtin is the jailed side of our own tools: an MCP tool server that
// speaks toolproto with the supervisor, without a server behind it.
//
// The tools can compute and can ask. What a tool needs from the world, it asks
// the supervisor for, which judges the request, makes it, and hands back what
// came of it: this process has no network, no files, and no say. A mistake in a
// tool's arguments is an answer that says what to correct (isError), as MCP
// wants it; what is no tool call at all is a JSON-RPC error.
package builtin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/toolproto"
)

// maxCalls is how many calls may be in flight.
const maxCalls = 1024

// initializeResult is what this server would answer to initialize.
const initializeResult = `{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"capsem-builtin","title":"Capsem built-in tools","version":"1"}}`

// program is the process while it runs.
type program struct {
	conn  *toolproto.Conn
	tools []tool
	tasks sync.WaitGroup

	mu      sync.Mutex
	calls   map[uint64]context.CancelFunc
	asked   uint64 // the last id of a request to the supervisor
	waiting map[uint64]chan toolproto.HTTPResult
}

// Run is the whole program: it announces itself on out and serves calls from in
// until in ends, Shutdown comes, or ctx ends. It closes in, which must unblock a
// read of it.
func Run(ctx context.Context, in io.ReadCloser, out io.Writer, log *slog.Logger) error {
	p := &program{
		conn: toolproto.NewConn(in, out), tools: tools(),
		calls: make(map[uint64]context.CancelFunc), waiting: make(map[uint64]chan toolproto.HTTPResult),
	}
	ctx, cancel := context.WithCancel(ctx)
	var closeOnce sync.Once
	var closeErr error
	closeIn := func() { closeOnce.Do(func() { closeErr = in.Close() }) }
	stop := context.AfterFunc(ctx, closeIn)
	defer stop()

	err := p.handshake()
	if err == nil {
		err = p.serve(ctx)
	}
	if ctx.Err() != nil {
		err = nil // reading failed because in was closed
	}
	cancel()
	p.tasks.Wait()
	closeIn()
	log.Debug("no more calls")
	return errors.Join(err, closeErr)
}

func (p *program) handshake() error {
	if err := p.conn.Write(&toolproto.Message{Hello: &toolproto.Hello{Version: toolproto.Version}}); err != nil {
		return fmt.Errorf("saying hello: %w", err)
	}
	m, err := p.conn.Read()
	switch {
	case err != nil:
		return fmt.Errorf("waiting for configure: %w", err)
	case m.Configure == nil:
		return errors.New("the supervisor's first message is no configure")
	case m.Configure.Version != toolproto.Version:
		return fmt.Errorf("the supervisor speaks version %d, this program %d", m.Configure.Version, toolproto.Version)
	}
	return p.conn.Write(&toolproto.Message{Ready: &toolproto.Ready{InitializeResult: []byte(initializeResult)}})
}

// serve takes the supervisor's messages until there are no more.
func (p *program) serve(ctx context.Context) error {
	for {
		m, err := p.conn.Read()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("reading from the supervisor: %w", err)
		case m.Call != nil:
			if err := p.accept(ctx, m.Call); err != nil {
				return err
			}
		case m.Cancel != nil:
			p.cancel(m.Cancel.ID)
		case m.HTTPResult != nil:
			p.settle(m.HTTPResult)
		case m.Notify != nil: // there is none that would change anything
		case m.Shutdown != nil:
			return nil
		default:
			return errors.New("a message from the supervisor that only a tool process sends")
		}
	}
}

// accept runs a call in the background.
func (p *program) accept(ctx context.Context, c *toolproto.Call) error {
	p.mu.Lock()
	if len(p.calls) >= maxCalls || p.calls[c.ID] != nil {
		p.mu.Unlock()
		return p.conn.Write(&toolproto.Message{Result: &toolproto.Result{
			ID: c.ID, Error: &toolproto.Error{Code: jsonrpc.CodeTimeout, Message: fmt.Sprintf("busy: %d calls are in flight", maxCalls)},
		}})
	}
	var cancel context.CancelFunc
	if c.TimeoutMS > 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(c.TimeoutMS)*time.Millisecond)
	} else {
		ctx, cancel = context.WithCancel(ctx)
	}
	p.calls[c.ID] = cancel
	p.mu.Unlock()
	p.tasks.Go(func() {
		defer cancel()
		answer := p.answer(ctx, c)
		p.mu.Lock()
		delete(p.calls, c.ID)
		p.mu.Unlock()
		// When it cannot be written the supervisor is gone, which the reader sees.
		_ = p.conn.Write(&toolproto.Message{Result: &toolproto.Result{ID: c.ID, Message: answer}})
	})
	return nil
}

func (p *program) cancel(id uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if cancel := p.calls[id]; cancel != nil {
		cancel()
	}
}

// answer returns the whole response to a call.
func (p *program) answer(ctx context.Context, c *toolproto.Call) []byte {
	id := strconv.AppendUint(nil, c.ID, 10)
	var result json.RawMessage
	var fault *jsonrpc.Error
	switch c.Method {
	case "ping":
		result = json.RawMessage("{}")
	case "tools/list":
		result = p.list()
	case "tools/call":
		result, fault = p.call(ctx, c)
	default:
		fault = &jsonrpc.Error{Code: jsonrpc.CodeMethodNotFound, Message: "method not found"}
	}
	if fault != nil {
		return jsonrpc.AppendError(nil, id, fault.Code, fault.Message, nil)
	}
	return jsonrpc.AppendResult(nil, id, result)
}

// list is the result of tools/list: one page.
func (p *program) list() json.RawMessage {
	out := []byte(`{"tools":[`)
	for i, t := range p.tools {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(out, t.definition()...)
	}
	return append(out, ']', '}')
}

// call runs the tool that a tools/call names.
func (p *program) call(ctx context.Context, c *toolproto.Call) (json.RawMessage, *jsonrpc.Error) {
	invalid := func(text string) (json.RawMessage, *jsonrpc.Error) {
		return nil, &jsonrpc.Error{Code: jsonrpc.CodeInvalidParams, Message: text}
	}
	raw, _ := jsonrpc.Member(c.Params, "name")
	name, ok := jsonrpc.String(raw)
	if !ok {
		return invalid("params.name must be a string")
	}
	arguments, ok := jsonrpc.Member(c.Params, "arguments")
	if !ok {
		arguments = json.RawMessage("{}")
	}
	if arguments[0] != '{' {
		return invalid("params.arguments must be an object")
	}
	for _, t := range p.tools {
		if t.name == name {
			return t.run(ctx, p.fetcher(c.ID), arguments), nil
		}
	}
	return invalid("unknown tool")
}

// fetcher makes HTTP requests on behalf of one call.
func (p *program) fetcher(call uint64) fetch {
	return func(ctx context.Context, req toolproto.HTTPRequest) (toolproto.HTTPResult, error) {
		answered := make(chan toolproto.HTTPResult, 1)
		p.mu.Lock()
		p.asked++
		req.ID, req.CallID = p.asked, call
		p.waiting[req.ID] = answered
		p.mu.Unlock()
		defer func() {
			p.mu.Lock()
			delete(p.waiting, req.ID)
			p.mu.Unlock()
		}()
		if err := p.conn.Write(&toolproto.Message{HTTPRequest: &req}); err != nil {
			return toolproto.HTTPResult{}, err
		}
		select {
		case r := <-answered:
			return r, nil
		case <-ctx.Done():
			return toolproto.HTTPResult{}, context.Cause(ctx)
		}
	}
}

func (p *program) settle(r *toolproto.HTTPResult) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if answered := p.waiting[r.ID]; answered != nil {
		delete(p.waiting, r.ID)
		answered <- *r
	}
}
