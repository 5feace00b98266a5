package policy

import (
	"fmt"

	"cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/common/operators"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/parser"
)

// residual is what remains of an expression for events of one family, once every
// clause about another family is known not to hold.
type residual struct {
	root ast.Expr
	info *ast.SourceInfo
	// whole says that nothing was taken out.
	whole bool
}

// never reports whether the expression cannot hold for this family.
func (r residual) never() bool { return r.root == nil }

// text writes the residual as an expression that compiles.
func (r residual) text() (string, error) {
	s, err := parser.Unparse(r.root, r.info)
	if err != nil {
		return "", fmt.Errorf("writing what remains of a rule: %w", err)
	}
	return s, nil
}

// residual takes out of e what cannot hold for events of fam.
//
// A clause is what stands between the outermost `&&`, `||` and `?:` of a rule. A
// clause that reads, tests or negates a field of a family that the event does not
// carry cannot hold, whatever it says: a rule about HTTP has nothing to say about
// a tool call, also where it is written as a negation.
func (v *vocabulary) residual(e *expression, fam family) residual {
	r := residual{root: e.root, info: e.info, whole: true}
	for f := range e.reads {
		if f.family != always && f.family != fam {
			r.whole = false
		}
	}
	if !r.whole {
		r.root = v.prune(e.root, fam)
	}
	return r
}

// prune returns what remains of a boolean expression, nil if it cannot hold.
func (v *vocabulary) prune(e ast.Expr, fam family) ast.Expr {
	factory := ast.NewExprFactory()
	if args, ok := isCall(e, operators.LogicalAnd); ok {
		left, right := v.prune(args[0], fam), v.prune(args[1], fam)
		if left == nil || right == nil {
			return nil
		}
		return factory.NewCall(e.ID(), operators.LogicalAnd, left, right)
	}
	if args, ok := isCall(e, operators.LogicalOr); ok {
		left, right := v.prune(args[0], fam), v.prune(args[1], fam)
		switch {
		case left == nil:
			return right
		case right == nil:
			return left
		}
		return factory.NewCall(e.ID(), operators.LogicalOr, left, right)
	}
	if args, ok := isCall(e, operators.Conditional); ok && !v.foreign(args[0], fam) {
		yes, no := v.prune(args[1], fam), v.prune(args[2], fam)
		if yes == nil && no == nil {
			return nil
		}
		return factory.NewCall(e.ID(), operators.Conditional, args[0], orFalse(yes), orFalse(no))
	}
	if v.foreign(e, fam) {
		return nil
	}
	return e
}

func orFalse(e ast.Expr) ast.Expr {
	if e != nil {
		return e
	}
	const anyNode = 1
	return ast.NewExprFactory().NewLiteral(anyNode, types.False)
}

// foreign reports whether a clause is about another family than fam.
func (v *vocabulary) foreign(e ast.Expr, fam family) bool {
	for _, f := range v.fieldsBelow(e) {
		if f.family != always && f.family != fam {
			return true
		}
	}
	return false
}

// conjuncts lists the clauses that all must hold for e to hold.
func conjuncts(e ast.Expr) []ast.Expr {
	if args, ok := isCall(e, operators.LogicalAnd); ok {
		return append(conjuncts(args[0]), conjuncts(args[1])...)
	}
	return []ast.Expr{e}
}
