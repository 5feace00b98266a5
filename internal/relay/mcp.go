//go:build linux

package relay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"

	"github.com/capsem/capsem/internal/guestproto"
)

// MCPOptions are what the MCP relay needs to know.
type MCPOptions struct {
	// Dial connects to the host's MCP port. It bounds how long it tries.
	Dial func(context.Context) (net.Conn, error)
	// Process is the name of the program that speaks through the relay.
	Process string
	// More says whether the host takes messages in several frames. It is asked
	// before each connection; nil means no.
	More func() bool
	Log  *slog.Logger
}

// codeTransport is the JSON-RPC error of a message that could not be carried.
const codeTransport = -32001

// lastGuestStream is the highest stream id of a guest's request. A connection that
// has used it is replaced.
const lastGuestStream = guestproto.FirstHostStream - 1

// MCP carries JSON-RPC between a client's lines, on in and out, and the host's
// frames. It reads and answers at the same time: neither direction waits for the
// other. It understands no more of a message than it must to put it into a frame;
// what it cannot read it hands on, for the host to answer.
//
// A connection that is lost answers every request that was under way with an
// error, and the next line opens another one; nothing is sent twice. At the end of
// in, MCP takes no more, waits for the answers that are under way, writes them and
// returns nil. If out cannot be written, it returns that error, and a read of in
// that is under way is left to end by itself.
func MCP(ctx context.Context, in io.Reader, out io.Writer, o MCPOptions) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r := &mcpRelay{opts: o, out: &lineWriter{dst: out, fail: cancel}}
	input := make(chan error, 1)
	go func() { input <- r.readLines(ctx, in) }()
	var err error
	select {
	case err = <-input:
		if err == nil {
			r.finish(ctx)
		}
	case <-ctx.Done():
	}
	r.close()
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

// mcpRelay is one client's relay.
type mcpRelay struct {
	opts MCPOptions
	out  *lineWriter

	mu sync.Mutex // guards what follows
	// link is the connection of the last line; it may be lost already.
	link   *mcpLink
	ended  bool // the client's input has
	closed bool
}

// readLines handles the client's lines until their end.
func (r *mcpRelay) readLines(ctx context.Context, in io.Reader) error {
	lines := newLineReader(in, guestproto.MaxMCPMessage)
	for ctx.Err() == nil {
		l, err := lines.next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading the client's lines: %w", err)
		}
		if l.text == nil {
			r.refuseLine(l)
			continue
		}
		r.line(ctx, l.text)
	}
	return nil
}

// refuseLine answers a line that was too long to be kept.
func (r *mcpRelay) refuseLine(l line) {
	if l.members.Object && !l.members.HasID {
		r.opts.Log.Warn("a notification is too long", "size", l.size, "limit", guestproto.MaxMCPMessage)
		return
	}
	r.out.fault(l.members.ID, codeTransport, fmt.Sprintf("the message has %d bytes, over the limit of %d", l.size, guestproto.MaxMCPMessage))
}

// line sends one message of the client on its way.
func (r *mcpRelay) line(ctx context.Context, text []byte) {
	what, m := classify(text)
	if what == answer {
		r.answer(text, m)
		return
	}
	link, err := r.connected(ctx)
	switch {
	case err != nil && what == notification:
		r.opts.Log.Warn("a notification is lost", "method", m.Method, "error", err)
	case err != nil:
		r.out.lost(m, err)
	case what == notification:
		link.notify(text, m)
	default:
		link.request(text, m)
	}
}

// answer sends the client's answer to a request that the host made.
func (r *mcpRelay) answer(text []byte, m members) {
	r.mu.Lock()
	link := r.link
	r.mu.Unlock()
	if link == nil || !link.answer(text, m.ID) {
		r.opts.Log.Warn("the client answers a request that nobody made", "id", string(m.ID[:min(len(m.ID), maxName)]))
	}
}

// connected returns the connection, a new one if the last is lost or used up.
func (r *mcpRelay) connected(ctx context.Context) (*mcpLink, error) {
	r.mu.Lock()
	link := r.link
	r.mu.Unlock()
	if link != nil && link.usable() {
		return link, nil
	}
	if link != nil {
		link.close()
	}
	conn, err := r.opts.Dial(ctx)
	if err != nil {
		return nil, err
	}
	more := r.opts.More != nil && r.opts.More()
	if _, err := conn.Write(guestproto.AppendMeta(nil, guestproto.Meta{Process: r.opts.Process, More: more})); err != nil {
		return nil, errors.Join(fmt.Errorf("greeting the host: %w", err), conn.Close())
	}
	link = newMCPLink(r, conn, more)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed { // nobody would end it any more
		link.close()
		return nil, context.Canceled
	}
	r.link = link
	return link, nil
}

// finish waits until nothing is under way any more.
func (r *mcpRelay) finish(ctx context.Context) {
	r.mu.Lock()
	r.ended = true
	link := r.link
	r.mu.Unlock()
	if link == nil {
		return
	}
	link.refuseHost()
	stop := context.AfterFunc(ctx, func() {
		_ = link.conn.Close() // ends the wait
	})
	defer stop()
	link.drained()
}

// close ends the connection and waits for its reader.
func (r *mcpRelay) close() {
	r.mu.Lock()
	r.closed = true
	link := r.link
	r.mu.Unlock()
	if link != nil {
		link.close()
	}
}

// inputEnded reports whether the client will say nothing any more.
func (r *mcpRelay) inputEnded() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ended
}

// lineWriter writes whole lines for several goroutines.
type lineWriter struct {
	mu   sync.Mutex
	dst  io.Writer
	err  error
	fail context.CancelCauseFunc
}

// write writes one message as one line. It may change b. JSON has line breaks only
// between its tokens, where a space means the same.
func (w *lineWriter) write(b []byte) {
	for i, c := range b {
		if c == '\n' || c == '\r' {
			b[i] = ' '
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return
	}
	if _, err := w.dst.Write(append(b, '\n')); err != nil {
		w.err = fmt.Errorf("writing to the client: %w", err)
		w.fail(w.err)
	}
}

// fault writes a JSON-RPC error of our own. A nil id is written as null.
func (w *lineWriter) fault(id []byte, code int, message string) {
	w.write(faultMessage(id, code, message))
}

// lost answers a request that the transport did not carry to its end.
func (w *lineWriter) lost(m members, cause error) {
	method := m.Method
	if method == "" {
		method = "a"
	}
	w.fault(m.ID, codeTransport, fmt.Sprintf("MCP transport disconnected before %s response: %v", method, cause))
}

func faultMessage(id []byte, code int, message string) []byte {
	if id == nil {
		id = []byte("null")
	}
	type fault struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}
	b, err := json.Marshal(struct {
		Version string          `json:"jsonrpc"`
		ID      json.RawMessage `json:"id"`
		Error   fault           `json:"error"`
	}{"2.0", id, fault{code, message}})
	if err != nil { // an id that was kept is valid JSON
		return faultMessage(nil, code, message)
	}
	return b
}
