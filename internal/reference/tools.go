package reference

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/capsem/capsem/internal/builtin"
	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/mcptools"
)

func toolsPage() (string, error) {
	p := newPage("Tools", "What AI clients can call. "+
		"`capsem-mcp` serves the first kind on this machine; the MCP server in a VM, `/run/capsem-mcp-server`, the second, beside the tools of the profile's servers.")
	p.heading(2, "Tools of capsem-mcp")
	p.text("Each result is JSON: as structured content, and the same as text. A failure is a tool error (`isError`) whose text says what happened, which rule, and what to do next. `id` is a VM's name or id.")
	for _, t := range mcptools.Describe() {
		p.heading(3, t.Name)
		p.text(t.Text)
		p.text("Hints: " + hints(t.ReadOnly, t.Destructive, t.Idempotent, t.OpenWorld) + ".")
		p.members("parameter", t.Parameters)
		p.members("result", t.Results)
	}
	p.heading(2, "Built-in tools in a VM")
	p.text("They are called with the prefix `builtin__`.")
	for _, raw := range builtin.Definitions() {
		if err := p.guestTool(raw); err != nil {
			return "", err
		}
	}
	return p.String(), nil
}

func hints(readOnly, destructive, idempotent, openWorld bool) string {
	var words []string
	for _, h := range []struct {
		set       bool
		word, not string
	}{
		{readOnly, "read-only", "changes things"},
		{destructive, "can destroy", ""},
		{idempotent, "repeating changes nothing", ""},
		{openWorld, "reaches beyond this machine", ""},
	} {
		if h.set {
			words = append(words, h.word)
		} else if h.not != "" {
			words = append(words, h.not)
		}
	}
	return strings.Join(words, ", ")
}

func (p *page) members(what string, members []mcptools.Member) {
	if len(members) == 0 {
		return
	}
	var rows [][]string
	for _, m := range members {
		row := []string{code(m.Name), m.Type, m.Text}
		if what == "parameter" {
			fallback := code(string(m.Default))
			if m.Required {
				fallback = "required"
			}
			row = []string{code(m.Name), m.Type, fallback, m.Text}
		}
		rows = append(rows, row)
	}
	header := []string{what, "type", "what"}
	if what == "parameter" {
		header = []string{what, "type", "default", "what"}
	}
	p.rows(header, rows)
}

// guestTool writes a tool from its definition in tools/list.
func (p *page) guestTool(raw json.RawMessage) error {
	var t struct {
		Name, Description string
		InputSchema       struct {
			Properties json.RawMessage
			Required   []string
		}
	}
	if err := json.Unmarshal(raw, &t); err != nil {
		return fmt.Errorf("reading the definition of a tool: %w", err)
	}
	p.heading(3, "builtin__"+t.Name)
	p.text(t.Description)
	required := make(map[string]bool)
	for _, name := range t.InputSchema.Required {
		required[name] = true
	}
	var members []mcptools.Member
	for name, schema := range jsonrpc.Members(t.InputSchema.Properties) {
		var s struct {
			Type, Description string
			Default           json.RawMessage
		}
		if err := json.Unmarshal(schema, &s); err != nil {
			return fmt.Errorf("reading the schema of %s: %w", name, err)
		}
		members = append(members, mcptools.Member{Name: name, Type: s.Type, Text: s.Description, Required: required[name], Default: s.Default})
	}
	p.members("parameter", members)
	return nil
}
