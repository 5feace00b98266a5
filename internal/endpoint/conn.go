package endpoint

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/capsem/capsem/internal/guestproto"
	"github.com/capsem/capsem/internal/inspect"
	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/route"
)

// Causes with which a request's context ends.
var (
	errCancelled    = errors.New("the guest cancelled the request")
	errDisconnected = errors.New("the guest disconnected")
)

// greetTime is how long a guest gets to say who it is.
const greetTime = 10 * time.Second

// conn is one connection of the guest.
type conn struct {
	e   *Endpoint
	net net.Conn
	// caller is the guest, with the claim of the metadata line; a frame has one
	// of its own. It does not change once the line is read.
	caller inspect.Caller
	out    *queue
	// more says that both sides take messages in several frames.
	more   bool
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	mu sync.Mutex
	// requests are those in flight, by stream.
	requests map[uint32]*request
	// highest is the last stream that was begun.
	highest uint32
	// initialized says that the guest takes notifications.
	initialized bool
	// listed is the catalogue as the guest knows it, nil before its first list.
	listed *route.Table
}

// request is one in flight.
type request struct {
	id     json.RawMessage
	cancel context.CancelCauseFunc
}

// serve reads until the guest goes away or breaks the framing.
func (c *conn) serve(ctx context.Context) {
	stop := context.AfterFunc(ctx, func() { c.closeNet() })
	defer func() {
		// Nothing more is written: the guest is gone, or an answer could be
		// mistaken for another's.
		c.cancel(errDisconnected)
		c.closeNet()
		c.wg.Wait()
		c.out.close()
		stop()
	}()
	r := bufio.NewReaderSize(c.net, 64<<10)
	if err := c.greet(r); err != nil {
		c.refuse(ctx, Refused{Detail: "metadata: " + err.Error()})
		return
	}
	in := guestproto.NewMCPReader(r, c.more)
	in.Reserve = c.e.budget.reserve
	defer in.Close()
	for {
		f, err := in.Read()
		if err == nil {
			err = c.frame(ctx, f)
		} else {
			err = c.badFrame(ctx, err)
		}
		if err != nil {
			return
		}
	}
}

func (c *conn) closeNet() {
	if err := c.net.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		c.e.opts.Log.Debug("closing an MCP connection", "error", err)
	}
}

// greet reads the line in which the guest's process names itself.
func (c *conn) greet(r *bufio.Reader) error {
	if err := c.net.SetReadDeadline(time.Now().Add(greetTime)); err != nil {
		return err
	}
	meta, err := guestproto.ReadMeta(r)
	if err != nil {
		return err
	}
	c.caller.Process, c.more = meta.Process, meta.More && c.e.opts.More
	return c.net.SetReadDeadline(time.Time{})
}

// badFrame answers what is wrong with the framing. An error ends the
// connection.
func (c *conn) badFrame(ctx context.Context, err error) error {
	var bad *guestproto.FrameError
	switch {
	case errors.Is(err, io.EOF):
		return err
	case !errors.As(err, &bad):
		if ctx.Err() == nil && !errors.Is(err, net.ErrClosed) {
			c.refuse(ctx, Refused{Detail: "frame: the connection broke inside it"})
		}
		return err
	case bad.Fatal:
		c.refuse(ctx, Refused{Detail: "frame: " + bad.Detail})
		return err
	case bad.Stream == 0:
		c.refuse(ctx, Refused{Detail: "frame: " + bad.Detail})
		return nil
	}
	code := jsonrpc.CodeInvalidRequest
	switch {
	case bad.Oversize:
		code = jsonrpc.CodeTransport
	case bad.Busy:
		code = jsonrpc.CodeTimeout
	}
	c.refuse(ctx, Refused{Code: code, Detail: "frame: " + bad.Detail})
	return c.reply(bad.Stream, jsonrpc.AppendError(nil, nil, code, bad.Error(), nil))
}

