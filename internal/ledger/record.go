package ledger

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/google/uuid"

	"github.com/capsem/capsem/internal/event"
)

// Receipt names a row that was begun. Its content is the ledger's own; it is an
// alias so that the gate's interface can be satisfied without an import.
type Receipt = any

// receipt is what End needs to know of Begin.
type receipt struct {
	table   tableID
	id      int64
	event   *event.Event
	verdict event.Verdict
	// later says that no row is there yet: a message that is no act is written
	// once, when it is over.
	later bool
	// finished says that Begin wrote the whole row.
	finished bool
}

// Begin records that ev is about to happen, or, where v does not let it, that
// it did not; then End must not be called. It returns when the row is
// committed. Cancelling ctx ends only the wait for a place in the queue, with
// nothing recorded. The event must not be changed before End has returned.
func (l *Ledger) Begin(ctx context.Context, ev *event.Event, v event.Verdict) (Receipt, error) {
	if ev.ID == "" {
		return nil, fmt.Errorf("recording in the ledger: the event has no id")
	}
	r := &receipt{table: tableOf(ev.Type), event: ev, verdict: v, finished: v.Decision == event.Block}
	if !r.finished && r.table == protocolEvents && !ev.Type.Act() {
		r.later = true
		return r, nil
	}
	status := event.Pending
	if r.finished {
		status = event.Blocked
	}
	o := l.newOp()
	o.synced = v.Decision == event.Block || v.Decision == event.Ask
	o.intent(r.table, ev, status, v)
	l.addRequest(o, ev, r.finished)
	o.matches(ev, v.Matches)
	id, err := l.submit(ctx, o)
	if err != nil {
		return nil, err
	}
	r.id = id
	return r, nil
}

// End records what came of the event that r stands for, and the response
// phase's verdict: what v does not allow is kept as digest and size. It is
// called once for each Begin that did not block, and waits for the commit even
// if ctx is cancelled, because what was done must be recorded.
func (l *Ledger) End(ctx context.Context, begun Receipt, out event.Outcome, v event.Verdict) error {
	r, ok := begun.(*receipt)
	if !ok || r.finished {
		return fmt.Errorf("recording in the ledger: %w", errors.New("the receipt is not of an open event"))
	}
	ctx = context.WithoutCancel(ctx)
	if !shown(v) {
		out.Error = nil // a server's error is part of the answer that was blocked
	}
	if r.later {
		return l.endLater(ctx, r, out, v)
	}
	o := l.newOp()
	blocked := out.Status == event.Blocked
	o.synced = blocked
	o.outcome(r, &out, v)
	l.addResponse(o, r.event, &out, v)
	o.matches(r.event, v.Matches)
	_, err := l.submit(ctx, o)
	return err
}

// endLater writes a message that is no act. Equal ones that came to the same end
// are counted, so that a guest cannot fill the disk with pings, nor with requests
// for what does not exist.
func (l *Ledger) endLater(ctx context.Context, r *receipt, out event.Outcome, v event.Verdict) error {
	decided := r.verdict
	if out.Status == event.Blocked {
		decided = v
	}
	if out.Status != event.Blocked && len(r.verdict.Matches) == 0 && len(v.Matches) == 0 &&
		!l.repeats.first(messageRepeat(r.event, &out, decided)) {
		return nil
	}
	o := l.newOp()
	o.synced = out.Status == event.Blocked
	o.message(r.event, &out, decided)
	l.addRequest(o, r.event, false)
	l.addResponse(o, r.event, &out, v)
	o.matches(r.event, r.verdict.Matches)
	o.matches(r.event, v.Matches)
	_, err := l.submit(ctx, o)
	return err
}

// tableOf says where an event of a type goes. What this version does not know
// is kept as a message, so that it is kept.
func tableOf(t event.Type) tableID {
	switch t {
	case event.MCPToolCall:
		return toolCalls
	case event.Exec:
		return execEvents
	case event.HTTP:
		return netEvents
	case event.FileImport, event.FileExport:
		return fsEvents
	case event.Boot, event.Admin:
		return vmEvents
	case event.MCPResourceRead, event.MCPPromptGet, event.MCPCompletion, event.MCPInitialize,
		event.MCPPing, event.MCPList, event.MCPNotification, event.MCPOther:
		return protocolEvents
	}
	return protocolEvents
}

// newEvent is an event of the ledger's own.
func newEvent(t event.Type) (*event.Event, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return nil, fmt.Errorf("making an event id: %w", err)
	}
	sec, nsec := id.Time().UnixTime()
	return &event.Event{ID: id.String(), Type: t, Time: unix(sec, nsec)}, nil
}

// intent adds the row that says what is tried. The order of the values in it
// and in the functions below is that of the table's columns.
func (o *op) intent(t tableID, ev *event.Event, status event.Status, v event.Verdict) {
	switch t {
	case toolCalls:
		o.toolCall(ev, status, v)
	case execEvents:
		o.exec(ev, status, v)
	case netEvents:
		o.request(ev, status, v)
	case fsEvents:
		o.file(ev, status, v)
	case vmEvents:
		o.vmEvent(ev, kindOf(ev.Type), ev.Detail, status, v)
	case protocolEvents, securityRuleEvents, eventBodyBlobs: // tableOf gives the first only
		o.protocol(ev, ToServer, "", 1, status, v, nil)
		o.nulls(1)
		o.close(insertRow(protocolEvents))
	}
}

// kindOf is the word for a machine's event: "boot", "admin".
func kindOf(t event.Type) string { return strings.TrimPrefix(string(t), "vm.") }

