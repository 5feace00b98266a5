package policy

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/parser"

	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/event"
)

// Report is what Check found in rule files.
type Report struct {
	// OK says that every file would load. Warnings do not change it.
	OK    bool         `json:"ok"`
	Files []FileReport `json:"files"`
}

// FileReport is what Check found in one file.
type FileReport struct {
	File string `json:"file"`
	// Rules is how many rules the file has, 0 where it does not load.
	Rules    int       `json:"rules"`
	Digest   string    `json:"digest,omitempty"`
	Findings []Finding `json:"findings"`
}

// Severities of a finding.
const (
	SeverityError   = "error"   // the file does not load
	SeverityWarning = "warning" // it loads, and probably does not say what is meant
)

// Finding is one thing to look at.
type Finding struct {
	config.Position
	Severity string `json:"severity"`
	Rule     string `json:"rule,omitempty"`
	Message  string `json:"message"`
}

// String returns the finding as one line, its position first.
func (f Finding) String() string {
	return fmt.Sprintf("%s: %s: %s", f.Position, f.Severity, f.Message)
}

// Check compiles each of the files by itself and looks for rules that load and
// still are mistakes: those that can never match, those that another rule makes
// pointless, and those that are expensive. A file called corp.toml is read as the
// organisation's, all others as profiles.
func Check(files ...string) Report {
	report := Report{OK: true, Files: []FileReport{}}
	for _, file := range files {
		f := checkFile(file)
		for _, finding := range f.Findings {
			report.OK = report.OK && finding.Severity != SeverityError
		}
		report.Files = append(report.Files, f)
	}
	return report
}

func checkFile(file string) FileReport {
	report := FileReport{File: file, Findings: []Finding{}}
	source, err := readSource(file)
	if err != nil {
		report.Findings = append(report.Findings, errorFindings(file, err)...)
		return report
	}
	c, err := newCompiler()
	if err != nil {
		report.Findings = append(report.Findings, errorFindings(file, err)...)
		return report
	}
	p := c.policy([]Source{source})
	if len(c.errs) > 0 {
		report.Findings = append(report.Findings, errorFindings(file, c.errs)...)
		return report
	}
	report.Rules, report.Digest = p.Len(), p.Digest()
	report.Findings = append(report.Findings, c.lint(p)...)
	return report
}

func readSource(file string) (Source, error) {
	if filepath.Base(file) != "corp.toml" {
		p, err := config.LoadProfileFile(file)
		return Source{Scope: Profile, File: file, Default: p.Default, Rules: p.Rules}, err
	}
	corps, err := config.LoadCorp([]string{file})
	if err == nil && len(corps) == 0 {
		err = fmt.Errorf("%s does not exist", file)
	}
	if err != nil {
		return Source{}, err
	}
	return Source{Scope: Corp, File: file, Rules: corps[0].Rules}, nil
}

func errorFindings(file string, err error) []Finding {
	var all config.Errors
	if !errors.As(err, &all) {
		var one *config.Error
		if !errors.As(err, &one) {
			one = &config.Error{Position: config.Position{File: file}, Message: err.Error()}
		}
		all = config.Errors{one}
	}
	out := make([]Finding, len(all))
	for i, e := range all {
		out[i] = Finding{Position: e.Position, Severity: SeverityError, Message: e.Message}
	}
	return out
}

// lint looks at rules that compiled.
func (c *compiler) lint(p *Policy) []Finding {
	var out []Finding
	for _, r := range c.parsed {
		warn := func(at config.Position, format string, args ...any) {
			out = append(out, Finding{Position: at, Severity: SeverityWarning, Rule: r.rule.id, Message: fmt.Sprintf(format, args...)})
		}
		c.lintWords(r, warn)
		if why := neverMatches(r.rule, p); why != "" {
			warn(r.source.Match.Position, "rule %s can never match: %s", r.rule.id, why)
		}
		if r.cost.expensive() {
			warn(r.source.Match.Position, "rule %s is expensive (up to %d by estimate, %d run without a limit): over %d it counts as broken",
				r.rule.id, r.cost, maxStaticCost, maxRuntimeCost)
		}
	}
	out = append(out, c.shadowed()...)
	slices.SortStableFunc(out, func(a, b Finding) int { return a.Line - b.Line })
	return out
}

