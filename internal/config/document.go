package config

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sort"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
)

// maxFileBytes bounds a configuration file. 10,000 rules of 100 bytes fit.
const maxFileBytes = 1 << 20

// document is one TOML file: its values, and where each key and value stands.
// Mistakes are collected, so that a person learns of all of them at once.
type document struct {
	file   string
	data   []byte
	keys   map[string]int // offset of a key, by its path
	values map[string]int // offset of a value's text, where it has one
	order  map[string]int // place of a key among all keys, by its path
	lines  []int          // offset of each line's first byte
	root   map[string]any
	errs   Errors
}

// pathSeparator joins the parts of a key's path. A TOML key cannot hold it
// unescaped, and validated names never do.
const pathSeparator = "\x00"

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + pathSeparator + key
}

func joinIndex(path string, i int) string { return join(path, fmt.Sprintf("[%d]", i)) }

// readFile reads a file of at most maxFileBytes.
func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	if len(data) > maxFileBytes {
		return nil, &Error{Position{File: path}, fmt.Sprintf("the file is larger than %d bytes", maxFileBytes)}
	}
	return data, nil
}

// parse reads data as TOML. A syntax error is returned as *Error.
func parse(file string, data []byte) (*document, error) {
	d := &document{
		file: file, data: data, keys: map[string]int{}, values: map[string]int{}, order: map[string]int{},
		lines: []int{0}, root: map[string]any{},
	}
	if err := toml.Unmarshal(data, &d.root); err != nil {
		var de *toml.DecodeError
		if errors.As(err, &de) {
			line, column := de.Position()
			return nil, &Error{Position{file, line, column}, strings.TrimPrefix(de.Error(), "toml: ")}
		}
		return nil, &Error{Position{File: file}, strings.TrimPrefix(err.Error(), "toml: ")}
	}
	for i, c := range data {
		if c == '\n' {
			d.lines = append(d.lines, i+1)
		}
	}
	d.index()
	return d, nil
}

// index records where every key and value stands. The file has parsed before.
func (d *document) index() {
	var p unstable.Parser
	p.Reset(d.data)
	prefix := ""
	tables := map[string]int{} // elements seen of each array of tables
	for p.NextExpression() {
		e := p.Expression()
		switch e.Kind {
		case unstable.Table:
			prefix = d.keyPath("", e.Key(), tables, true)
		case unstable.ArrayTable:
			prefix = d.keyPath("", e.Key(), tables, false)
			n := tables[prefix]
			tables[prefix]++
			element := joinIndex(prefix, n)
			d.note(element, d.keys[prefix])
			prefix = element
		case unstable.KeyValue:
			d.keyValue(prefix, e)
		default:
		}
	}
}

// keyPath records the parts of a dotted key under prefix and returns its path.
// A part that names an array of tables means the array's last element, the last
// part only if indexLast is set.
func (d *document) keyPath(prefix string, key unstable.Iterator, tables map[string]int, indexLast bool) string {
	path := prefix
	for key.Next() {
		n := key.Node()
		path = join(path, string(n.Data))
		d.note(path, int(n.Raw.Offset))
		if count := tables[path]; count > 0 && (indexLast || !key.IsLast()) {
			path = joinIndex(path, count-1)
		}
	}
	return path
}

func (d *document) keyValue(prefix string, kv *unstable.Node) {
	path := d.keyPath(prefix, kv.Key(), nil, false)
	d.value(path, d.keys[path], kv.Value())
}

func (d *document) value(path string, keyOffset int, v *unstable.Node) {
	offset := keyOffset
	if v.Raw.Length > 0 {
		offset = int(v.Raw.Offset)
		d.values[path] = offset
	}
	switch v.Kind {
	case unstable.InlineTable:
		for it := v.Children(); it.Next(); {
			if it.Node().Kind == unstable.KeyValue {
				d.keyValue(path, it.Node())
			}
		}
	case unstable.Array:
		i := 0
		for it := v.Children(); it.Next(); {
			if it.Node().Kind == unstable.Comment {
				continue
			}
			element := joinIndex(path, i)
			d.note(element, offset)
			d.value(element, offset, it.Node())
			i++
		}
	default:
	}
}

// note keeps the last place where a path stands: for an array of tables, that of
// its newest element, which is what its own path is looked up for.
func (d *document) note(path string, offset int) {
	d.keys[path] = offset
	if _, seen := d.order[path]; !seen {
		d.order[path] = len(d.order)
	}
}

func (d *document) at(offset int) Position {
	line := sort.SearchInts(d.lines, offset+1)
	return Position{File: d.file, Line: line, Column: offset - d.lines[line-1] + 1}
}

// keyPosition is where the key at path stands, the file as a whole if it is not
// in it.
func (d *document) keyPosition(path string) Position {
	if offset, ok := d.keys[path]; ok {
		return d.at(offset)
	}
	return Position{File: d.file}
}

// valuePosition is where the value at path begins, else where its key stands.
func (d *document) valuePosition(path string) Position {
	if offset, ok := d.values[path]; ok {
		return d.at(offset)
	}
	return d.keyPosition(path)
}

// textPosition is where the first byte inside the string at path stands, past its
// quotes. Text after an escape in it stands further right than its index says.
func (d *document) textPosition(path string) Position {
	offset, ok := d.values[path]
	if !ok {
		return d.keyPosition(path)
	}
	for _, quotes := range []string{"\"\"\"", "'''"} {
		if rest, ok := strings.CutPrefix(string(d.data[offset:min(len(d.data), offset+5)]), quotes); ok {
			skipped := 3
			if strings.HasPrefix(rest, "\r\n") {
				skipped = 5
			} else if strings.HasPrefix(rest, "\n") {
				skipped = 4
			}
			return d.at(offset + skipped)
		}
	}
	return d.at(offset + 1)
}

func (d *document) fail(at Position, format string, args ...any) {
	d.errs = append(d.errs, &Error{at, fmt.Sprintf(format, args...)})
}

// err returns the mistakes found, in the order of the file, nil if there are
// none.
func (d *document) err() error {
	if len(d.errs) == 0 {
		return nil
	}
	sort.SliceStable(d.errs, func(i, j int) bool {
		a, b := d.errs[i], d.errs[j]
		if a.Line != b.Line {
			return a.Line < b.Line
		}
		return a.Column < b.Column
	})
	return d.errs
}
