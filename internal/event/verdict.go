package event

// Decision is what is to be done with an event.
type Decision int

// The decisions. The zero value blocks, so that a verdict nobody reached is a
// refusal.
const (
	Block Decision = iota
	Ask
	Allow
	Rewrite
)

// String returns the word that the ledger and rule files use.
func (d Decision) String() string {
	switch d {
	case Block:
		return "block"
	case Ask:
		return "ask"
	case Allow:
		return "allow"
	case Rewrite:
		return "rewrite"
	}
	return "block"
}

// Phase says on which side of the act a judgement is made.
type Phase int

// The two phases of an event.
const (
	Request Phase = iota
	Response
)

// String returns the word that the ledger uses.
func (p Phase) String() string {
	if p == Response {
		return "response"
	}
	return "request"
}

// Verdict is what policy decided about one event in one phase.
type Verdict struct {
	Decision Decision
	// Rule is the id of the rule that decided (`profile.no_evil`), "default"
	// where the profile's default did, "" for an allow without any rule.
	Rule string
	// Reason is the rule's own text for people, or why a judgement failed.
	Reason string
	// Matches are all rules that matched, the deciding one among them.
	Matches []Match
	// Policy is the digest of the rules that judged.
	Policy string
}

// Match is one rule that matched one event.
type Match struct {
	Rule, Reason, Severity string
	Action                 string
	Phase                  Phase
	// Broken says that the rule failed to evaluate and counted as matching
	// because of that; Reason then has the cause.
	Broken bool
	// Digest identifies the rule's text.
	Digest string
}
