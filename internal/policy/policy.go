// Package policy judges events by rules written in CEL.
//
// A rule is an expression over the fields of an event (see Fields), an action,
// and optionally an exception (`unless`). Compile turns the rules of the
// organisation and of a profile into a Policy, which is immutable and safe for
// concurrent use; whoever holds it replaces it whole, so that a reload is atomic.
//
// What it promises:
//   - Block beats allow, whatever the order, the names and the files of the
//     rules. Where nothing matches, the default decides about acts, and what is
//     no act is allowed.
//   - A mistake in a rule is found when it is loaded, and told with file, line,
//     column and the nearest valid name. A field that is unknown, an expression
//     that is not a boolean and an action that is not enforced do not load.
//   - A rule about one family of events never touches another: a clause about a
//     family that an event does not carry cannot hold, and is taken out of the
//     rule for that kind of event when it is loaded (residual.go).
//   - A member that a message does not have makes a rule not match, and only if
//     that absence is the result of the whole rule. Any other failure breaks the
//     rule: a broken block matches, a broken allow does not. Which of the two it
//     was does not depend on the order in which the rule is written (worst.go).
//   - A judgement that fails blocks. So does a Policy that nobody compiled.
//
// What it refuses: to decide by anything that the guest says about the meaning of
// its message. Fields are read from the bytes that will be forwarded.
//
// How it is fast: for each type of event and phase, rules are indexed by the
// tool, server, host or intent that they require (index.go), so that few are
// evaluated; values are converted once for all rules, and arguments only when a
// rule reads them (facts.go).
package policy

import (
	"context"
	"fmt"
	"runtime"

	"github.com/capsem/capsem/internal/event"
)

// ruleDefault is the verdict's rule where the profile's default decided.
const ruleDefault = "default"

// Policy is a compiled set of rules. The zero value blocks everything.
type Policy struct {
	vocabulary *vocabulary
	rules      []*rule
	index      map[event.Type]*[2]bucket
	// defaultDecision is for acts that no rule matches.
	defaultDecision event.Decision
	digest          string
}

// Digest identifies the rules and the default: policies of equal text have equal
// digests. It is hexadecimal, of a SHA-256.
func (p *Policy) Digest() string { return p.digest }

// Len is the number of rules.
func (p *Policy) Len() int { return len(p.rules) }

// Judge decides about ev. In the response phase out is what came of the act, nil
// if nothing did. It does no I/O and does not wait; the context is for judges that
// do. It never panics, and every failure blocks.
func (p *Policy) Judge(_ context.Context, ev *event.Event, phase event.Phase, out *event.Outcome) (v event.Verdict) {
	if p == nil || ev == nil {
		return event.Verdict{Reason: "there is no policy or no event to judge"}
	}
	defer func() {
		if r := recover(); r != nil {
			v = event.Verdict{Policy: p.digest, Reason: "judging failed"}
			if err, ok := r.(runtime.Error); ok { // which quotes no value of the event
				v.Reason += ": " + err.Error()
			}
		}
	}()
	buckets, known := p.index[ev.Type]
	if !known || (phase != event.Request && phase != event.Response) {
		return event.Verdict{Policy: p.digest, Reason: fmt.Sprintf("no rule can judge an event of type %q in phase %d", ev.Type, phase)}
	}
	if !carries(ev) {
		return event.Verdict{Policy: p.digest, Reason: fmt.Sprintf("the event of type %q lacks what it is about", ev.Type)}
	}
	f, err := newFacts(p.vocabulary, ev, out)
	if err != nil {
		return event.Verdict{Policy: p.digest, Reason: err.Error()}
	}
	var hits []hit
	for c := range buckets[phase].candidates(ev) {
		if h, ok := c.judge(f); ok {
			hits = append(hits, h)
		}
	}
	f.close()
	v = p.verdict(hits, ev.Type, phase)
	v.Policy = p.digest
	return v
}

// carries reports whether an event has what its type promises.
func carries(ev *event.Event) bool {
	switch familyOf(ev.Type) {
	case familyMCP:
		return ev.MCP != nil && (ev.Type != event.MCPToolCall || ev.MCP.Tool != nil)
	case familyHTTP:
		return ev.HTTP != nil
	case familyFile:
		return ev.File != nil
	case familyProcess:
		return ev.Exec != nil
	case always:
	}
	return true
}

// hit is a rule that matched.
type hit struct {
	rule *rule
	// cause is why the rule is broken, nil if it is not.
	cause error
}

// verdict puts what matched together.
func (p *Policy) verdict(hits []hit, t event.Type, phase event.Phase) event.Verdict {
	v := event.Verdict{Decision: event.Allow}
	if len(hits) == 0 {
		if t.Act() && phase == event.Request {
			v.Decision, v.Rule = p.defaultDecision, ruleDefault
		}
		return v
	}
	sortHits(hits)
	v.Matches = make([]event.Match, len(hits))
	for i, h := range hits {
		v.Matches[i] = event.Match{
			Rule: h.rule.id, Reason: h.rule.reason, Action: h.rule.action.String(),
			Phase: phase, Digest: h.rule.digest,
		}
		if h.cause != nil {
			v.Matches[i].Broken = true
			v.Matches[i].Reason = "the rule could not be evaluated: " + cause(h.cause)
		}
	}
	// Blocks come first.
	v.Decision, v.Rule, v.Reason = hits[0].rule.action, v.Matches[0].Rule, v.Matches[0].Reason
	return v
}