// lintWords finds comparisons of a field that has a fixed set of words with one
// that is not in it.
func (c *compiler) lintWords(r *parsedRule, warn func(config.Position, string, ...any)) {
	for _, e := range []*expression{r.match, r.unless} {
		if e == nil {
			continue
		}
		visit(e.root, func(node ast.Expr) {
			name, compared, ok := requirement(node)
			f, declared := c.vocabulary.field(name)
			if !ok || !declared || f.words == nil {
				return
			}
			for _, w := range compared {
				if !slices.Contains(f.words, w) {
					hint := ""
					if near := config.Nearest(w, f.words); near != "" {
						hint = fmt.Sprintf(" (did you mean %q?)", near)
					}
					warn(e.errorAt(node.ID(), "").Position, "%s is never %q%s: it is one of %s", name, w, hint, strings.Join(f.words, ", "))
				}
			}
		})
	}
}

func visit(e ast.Expr, f func(ast.Expr)) {
	f(e)
	for _, child := range children(e) {
		visit(child, f)
	}
}

// neverMatches says why no event can match the rule, "" if one might.
func neverMatches(r *rule, p *Policy) string {
	if len(r.variants) == 0 {
		return "its clauses are about different kinds of event"
	}
	contradiction := ""
	for _, v := range r.variants {
		word := ""
		for field, words := range v.requires {
			if len(words) == 0 {
				word = field + " cannot have two values at once"
			}
		}
		if word == "" && p.filed(r) {
			return ""
		}
		if word != "" {
			contradiction = word
		}
	}
	if contradiction == "" {
		contradiction = "no event has such a type"
	}
	return contradiction
}

// filed reports whether the index has the rule for any type of event.
func (p *Policy) filed(r *rule) bool {
	for _, t := range event.Types() {
		v := r.variants[familyOf(t)]
		if v == nil {
			continue
		}
		if types, ok := v.requires["event.type"]; !ok || slices.Contains(types, string(t)) {
			return true
		}
	}
	return false
}

// shadowed finds rules that never decide anything, because a block without an
// exception matches whatever they match, and rules that say the same twice.
func (c *compiler) shadowed() []Finding {
	clauses := make([]map[string]bool, len(c.parsed))
	blocks := map[string][]int{} // unexceptional blocks, by one of their clauses
	for i, r := range c.parsed {
		clauses[i] = map[string]bool{}
		for _, clause := range conjuncts(r.match.root) {
			clauses[i][written(clause, r.match.info)] = true
		}
		if r.rule.action == event.Block && r.unless == nil {
			first := written(conjuncts(r.match.root)[0], r.match.info)
			blocks[first] = append(blocks[first], i)
		}
	}
	var out []Finding
	for i, r := range c.parsed {
		if by := c.shadow(i, clauses, blocks); by != nil {
			out = append(out, Finding{
				Position: r.source.Position, Severity: SeverityWarning, Rule: r.rule.id,
				Message: fmt.Sprintf("rule %s decides nothing: %s blocks all that it matches, at %s", r.rule.id, by.rule.id, by.source.Position),
			})
		}
	}
	return out
}

// shadow returns a block whose clauses all are among those of rule i. Of two
// equal rules the later one is shadowed.
func (c *compiler) shadow(i int, clauses []map[string]bool, blocks map[string][]int) *parsedRule {
	candidates := slices.Clone(blocks["true"])
	for clause := range clauses[i] {
		candidates = append(candidates, blocks[clause]...)
	}
	slices.Sort(candidates)
	for _, j := range candidates {
		if j == i || (len(clauses[j]) == len(clauses[i]) && c.parsed[i].rule.action == event.Block && c.parsed[i].unless == nil && j > i) {
			continue
		}
		if subset(clauses[j], clauses[i]) {
			return c.parsed[j]
		}
	}
	return nil
}

func subset(small, large map[string]bool) bool {
	for clause := range small {
		if clause != "true" && !large[clause] {
			return false
		}
	}
	return true
}

// written is a clause in one form, however it was spaced.
func written(e ast.Expr, info *ast.SourceInfo) string {
	s, err := parser.Unparse(e, info)
	if err != nil {
		// Only what the parser never makes cannot be written: such a clause equals
		// no other.
		return fmt.Sprintf("%p", e)
	}
	return s
}
