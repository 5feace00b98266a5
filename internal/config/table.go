package config

import (
	"fmt"
	"math"
	"slices"
	"sort"
	"strings"
)

// table reads one TOML table. Each key that is asked for is thereby known; close
// refuses what was never asked for. Its methods return the zero value where a key
// is absent or its value is wrong; the latter is recorded in the document.
type table struct {
	doc    *document
	path   string
	values map[string]any
	known  []string
}

func (d *document) table() *table { return &table{doc: d, values: d.root} }

// get marks key as known and returns its value.
func (t *table) get(key string) (any, bool) {
	t.known = append(t.known, key)
	v, ok := t.values[key]
	return v, ok
}

func (t *table) has(key string) bool { _, ok := t.values[key]; return ok }

func (t *table) at(key string) Position { return t.doc.valuePosition(join(t.path, key)) }

func (t *table) keyAt(key string) Position { return t.doc.keyPosition(join(t.path, key)) }

func (t *table) fail(key, format string, args ...any) { t.doc.fail(t.at(key), format, args...) }

// text returns a string, and whether a valid one is there.
func (t *table) text(key string) (string, bool) {
	v, ok := t.get(key)
	if !ok {
		return "", false
	}
	s, ok := v.(string)
	if !ok {
		t.fail(key, "%s must be a string, not %s", key, kind(v))
	}
	return s, ok
}

// integer returns a whole number, and whether a valid one is there.
func (t *table) integer(key string, least, most int64) (int64, bool) {
	v, ok := t.get(key)
	if !ok {
		return 0, false
	}
	n, ok := v.(int64)
	if !ok {
		t.fail(key, "%s must be a whole number, not %s", key, kind(v))
		return 0, false
	}
	if n < least || n > most {
		t.fail(key, "%s is %d: it must be from %d to %d", key, n, least, most)
		return 0, false
	}
	return n, true
}

// choice returns one of the words, fallback where the key is absent or wrong.
// Words that later versions take are refused as such.
func (t *table) choice(key, fallback string, words []string, later ...string) string {
	s, ok := t.text(key)
	switch {
	case !ok, slices.Contains(words, s):
	case slices.Contains(later, s):
		t.fail(key, "%s = %q is not supported by this version: use %s", key, s, alternatives(words))
		return fallback
	default:
		t.fail(key, "%s = %q is not valid: use %s%s", key, s, alternatives(words), suggestion(s, words))
		return fallback
	}
	if !ok {
		return fallback
	}
	return s
}

// texts returns a list of strings.
func (t *table) texts(key string) []string {
	v, ok := t.get(key)
	if !ok {
		return nil
	}
	list, ok := v.([]any)
	if !ok {
		t.fail(key, "%s must be a list of strings, not %s", key, kind(v))
		return nil
	}
	out := make([]string, 0, len(list))
	for i, e := range list {
		s, ok := e.(string)
		if !ok {
			t.doc.fail(t.elementAt(key, i), "%s must hold strings, not %s", key, kind(e))
			continue
		}
		out = append(out, s)
	}
	return out
}

// elementAt is where element i of the list at key stands.
func (t *table) elementAt(key string, i int) Position {
	return t.doc.valuePosition(joinIndex(join(t.path, key), i))
}

// textMap returns a table of strings; valid decides on each entry.
func (t *table) textMap(key string, valid func(name, value string) error) map[string]string {
	sub := t.sub(key)
	if sub == nil {
		return nil
	}
	out := make(map[string]string, len(sub.values))
	for _, name := range sub.names() {
		s, ok := sub.text(name)
		if !ok {
			continue
		}
		if err := valid(name, s); err != nil {
			sub.fail(name, "%s: %v", key, err)
			continue
		}
		out[name] = s
	}
	return out
}

// sub returns the table at key, nil where there is none.
func (t *table) sub(key string) *table {
	v, ok := t.get(key)
	if !ok {
		return nil
	}
	m, ok := v.(map[string]any)
	if !ok {
		t.fail(key, "%s must be a table, not %s", key, kind(v))
		return nil
	}
	return &table{doc: t.doc, path: join(t.path, key), values: m}
}

// subs returns the elements of the array of tables at key.
func (t *table) subs(key string) []*table {
	v, ok := t.get(key)
	if !ok {
		return nil
	}
	list, ok := v.([]any)
	if !ok {
		t.fail(key, "%s must be a list of tables ([[%s]]), not %s", key, key, kind(v))
		return nil
	}
	var out []*table
	for i, e := range list {
		m, ok := e.(map[string]any)
		if !ok {
			t.doc.fail(t.elementAt(key, i), "%s must hold tables, not %s", key, kind(e))
			continue
		}
		out = append(out, &table{doc: t.doc, path: joinIndex(join(t.path, key), i), values: m})
	}
	return out
}

// names returns the table's keys in the order of the file.
func (t *table) names() []string {
	names := make([]string, 0, len(t.values))
	for name := range t.values {
		names = append(names, name)
	}
	sort.Slice(names, func(i, j int) bool {
		a, b := t.doc.order[join(t.path, names[i])], t.doc.order[join(t.path, names[j])]
		if a != b {
			return a < b
		}
		return names[i] < names[j]
	})
	return names
}

// close refuses every key that nobody asked for. later are keys that the design
// has and this version does not enforce.
func (t *table) close(later ...string) {
	for _, name := range t.names() {
		if slices.Contains(t.known, name) {
			continue
		}
		if slices.Contains(later, name) {
			t.doc.fail(t.keyAt(name), "%s is not supported by this version", name)
			continue
		}
		t.doc.fail(t.keyAt(name), "unknown key %q%s", name, suggestion(name, t.known))
	}
}

// suggestion is the end of a message that offers the nearest valid name.
func suggestion(name string, names []string) string {
	if near := Nearest(name, names); near != "" {
		return fmt.Sprintf(" (did you mean %q?)", near)
	}
	return ""
}

// alternatives lists words for a sentence: "a", "b" or "c".
func alternatives(words []string) string {
	quoted := make([]string, len(words))
	for i, w := range words {
		quoted[i] = fmt.Sprintf("%q", w)
	}
	if len(quoted) < 2 {
		return strings.Join(quoted, "")
	}
	last := len(quoted) - 1
	return strings.Join(quoted[:last], ", ") + " or " + quoted[last]
}

// kind names a TOML value's type for people.
func kind(v any) string {
	switch v := v.(type) {
	case string:
		return "a string"
	case int64:
		return "a number"
	case float64:
		if math.IsInf(v, 0) || math.IsNaN(v) {
			return "no finite number"
		}
		return "a number with a fraction"
	case bool:
		return "a boolean"
	case []any:
		return "a list"
	case map[string]any:
		return "a table"
	}
	return "a date or time"
}
