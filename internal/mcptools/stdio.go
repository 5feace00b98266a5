package mcptools

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

const (
	// maxLine is the longest message that is read, in bytes.
	maxLine = 17 << 20
	// drainTime is how long calls get to be answered after the client's end of
	// input. A script that writes its calls and closes gets its answers; what a
	// client that died left running is ended.
	drainTime = 60 * time.Second
	// metaCallID is the member of a call's _meta with the id of its request, which
	// the record of the call names.
	metaCallID = "capsem/requestId"
)

// stdio carries a message a line, as the stdio transport of MCP does. Other than
// the SDK's own it answers a line that is no message instead of ending, tells
// tools the id of their request, and answers what is under way when its input
// ends.
type stdio struct {
	in  io.Reader
	out io.Writer
}

// Connect implements mcp.Transport. The connection breaks when ctx ends: the SDK
// closes one in good order, and would wait for commands that run.
func (s *stdio) Connect(ctx context.Context) (mcp.Connection, error) {
	c := &lines{
		out: s.out, incoming: make(chan incoming), closed: make(chan struct{}), broken: ctx.Done(),
		pending: make(map[jsonrpc.ID]bool), idle: make(chan struct{}, 1),
	}
	// A read of stdin cannot be called off: the reader ends with its input, or
	// with the program.
	go c.read(s.in)
	return c, nil
}

// incoming is what a line held, or why there are no more.
type incoming struct {
	message jsonrpc.Message
	err     error
}

// lines is one connection over stdio.
type lines struct {
	incoming  chan incoming
	closed    chan struct{}
	closeOnce sync.Once
	// broken is closed when the server is to end.
	broken <-chan struct{}
	// idle has an element after pending has become empty.
	idle chan struct{}

	mu  sync.Mutex // guards out and pending
	out io.Writer
	// pending are the requests that have no answer yet.
	pending map[jsonrpc.ID]bool
}

// read hands on a message after the other.
func (c *lines) read(in io.Reader) {
	r := bufio.NewReaderSize(in, 64<<10)
	for {
		line, err := readLine(r)
		if over, ok := errors.AsType[*overlong](err); ok {
			c.refuse(over.id(), codeTooLarge, over.Error())
			continue
		}
		if message, ok := c.decode(line); ok {
			select {
			case c.incoming <- incoming{message: message}:
			case <-c.closed:
				return
			}
		}
		if err != nil {
			select {
			case c.incoming <- incoming{err: err}:
			case <-c.closed:
			}
			return
		}
	}
}

// readLine returns the next line without its end; the last one may come with
// io.EOF. One of more than maxLine bytes is read to its end and is an *overlong.
func readLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	var over *overlong
	for {
		part, err := r.ReadSlice('\n')
		if over == nil && len(line)+len(part) > maxLine {
			over, line = &overlong{head: line[:min(len(line), idWithin)]}, nil
		}
		if over != nil {
			over.add(part)
		} else {
			line = append(line, part...)
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
		case over != nil && err == nil:
			return nil, over
		default:
			return bytes.TrimSpace(line), err
		}
	}
}

// decode reads a line. What is no message is answered here.
func (c *lines) decode(line []byte) (jsonrpc.Message, bool) {
	if len(line) == 0 {
		return nil, false
	}
	if !json.Valid(line) {
		c.refuse(nil, jsonrpc.CodeParseError, "this is not JSON")
		return nil, false
	}
	message, err := jsonrpc.DecodeMessage(line)
	if err != nil {
		c.refuse(nil, jsonrpc.CodeInvalidRequest, "this is not a JSON-RPC 2.0 message (a batch is none)")
		return nil, false
	}
	if req, ok := message.(*jsonrpc.Request); ok && req.IsCall() {
		c.mu.Lock()
		c.pending[req.ID] = true
		c.mu.Unlock()
		if req.Method == "tools/call" {
			stamp(req)
		}
	}
	return message, true
}

// refuse answers a line that is not handed on. id is nil where it is not known.
func (c *lines) refuse(id json.RawMessage, code int, message string) {
	if id == nil {
		id = json.RawMessage("null")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	line := fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"error":{"code":%d,"message":%q}}`+"\n", id, code, message)
	if _, err := io.WriteString(c.out, line); err != nil {
		return // the next answer fails too, and ends the connection
	}
}

// stamp puts the id of a request into its _meta, over what the client may have
// put there. Params that are no object are refused later.
func stamp(req *jsonrpc.Request) {
	var params, meta map[string]json.RawMessage
	if json.Unmarshal(req.Params, &params) != nil || params == nil {
		return
	}
	if raw, ok := params["_meta"]; ok && json.Unmarshal(raw, &meta) != nil {
		return
	}
	if meta == nil {
		meta = make(map[string]json.RawMessage)
	}
	id, err := json.Marshal(fmt.Sprint(req.ID.Raw()))
	if err != nil {
		return // a string always encodes
	}
	meta[metaCallID] = id
	if params["_meta"], err = encode(meta); err != nil {
		return // as do values that were decoded just now
	}
	if stamped, err := encode(params); err == nil {
		req.Params = stamped
	}
}

// callID is the id of a call's request, fit for a header.
func callID(meta mcp.Meta) string {
	id, ok := meta[metaCallID].(string)
	if !ok {
		return ""
	}
	return headerText(id)
}

// Read implements mcp.Connection. It returns the end of the input only when
// everything is answered, or drainTime is over.
func (c *lines) Read(ctx context.Context) (jsonrpc.Message, error) {
	select {
	case in := <-c.incoming:
		if in.err != nil {
			c.drain(ctx)
		}
		return in.message, in.err
	case <-c.closed:
		return nil, io.EOF
	case <-c.broken:
		return nil, context.Canceled
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (c *lines) drain(ctx context.Context) {
	over := time.NewTimer(drainTime)
	defer over.Stop()
	for {
		c.mu.Lock()
		left := len(c.pending)
		c.mu.Unlock()
		if left == 0 {
			return
		}
		select {
		case <-c.idle:
		case <-over.C:
			return
		case <-c.closed:
			return
		case <-c.broken:
			return
		case <-ctx.Done():
			return
		}
	}
}

// Write implements mcp.Connection.
func (c *lines) Write(_ context.Context, message jsonrpc.Message) error {
	line, err := jsonrpc.EncodeMessage(message)
	if err != nil {
		return fmt.Errorf("encoding a message: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, err := c.out.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("writing a message: %w", err)
	}
	if resp, ok := message.(*jsonrpc.Response); ok {
		delete(c.pending, resp.ID)
		if len(c.pending) == 0 {
			select {
			case c.idle <- struct{}{}:
			default: // it is known already
			}
		}
	}
	return nil
}

// Close implements mcp.Connection.
func (c *lines) Close() error {
	c.closeOnce.Do(func() { close(c.closed) })
	return nil
}

// SessionID implements mcp.Connection; stdio has one session, without a name.
func (c *lines) SessionID() string { return "" }
