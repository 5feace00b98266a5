package aggregator

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/toolproto"
)

// The two content types of streamable HTTP.
const (
	typeJSON = "application/json"
	typeSSE  = "text/event-stream"
)

// do makes one request in the session that as names, with everything that the
// server wants in its headers. What it returns as an error names neither address nor headers.
func (t *httpTransport) do(ctx context.Context, as identity, method string, body []byte, lastEvent string) (*http.Response, error) {
	var reader io.Reader
	if body != nil {
		reader = bytes.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, t.server.URL, reader)
	if err != nil {
		return nil, errors.New("its URL is no http or https address")
	}
	for _, h := range t.server.Headers {
		req.Header.Set(h.Name, string(h.Value))
	}
	switch method {
	case http.MethodPost:
		req.Header.Set("Content-Type", typeJSON)
		req.Header.Set("Accept", typeJSON+", "+typeSSE)
	case http.MethodGet:
		req.Header.Set("Accept", typeSSE)
	}
	for name, value := range map[string]string{
		"Mcp-Session-Id": as.sessionID, "MCP-Protocol-Version": as.version, "Last-Event-ID": lastEvent,
	} {
		if value != "" {
			req.Header.Set(name, value)
		}
	}
	resp, err := t.client.Do(req)
	var urlErr *url.Error
	if errors.As(err, &urlErr) {
		err = urlErr.Err
	}
	if err != nil {
		return nil, fmt.Errorf("it cannot be reached: %w", err)
	}
	return resp, nil
}

// discard ends a response that is not wanted. What is left of it is read as far
// as that lets its connection be used again.
func discard(resp *http.Response) {
	_, _ = io.CopyN(io.Discard, resp.Body, 4<<10) // at worst the connection is not used again
	_ = resp.Body.Close()
}

// post sends a message, in a new session if the server has forgotten the old one.
func (t *httpTransport) post(ctx context.Context, message []byte) (*http.Response, error) {
	as := t.identity()
	resp, err := t.do(ctx, as, http.MethodPost, message, "")
	if err != nil || resp.StatusCode != http.StatusNotFound || as.sessionID == "" {
		return resp, err
	}
	discard(resp)
	if err := t.renew(ctx, as); err != nil {
		return nil, fmt.Errorf("its session has expired and cannot be renewed: %w", err)
	}
	return t.do(ctx, t.identity(), http.MethodPost, message, "")
}

// tell sends a message that has no answer.
func (t *httpTransport) tell(ctx context.Context, message []byte) error {
	resp, err := t.post(ctx, message)
	if err != nil {
		return err
	}
	return accepted(resp)
}

// accepted ends a response that should have no content.
func accepted(resp *http.Response) error {
	discard(resp)
	if resp.StatusCode/100 != 2 {
		return statusError(resp.StatusCode)
	}
	return nil
}

// deliver makes one call and sees its answer through.
func (t *httpTransport) deliver(ctx context.Context, id uint64, message []byte) {
	resp, err := t.post(ctx, message)
	if err == nil && id == initializeID {
		if err = t.adopt(resp); err != nil {
			discard(resp)
		}
	}
	if err == nil {
		err = t.consume(ctx, id, resp)
	}
	var status statusError
	switch {
	case err == nil:
		// No-op for a call that was answered.
		t.session.fail(id, jsonrpc.CodeInternal, "it ended its answer without a response to the request")
	case errors.As(err, &status):
		t.session.fail(id, jsonrpc.CodeInternal, "%v", err)
	default:
		t.session.fail(id, jsonrpc.CodeTransport, "%v", err)
	}
}

// consume takes the answer to call id, in either of its forms.
func (t *httpTransport) consume(ctx context.Context, id uint64, resp *http.Response) error {
	kind, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if err != nil {
		kind = "" // as good as none
	}
	switch {
	case resp.StatusCode/100 != 2:
		// An error that is a response to this call says more than the status.
		if body, err := readBody(resp); err == nil && kind == typeJSON && answers(body, id) {
			t.session.receive(body)
			return nil
		}
		return statusError(resp.StatusCode)
	case kind == typeSSE:
		return t.stream(ctx, id, resp)
	case kind == typeJSON:
		body, err := readBody(resp)
		if err != nil {
			return err
		}
		t.session.receive(body)
		return nil
	}
	discard(resp)
	if resp.StatusCode == http.StatusAccepted || resp.StatusCode == http.StatusNoContent {
		return nil
	}
	return fmt.Errorf("its answer is neither %s nor %s", typeJSON, typeSSE)
}

// readBody reads a whole answer and closes it.
func readBody(resp *http.Response) ([]byte, error) {
	body, err := io.ReadAll(io.LimitReader(resp.Body, toolproto.MaxPayload+1))
	_ = resp.Body.Close() // it was read, or is not wanted any more
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading its answer: %w", err)
	case len(body) > toolproto.MaxPayload:
		return nil, fmt.Errorf("its answer is over the limit of %d bytes", toolproto.MaxPayload)
	}
	return body, nil
}

