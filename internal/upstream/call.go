package upstream

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/toolproto"
)

// call is a call in flight.
type call struct {
	done     chan outcome  // buffered
	progress chan struct{} // buffered: something has moved
	token    string        // its progress token as it stands, "" for none
	size     int           // of params
	fetch    func(req toolproto.HTTPRequest) toolproto.HTTPResult
}

type outcome struct {
	message []byte
	err     error
}

// settle gives a call its outcome. Whoever removed it from the life's calls does
// it, so that it happens once.
func (c *call) settle(o outcome) { c.done <- o }

// Call makes a request of the server and returns its whole answer, with an id
// that is of no meaning to the caller. params are the bytes that the server will
// see, nil for none. While the process is starting it waits for that first.
//
// timeout is how long the server may go without an answer or a progress
// notification for this call; Ceiling holds in any case. The error is an
// *event.Error, but for the cause of ctx when that has ended; the server is then
// told that the call is cancelled.
func (u *Upstream) Call(ctx context.Context, method string, params []byte, timeout time.Duration) (message []byte, err error) {
	l, err := u.ready(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // what it has asked for over HTTP ends with it
	c := &call{
		done: make(chan outcome, 1), progress: make(chan struct{}, 1), token: progressToken(params), size: len(params),
		fetch: func(req toolproto.HTTPRequest) toolproto.HTTPResult { return u.opts.HTTP(ctx, req) },
	}
	id := u.lastID.Add(1)
	if err := l.register(id, c); err != nil {
		return nil, err
	}
	m := &toolproto.Message{Call: &toolproto.Call{ID: id, Method: method, Params: params, TimeoutMS: Ceiling.Milliseconds()}}
	if err := l.send(m, len(params)); err != nil {
		l.unregister(id)
		return nil, err
	}
	return l.settled(ctx, id, c, timeout)
}

// settled waits for the outcome of one call.
func (l *life) settled(ctx context.Context, id uint64, c *call, timeout time.Duration) ([]byte, error) {
	idle := time.NewTimer(timeout)
	defer idle.Stop()
	ceiling := time.NewTimer(Ceiling)
	defer ceiling.Stop()
	for {
		var err error
		select {
		case o := <-c.done:
			return o.message, o.err
		case <-c.progress:
			idle.Reset(timeout)
			continue
		case <-ctx.Done():
			err = context.Cause(ctx)
		case <-idle.C:
			err = l.u.failure(jsonrpc.CodeTimeout, "server %s did not answer within %s", l.u.Name(), timeout)
		case <-ceiling.C:
			err = l.u.failure(jsonrpc.CodeTimeout, "server %s did not answer within %s", l.u.Name(), Ceiling)
		}
		if !l.unregister(id) { // its outcome came at the same time
			o := <-c.done
			return o.message, o.err
		}
		reason := "timed out"
		if ctx.Err() != nil {
			reason = "cancelled"
		}
		// If it does not take the message, it has worse to fear.
		_ = l.send(&toolproto.Message{Cancel: &toolproto.Cancel{ID: id, Reason: reason}}, 0)
		return nil, err
	}
}

func (l *life) register(id uint64, c *call) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.calls == nil:
		return l.u.exited(l.err)
	case len(l.calls) >= MaxCalls:
		return l.u.failure(jsonrpc.CodeTimeout, "server %s is busy: %d calls are in flight", l.u.Name(), MaxCalls)
	case l.bytes+c.size > MaxBytes:
		return l.u.failure(jsonrpc.CodeTimeout, "server %s is busy: %d bytes are in flight", l.u.Name(), l.bytes)
	}
	l.calls[id] = c
	l.bytes += c.size
	return nil
}

// unregister reports whether the call was still in flight.
func (l *life) unregister(id uint64) bool {
	return l.remove(id) != nil
}

func (l *life) remove(id uint64) *call {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.calls[id]
	if c != nil {
		delete(l.calls, id)
		l.bytes -= c.size
	}
	return c
}

// result settles the call that it answers. One that nobody waits for any more is
// dropped; one to a call that was never made is a lie.
func (l *life) result(r *toolproto.Result) error {
	if r.ID == 0 || r.ID > l.u.lastID.Load() {
		return &protocolError{"its process answered a call that was never made"}
	}
	c := l.remove(r.ID)
	switch {
	case c == nil:
		if !l.afford() {
			return &protocolError{fmt.Sprintf("it floods: over %d messages a second", floodRate)}
		}
	case r.Error != nil:
		c.settle(outcome{err: &event.Error{Code: r.Error.Code, Message: r.Error.Message}})
	case len(r.Message) == 0:
		c.settle(outcome{err: l.u.failure(jsonrpc.CodeInternal, "server %s: its process gave an empty answer", l.u.Name())})
	default:
		c.settle(outcome{message: r.Message})
	}
	return nil
}

