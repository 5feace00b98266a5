package policy

import (
	"fmt"
	"slices"
	"strings"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common"
	"cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"cel.dev/cel-go/ext"
	"cel.dev/cel-go/parser"
)

// presencePrefix makes the name of the variable that says whether a field is
// there. A rule cannot write it.
const presencePrefix = "has "

// Bounds of one expression, beside that of its text in package config.
const (
	maxExpressionNodes = 4096
	maxNesting         = 64
)

// vocabulary is what rules are written in: the fields, the functions and the two
// readings of an expression.
type vocabulary struct {
	fields []*field
	slots  map[string]slot
	// absent holds, by the field's place, the error value of its absence.
	absent []ref.Val
	// roots are the first parts of names; groups all parts that lead to fields.
	roots  []string
	groups map[string]bool
	// syntax parses without expanding macros: as the author wrote it.
	syntax *cel.Env
	// typed parses, checks and plans.
	typed *cel.Env
}

type slot struct {
	field    int
	presence bool
}

func newVocabulary() (*vocabulary, error) {
	// CEL shares this error between all evaluations and writes the first node that
	// returns it into it; once it has a node, nobody writes.
	types.LabelErrNode(1, types.NoSuchOverloadErr())
	v := &vocabulary{fields: declaredFields(), slots: map[string]slot{}, groups: map[string]bool{}}
	limits := []cel.EnvOption{
		cel.ParserRecursionLimit(maxNesting), cel.ExpressionNodeLimit(maxExpressionNodes),
	}
	options := append([]cel.EnvOption{
		cel.StdLib(), ext.Strings(ext.StringsVersion(4)), ext.Sets(ext.SetsVersion(1)), cel.CrossTypeNumericComparisons(true),
		cel.Macros(cel.GlobalMacro("has", 1, v.expandHas)), cel.Lib(functions{}), cel.ASTValidators(cel.ValidateDurationLiterals(), cel.ValidateTimestampLiterals()),
	}, limits...)
	options = append(options, worstOperators()...)
	for i, f := range v.fields {
		v.slots[f.name] = slot{i, false}
		v.slots[presencePrefix+f.name] = slot{i, true}
		v.absent = append(v.absent, absentValue(f.name))
		options = append(options, cel.Variable(f.name, f.typ), cel.Variable(presencePrefix+f.name, cel.BoolType))
		parts := strings.Split(f.name, ".")
		if !slices.Contains(v.roots, parts[0]) {
			v.roots = append(v.roots, parts[0])
		}
		for n := 1; n < len(parts); n++ {
			v.groups[strings.Join(parts[:n], ".")] = true
		}
	}
	var err error
	if v.syntax, err = cel.NewCustomEnv(limits...); err != nil {
		return nil, fmt.Errorf("preparing the parser of rules: %w", err)
	}
	if v.typed, err = cel.NewCustomEnv(options...); err != nil {
		return nil, fmt.Errorf("preparing the checker of rules: %w", err)
	}
	return v, nil
}

// field returns the field called name.
func (v *vocabulary) field(name string) (*field, bool) {
	s, ok := v.slots[name]
	if !ok || s.presence {
		return nil, false
	}
	return v.fields[s.field], true
}

// names lists all fields' names.
func (v *vocabulary) names() []string {
	out := make([]string, len(v.fields))
	for i, f := range v.fields {
		out[i] = f.name
	}
	return out
}

// expandHas gives `has()` a meaning for declared fields too: CEL's own tests
// members of values only.
func (v *vocabulary) expandHas(h parser.ExprHelper, _ ast.Expr, args []ast.Expr) (ast.Expr, *common.Error) {
	if args[0].Kind() != ast.SelectKind {
		return nil, h.NewError(args[0].ID(), "has() takes a field or a member: has(mcp.request.arguments.path)")
	}
	if name, ok := dotted(args[0]); ok {
		if _, declared := v.field(name); declared {
			return h.NewIdent(presencePrefix + name), nil
		}
	}
	sel := args[0].AsSelect()
	return h.NewPresenceTest(sel.Operand(), sel.FieldName()), nil
}

// dotted returns the name that a chain of selections spells.
func dotted(e ast.Expr) (string, bool) {
	switch e.Kind() {
	case ast.IdentKind:
		return e.AsIdent(), true
	case ast.SelectKind:
		sel := e.AsSelect()
		operand, ok := dotted(sel.Operand())
		return operand + "." + sel.FieldName(), ok
	default:
		return "", false
	}
}
