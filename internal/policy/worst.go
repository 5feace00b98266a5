package policy

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/common/operators"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"cel.dev/cel-go/interpreter"
)

// A rule whose result is an error is either silent, because the message lacks a
// member, or broken. CEL gives the error of the first operand that failed, so
// that `absent || broken` and `broken || absent` would differ, and a guest could
// choose the order. Therefore a rule that ends in absence is evaluated once more
// by a second plan, in which every operator looks at all its operands, and what
// is broken wins over what is absent.

// The names of the operators in the second plan. No rule can write them.
const (
	worstOr  = "@worst_or"
	worstAnd = "@worst_and"
)

// isAbsence reports whether an error of an evaluation only says that the message
// lacks a member. CEL does not export its error for a missing key; its text is
// the whole text of the error, and no other error begins with it.
func isAbsence(err error) bool {
	var absent *absentError
	return errors.As(err, &absent) || strings.HasPrefix(err.Error(), "no such key: ")
}

// program is a compiled expression.
type program struct {
	plan cel.Program
	// limited says that the plan counts its cost, and needs a frame of its own for
	// that.
	limited bool
	// worst makes the second plan, once, when it is first needed. It is nil where
	// the expression has one operand that can fail.
	worst func() (cel.Program, error)
}

// eval returns whether the expression holds. An error is an absence, or says what
// is broken.
func (p *program) eval(f *facts) (bool, error) {
	holds, err := p.evaluate(p.plan, f)
	if err == nil || !isAbsence(err) || p.worst == nil {
		return holds, err
	}
	second, planErr := p.worst()
	if planErr != nil {
		return false, planErr
	}
	return p.evaluate(second, f)
}

// evaluate runs a plan. A panic in it is recovered by CEL and is an error here.
func (p *program) evaluate(plan cel.Program, f *facts) (bool, error) {
	var input any = f
	if !p.limited {
		// A rule that failed may have left its own scope.
		f.frame.SetScope(f)
		input = f.frame
	}
	v, _, err := plan.Eval(input)
	if err != nil {
		return false, err
	}
	b, ok := v.(types.Bool)
	if !ok {
		return false, fmt.Errorf("%w, not %s", errNotBoolean, v.Type())
	}
	return bool(b), nil
}

// plan makes a program of a checked expression.
func (v *vocabulary) plan(checked *cel.Ast, limited bool) (*program, error) {
	options := []cel.ProgramOption{cel.EvalOptions(cel.OptOptimize)}
	first := append(slices.Clone(options), cel.CustomDecoratorV2(v.shorten))
	if limited {
		options = append(options, cel.CostLimit(maxRuntimeCost))
		first = options
	}
	plan, err := v.typed.Program(checked, first...)
	if err != nil {
		return nil, fmt.Errorf("planning a rule: %w", err)
	}
	p := &program{plan: plan, limited: limited}
	if operands(checked.NativeRep().Expr()) > 1 {
		p.worst = sync.OnceValues(func() (cel.Program, error) {
			second, err := planWorst(v.typed, checked, options)
			if err != nil {
				return nil, fmt.Errorf("planning a rule's second evaluation: %w", err)
			}
			return second, nil
		})
	}
	return p, nil
}

// operands counts the expressions that can fail beside each other: all that is
// below an operator or call of several arguments and is no literal.
func operands(e ast.Expr) int {
	n := 0
	ast.PreOrderVisit(e, ast.NewExprVisitor(func(e ast.Expr) {
		switch e.Kind() {
		case ast.IdentKind:
			n++
		case ast.ComprehensionKind:
			n += 2
		default:
		}
	}))
	return n
}

// planWorst makes the second plan.
func planWorst(env *cel.Env, checked *cel.Ast, options []cel.ProgramOption) (cel.Program, error) {
	second := ast.Copy(checked.NativeRep())
	factory := ast.NewExprFactory()
	ast.PostOrderVisit(second.Expr(), ast.NewExprVisitor(func(e ast.Expr) {
		for from, to := range map[string]string{operators.LogicalOr: worstOr, operators.LogicalAnd: worstAnd} {
			if args, ok := isCall(e, from); ok {
				e.SetKindCase(factory.NewCall(e.ID(), to, args...))
				second.SetReference(e.ID(), ast.NewFunctionReference(to))
			}
		}
	}))
	return env.PlanProgram(second, append(slices.Clone(options), cel.CustomDecoratorV2(lookAtAll))...)
}

// worstOperators declares the operators of the second plan.
func worstOperators() []cel.EnvOption {
	operator := func(name string, decisive types.Bool) cel.EnvOption {
		return cel.Function(name, cel.Overload(name, []*cel.Type{cel.BoolType, cel.BoolType}, cel.BoolType,
			cel.OverloadIsNonStrict(), cel.BinaryBinding(func(a, b ref.Val) ref.Val { return worstOf(decisive, a, b) })))
	}
	return []cel.EnvOption{operator(worstOr, types.True), operator(worstAnd, types.False)}
}

// worstOf is `||` where decisive is true and `&&` where it is false. An operand
// that decides absorbs the other's error, as in CEL.
func worstOf(decisive types.Bool, a, b ref.Val) ref.Val {
	if a == decisive || b == decisive {
		return decisive
	}
	result := ref.Val(!decisive)
	for _, v := range []ref.Val{a, b} {
		if _, ok := v.(types.Bool); ok {
			continue
		}
		err := types.MaybeNoSuchOverloadErr(v)
		if !isAbsence(err.(error)) {
			return err
		}
		result = err
	}
	return result
}

// lookAtAll makes calls and constructors of the second plan look at all operands
// where one is absent.
func lookAtAll(i interpreter.InterpretableV2) (interpreter.InterpretableV2, error) {
	switch node := i.(type) {
	case interpreter.InterpretableCall:
		if name := node.Function(); name == worstOr || name == worstAnd || len(node.Args()) < 2 {
			return i, nil
		}
		return &exhaustive{node, node.Args()}, nil
	case interpreter.InterpretableConstructor:
		return &exhaustive{node, node.InitVals()}, nil
	}
	return i, nil
}

// exhaustive is a node whose error is the worst of its operands' errors.
type exhaustive struct {
	interpreter.InterpretableV2
	operands []interpreter.InterpretableV2
}

// Exec evaluates the node. It is called by CEL.
func (e *exhaustive) Exec(frame *interpreter.ExecutionFrame) ref.Val {
	v := e.InterpretableV2.Exec(frame)
	if err, failed := v.(*types.Err); !failed || !isAbsence(err) {
		return v
	}
	for _, operand := range e.operands {
		if err, failed := operand.Exec(frame).(*types.Err); failed && !isAbsence(err) {
			return err
		}
	}
	return v
}

// Eval evaluates the node. It is called by CEL.
func (e *exhaustive) Eval(vars interpreter.Activation) ref.Val {
	return interpreter.EvalActivation(vars, e.Exec)
}
