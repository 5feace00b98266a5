// Package route says which server serves a name.
//
// A guest sees one MCP server with namespaced tools: `github__create_issue` is
// the tool `create_issue` of the server `github`. Names are resolved by exact
// look-up in a Table and never taken apart, so that a `__` inside a tool's own
// name cannot be misread. A Table is immutable; a change of any server's tools
// makes a new one.
package route

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
)

// Separator stands between a server's name and a tool's.
const Separator = "__"

// MaxName is how long a name may be that a guest sees, in bytes: many clients
// refuse tools with longer ones.
const MaxName = 64

// hashLen is how much of a name's hash replaces its end, in hex digits.
const hashLen = 8

// Server is one server and what it offers, in its own order.
type Server struct {
	Name  string
	Tools []Tool
}

// Tool is a tool as its server lists it.
type Tool struct {
	// Name is the server's own.
	Name string
	// Definition is the object that the server sent, byte for byte.
	Definition json.RawMessage
	// ReadOnly is what the server claims with annotations.readOnlyHint.
	ReadOnly bool
}

// Entry is one tool that a guest can call.
type Entry struct {
	// Name is what the guest calls it, Server and Tool whom that reaches.
	Name, Server, Tool string
	Definition         json.RawMessage
	ReadOnly           bool
	// Digest identifies the definition: hex SHA-256 of its bytes.
	Digest string
}

// Conflict is a tool that cannot be offered because its name is taken.
type Conflict struct {
	Name string
	// Kept has the name; Dropped would have had it too.
	Kept, Dropped Entry
}

// Error says which two tools collide.
func (c Conflict) Error() string {
	return fmt.Sprintf("the tools %q of server %s and %q of server %s would both be called %s; the first keeps the name",
		c.Kept.Tool, c.Kept.Server, c.Dropped.Tool, c.Dropped.Server, c.Name)
}

// Table is every tool that a guest can call. It is safe for concurrent use.
type Table struct {
	entries []Entry
	byName  map[string]int
}

// New makes a table of servers, in their order. Where two tools would have one
// name the earlier one keeps it, and the conflict is returned.
func New(servers []Server) (*Table, []Conflict) {
	t := &Table{byName: map[string]int{}}
	var conflicts []Conflict
	for _, s := range servers {
		for _, tool := range s.Tools {
			sum := sha256.Sum256(tool.Definition)
			e := Entry{
				Name: Name(s.Name, tool.Name), Server: s.Name, Tool: tool.Name,
				Definition: tool.Definition, ReadOnly: tool.ReadOnly, Digest: hex.EncodeToString(sum[:]),
			}
			if i, taken := t.byName[e.Name]; taken {
				conflicts = append(conflicts, Conflict{Name: e.Name, Kept: t.entries[i], Dropped: e})
				continue
			}
			t.byName[e.Name] = len(t.entries)
			t.entries = append(t.entries, e)
		}
	}
	return t, conflicts
}

// Tool finds the tool that a guest calls name.
func (t *Table) Tool(name string) (Entry, bool) {
	i, ok := t.byName[name]
	if !ok {
		return Entry{}, false
	}
	return t.entries[i], true
}

// Tools returns every entry, in the order of the servers and of their lists.
// The caller must not change it.
func (t *Table) Tools() []Entry { return t.entries }

// Equal reports whether a guest would see the same tools in both tables.
func (t *Table) Equal(other *Table) bool {
	if len(t.entries) != len(other.entries) {
		return false
	}
	for i, e := range t.entries {
		if o := other.entries[i]; e.Name != o.Name || e.Digest != o.Digest {
			return false
		}
	}
	return true
}

// Name is what a guest calls a server's tool. Characters that models' APIs
// refuse in names become '_', and a name that was changed or is longer than
// MaxName ends in a hash of the whole, so that it is stable and its own.
func Name(server, tool string) string {
	whole := server + Separator + tool
	name := strings.Map(allowed, whole)
	if name == whole && len(name) <= MaxName {
		return name
	}
	sum := sha256.Sum256([]byte(whole))
	end := "_" + hex.EncodeToString(sum[:])[:hashLen]
	return name[:min(len(name), MaxName-len(end))] + end
}

// Owner reports whether name could be a tool of the server, known or not.
func Owner(server, name string) bool {
	return strings.HasPrefix(name, server+Separator)
}

func allowed(r rune) rune {
	switch {
	case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '_', r == '-':
		return r
	}
	return '_'
}
