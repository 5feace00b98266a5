package gate_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/gate"
)

type judge func(phase event.Phase, out *event.Outcome) event.Verdict

func (j judge) Judge(_ context.Context, _ *event.Event, p event.Phase, out *event.Outcome) event.Verdict {
	return j(p, out)
}

func allow(event.Phase, *event.Outcome) event.Verdict { return event.Verdict{Decision: event.Allow} }

// tape is a recorder that keeps what it was told, in order.
type tape struct {
	lines            []string
	beginErr, endErr error
	ctxErr           error
}

func (t *tape) Begin(_ context.Context, ev *event.Event, v event.Verdict) (gate.Receipt, error) {
	t.lines = append(t.lines, "begin "+v.Decision.String())
	return ev.ID, t.beginErr
}

func (t *tape) End(ctx context.Context, r gate.Receipt, out event.Outcome, v event.Verdict) error {
	t.ctxErr = ctx.Err()
	t.lines = append(t.lines, "end "+r.(string)+" "+string(out.Status)+" "+v.Decision.String())
	return t.endErr
}

func done(context.Context) event.Outcome {
	return event.Outcome{
		Status: event.Done, CarriedOut: true,
		MCP: &event.MCPResponse{Result: []byte(`"secret"`)},
	}
}

func TestWhatIsAllowedIsRecordedBeforeAndAfter(t *testing.T) {
	rec := &tape{}
	acted := func(ctx context.Context) event.Outcome {
		rec.lines = append(rec.lines, "act")
		return done(ctx)
	}
	v, out := gate.New(judge(allow), rec).Do(t.Context(), &event.Event{ID: "e1"}, acted)
	if v.Decision != event.Allow || out.Status != event.Done {
		t.Errorf("got %v, %v", v.Decision, out.Status)
	}
	if got, want := strings.Join(rec.lines, "|"), "begin allow|act|end e1 done allow"; got != want {
		t.Errorf("recorded %q, want %q", got, want)
	}
}

func TestNothingHappensWithoutAVerdictThatAllows(t *testing.T) {
	for name, j := range map[string]judge{
		"zero verdict": func(event.Phase, *event.Outcome) event.Verdict { return event.Verdict{} },
		"block": func(event.Phase, *event.Outcome) event.Verdict {
			return event.Verdict{Decision: event.Block, Rule: "r"}
		},
		"ask":     func(event.Phase, *event.Outcome) event.Verdict { return event.Verdict{Decision: event.Ask} },
		"rewrite": func(event.Phase, *event.Outcome) event.Verdict { return event.Verdict{Decision: event.Rewrite} },
		"unknown": func(event.Phase, *event.Outcome) event.Verdict { return event.Verdict{Decision: 99} },
		"panic":   func(event.Phase, *event.Outcome) event.Verdict { panic("boom") },
	} {
		t.Run(name, func(t *testing.T) {
			rec := &tape{}
			v, out := gate.New(j, rec).Do(t.Context(), &event.Event{}, func(context.Context) event.Outcome {
				t.Error("the act was carried out")
				return event.Outcome{}
			})
			if v.Decision != event.Block || out.Status != event.Blocked || out.CarriedOut {
				t.Errorf("got %v, %+v", v.Decision, out)
			}
			if got := strings.Join(rec.lines, "|"); got != "begin block" {
				t.Errorf("recorded %q", got)
			}
		})
	}
}

func TestNothingHappensThatCannotBeRecorded(t *testing.T) {
	rec := &tape{beginErr: errors.New("disk full")}
	v, out := gate.New(judge(allow), rec).Do(t.Context(), &event.Event{}, func(context.Context) event.Outcome {
		t.Error("the act was carried out")
		return event.Outcome{}
	})
	if v.Decision != event.Block || !strings.Contains(out.Error.Message, "disk full") {
		t.Errorf("got %v, %+v", v, out)
	}
}

func TestABlockedResponseDoesNotReachTheCaller(t *testing.T) {
	for name, j := range map[string]judge{
		"block": func(p event.Phase, _ *event.Outcome) event.Verdict {
			if p == event.Response {
				return event.Verdict{Decision: event.Block, Rule: "profile.no_secret"}
			}
			return event.Verdict{Decision: event.Allow}
		},
		"panic": func(p event.Phase, _ *event.Outcome) event.Verdict {
			if p == event.Response {
				panic("boom")
			}
			return event.Verdict{Decision: event.Allow}
		},
	} {
		t.Run(name, func(t *testing.T) {
			rec := &tape{}
			v, out := gate.New(j, rec).Do(t.Context(), &event.Event{ID: "e"}, done)
			if v.Decision != event.Block || out.MCP != nil || !out.CarriedOut || out.Status != event.Blocked {
				t.Errorf("got %+v, %+v", v, out)
			}
			if got := strings.Join(rec.lines, "|"); got != "begin allow|end e blocked block" {
				t.Errorf("recorded %q", got)
			}
		})
	}
}