// answers reports whether body is a response to call id.
func answers(body []byte, id uint64) bool {
	m, err := jsonrpc.Parse(body)
	return err == nil && m.Kind == jsonrpc.Response && string(m.ID) == strconv.FormatUint(id, 10)
}

// firstAnswer returns the response in an answer to initialize; it is for a
// session that is being renewed, where nobody else waits for it.
func (t *httpTransport) firstAnswer(resp *http.Response) ([]byte, error) {
	kind, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	switch {
	case resp.StatusCode/100 != 2:
		discard(resp)
		return nil, statusError(resp.StatusCode)
	case err == nil && kind == typeJSON:
		return readBody(resp)
	case err != nil || kind != typeSSE:
		discard(resp)
		return nil, fmt.Errorf("its answer is neither %s nor %s", typeJSON, typeSSE)
	}
	defer func() { _ = resp.Body.Close() }() // what follows the answer is not wanted
	events := newSSEReader(resp.Body, toolproto.MaxPayload)
	for {
		event, err := events.next()
		if err != nil {
			return nil, fmt.Errorf("reading its answer: %w", err)
		}
		if answers(event.data, initializeID) {
			return event.data, nil
		}
	}
}

// position is where a stream was when it ended.
type position struct {
	lastEvent string
	retry     time.Duration
	events    int
}

// pump gives a stream's messages to the session until it ends, and closes it.
func (t *httpTransport) pump(resp *http.Response) (position, error) {
	defer func() { _ = resp.Body.Close() }() // it has ended
	events := newSSEReader(resp.Body, toolproto.MaxPayload)
	var at position
	for {
		event, err := events.next()
		at.lastEvent, at.retry = events.id, events.retry
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return at, nil
		}
		if err != nil {
			return at, fmt.Errorf("reading its stream: %w", err)
		}
		at.events++
		if (event.name == "" || event.name == "message") && len(event.data) > 0 {
			t.session.receive(event.data)
		}
	}
}

// stream takes a call's answer from a stream, which the server may close and let
// be resumed as often as it sends something.
func (t *httpTransport) stream(ctx context.Context, id uint64, resp *http.Response) error {
	resumes := 0
	lastEvent := ""
	for {
		at, err := t.pump(resp)
		if at.lastEvent != "" {
			lastEvent = at.lastEvent
		}
		if at.events > 0 {
			resumes = 0
		}
		if !t.session.pending(id) {
			return nil
		}
		if lastEvent == "" || resumes == maxResumes || errors.Is(err, errEventTooLarge) {
			return err
		}
		resumes++
		if err := pause(ctx, max(at.retry, firstPause)); err != nil {
			return err
		}
		if resp, err = t.open(ctx, lastEvent); err != nil {
			return err
		}
	}
}

// open asks for a stream of the server's messages, from after lastEvent on.
func (t *httpTransport) open(ctx context.Context, lastEvent string) (*http.Response, error) {
	resp, err := t.do(ctx, t.identity(), http.MethodGet, nil, lastEvent)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		discard(resp)
		return nil, statusError(resp.StatusCode)
	}
	if kind, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); err != nil || kind != typeSSE {
		discard(resp)
		return nil, fmt.Errorf("its stream is no %s", typeSSE)
	}
	return resp, nil
}

// listen keeps the stream open on which the server says what belongs to no call.
// A server need not have one; then it answers 405.
func (t *httpTransport) listen() {
	t.mu.Lock()
	started := t.listening
	t.listening = true
	t.mu.Unlock()
	if started {
		return
	}
	failure := t.spawn(nil, func(ctx context.Context) {
		t.hear(ctx)
		t.mu.Lock()
		defer t.mu.Unlock()
		t.listening = false // a renewed session tries again
	})
	if failure != nil {
		t.session.events.report(toolproto.EventJunk, "its messages are not listened for: "+failure.Message)
	}
}

func (t *httpTransport) hear(ctx context.Context) {
	lastEvent := ""
	wait := firstPause
	for {
		var at position
		resp, err := t.open(ctx, lastEvent)
		var status statusError
		if errors.As(err, &status) && status < http.StatusInternalServerError {
			return
		}
		if err == nil {
			at, err = t.pump(resp)
		}
		if err != nil && ctx.Err() == nil {
			t.session.events.report(toolproto.EventJunk, "its stream of messages broke: "+err.Error())
		}
		if at.lastEvent != "" {
			lastEvent = at.lastEvent
		}
		if at.events > 0 {
			wait = firstPause
		}
		if pause(ctx, max(at.retry, wait)) != nil {
			return
		}
		wait = min(2*wait, lastPause)
	}
}

// pause waits for d, at most lastPause, or until ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(min(d, lastPause))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
