package policy

import (
	"iter"
	"slices"

	"cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/common/operators"

	"github.com/capsem/capsem/internal/event"
)

// key is a field by whose value rules are looked up.
type key struct {
	field string
	// value returns the field's value; it is there for every event of types.
	value func(*event.Event) string
	types []event.Type
}

// keys are the fields of the index, the most telling first. A key serves only
// types of event that always have it: then a rule that requires another word
// cannot match, nor can it be broken, for `false && x` is false whatever x is.
func keys() []key {
	mcpTypes := slices.DeleteFunc(event.Types(), func(t event.Type) bool { return familyOf(t) != familyMCP })
	call := []event.Type{event.MCPToolCall}
	return []key{
		{"tool.name", toolName, event.Types()},
		{"mcp.tool_call.name", toolName, call},
		{"mcp.tool_call.tool", func(e *event.Event) string { return e.MCP.Tool.Tool }, call},
		{"mcp.server.name", func(e *event.Event) string { return e.MCP.Server }, mcpTypes},
		{"http.host", func(e *event.Event) string { return e.HTTP.Host }, []event.Type{event.HTTP}},
		{"mcp.method", func(e *event.Event) string { return e.MCP.Method }, mcpTypes},
		{"intent", func(e *event.Event) string { return string(e.Intent) }, event.Types()},
		{"initiator.kind", func(e *event.Event) string { return string(e.Initiator.Kind) }, event.Types()},
	}
}

// bucket holds the rules for one type of event in one phase.
type bucket struct {
	// rest are the rules without a key; they are candidates for every event.
	rest   []*variant
	tables []keyTable
}

// keyTable holds the rules that require one of some words of one field.
type keyTable struct {
	key   key
	rules map[string][]*variant
}

// add files a rule under its most telling key.
func (b *bucket) add(v *variant, t event.Type, all []key) {
	for _, k := range all {
		words, ok := v.requires[k.field]
		if !ok || !slices.Contains(k.types, t) {
			continue
		}
		i := slices.IndexFunc(b.tables, func(have keyTable) bool { return have.key.field == k.field })
		if i < 0 {
			i = len(b.tables)
			b.tables = append(b.tables, keyTable{k, map[string][]*variant{}})
		}
		for _, w := range words {
			b.tables[i].rules[w] = append(b.tables[i].rules[w], v)
		}
		return
	}
	b.rest = append(b.rest, v)
}

// candidates iterates over the rules that could match an event of the bucket's
// type. An event that lacks what its type promises panics, and is blocked.
func (b *bucket) candidates(ev *event.Event) iter.Seq[*variant] {
	return func(yield func(*variant) bool) {
		for _, t := range b.tables {
			for _, v := range t.rules[t.key.value(ev)] {
				if !yield(v) {
					return
				}
			}
		}
		for _, v := range b.rest {
			if !yield(v) {
				return
			}
		}
	}
}

// requirements finds the words that fields must have for e to hold. Several
// requirements of one field leave what satisfies all of them.
func requirements(e ast.Expr) map[string][]string {
	out := map[string][]string{}
	for _, clause := range conjuncts(e) {
		field, words, ok := requirement(clause)
		if !ok {
			continue
		}
		if before, twice := out[field]; twice {
			words = slices.DeleteFunc(words, func(w string) bool { return !slices.Contains(before, w) })
		}
		out[field] = words
	}
	return out
}

// requirement reads `field == "word"`, `"word" == field` and
// `field in ["word", …]`.
func requirement(clause ast.Expr) (field string, words []string, ok bool) {
	if args, is := isCall(clause, operators.Equals); is {
		for i := range args {
			name, named := dotted(args[i])
			if word, literal := stringLiteral(args[1-i]); named && literal {
				return name, []string{word}, true
			}
		}
		return "", nil, false
	}
	args, is := isCall(clause, operators.In)
	if !is || args[1].Kind() != ast.ListKind {
		return "", nil, false
	}
	name, named := dotted(args[0])
	for _, e := range args[1].AsList().Elements() {
		word, literal := stringLiteral(e)
		if !literal {
			return "", nil, false
		}
		if !slices.Contains(words, word) {
			words = append(words, word)
		}
	}
	return name, words, named
}
