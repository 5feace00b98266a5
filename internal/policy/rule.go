package policy

import (
	"cmp"
	"slices"

	"github.com/capsem/capsem/internal/event"
)

// Scope is whose rule it is.
type Scope string

// The scopes, the stronger first.
const (
	Corp    Scope = "corp"
	Profile Scope = "profile"
)

// rule is one compiled rule.
type rule struct {
	// id has the scope before it: `profile.no_evil`.
	id     string
	scope  Scope
	action event.Decision
	reason string
	digest string
	// place is the rule's place among all, for a stable order of matches.
	place    int
	variants map[family]*variant
}

// variant is a rule as it applies to events of one family.
type variant struct {
	rule   *rule
	match  *program
	unless *program // nil where there is no exception that could hold
	phase  event.Phase
	// requires are the words, by the name of a field, one of which that field must
	// have for the rule to match.
	requires map[string][]string
}

// judge says whether the rule matches. What fails in a block counts against the
// event, what fails in an allow does not count for it.
func (v *variant) judge(f *facts) (hit, bool) {
	holds, err := v.match.eval(f)
	switch {
	case err != nil && (isAbsence(err) || v.rule.action != event.Block):
		return hit{}, false
	case err != nil:
		return hit{rule: v.rule, cause: err}, true
	case !holds:
		return hit{}, false
	case v.unless == nil:
		return hit{rule: v.rule}, true
	}
	lifted, err := v.unless.eval(f)
	if err != nil { // absent or broken
		lifted = v.rule.action != event.Block
	}
	return hit{rule: v.rule}, !lifted
}

// sortHits puts blocks before allows, the organisation's before the profile's,
// and then the order of the files.
func sortHits(hits []hit) {
	slices.SortFunc(hits, func(a, b hit) int {
		return cmp.Or(
			cmp.Compare(a.rule.action, b.rule.action), // Block is the least
			cmp.Compare(a.rule.scope, b.rule.scope),   // "corp" is the least
			cmp.Compare(a.rule.place, b.rule.place),
		)
	})
}
