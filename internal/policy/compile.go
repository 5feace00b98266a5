package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common/ast"

	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/event"
)

// Source is the rules of one file.
type Source struct {
	Scope Scope
	File  string
	// Default is config.DefaultAllow or config.DefaultBlock for a profile, ""
	// for the organisation.
	Default string
	Rules   []config.Rule
}

// FromProfile returns the sources of a profile and of the organisation's files.
func FromProfile(p config.Profile, corp ...config.Corp) []Source {
	sources := make([]Source, 0, len(corp)+1)
	for _, c := range corp {
		sources = append(sources, Source{Scope: Corp, File: c.File, Rules: c.Rules})
	}
	return append(sources, Source{Scope: Profile, File: p.File, Default: p.Default, Rules: p.Rules})
}

// Load compiles the rules of the profile at path, under the organisation's.
func Load(path string, corp ...config.Corp) (*Policy, error) {
	p, err := config.LoadProfileFile(path)
	if err != nil {
		return nil, err
	}
	return Compile(FromProfile(p, corp...))
}

// Compile makes a policy. Mistakes are config.Errors, all of them at once; with
// one mistake there is no policy.
func Compile(sources []Source) (*Policy, error) {
	c, err := newCompiler()
	if err != nil {
		return nil, err
	}
	p := c.policy(sources)
	if len(c.errs) > 0 {
		return nil, c.errs
	}
	return p, nil
}

// compiler compiles rules and collects their mistakes.
type compiler struct {
	vocabulary *vocabulary
	errs       config.Errors
	// parsed are the rules that compiled, for the checks that compare rules.
	parsed []*parsedRule
}

// parsedRule is a rule with what it was made from.
type parsedRule struct {
	rule          *rule
	source        config.Rule
	match, unless *expression // unless is nil where there is none
	cost          cost
}

func newCompiler() (*compiler, error) {
	v, err := newVocabulary()
	if err != nil {
		return nil, err
	}
	return &compiler{vocabulary: v}, nil
}

func (c *compiler) policy(sources []Source) *Policy {
	p := &Policy{vocabulary: c.vocabulary, defaultDecision: event.Block}
	first := map[string]config.Position{}
	for _, s := range sources {
		if s.Scope == Profile {
			p.defaultDecision = c.defaultDecision(s)
		}
		for _, r := range s.Rules {
			id := string(s.Scope) + "." + r.ID
			if at, dup := first[id]; dup {
				c.fail(r.Position, "rule %s is declared twice, first at %s", id, at)
				continue
			}
			first[id] = r.Position
			if compiled := c.rule(s.Scope, id, r); compiled != nil {
				compiled.place = len(p.rules)
				p.rules = append(p.rules, compiled)
			}
		}
	}
	p.index = buildIndex(p.rules)
	p.digest = digestOf(p)
	return p
}

func (c *compiler) fail(at config.Position, format string, args ...any) {
	c.errs = append(c.errs, &config.Error{Position: at, Message: fmt.Sprintf(format, args...)})
}

func (c *compiler) defaultDecision(s Source) event.Decision {
	switch s.Default {
	case config.DefaultAllow:
		return event.Allow
	case config.DefaultBlock:
		return event.Block
	}
	c.fail(config.Position{File: s.File}, "default = %q is not supported by this version", s.Default)
	return event.Block
}

// rule compiles one rule, nil if it has mistakes.
func (c *compiler) rule(scope Scope, id string, r config.Rule) *rule {
	before := len(c.errs)
	out := &rule{id: id, scope: scope, reason: r.Reason, digest: ruleDigest(id, r), variants: map[family]*variant{}}
	switch r.Action {
	case config.ActionAllow:
		out.action = event.Allow
	case config.ActionBlock:
		out.action = event.Block
	default:
		c.fail(r.Position, "action %q is not supported by this version", r.Action)
	}
	parsed := &parsedRule{rule: out, source: r}
	parsed.match = c.expression(r.Match)
	if r.Unless.Text != "" {
		parsed.unless = c.expression(r.Unless)
	}
	if parsed.match != nil && out.action == event.Block {
		c.errs = append(c.errs, c.vocabulary.negations(parsed.match)...)
	}
	if len(c.errs) > before {
		return nil
	}
	for _, fam := range []family{always, familyMCP, familyHTTP, familyFile, familyProcess} {
		if v := c.variant(parsed, fam); v != nil {
			out.variants[fam] = v
		}
	}
	if len(c.errs) > before {
		return nil
	}
	c.parsed = append(c.parsed, parsed)
	return out
}

