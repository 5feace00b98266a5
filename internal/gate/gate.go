// Package gate is the one place through which anything takes effect.
//
// Do judges an event, records the intent, carries the act out, judges what came
// back, and records the outcome, in that order, and hands out verdict and
// outcome together: there is no way to get the effect without the judgement or
// the record. Every step that fails, fails closed. A judge that panics blocks;
// a ledger that cannot record the intent prevents the act; one that cannot
// record the outcome keeps the result from the caller.
//
// The gate knows neither CEL nor SQLite. It declares the two small interfaces
// that it needs, and policy and ledger satisfy them.
package gate

import (
	"context"
	"fmt"
	"time"

	"github.com/capsem/capsem/internal/event"
)

// Judge decides about an event. In the response phase out is what came of the
// act. It must be safe for concurrent use.
type Judge interface {
	Judge(ctx context.Context, ev *event.Event, phase event.Phase, out *event.Outcome) event.Verdict
}

// Recorder keeps events. Both methods return when the record is committed.
type Recorder interface {
	// Begin records that ev is about to happen or, where v blocks, that it did
	// not; in that case End is not called. The receipt that it returns is
	// handed to End as it is.
	Begin(ctx context.Context, ev *event.Event, v event.Verdict) (Receipt, error)
	// End records what came of it and the response phase's verdict.
	End(ctx context.Context, r Receipt, out event.Outcome, v event.Verdict) error
}

// Receipt is a recorder's name for an event that it has begun.
type Receipt = any

// Act is the effect that an event stands for. It is called at most once, and
// reports failures in the outcome.
type Act = func(ctx context.Context) event.Outcome

// Gate judges and records. The zero value is not usable: see New.
type Gate struct {
	judge  Judge
	ledger Recorder
	now    func() time.Time
}

// New returns a gate that asks judge and writes to ledger.
func New(judge Judge, ledger Recorder) *Gate {
	return &Gate{judge: judge, ledger: ledger, now: time.Now}
}

// Do takes ev through the gate. The outcome is what the caller may show: of a
// blocked event it holds the refusal and nothing of the data. Cancelling ctx
// cancels the act, never the record of it.
func (g *Gate) Do(ctx context.Context, ev *event.Event, act Act) (event.Verdict, event.Outcome) {
	return g.Stream(ctx, ev, act, nil)
}

// Rest carries on with an act whose beginning was judged, and completes the
// outcome that is recorded: what was passed on, and how it ended.
type Rest = func(ctx context.Context, out *event.Outcome)

// Stream is Do for an effect that is too long to be judged whole: a tunnel, a
// body of any length. act goes as far as what rules can see, the response phase
// judges that, and only if it allows, and act is Done, rest goes on. The outcome
// is recorded when rest is over, so that the row has all of it; what rest has
// passed on by then cannot be taken back.
func (g *Gate) Stream(ctx context.Context, ev *event.Event, act Act, rest Rest) (event.Verdict, event.Outcome) {
	record := context.WithoutCancel(ctx)
	verdict := g.decide(ctx, ev, event.Request, nil)
	receipt, err := g.ledger.Begin(record, ev, verdict)
	if err != nil {
		return refuse(event.Verdict{Policy: verdict.Policy, Reason: fmt.Sprintf("the action cannot be recorded: %v", err)})
	}
	if verdict.Decision != event.Allow {
		return refuse(verdict)
	}

	start := g.now()
	out := carryOut(ctx, act)
	out.Duration = g.now().Sub(start)
	after := g.decide(ctx, ev, event.Response, &out)
	switch {
	case after.Decision != event.Allow:
		out.Status = event.Blocked
	case rest != nil && out.Status == event.Done:
		out = carryOn(ctx, out, rest)
		out.Duration = g.now().Sub(start)
	}
	if err := g.ledger.End(record, receipt, out, after); err != nil {
		return refuse(event.Verdict{
			Policy: verdict.Policy,
			Reason: fmt.Sprintf("the action was carried out, but its outcome cannot be recorded: %v", err),
		})
	}
	if after.Decision != event.Allow {
		v, refused := refuse(after)
		refused.CarriedOut, refused.Duration = out.CarriedOut, out.Duration
		return v, refused
	}
	return join(verdict, after), out
}

// Refuse records that ev was refused before any rule was asked: by a list that a
// rule cannot widen, or because it cannot be read.
func (g *Gate) Refuse(ctx context.Context, ev *event.Event, reason string) (event.Verdict, event.Outcome) {
	v := event.Verdict{Reason: reason}
	if _, err := g.ledger.Begin(context.WithoutCancel(ctx), ev, v); err != nil {
		v.Reason = fmt.Sprintf("%s (and the refusal cannot be recorded: %v)", reason, err)
	}
	return refuse(v)
}

// decide asks the judge. A panic in it is a refusal, and so is a decision that
// the gate cannot enforce.
func (g *Gate) decide(ctx context.Context, ev *event.Event, phase event.Phase, out *event.Outcome) (v event.Verdict) {
	defer func() {
		if p := recover(); p != nil {
			v = event.Verdict{Reason: fmt.Sprintf("judging the action failed: %v", p)}
		}
	}()
	v = g.judge.Judge(ctx, ev, phase, out)
	if v.Decision != event.Allow && v.Decision != event.Block {
		v.Reason = fmt.Sprintf("this version cannot enforce the decision %q", v.Decision)
		v.Decision = event.Block
	}
	return v
}

// carryOut runs the act. A panic in it is a failure of that act alone.
func carryOut(ctx context.Context, act Act) (out event.Outcome) {
	defer func() {
		if p := recover(); p != nil {
			out = event.Outcome{
				Status: event.Failed, CarriedOut: true,
				Error: &event.Error{Message: fmt.Sprintf("carrying out the action failed: %v", p)},
			}
		}
	}()
	return act(ctx)
}

// carryOn runs the rest of an act. A panic in it is a failure of that act alone.
func carryOn(ctx context.Context, begun event.Outcome, rest Rest) (out event.Outcome) {
	out = begun
	defer func() {
		if p := recover(); p != nil {
			out.Status = event.Failed
			out.Error = &event.Error{Message: fmt.Sprintf("carrying out the action failed: %v", p)}
		}
	}()
	rest(ctx, &out)
	return out
}

func refuse(v event.Verdict) (event.Verdict, event.Outcome) {
	v.Decision = event.Block
	return v, event.Outcome{Status: event.Blocked, Error: &event.Error{Message: Refusal(v), Rule: v.Rule}}
}

// Refusal is the sentence that a caller is told about a verdict that blocks.
func Refusal(v event.Verdict) string {
	switch {
	case v.Rule == "":
		return v.Reason
	case v.Reason == "":
		return "blocked by rule " + v.Rule
	default:
		return "blocked by rule " + v.Rule + ": " + v.Reason
	}
}

// join is the verdict on an event that both phases allowed.
func join(request, response event.Verdict) event.Verdict {
	if len(response.Matches) > 0 {
		request.Matches = append(append([]event.Match(nil), request.Matches...), response.Matches...)
	}
	return request
}
