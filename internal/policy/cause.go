package policy

import (
	"errors"
	"strings"
)

// Causes that rules can be broken by, in our own words. CEL's errors quote the
// values that they are about, and a verdict's reason reaches the guest and the
// ledger: a block must not tell what it blocks.
var (
	errNotBoolean = errors.New("a rule must be true or false")
	errTooLong    = errors.New("matches() sees at most 64 KiB of text; contains() sees all")
	errUnreadable = errors.New("the message is no JSON that has one meaning only")
	errWrongKind  = errors.New("a member of the message has another type than the protocol says")
)

// cause says why a rule is broken, without any value of the event.
func cause(err error) string {
	for _, own := range []error{errNotBoolean, errTooLong, errUnreadable, errWrongKind} {
		if errors.Is(err, own) {
			return own.Error()
		}
	}
	text := err.Error()
	for _, c := range []struct{ part, cause string }{
		{"cost limit", "it costs more than the limit for one evaluation"},
		{"no such overload", "a value has another type than the rule expects"},
		{"index out of", "a list or text is shorter than the rule expects"},
		{"by zero", "a number is divided by zero"},
		{"overflow", "a number is too large"},
		{"internal error", "the evaluation failed"},
	} {
		if strings.Contains(text, c.part) {
			return c.cause
		}
	}
	return "a value cannot be converted as the rule expects"
}