// expression parses, resolves and type-checks an expression, nil if it has
// mistakes.
func (c *compiler) expression(source config.Expression) *expression {
	e, err := c.vocabulary.parseExpression(source)
	if err == nil {
		_, err = c.check(source)
	}
	if err != nil {
		c.add(source.Position, err)
		return nil
	}
	return e
}

func (c *compiler) add(at config.Position, err error) {
	var all config.Errors
	if errors.As(err, &all) {
		c.errs = append(c.errs, all...)
		return
	}
	c.fail(at, "%v", err)
}

// check compiles the text of an expression, which must be a boolean.
func (c *compiler) check(source config.Expression) (*cel.Ast, error) {
	checked, issues := c.vocabulary.typed.Compile(source.Text)
	if issues.Err() != nil {
		return nil, celErrors(source, issues.Errors())
	}
	if t := checked.OutputType(); !t.IsExactType(cel.BoolType) {
		return nil, fmt.Errorf("%w, and this is %s", errNotBoolean, t)
	}
	return checked, nil
}

// variant compiles a rule for the events of one family, nil where it cannot match
// them.
func (c *compiler) variant(p *parsedRule, fam family) *variant {
	match := c.vocabulary.residual(p.match, fam)
	if match.never() {
		return nil
	}
	v := &variant{rule: p.rule, requires: requirements(match.root)}
	if v.match = c.program(p, p.match, match); c.vocabulary.readsResponse(match.root) {
		v.phase = event.Response
	}
	if p.unless == nil {
		return v
	}
	unless := c.vocabulary.residual(p.unless, fam)
	if unless.never() {
		return v
	}
	if v.unless = c.program(p, p.unless, unless); c.vocabulary.readsResponse(unless.root) {
		v.phase = event.Response
	}
	return v
}

// program plans what remains of an expression, under a limit where it is
// expensive.
func (c *compiler) program(p *parsedRule, e *expression, r residual) *program {
	source := e.source
	if !r.whole {
		text, err := r.text()
		if err != nil {
			c.add(source.Position, err)
			return nil
		}
		source.Text = text
	}
	checked, err := c.check(source)
	if err != nil {
		c.add(source.Position, err)
		return nil
	}
	estimate, err := c.vocabulary.estimate(checked)
	if err != nil {
		c.add(source.Position, err)
		return nil
	}
	p.cost = max(p.cost, estimate)
	out, err := c.vocabulary.plan(checked, estimate.expensive())
	if err != nil {
		c.add(source.Position, err)
		return nil
	}
	return out
}

// readsResponse reports whether e needs to know what came of the act.
func (v *vocabulary) readsResponse(e ast.Expr) bool {
	for _, f := range v.fieldsBelow(e) {
		if f.response {
			return true
		}
	}
	return false
}

// buildIndex files every rule under each type of event that it can match.
func buildIndex(rules []*rule) map[event.Type]*[2]bucket {
	index := map[event.Type]*[2]bucket{}
	all := keys()
	for _, t := range event.Types() {
		index[t] = &[2]bucket{}
		for _, r := range rules {
			v := r.variants[familyOf(t)]
			if v == nil {
				continue
			}
			if types, ok := v.requires["event.type"]; ok && !slices.Contains(types, string(t)) {
				continue
			}
			index[t][v.phase].add(v, t, all)
		}
	}
	return index
}

// celErrors places CEL's errors in the file.
func celErrors(source config.Expression, issues []*cel.Error) config.Errors {
	errs := make(config.Errors, len(issues))
	for i, issue := range issues {
		message, _, _ := strings.Cut(issue.Message, "\n")
		errs[i] = &config.Error{
			Position: within(source.Position, issue.Location.Line(), issue.Location.Column()), Message: message,
		}
	}
	return errs
}

// ruleDigest identifies a rule's text, wherever it stands.
func ruleDigest(id string, r config.Rule) string {
	return digestText(id, r.Match.Text, r.Unless.Text, r.Action, r.Reason)
}

func digestOf(p *Policy) string {
	parts := []string{p.defaultDecision.String()}
	for _, r := range p.rules {
		parts = append(parts, r.digest)
	}
	return digestText(parts...)
}

// digestText is one digest over several texts; their lengths keep them apart.
func digestText(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		// A hash never fails to write.
		_, _ = fmt.Fprintf(h, "%d:", len(p))
		_, _ = io.WriteString(h, p)
	}
	return hex.EncodeToString(h.Sum(nil))
}
