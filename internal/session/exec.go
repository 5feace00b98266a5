package session

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/guest"
	"github.com/capsem/capsem/internal/guestproto"
	"github.com/capsem/capsem/internal/inspect"
)

// maxCaptured is the most that a captured command may keep of each stream.
const maxCaptured = 256 << 20

// serveExec runs a command: captured, or with its streams on the connection.
func (s *Session) serveExec(w http.ResponseWriter, r *http.Request) error {
	var req api.ExecRequest
	if err := api.ReadJSON(r, &req); err != nil {
		return err
	}
	if len(req.Argv) == 0 || len(req.Argv[0]) == 0 {
		return &api.Error{Code: api.CodeInvalid, Message: "there is no command"}
	}
	if req.StopAfter {
		defer s.stop(api.DefaultStop)
	}
	cmd := event.Command{ID: inspect.NewID(), Cwd: req.Cwd, User: req.User}
	for _, arg := range req.Argv {
		cmd.Argv = append(cmd.Argv, string(arg))
	}
	exec := guestproto.Exec{
		ID: cmd.ID, Argv: req.Argv, Env: req.Env, Cwd: []byte(req.Cwd), User: req.User,
		Stdin: req.OpenStdin, TimeoutMS: req.TimeoutMS,
	}
	ev := s.requester(r).Exec(cmd)
	if strings.EqualFold(r.Header.Get("Upgrade"), api.StreamProtocol) {
		return s.attached(w, r, ev, exec)
	}
	return s.captured(w, r, ev, exec, req)
}

// captured runs a command whose output is part of the answer.
func (s *Session) captured(w http.ResponseWriter, r *http.Request, ev *event.Event, exec guestproto.Exec, req api.ExecRequest) error {
	limit := req.MaxOutput
	if limit <= 0 {
		limit = api.DefaultMaxOutput
	}
	stdout, stderr := &capture{limit: min(limit, maxCaptured)}, &capture{limit: min(limit, maxCaptured)}
	streams := guest.IO{Stdout: stdout, Stderr: stderr}
	if len(req.Stdin) > 0 {
		streams.Stdin = bytes.NewReader(req.Stdin)
	}
	var failure error
	verdict, out := s.gate.Do(r.Context(), ev, func(ctx context.Context) event.Outcome {
		var result event.ExecResult
		result, failure = s.guest.Exec(ctx, exec, streams)
		result.Truncated = stdout.cut || stderr.cut
		return execOutcome(ctx, result, failure)
	})
	if verdict.Decision != event.Allow {
		return blocked(out)
	}
	if failure != nil {
		return failure
	}
	result := out.Exec
	api.WriteJSON(w, http.StatusOK, api.ExecResult{
		ID: exec.ID, ExitCode: result.ExitCode, Signal: result.Signal, TimedOut: result.TimedOut,
		Stdout: stdout.bytes(), Stderr: stderr.bytes(), StdoutBytes: result.StdoutBytes, StderrBytes: result.StderrBytes,
		Truncated: result.Truncated, Leaked: result.Leaked, DurationUS: out.Duration.Microseconds(), EventID: ev.ID,
	})
	return nil
}

// attached runs a command whose streams the client's connection carries. The
// client learns how it ended after that was judged.
func (s *Session) attached(w http.ResponseWriter, r *http.Request, ev *event.Event, exec guestproto.Exec) error {
	var end *guest.Attached
	verdict, out := s.gate.Do(r.Context(), ev, func(context.Context) event.Outcome {
		conn, err := upgrade(w)
		if err != nil {
			return event.Outcome{Status: event.Failed, Error: &event.Error{Message: err.Error()}}
		}
		// The server no longer watches a connection that was taken over: its
		// end is Attach's to see. What ends it besides is the session's end.
		ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
		defer cancel()
		stop := context.AfterFunc(s.life, cancel)
		defer stop()
		var result event.ExecResult
		result, end, err = s.guest.Attach(ctx, conn, exec)
		return execOutcome(ctx, result, err)
	})
	var refusal error
	if verdict.Decision != event.Allow {
		refusal = blocked(out)
	}
	if end == nil {
		return errors.Join(refusal, outcomeError(out))
	}
	if err := end.Finish(refusal); err != nil {
		s.log.Debug("a command's client is gone", "error", err)
	}
	return nil
}

// outcomeError is why a command whose connection could not be taken over failed.
func outcomeError(out event.Outcome) error {
	if out.Status == event.Blocked || out.Error == nil {
		return nil
	}
	return errors.New(out.Error.Message)
}

// upgrade takes the client's connection over.
func upgrade(w http.ResponseWriter) (net.Conn, error) {
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return nil, fmt.Errorf("taking the connection over: %w", err)
	}
	head := "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + api.StreamProtocol + "\r\n\r\n"
	if _, err := io.WriteString(conn, head); err != nil {
		return nil, errors.Join(fmt.Errorf("taking the connection over: %w", err), conn.Close())
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return nil, errors.Join(fmt.Errorf("taking the connection over: %w", err), conn.Close())
	}
	return &rest{Conn: conn, r: buffered}, nil
}

// rest reads what the server had read already first.
type rest struct {
	net.Conn
	r io.Reader
}

func (c *rest) Read(p []byte) (int, error) { return c.r.Read(p) }

// execOutcome is how a command ended, for policy and ledger.
func execOutcome(ctx context.Context, result event.ExecResult, err error) event.Outcome {
	out := event.Outcome{Status: event.Done, CarriedOut: true, Exec: &result, BytesReceived: result.StdoutBytes + result.StderrBytes}
	switch {
	case err != nil && ctx.Err() != nil:
		out.Status, out.Error = event.Cancelled, &event.Error{Message: err.Error()}
	case err != nil:
		out.Status, out.Error = event.Failed, &event.Error{Message: err.Error()}
	case result.TimedOut:
		out.Status = event.Timeout
	}
	return out
}

// capture keeps the beginning of a stream. The buffer is a member, not embedded:
// its ReadFrom would go round the limit.
type capture struct {
	kept  bytes.Buffer
	limit int64
	cut   bool
}

// Write takes everything and keeps what fits.
func (c *capture) Write(p []byte) (int, error) {
	fits := p
	if room := c.limit - int64(c.kept.Len()); int64(len(p)) > room {
		c.cut = true
		fits = p[:max(room, 0)]
	}
	c.kept.Write(fits)
	return len(p), nil
}

// bytes is what was kept. It is never nil, which JSON would have as null.
func (c *capture) bytes() []byte {
	if c.kept.Len() == 0 {
		return []byte{}
	}
	return c.kept.Bytes()
}

// apiError names the guest's failures for the API.
func apiError(err error) error {
	var known *api.Error
	var said *guest.Error
	switch {
	case errors.As(err, &known):
		return known
	case errors.As(err, &said):
		return &api.Error{Code: guestCode(said.Code), Message: said.Message}
	case errors.Is(err, guest.ErrUnreachable):
		return &api.Error{Code: api.CodeUnreachable, Message: err.Error(), Hint: "capsem logs shows the guest's console; capsem restart boots it anew"}
	case errors.Is(err, guest.ErrClosed):
		return &api.Error{Code: api.CodeUnavailable, Message: "the VM is stopping"}
	}
	return err
}

func guestCode(code string) api.Code {
	switch code {
	case "not_found":
		return api.CodeNotFound
	case "invalid", "permission":
		return api.CodeInvalid
	case "too_large":
		return api.CodeTooLarge
	case "busy":
		return api.CodeBusy
	case "exists":
		return api.CodeExists
	}
	return api.CodeFailed
}
