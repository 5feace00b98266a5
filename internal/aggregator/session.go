package aggregator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/toolproto"
)

// Bounds of a session.
const (
	// maxCalls is how many calls may be in flight.
	maxCalls = 2048
	// maxServerRequests is how many requests of the server may be unanswered.
	maxServerRequests = 64
)

// initializeID is the id of initialize. The supervisor's call ids begin at 1 and
// are the ids of its requests.
const initializeID = 0

// clientVersion is what servers are told of this program.
const clientVersion = "1"

// versions are the protocol versions that this client speaks by initialize, the
// one it asks for first.
func versions() []string {
	return []string{"2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"}
}

// session is the MCP conversation with one server.
type session struct {
	server    toolproto.Server
	conn      *toolproto.Conn
	transport transport
	events    *reporter
	stop      context.CancelCauseFunc

	mu    sync.Mutex
	calls map[uint64]*call
	asked map[uint64]bool // requests of the server that are not answered
	asks  uint64          // the last id of one
	err   error           // why the server is gone
}

// call is a request that the server has not answered.
type call struct {
	// done takes the outcome, once. message is valid only until it returns.
	done  func(message []byte, failure *toolproto.Error)
	timer *time.Timer // nil without a timeout
}

func newSession(server toolproto.Server, conn *toolproto.Conn, stop context.CancelCauseFunc) *session {
	s := &session{
		server: server, conn: conn, stop: stop,
		calls: make(map[uint64]*call), asked: make(map[uint64]bool),
	}
	s.events = newReporter(s.tell)
	return s
}

// tell writes to the supervisor. When that fails it is gone, and the run ends.
func (s *session) tell(m *toolproto.Message) {
	if err := s.conn.Write(m); err != nil {
		s.stop(fmt.Errorf("writing to the supervisor: %w", err))
	}
}

// start connects and initializes, and announces the server.
func (s *session) start(ctx context.Context) error {
	timeout := s.server.StartTimeout
	if timeout <= 0 {
		timeout = defaultStart
	}
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("it did not answer initialize within %s", timeout))
	defer cancel()
	if err := s.transport.start(ctx); err != nil {
		return err
	}
	result, err := s.initialize(ctx)
	if err != nil {
		return err
	}
	s.tell(&toolproto.Message{Ready: &toolproto.Ready{InitializeResult: result}})
	return nil
}

// initialize is the handshake of MCP's lifecycle (specification 2025-11-25,
// basic/lifecycle). It returns the server's result.
func (s *session) initialize(ctx context.Context) (json.RawMessage, error) {
	type outcome struct {
		message []byte
		failure *toolproto.Error
	}
	answered := make(chan outcome, 1)
	failure := s.begin(initializeID, 0, initializeRequest(), func(message []byte, failure *toolproto.Error) {
		answered <- outcome{slices.Clone(message), failure}
	})
	if failure != nil {
		return nil, errors.New(failure.Message)
	}
	var o outcome
	select {
	case o = <-answered:
	case <-ctx.Done():
		s.take(initializeID)
		return nil, context.Cause(ctx)
	}
	if o.failure != nil {
		return nil, errors.New(o.failure.Message)
	}
	result, version, err := initializeResult(o.message)
	if err != nil {
		return nil, err
	}
	if err := s.transport.opened(ctx, version, initializedNotification()); err != nil {
		return nil, err
	}
	return result, nil
}

func initializedNotification() []byte {
	return jsonrpc.AppendNotification(nil, "notifications/initialized", nil)
}

// initializeRequest declares no capability: a server that asks for sampling or
// elicitation anyway is passed on, and refused by the supervisor.
func initializeRequest() []byte {
	params := fmt.Appendf(nil, `{"protocolVersion":%q,"capabilities":{},"clientInfo":{"name":"capsem","version":%q}}`,
		versions()[0], clientVersion)
	return jsonrpc.AppendRequest(nil, strconv.AppendUint(nil, initializeID, 10), "initialize", params)
}

