package policy

import (
	"fmt"
	"regexp"
	"strings"

	"cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/common/operators"
	"cel.dev/cel-go/common/types"

	"github.com/capsem/capsem/internal/config"
)

// A block that negates a clause on something that a message may leave out is a
// hole: `!mcp.request.arguments.path.startsWith("/ws")` is silenced by a call
// without path. Such rules do not load, unless they say with has() what absence
// means; an exception is better written with `unless`, which absence never
// fulfils.

// negations returns the faults of a block's match.
func (v *vocabulary) negations(e *expression) config.Errors {
	n := negationFinder{vocabulary: v, expression: e}
	n.find(e.root, false)
	return n.faults
}

type negationFinder struct {
	vocabulary *vocabulary
	expression *expression
	faults     config.Errors
}

// find looks for optional members below a negation.
func (n *negationFinder) find(e ast.Expr, negated bool) {
	if _, ok := isCall(e, "has"); ok {
		// What is tested is no read, but what leads to a member is.
		tested := e.AsCall().Args()[0]
		path, named := pathOf(tested)
		if _, declared := n.vocabulary.field(path); !named || !declared {
			n.find(tested.AsSelect().Operand(), negated)
		}
		return
	}
	if path, ok := pathOf(e); ok {
		if negated {
			n.check(e, path)
		}
		return
	}
	negated = negated || isNegation(e)
	for _, child := range children(e) {
		n.find(child, negated)
	}
}

// check records a fault if a member that may be absent is not tested.
func (n *negationFinder) check(e ast.Expr, path string) {
	for _, optional := range n.vocabulary.optionalPrefixes(path) {
		if !n.expression.tested[optional] {
			n.faults = append(n.faults, n.expression.errorAt(e.ID(),
				"a block must not negate a clause on %s, which a message may leave out to silence the rule: "+
					"write the exception as `unless`, or say what absence means with %s", path, test(optional)))
			return
		}
	}
}

// test writes the test for a member. A name that is no identifier takes `in`.
func test(path string) string {
	group, member, _ := cutLastDot(path)
	if !regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`).MatchString(member) {
		return fmt.Sprintf("%q in %s", member, group)
	}
	return "has(" + path + ")"
}

// optionalPrefixes lists the parts of a path that a message may leave out: an
// optional field, and every member below a field or a variable.
func (v *vocabulary) optionalPrefixes(path string) []string {
	parts := strings.Split(path, ".")
	var out []string
	base := 1 // the length of what is not a member: a variable's name
	for n := 1; n <= len(parts); n++ {
		if f, ok := v.field(strings.Join(parts[:n], ".")); ok {
			base = n
			if f.optional {
				out = append(out, f.name)
			}
			break
		}
	}
	for n := base + 1; n <= len(parts); n++ {
		out = append(out, strings.Join(parts[:n], "."))
	}
	return out
}

// isNegation reports whether e can hold because something below it does not.
func isNegation(e ast.Expr) bool {
	if e.Kind() != ast.CallKind {
		return false
	}
	c := e.AsCall()
	switch c.FunctionName() {
	case operators.LogicalNot, operators.NotEquals, operators.Conditional:
		return true
	case operators.Equals:
		for _, arg := range c.Args() {
			if isFalse(arg) || isBoolean(arg) {
				return true
			}
		}
	}
	return false
}

func isFalse(e ast.Expr) bool { return e.Kind() == ast.LiteralKind && e.AsLiteral() == types.False }

// isBoolean reports whether e is a test of its own, so that comparing it with
// another may turn it around.
func isBoolean(e ast.Expr) bool {
	if e.Kind() != ast.CallKind {
		return false
	}
	switch e.AsCall().FunctionName() {
	case operators.Equals, operators.NotEquals, operators.LogicalAnd, operators.LogicalOr, operators.LogicalNot, operators.In,
		operators.Less, operators.LessEquals, operators.Greater, operators.GreaterEquals,
		"startsWith", "endsWith", "contains", "icontains", "matches", "imatches",
		operators.All, operators.Exists, operators.ExistsOne, "equivalent", "intersects":
		return true
	}
	return false
}