func (o *op) toolCall(ev *event.Event, status event.Status, v event.Verdict) {
	m, tool := orZero(ev.MCP), event.Tool{}
	if m.Tool != nil {
		tool = *m.Tool
	}
	o.common(ev)
	o.text(string(m.Origin), m.Transport, m.Server, m.Method, tool.Name, tool.Tool)
	o.json(m.RequestID)
	o.text(string(tool.Effect))
	if v.Decision == event.Block {
		o.nulls(1)
	} else {
		o.json(m.Arguments)
	}
	o.text(v.Policy, tool.Digest)
	o.judged(status, v, nil)
	o.nulls(5)
	o.close(insertRow(toolCalls))
}

func (o *op) exec(ev *event.Event, status event.Status, v event.Verdict) {
	c := orZero(ev.Exec)
	o.common(ev)
	o.text(c.ID)
	o.json(argvJSON(c.Argv))
	o.text(c.Cwd, c.User, v.Policy)
	o.judged(status, v, nil)
	o.nulls(8)
	o.close(insertRow(execEvents))
}

func (o *op) request(ev *event.Event, status event.Status, v event.Verdict) {
	h := orZero(ev.HTTP)
	o.common(ev)
	o.text(h.Scheme, h.Host)
	o.integer(int64(h.Port))
	o.text(h.Method, h.Path, h.Query, h.RedirectedFrom, h.Via, v.Policy)
	o.judged(status, v, nil)
	o.nulls(3)
	o.close(insertRow(netEvents))
}

func (o *op) file(ev *event.Event, status event.Status, v event.Verdict) {
	f := orZero(ev.File)
	o.common(ev)
	o.text(f.Op, f.Path, "")
	o.integer(f.Size)
	o.text("host")
	o.integer(1)
	o.text(v.Policy)
	o.judged(status, v, nil)
	o.close(insertRow(fsEvents))
}

func (o *op) vmEvent(ev *event.Event, kind, detail string, status event.Status, v event.Verdict) {
	o.common(ev)
	o.text(kind, detail, v.Policy)
	o.judged(status, v, nil)
	o.close(insertRow(vmEvents))
}

// message adds the whole row of a message that is no act.
func (o *op) message(ev *event.Event, out *event.Outcome, v event.Verdict) {
	o.protocol(ev, ToServer, "", 1, out.Status, v, out)
	o.code(out.Error)
	o.close(insertRow(protocolEvents))
}

// protocol adds a protocol_events row up to its error_code.
func (o *op) protocol(ev *event.Event, d Direction, detail string, count int64, status event.Status, v event.Verdict, out *event.Outcome) {
	m := orZero(ev.MCP)
	subject := m.ResourceURI
	if subject == "" {
		subject = m.PromptName
	}
	o.common(ev)
	o.text(string(ev.Type), string(d), m.Method)
	o.json(m.RequestID)
	o.text(m.Server, subject, detail)
	o.integer(count)
	o.text(v.Policy)
	o.judged(status, v, out)
}

// common adds the values of common().
func (o *op) common(ev *event.Event) {
	o.text(ev.ID)
	o.time(ev.Time)
	o.text(ev.TraceID, ev.TurnID, string(ev.Initiator.Kind), ev.Initiator.ID, ev.Actor, ev.Process)
}

// judged adds the values of judged() for a new row; out is nil while nothing
// has come of it.
func (o *op) judged(status event.Status, v event.Verdict, out *event.Outcome) {
	o.text(string(status), v.Decision.String(), v.Rule, v.Reason)
	switch {
	case out != nil:
		o.ended(out)
	case status == event.Blocked:
		o.ended(&event.Outcome{})
	default:
		o.nulls(3)
	}
}

// ended adds carried_out, duration_us and error_message.
func (o *op) ended(out *event.Outcome) {
	o.integer(truth(out.CarriedOut))
	o.integer(out.Duration.Microseconds())
	if out.Error == nil {
		o.nulls(1)
		return
	}
	o.text(out.Error.Message)
}

// outcome adds the update of a pending row.
func (o *op) outcome(r *receipt, out *event.Outcome, v event.Verdict) {
	o.text(string(out.Status))
	if out.Status == event.Blocked {
		o.text(v.Decision.String(), v.Rule, v.Reason)
	} else {
		o.nulls(3)
	}
	o.ended(out)
	switch r.table {
	case toolCalls:
		o.toolResult(out, v)
	case execEvents:
		o.execResult(orZero(out.Exec))
	case netEvents:
		o.integer(int64(orZero(out.HTTP).Status))
		o.integer(out.BytesSent)
		o.integer(out.BytesReceived)
	case protocolEvents:
		o.code(out.Error)
	case fsEvents, vmEvents, securityRuleEvents, eventBodyBlobs:
		// The first two have no more; the others have no outcome.
	}
	o.integer(r.id)
	o.close(finishRow(r.table))
}

func (o *op) toolResult(out *event.Outcome, v event.Verdict) {
	m := orZero(out.MCP)
	o.code(out.Error)
	o.integer(truth(m.IsError))
	switch {
	case !shown(v):
		o.nulls(1)
	case len(m.Result) > 0:
		o.json(m.Result)
	default:
		o.json(m.Message)
	}
	o.integer(out.BytesSent)
	o.integer(out.BytesReceived)
}

func (o *op) execResult(e event.ExecResult) {
	o.integer(int64(e.ExitCode))
	o.text(e.Signal)
	o.integer(truth(e.TimedOut))
	o.integer(truth(e.OOM))
	o.integer(truth(e.Truncated))
	o.integer(truth(e.Leaked))
	o.integer(e.StdoutBytes)
	o.integer(e.StderrBytes)
}

// shown reports whether a response may be kept: only what was let through.
func shown(v event.Verdict) bool {
	return v.Decision == event.Allow || v.Decision == event.Rewrite
}

func truth(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// orZero reads through a pointer that the event's type may leave nil.
func orZero[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}
