package policy

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/common/operators"
	"cel.dev/cel-go/common/types"

	"github.com/capsem/capsem/internal/config"
)

// expression is one `match` or `unless`, as the author wrote it: parsed without
// expanding macros, every name resolved.
type expression struct {
	source config.Expression
	root   ast.Expr
	info   *ast.SourceInfo
	// reads are the fields that it depends on, also those it only tests.
	reads map[*field]bool
	// tested are the paths of which it asks has(), or whether they are in a map.
	tested map[string]bool
}

// parseExpression parses and resolves one expression.
func (v *vocabulary) parseExpression(source config.Expression) (*expression, error) {
	parsed, issues := v.syntax.Parse(source.Text)
	if issues.Err() != nil {
		return nil, celErrors(source, issues.Errors())
	}
	native := parsed.NativeRep()
	e := &expression{
		source: source, root: native.Expr(), info: native.SourceInfo(),
		reads: map[*field]bool{}, tested: map[string]bool{},
	}
	r := resolver{vocabulary: v, expression: e}
	r.resolve(e.root)
	if len(r.mistakes) == 0 {
		return e, nil
	}
	return nil, r.mistakes
}

// errorAt makes an error that points at a node of the expression.
func (e *expression) errorAt(node int64, format string, args ...any) *config.Error {
	loc := e.info.GetStartLocation(node)
	return &config.Error{
		Position: within(e.source.Position, loc.Line(), loc.Column()), Message: fmt.Sprintf(format, args...),
	}
}

// within places a line (from 1) and a column (from 0) of an expression in its file.
func within(start config.Position, line, column int) config.Position {
	switch {
	case line < 1:
	case line == 1:
		start.Column += column
	default:
		start.Line += line - 1
		start.Column = column + 1
	}
	return start
}

// resolver walks an expression and finds out what each name means.
type resolver struct {
	vocabulary *vocabulary
	expression *expression
	// locals are the variables of the macros around the node.
	locals   []string
	mistakes config.Errors
}

func (r *resolver) fail(e ast.Expr, format string, args ...any) {
	err := r.expression.errorAt(e.ID(), format, args...)
	if e.Kind() == ast.SelectKind {
		err.Column++ // CEL places a selection at its dot
	}
	r.mistakes = append(r.mistakes, err)
}

func (r *resolver) resolve(e ast.Expr) {
	switch e.Kind() {
	case ast.IdentKind, ast.SelectKind:
		r.name(e)
	case ast.CallKind:
		r.call(e)
	default:
		for _, child := range children(e) {
			r.resolve(child)
		}
	}
}

// name resolves an identifier or a selection.
func (r *resolver) name(e ast.Expr) {
	chain, ok := dotted(e)
	if !ok { // a member of a computed value
		r.resolve(e.AsSelect().Operand())
		return
	}
	parts := strings.Split(chain, ".")
	if slices.Contains(r.locals, parts[0]) || isTypeName(chain) {
		return
	}
	for n := 1; n <= len(parts); n++ {
		prefix := strings.Join(parts[:n], ".")
		if f, ok := r.vocabulary.field(prefix); ok {
			r.expression.reads[f] = true
			return
		}
		if !r.vocabulary.groups[prefix] {
			r.unknown(ancestor(e, len(parts)-n), prefix)
			return
		}
	}
	r.fail(e, "%s is a group of fields, not a field: choose one of %s", chain, strings.Join(r.below(chain), ", "))
}

func (r *resolver) unknown(e ast.Expr, name string) {
	if slices.Contains(laterRoots(), name) {
		r.fail(e, "the fields of %s are not supported by this version", name)
		return
	}
	r.fail(e, "unknown field %s%s", name, r.suggest(name))
}

// suggest offers the nearest name for one that is unknown, else all that its
// group has.
func (r *resolver) suggest(name string) string {
	group, last, dotted := cutLastDot(name)
	if !dotted {
		if near := config.Nearest(name, r.vocabulary.roots); near != "" {
			return fmt.Sprintf(" (did you mean %s?)", near)
		}
		return fmt.Sprintf(" (there are %s)", strings.Join(r.vocabulary.roots, ", "))
	}
	var siblings []string
	for _, full := range r.below(group) {
		sibling, _, _ := strings.Cut(strings.TrimPrefix(full, group+"."), ".")
		siblings = append(siblings, sibling)
	}
	if near := config.Nearest(last, siblings); near != "" {
		return fmt.Sprintf(" (did you mean %s.%s?)", group, near)
	}
	return fmt.Sprintf(" (%s has %s)", group, strings.Join(r.below(group), ", "))
}

