package ledger

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/capsem/capsem/internal/event"
)

// Malformed is the event_type of protocol_events for input that was refused
// before it became an event.
const Malformed event.Type = "mcp.malformed"

// Direction says which way a message went.
type Direction string

// The two directions of a message.
const (
	ToServer Direction = "to_server"
	ToClient Direction = "to_client"
)

// ProtocolEvent is input that the protocol refuses: a frame that is none, a
// message that is no JSON-RPC.
type ProtocolEvent struct {
	Direction Direction
	// Initiator and Process say who sent it, as for an event.
	Initiator event.Initiator
	Process   string
	// Method, RequestID and Server are set where they could be read.
	Method    string
	RequestID json.RawMessage
	Server    string
	// ErrorCode is the JSON-RPC code that it was answered with, 0 for none.
	ErrorCode int
	// Detail says what is wrong, in our words: it tells kinds of malformed
	// input apart, so it must hold nothing that the sender can vary at will.
	Detail string
}

// Protocol records malformed input. The first of a kind is written before
// Protocol returns; equal ones within a second are counted, and written as one
// further row when it ends.
func (l *Ledger) Protocol(ctx context.Context, p ProtocolEvent) error {
	kind := repeat{
		eventType: Malformed, direction: p.Direction, method: p.Method, server: p.Server, detail: p.Detail,
		process: p.Process, code: p.ErrorCode, status: event.Failed, decision: event.Block, initiator: p.Initiator,
	}
	if !l.repeats.first(kind) {
		return nil
	}
	return l.writeKind(ctx, kind, p.RequestID, 1, time.Now())
}

// messageRepeat is what an event that is no act, and what came of it, has in
// common with others. The words of a failure do not tell it apart: they may
// repeat what the sender said.
func messageRepeat(ev *event.Event, out *event.Outcome, v event.Verdict) repeat {
	m := orZero(ev.MCP)
	subject := m.ResourceURI
	if subject == "" {
		subject = m.PromptName
	}
	return repeat{
		eventType: ev.Type, direction: ToServer, method: m.Method, server: m.Server, subject: subject, process: ev.Process,
		code: orZero(out.Error).Code, decision: v.Decision, rule: v.Rule, policy: v.Policy, status: out.Status,
		initiator: ev.Initiator,
	}
}

// writeRepeat writes the row of what was counted, for the timer, which has
// nobody to tell.
func (l *Ledger) writeRepeat(kind repeat, count int64, last time.Time) error {
	err := l.writeKind(context.Background(), kind, nil, count, last)
	if err != nil {
		l.options.Log.Error("counted messages not written", "count", count, "error", err)
	}
	return err
}

func (l *Ledger) writeKind(ctx context.Context, k repeat, requestID json.RawMessage, count int64, at time.Time) error {
	ev, err := newEvent(k.eventType)
	if err != nil {
		return fmt.Errorf("recording in the ledger: %w", err)
	}
	ev.Time, ev.Initiator, ev.Process = at, k.initiator, k.process
	ev.MCP = &event.MCP{Method: k.method, Server: k.server, RequestID: requestID, ResourceURI: k.subject}
	o := l.newOp()
	o.protocol(ev, k.direction, k.detail, count, k.status, event.Verdict{Decision: k.decision, Rule: k.rule, Policy: k.policy}, nil)
	if k.code == 0 {
		o.nulls(1)
	} else {
		o.integer(int64(k.code))
	}
	o.close(insertRow(protocolEvents))
	_, err = l.submit(ctx, o)
	return err
}
