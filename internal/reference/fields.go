package reference

import (
	"strings"

	"github.com/capsem/capsem/internal/policy"
)

// families are the headings of the groups of fields.
func families() map[string]string {
	return map[string]string{
		"": "Of every event", "mcp": "Of MCP messages", "http": "Of HTTP requests",
		"file": "Of files that go in or out", "process": "Of commands",
	}
}

func fieldsPage() string {
	p := newPage("Event fields", "What a rule's `match` and `unless` can read. "+
		"A rule that reads a field of the response phase is judged when the act is done, before its result is handed on; all others before the act. "+
		"A clause on a field that the event does not carry cannot hold; of `a || b` the other side then decides, and a rule that has no other side does not match.")
	fields := policy.Fields()
	for len(fields) > 0 {
		family := fields[0].Family
		title, ok := families()[family]
		if !ok {
			title = "Of " + family
		}
		p.heading(2, title)
		var rows [][]string
		for len(fields) > 0 && fields[0].Family == family {
			f := fields[0]
			doc := f.Doc
			if len(f.Words) > 0 {
				doc += ": `" + strings.Join(f.Words, "`, `") + "`"
			}
			rows = append(rows, []string{code(f.Name), code(f.Type), f.Phase, yes(f.Optional, "may be absent"), doc})
			fields = fields[1:]
		}
		p.rows([]string{"field", "type", "phase", "", "what"}, rows)
	}
	return p.String()
}