// initializeResult takes an answer to initialize apart.
func initializeResult(message []byte) (result json.RawMessage, version string, err error) {
	m, err := jsonrpc.Parse(message)
	if err != nil {
		return nil, "", fmt.Errorf("its answer to initialize is invalid: %w", err)
	}
	if m.Error != nil {
		text := "an error without a message"
		if e, ok := jsonrpc.ParseError(m.Error); ok {
			text = cut(e.Message, maxErrorText)
		}
		return nil, "", fmt.Errorf("it refused initialize: %s", text)
	}
	raw, _ := jsonrpc.Member(m.Result, "protocolVersion")
	version, ok := jsonrpc.String(raw)
	if !ok {
		return nil, "", errors.New("its answer to initialize has no protocolVersion")
	}
	if !slices.Contains(versions(), version) {
		return nil, "", fmt.Errorf("it speaks MCP version %q, supported are %q", cut(version, maxErrorText), versions())
	}
	return m.Result, version, nil
}

// serve takes the supervisor's messages until there are no more.
func (s *session) serve() error {
	for {
		m, err := s.conn.Read()
		switch {
		case errors.Is(err, io.EOF):
			return errShutdown
		case err != nil:
			return fmt.Errorf("reading from the supervisor: %w", err)
		case m.Call != nil:
			s.call(m.Call)
		case m.Cancel != nil:
			s.cancel(m.Cancel)
		case m.Notify != nil:
			s.notify(jsonrpc.AppendNotification(nil, m.Notify.Method, m.Notify.Params))
		case m.ServerResult != nil:
			s.answer(m.ServerResult)
		case m.Shutdown != nil:
			return errShutdown
		default:
			return errors.New("a message from the supervisor that only a tool process sends")
		}
	}
}

// call makes one request on the supervisor's behalf.
func (s *session) call(c *toolproto.Call) {
	id := c.ID
	result := func(message []byte, failure *toolproto.Error) {
		s.tell(&toolproto.Message{Result: &toolproto.Result{ID: id, Message: message, Error: failure}})
	}
	if id == initializeID {
		result(nil, &toolproto.Error{Code: jsonrpc.CodeInternal, Message: "call ids begin at 1"})
		return
	}
	request := jsonrpc.AppendRequest(nil, strconv.AppendUint(nil, id, 10), c.Method, c.Params)
	if failure := s.begin(id, time.Duration(c.TimeoutMS)*time.Millisecond, request, result); failure != nil {
		result(nil, failure)
	}
}

// begin registers a call and sends its request. When it returns a failure, done
// is never called.
func (s *session) begin(id uint64, timeout time.Duration, request []byte, done func([]byte, *toolproto.Error)) *toolproto.Error {
	c := &call{done: done}
	s.mu.Lock()
	switch {
	case s.err != nil:
		s.mu.Unlock()
		return s.exitError(s.err)
	case s.calls[id] != nil:
		s.mu.Unlock()
		return &toolproto.Error{Code: jsonrpc.CodeInternal, Message: fmt.Sprintf("call %d is in flight", id)}
	case len(s.calls) >= maxCalls:
		s.mu.Unlock()
		return &toolproto.Error{Code: jsonrpc.CodeTimeout, Message: fmt.Sprintf("busy: %d calls are in flight", maxCalls)}
	}
	s.calls[id] = c
	if timeout > 0 {
		c.timer = time.AfterFunc(timeout, func() { s.expire(id, timeout) })
	}
	s.mu.Unlock()

	failure := s.transport.request(id, request)
	if failure != nil && s.take(id) == nil {
		return nil // it has failed in the meantime
	}
	return failure
}

// take removes a call: whoever gets it settles it.
func (s *session) take(id uint64) *call {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.calls[id]
	if c == nil {
		return nil
	}
	delete(s.calls, id)
	if c.timer != nil {
		c.timer.Stop()
	}
	return c
}

// fail settles a call without an answer. A call that is settled stays so.
func (s *session) fail(id uint64, code int, format string, args ...any) {
	if c := s.take(id); c != nil {
		c.done(nil, &toolproto.Error{Code: code, Message: "server " + s.server.Name + ": " + fmt.Sprintf(format, args...)})
	}
}

func (s *session) pending(id uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[id] != nil
}

func (s *session) expire(id uint64, timeout time.Duration) {
	if c := s.take(id); c != nil {
		c.done(nil, &toolproto.Error{Code: jsonrpc.CodeTimeout, Message: fmt.Sprintf("server %s did not answer within %s", s.server.Name, timeout)})
		s.cancelled(id, "timed out")
	}
}