func TestAResultThatCannotBeRecordedIsWithheld(t *testing.T) {
	rec := &tape{endErr: errors.New("input/output error")}
	v, out := gate.New(judge(allow), rec).Do(t.Context(), &event.Event{ID: "e"}, done)
	if v.Decision != event.Block || out.MCP != nil || !strings.Contains(out.Error.Message, "input/output error") {
		t.Errorf("got %+v, %+v", v, out)
	}
}

func TestCancellingTheCallerDoesNotCancelTheRecord(t *testing.T) {
	rec := &tape{}
	ctx, cancel := context.WithCancel(t.Context())
	gate.New(judge(allow), rec).Do(ctx, &event.Event{ID: "e"}, func(ctx context.Context) event.Outcome {
		cancel()
		if ctx.Err() == nil {
			t.Error("the act does not see the cancellation")
		}
		return event.Outcome{Status: event.Cancelled, CarriedOut: true}
	})
	if len(rec.lines) != 2 || rec.ctxErr != nil {
		t.Errorf("recorded %q, with a context that says %v", rec.lines, rec.ctxErr)
	}
}

func TestAPanickingActFailsAlone(t *testing.T) {
	rec := &tape{}
	_, out := gate.New(judge(allow), rec).Do(t.Context(), &event.Event{ID: "e"}, func(context.Context) event.Outcome {
		panic("boom")
	})
	if out.Status != event.Failed || !out.CarriedOut || out.Error == nil {
		t.Errorf("got %+v", out)
	}
}

func TestARefusalNamesTheRuleAndItsReason(t *testing.T) {
	for _, tt := range []struct {
		v    event.Verdict
		want string
	}{
		{event.Verdict{Rule: "profile.a"}, "blocked by rule profile.a"},
		{event.Verdict{Rule: "profile.a", Reason: "Not here."}, "blocked by rule profile.a: Not here."},
		{event.Verdict{Reason: "the action cannot be recorded"}, "the action cannot be recorded"},
	} {
		if got := gate.Refusal(tt.v); got != tt.want {
			t.Errorf("Refusal(%+v) = %q, want %q", tt.v, got, tt.want)
		}
	}
}

func TestTheRestOfAStreamFollowsItsJudgementAndIsInTheRecord(t *testing.T) {
	rec := &tape{}
	rest := func(_ context.Context, out *event.Outcome) {
		rec.lines = append(rec.lines, "rest")
		out.Status, out.BytesReceived = event.Failed, 7
	}
	_, out := gate.New(judge(allow), rec).Stream(t.Context(), &event.Event{ID: "e1"}, done, rest)
	if out.Status != event.Failed || out.BytesReceived != 7 {
		t.Errorf("got %+v", out)
	}
	if got, want := strings.Join(rec.lines, "|"), "begin allow|rest|end e1 failed allow"; got != want {
		t.Errorf("recorded %q, want %q", got, want)
	}
}

func TestTheRestOfAStreamNeedsAnActThatWentWellAndWasAllowed(t *testing.T) {
	rest := func(context.Context, *event.Outcome) { t.Error("the rest went on") }
	failed := func(context.Context) event.Outcome { return event.Outcome{Status: event.Failed} }
	gate.New(judge(allow), &tape{}).Stream(t.Context(), &event.Event{}, failed, rest)
	blocks := judge(func(p event.Phase, _ *event.Outcome) event.Verdict {
		if p == event.Response {
			return event.Verdict{}
		}
		return event.Verdict{Decision: event.Allow}
	})
	if v, _ := gate.New(blocks, &tape{}).Stream(t.Context(), &event.Event{}, done, rest); v.Decision != event.Block {
		t.Errorf("got %v", v.Decision)
	}
}

func TestAPanicInTheRestIsAFailureThatIsRecorded(t *testing.T) {
	rec := &tape{}
	rest := func(context.Context, *event.Outcome) { panic("lost") }
	_, out := gate.New(judge(allow), rec).Stream(t.Context(), &event.Event{ID: "e1"}, done, rest)
	if out.Status != event.Failed || !strings.Contains(out.Error.Message, "lost") || rec.lines[1] != "end e1 failed allow" {
		t.Errorf("got %+v, recorded %q", out, rec.lines)
	}
}

func TestARefusalBeforeTheRulesIsRecorded(t *testing.T) {
	rec := &tape{}
	asked := judge(func(event.Phase, *event.Outcome) event.Verdict { t.Error("a rule was asked"); return event.Verdict{} })
	v, out := gate.New(asked, rec).Refuse(t.Context(), &event.Event{}, "not in the list")
	if v.Decision != event.Block || out.Status != event.Blocked || out.Error.Message != "not in the list" {
		t.Errorf("got %+v, %+v", v, out)
	}
	if got := strings.Join(rec.lines, "|"); got != "begin block" {
		t.Errorf("recorded %q", got)
	}
	rec.beginErr = errors.New("disk full")
	if _, out := gate.New(asked, rec).Refuse(t.Context(), &event.Event{}, "no"); !strings.Contains(out.Error.Message, "disk full") {
		t.Errorf("got %q", out.Error.Message)
	}
}