// below lists the fields of a group.
func (r *resolver) below(group string) []string {
	var out []string
	for _, name := range r.vocabulary.names() {
		if strings.HasPrefix(name, group+".") {
			out = append(out, name)
		}
	}
	return out
}

func cutLastDot(s string) (before, after string, ok bool) {
	i := strings.LastIndexByte(s, '.')
	if i < 0 {
		return "", s, false
	}
	return s[:i], s[i+1:], true
}

// ancestor returns the operand n selections inwards.
func ancestor(e ast.Expr, n int) ast.Expr {
	for ; n > 0; n-- {
		e = e.AsSelect().Operand()
	}
	return e
}

func isTypeName(s string) bool {
	return slices.Contains([]string{"bool", "bytes", "double", "int", "list", "map", "null_type", "string", "type", "uint"}, s)
}

// call resolves a call, or a macro.
func (r *resolver) call(e ast.Expr) {
	c := e.AsCall()
	name := c.FunctionName()
	r.checkFunction(e)
	if name == "has" && !c.IsMemberFunction() {
		r.has(e)
		return
	}
	if name == operators.In && len(c.Args()) == 2 {
		if member, ok := stringLiteral(c.Args()[0]); ok {
			if path, ok := pathOf(c.Args()[1]); ok {
				r.expression.tested[path+"."+member] = true
			}
		}
	}
	if c.IsMemberFunction() && !r.namespaced(c) {
		r.resolve(c.Target())
	}
	args := c.Args()
	if c.IsMemberFunction() && isIteration(name) && len(args) > 0 {
		r.iteration(args)
		return
	}
	for _, arg := range args {
		r.resolve(arg)
	}
}

// namespaced reports whether c calls a function like sets.contains, which the
// syntax shows as a call on `sets`.
func (r *resolver) namespaced(c ast.CallExpr) bool {
	if !c.IsMemberFunction() {
		return false
	}
	namespace, ok := dotted(c.Target())
	return ok && r.vocabulary.typed.HasFunction(namespace+"."+c.FunctionName())
}

// has resolves what a has() asks about. Its own member is tested; what leads to
// it is read.
func (r *resolver) has(e ast.Expr) {
	args := e.AsCall().Args()
	if len(args) != 1 || args[0].Kind() != ast.SelectKind {
		r.fail(e, "has() takes one field or member: has(mcp.request.arguments.path)")
		return
	}
	r.name(args[0])
	if path, ok := pathOf(args[0]); ok {
		r.expression.tested[path] = true
	}
}

// iteration resolves the arguments of a macro: a variable, then what uses it.
func (r *resolver) iteration(args []ast.Expr) {
	if args[0].Kind() != ast.IdentKind {
		r.fail(args[0], "the first argument of a macro must be a name")
		return
	}
	name := args[0].AsIdent()
	if slices.Contains(r.vocabulary.roots, name) || slices.Contains(laterRoots(), name) {
		r.fail(args[0], "variable %s hides the fields of that name: choose another", name)
	}
	r.locals = append(r.locals, name)
	for _, arg := range args[1:] {
		r.resolve(arg)
	}
	r.locals = r.locals[:len(r.locals)-1]
}

func isIteration(function string) bool {
	return slices.Contains([]string{operators.All, operators.Exists, operators.ExistsOne, operators.Filter, operators.Map}, function)
}

// checkFunction refuses functions that do not exist, and arguments that would
// make a guest's text the cost of a rule.
func (r *resolver) checkFunction(e ast.Expr) {
	c := e.AsCall()
	name, args := c.FunctionName(), c.Args()
	if r.namespaced(c) {
		return
	}
	switch {
	case name == "has" || isIteration(name):
	case name == "matches" || name == "imatches":
		r.checkPattern(e)
	case slices.Contains([]string{"contains_pii", "cidr", "ip", "isIP", "isCIDR"}, name):
		r.fail(e, "function %s() is not supported by this version", name)
	case !r.vocabulary.typed.HasFunction(name):
		r.fail(e, "unknown function %s()%s", name, r.suggestFunction(name))
	case name == "replace":
		r.checkReplacement(e, args)
	}
}