func (s *session) cancel(c *toolproto.Cancel) {
	if c.ID != initializeID && s.take(c.ID) != nil {
		s.cancelled(c.ID, c.Reason)
	}
}

// cancelled tells the server that nobody waits for a call.
func (s *session) cancelled(id uint64, reason string) {
	params := fmt.Appendf(nil, `{"requestId":%d,"reason":`, id)
	params = append(jsonrpc.AppendQuote(params, reason), '}')
	s.notify(jsonrpc.AppendNotification(nil, "notifications/cancelled", params))
	s.transport.abandon(id)
}

// notify sends what nobody waits for; that it could not be sent is an event.
func (s *session) notify(message []byte) {
	if failure := s.transport.notify(message); failure != nil {
		s.events.report(toolproto.EventJunk, "not sent: "+failure.Message)
	}
}

// receive takes one message of the server, and reports whether it is one. data
// is not kept.
func (s *session) receive(data []byte) bool {
	m, err := jsonrpc.Parse(data)
	if err != nil {
		s.refuse(data, err)
		return false
	}
	switch m.Kind {
	case jsonrpc.Response:
		id, err := strconv.ParseUint(string(m.ID), 10, 64)
		c := s.take(id)
		if err != nil || c == nil {
			s.events.report(toolproto.EventJunk, "an answer to nothing that was asked: "+string(data[:min(len(data), toolproto.MaxEventText)]))
			return true
		}
		c.done(m.Raw, nil)
	case jsonrpc.Notification:
		s.tell(&toolproto.Message{Notify: &toolproto.Notify{Method: m.Method, Params: m.Params}})
	case jsonrpc.Request:
		s.ask(&m)
	}
	return true
}

// refuse handles a message that is no valid one. If it would have been an
// answer, its call fails: a caller that waits for its timeout learns less. One
// that has an id and no method was meant as an answer, also where its result is
// in doubt.
func (s *session) refuse(data []byte, err error) {
	var fault *jsonrpc.Error
	if errors.As(err, &fault) && fault.Kind != jsonrpc.Request && fault.Kind != jsonrpc.Notification {
		if id, parseErr := strconv.ParseUint(string(fault.ID), 10, 64); parseErr == nil {
			s.fail(id, jsonrpc.CodeInternal, "its answer is invalid: %s", fault.Detail)
		}
	}
	s.events.report(toolproto.EventJunk, err.Error()+": "+string(data[:min(len(data), toolproto.MaxEventText)]))
}

// ask passes a request of the server on.
func (s *session) ask(m *jsonrpc.Message) {
	s.mu.Lock()
	full := len(s.asked) >= maxServerRequests
	if !full {
		s.asks++
		s.asked[s.asks] = true
	}
	id := s.asks
	s.mu.Unlock()
	if full {
		s.notify(jsonrpc.AppendError(nil, m.ID, jsonrpc.CodeTimeout, "busy: too many requests are unanswered", nil))
		return
	}
	s.tell(&toolproto.Message{ServerRequest: &toolproto.ServerRequest{ID: id, Message: m.Raw}})
}

// answer gives the server the supervisor's answer to its request.
func (s *session) answer(r *toolproto.ServerResult) {
	s.mu.Lock()
	asked := s.asked[r.ID]
	delete(s.asked, r.ID)
	s.mu.Unlock()
	if asked {
		s.notify(r.Message)
	}
}

// gone fails everything, because the server is no more. The first reason stands.
func (s *session) gone(reason error) {
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return
	}
	s.err = reason
	calls := s.calls
	s.calls = make(map[uint64]*call)
	s.mu.Unlock()

	failure := s.exitError(reason)
	for _, c := range calls {
		if c.timer != nil {
			c.timer.Stop()
		}
		c.done(nil, failure)
	}
	s.events.exit(reason.Error())
	s.stop(reason)
}

func (s *session) exitError(reason error) *toolproto.Error {
	return &toolproto.Error{Code: jsonrpc.CodeInternal, Message: "server " + s.server.Name + " exited: " + reason.Error()}
}

// finish settles what is left when the run ends.
func (s *session) finish() {
	s.mu.Lock()
	ended := s.err != nil
	s.mu.Unlock()
	if !ended {
		s.gone(errShutdown)
	}
}