// progressToken returns params._meta.progressToken as it stands, "" for none.
func progressToken(params []byte) string {
	meta, ok := jsonrpc.Member(params, "_meta")
	if !ok {
		return ""
	}
	token, _ := jsonrpc.Member(meta, "progressToken")
	return string(token)
}

// notified handles a notification of the server.
func (l *life) notified(n *toolproto.Notify) {
	if n.Method == "notifications/progress" {
		l.progressed(n.Params)
	}
	if l.u.opts.OnNotify != nil {
		l.u.opts.OnNotify(*n)
	}
}

// progressed gives the call with this token new time.
func (l *life) progressed(params []byte) {
	token, ok := jsonrpc.Member(params, "progressToken")
	if !ok {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.calls {
		if c.token == string(token) {
			select {
			case c.progress <- struct{}{}:
			default:
			}
		}
	}
}

// Notify sends the server a notification. It does not wait for a process that is
// not ready. The error is an *event.Error.
func (u *Upstream) Notify(method string, params []byte) error {
	u.mu.Lock()
	l, reason := u.life, u.reason
	u.mu.Unlock()
	if l == nil {
		return u.exited(reason)
	}
	if err := l.send(&toolproto.Message{Notify: &toolproto.Notify{Method: method, Params: params}}, len(params)); err != nil {
		return err
	}
	return nil
}

// serverRequest answers a request of the server in the background.
func (l *life) serverRequest(ctx context.Context, r *toolproto.ServerRequest) {
	answer := func(message []byte) {
		err := l.send(&toolproto.Message{ServerResult: &toolproto.ServerResult{ID: r.ID, Message: message}}, len(message))
		if err != nil {
			l.u.opts.Log.Debug("a server's request goes unanswered", "server", l.u.Name(), "error", err)
		}
	}
	select {
	case l.asks <- struct{}{}:
	default:
		answer(refusal(r.Message, jsonrpc.CodeTimeout, "busy"))
		return
	}
	l.tasks.Go(func() {
		defer func() { <-l.asks }()
		if l.u.opts.ServerRequest != nil {
			answer(l.u.opts.ServerRequest(ctx, r.Message))
			return
		}
		if m, err := jsonrpc.Parse(r.Message); err == nil && m.Method == "ping" {
			answer(jsonrpc.AppendResult(nil, m.ID, json.RawMessage("{}")))
			return
		}
		answer(refusal(r.Message, jsonrpc.CodeMethodNotFound, "not supported"))
	})
}

// refusal is an error in answer to a request.
func refusal(request []byte, code int, text string) []byte {
	m, err := jsonrpc.Parse(request)
	if err != nil {
		return jsonrpc.AppendError(nil, nil, jsonrpc.CodeInvalidRequest, err.Error(), nil)
	}
	return jsonrpc.AppendError(nil, m.ID, code, text, nil)
}

// fetch makes an HTTP request in the background for the call that it names.
func (l *life) fetch(r *toolproto.HTTPRequest) {
	answer := func(result toolproto.HTTPResult) {
		result.ID = r.ID
		if len(result.Body) > toolproto.MaxPayload {
			result = toolproto.HTTPResult{ID: r.ID, Error: "the answer is over the limit of a message"}
		}
		if err := l.send(&toolproto.Message{HTTPResult: &result}, len(result.Body)); err != nil {
			l.u.opts.Log.Debug("an HTTP request goes unanswered", "server", l.u.Name(), "error", err)
		}
	}
	l.mu.Lock()
	c := l.calls[r.CallID]
	l.mu.Unlock()
	if c == nil || l.u.opts.HTTP == nil {
		answer(toolproto.HTTPResult{Error: "it belongs to no call that is in flight"})
		return
	}
	select {
	case l.fetches <- struct{}{}:
	default:
		answer(toolproto.HTTPResult{Error: "busy: too many requests are in flight"})
		return
	}
	l.tasks.Go(func() {
		defer func() { <-l.fetches }()
		answer(c.fetch(*r))
	})
}