func (r *resolver) suggestFunction(name string) string {
	names := []string{"has", "imatches", operators.All, operators.Exists, operators.ExistsOne, operators.Filter, operators.Map}
	for f := range r.vocabulary.typed.Functions() {
		if f != "" && f[0] >= 'a' && f[0] <= 'z' {
			names = append(names, f)
		}
	}
	slices.Sort(names)
	if near := config.Nearest(name, names); near != "" {
		return fmt.Sprintf(" (did you mean %s()?)", near)
	}
	return ""
}

// checkPattern takes literal patterns only: one that the guest could choose is
// not a rule.
func (r *resolver) checkPattern(e ast.Expr) {
	args := e.AsCall().Args()
	if len(args) == 0 {
		return // the checker says what is missing
	}
	last := args[len(args)-1]
	pattern, ok := stringLiteral(last)
	if !ok {
		r.fail(last, "the pattern of %s() must be a literal", e.AsCall().FunctionName())
		return
	}
	if _, err := regexp.Compile(pattern); err != nil {
		r.fail(last, "the pattern of %s() is not valid: %v", e.AsCall().FunctionName(), err)
	}
}

// maxGrowth is how many times longer a text may become by replace().
const maxGrowth = 16

func (r *resolver) checkReplacement(e ast.Expr, args []ast.Expr) {
	if len(args) < 2 {
		return // the checker says what is missing
	}
	before, ok1 := stringLiteral(args[0])
	after, ok2 := stringLiteral(args[1])
	if !ok1 || !ok2 || before == "" || len(after) > maxGrowth*len(before) {
		r.fail(e, "replace() takes two literals, the first not empty, the second at most %d times as long", maxGrowth)
	}
}

func stringLiteral(e ast.Expr) (string, bool) {
	if e.Kind() != ast.LiteralKind {
		return "", false
	}
	s, ok := e.AsLiteral().(types.String)
	return string(s), ok
}

// pathOf spells the way to a member: selections and literal indexes are equal.
// It reports false for computed values.
func pathOf(e ast.Expr) (string, bool) {
	switch e.Kind() {
	case ast.IdentKind:
		return e.AsIdent(), true
	case ast.SelectKind:
		sel := e.AsSelect()
		operand, ok := pathOf(sel.Operand())
		return operand + "." + sel.FieldName(), ok
	case ast.CallKind:
		c := e.AsCall()
		if c.FunctionName() != operators.Index || len(c.Args()) != 2 {
			return "", false
		}
		operand, ok := pathOf(c.Args()[0])
		if member, literal := stringLiteral(c.Args()[1]); literal {
			return operand + "." + member, ok
		}
		return operand + ".[]", ok
	default:
		return "", false
	}
}

// children lists the expressions directly below e.
func children(e ast.Expr) []ast.Expr {
	switch e.Kind() {
	case ast.CallKind:
		c := e.AsCall()
		if c.IsMemberFunction() {
			return append([]ast.Expr{c.Target()}, c.Args()...)
		}
		return c.Args()
	case ast.SelectKind:
		return []ast.Expr{e.AsSelect().Operand()}
	case ast.ListKind:
		return e.AsList().Elements()
	case ast.MapKind:
		var out []ast.Expr
		for _, entry := range e.AsMap().Entries() {
			out = append(out, entry.AsMapEntry().Key(), entry.AsMapEntry().Value())
		}
		return out
	case ast.StructKind:
		var out []ast.Expr
		for _, f := range e.AsStruct().Fields() {
			out = append(out, f.AsStructField().Value())
		}
		return out
	default:
		return nil
	}
}

// fieldsBelow lists the fields that e or anything below it reads or tests. Every
// name in it is resolved, and no local variable hides a field.
func (v *vocabulary) fieldsBelow(e ast.Expr) []*field {
	if chain, ok := dotted(e); ok {
		parts := strings.Split(chain, ".")
		for n := 1; n <= len(parts); n++ {
			if f, ok := v.field(strings.Join(parts[:n], ".")); ok {
				return []*field{f}
			}
		}
		return nil
	}
	var out []*field
	for _, child := range children(e) {
		out = append(out, v.fieldsBelow(child)...)
	}
	return out
}

// isCall reports whether e calls function, and returns its arguments.
func isCall(e ast.Expr, function string) ([]ast.Expr, bool) {
	if e.Kind() != ast.CallKind || e.AsCall().FunctionName() != function {
		return nil, false
	}
	return e.AsCall().Args(), true
}
