package doctor

import (
	"errors"
	"fmt"
	"strings"
)

// maxDepth bounds the nesting of an expression.
const maxDepth = 32

// Filter says whether a check of this name is wanted.
type Filter func(name string) bool

// ParseFilter reads an expression as pytest's -k has it: words that are parts of
// a name, without regard to case, joined by and, or, not and parentheses. The
// empty expression wants everything.
func ParseFilter(expr string) (Filter, error) {
	p := &parser{words: split(expr)}
	if len(p.words) == 0 {
		return func(string) bool { return true }, nil
	}
	f, err := p.or(0)
	if err == nil && len(p.words) > 0 {
		err = fmt.Errorf("%q has no place there", p.words[0])
	}
	if err != nil {
		return nil, fmt.Errorf("reading the expression %q: %w", expr, err)
	}
	return f, nil
}

// split cuts an expression into words and parentheses.
func split(expr string) []string {
	return strings.Fields(strings.NewReplacer("(", " ( ", ")", " ) ").Replace(expr))
}

// parser is a recursive descent over the words that are left.
type parser struct{ words []string }

// next takes the next word if it is w.
func (p *parser) next(w string) bool {
	if len(p.words) == 0 || p.words[0] != w {
		return false
	}
	p.words = p.words[1:]
	return true
}

func (p *parser) or(depth int) (Filter, error) {
	left, err := p.and(depth)
	for err == nil && p.next("or") {
		a := left
		var b Filter
		b, err = p.and(depth)
		left = func(name string) bool { return a(name) || b(name) }
	}
	return left, err
}

func (p *parser) and(depth int) (Filter, error) {
	left, err := p.not(depth)
	for err == nil && p.next("and") {
		a := left
		var b Filter
		b, err = p.not(depth)
		left = func(name string) bool { return a(name) && b(name) }
	}
	return left, err
}

func (p *parser) not(depth int) (Filter, error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("it is nested deeper than %d", maxDepth)
	}
	switch {
	case p.next("not"):
		f, err := p.not(depth + 1)
		return func(name string) bool { return !f(name) }, err
	case p.next("("):
		f, err := p.or(depth + 1)
		if err == nil && !p.next(")") {
			err = errors.New("a parenthesis is not closed")
		}
		return f, err
	case len(p.words) == 0:
		return nil, errors.New("it ends too early")
	}
	word := p.words[0]
	switch word {
	case "and", "or", ")":
		return nil, fmt.Errorf("%q has no place there", word)
	}
	p.words = p.words[1:]
	word = strings.ToLower(word)
	return func(name string) bool { return strings.Contains(strings.ToLower(name), word) }, nil
}