// frame takes one whole message. An error ends the connection.
func (c *conn) frame(ctx context.Context, f guestproto.MCPFrame) error {
	who := c.caller
	if f.Process != "" {
		who.Process = f.Process
	}
	if f.Notification {
		c.notification(ctx, who, f.Payload)
		return nil
	}
	c.mu.Lock()
	_, open := c.requests[f.Stream]
	used := f.Stream <= c.highest
	if !used && f.Stream < guestproto.FirstHostStream {
		c.highest = f.Stream
	}
	c.mu.Unlock()
	switch {
	case open:
		c.refuse(ctx, Refused{Detail: "stream: still in flight"})
		return errors.New("a stream was used for two requests at a time")
	case f.Stream >= guestproto.FirstHostStream:
		return c.refuseOn(ctx, f.Stream, nil, "stream: nothing was asked on it")
	case used:
		return c.refuseOn(ctx, f.Stream, nil, "stream: ids must increase")
	}
	m, err := jsonrpc.Parse(f.Payload)
	if err != nil {
		return c.malformed(ctx, f.Stream, err)
	}
	switch m.Kind {
	case jsonrpc.Request:
		return c.begin(ctx, who, f.Stream, m)
	case jsonrpc.Notification:
		return c.refuseOn(ctx, f.Stream, nil, "id_missing")
	case jsonrpc.Response:
		return c.refuseOn(ctx, f.Stream, m.ID, "response: nothing was asked")
	}
	return c.refuseOn(ctx, f.Stream, nil, "kind")
}

// malformed answers a payload that is no message.
func (c *conn) malformed(ctx context.Context, stream uint32, err error) error {
	var bad *jsonrpc.Error
	if !errors.As(err, &bad) {
		return err
	}
	c.refuse(ctx, Refused{Method: bad.Method, ID: bad.ID, Code: bad.Code, Detail: string(bad.Detail)})
	return c.reply(stream, bad.Response())
}

// refuseOn records a message that is not legal where it came, and answers it.
func (c *conn) refuseOn(ctx context.Context, stream uint32, id json.RawMessage, detail string) error {
	c.refuse(ctx, Refused{ID: id, Code: jsonrpc.CodeInvalidRequest, Detail: detail})
	return c.reply(stream, jsonrpc.AppendError(nil, id, jsonrpc.CodeInvalidRequest, "invalid request: "+detail, nil))
}

// refuse records refused input. The ledger's failure does not let anything
// through, since nothing of it goes anywhere; it is logged.
func (c *conn) refuse(ctx context.Context, r Refused) {
	r.Caller = c.caller
	if err := c.e.opts.Refuse(context.WithoutCancel(ctx), r); err != nil {
		c.e.opts.Log.Error("recording refused input", "error", err, "detail", r.Detail)
	}
}

// begin serves a request in the background, or answers that there is too much
// already.
func (c *conn) begin(ctx context.Context, who inspect.Caller, stream uint32, m jsonrpc.Message) error {
	ctx, cancel := context.WithCancelCause(ctx)
	c.mu.Lock()
	full := len(c.requests) >= MaxInFlightConn
	if !full && c.e.budget.begin(len(m.Raw)) {
		c.requests[stream] = &request{id: m.ID, cancel: cancel}
		c.mu.Unlock()
		c.wg.Go(func() {
			defer cancel(nil)
			answer := c.answer(ctx, who, m)
			c.mu.Lock()
			delete(c.requests, stream)
			c.mu.Unlock()
			c.e.budget.end(len(m.Raw))
			if errors.Is(context.Cause(ctx), errCancelled) {
				answer = nil // nobody waits for it; the stream is done all the same
			}
			if err := c.reply(stream, answer); err != nil {
				c.cancel(err)
			}
		})
		return nil
	}
	c.mu.Unlock()
	defer cancel(nil)
	return c.reply(stream, c.busy(ctx, who, m, full))
}

// reply queues an answer. One without bytes says that the stream is done and
// that no answer will come.
func (c *conn) reply(stream uint32, message []byte) error {
	frames, err := guestproto.AppendMCP(nil, guestproto.MCPFrame{Stream: stream, Process: c.caller.Process, Payload: message}, c.more)
	if err != nil {
		m, parseErr := jsonrpc.Parse(message)
		if parseErr != nil {
			return err
		}
		text := fmt.Sprintf("the answer is too large for this connection: %v", err)
		return c.reply(stream, jsonrpc.AppendError(nil, m.ID, jsonrpc.CodeTransport, text, nil))
	}
	return c.out.put(frames)
}

// notify sends a notification to the guest.
func (c *conn) notify(method string) {
	f, err := guestproto.AppendMCP(nil, guestproto.MCPFrame{
		Notification: true, Process: c.caller.Process, Payload: jsonrpc.AppendNotification(nil, method, nil),
	}, c.more)
	if err == nil {
		err = c.out.put(f)
	}
	if err != nil {
		c.cancel(err)
	}
}

// listChanged says once that the guest's list is out of date.
func (c *conn) listChanged(table *route.Table) {
	c.mu.Lock()
	tell := c.initialized && c.listed != nil && !c.listed.Equal(table)
	if tell {
		c.listed = table
	}
	c.mu.Unlock()
	if tell {
		c.notify("notifications/tools/list_changed")
	}
}
