// Package reference writes docs/reference from the code that it describes: the
// host tools from their schemas, the command line from its commands, rules'
// fields, configuration keys and ledger tables from their declarations, and the
// bounds of the wire from their constants.
//
// The pages are checked in, so that they can be read without building anything,
// and a test fails when one is not what the code says.
package reference

import (
	"fmt"
	"strings"
)

//go:generate go test -count=1 -run ^TestPagesSayWhatTheCodeSays$ . -update

// Folder is where the pages are, from the root of the repository.
const Folder = "docs/reference"

// Page is one generated file.
type Page struct {
	// Name is the file's name in Folder.
	Name string
	Text string
}

// Pages writes all pages.
func Pages() ([]Page, error) {
	tools, err := toolsPage()
	if err != nil {
		return nil, err
	}
	return []Page{
		{"README.md", indexPage()},
		{"tools.md", tools},
		{"cli.md", cliPage()},
		{"config.md", configPage()},
		{"event-fields.md", fieldsPage()},
		{"ledger.md", ledgerPage()},
		{"wire.md", wirePage()},
	}, nil
}

func indexPage() string {
	p := newPage("Reference", "What there is, with its exact names and bounds.")
	p.rows([]string{"page", "what"}, [][]string{
		{"[tools.md](tools.md)", "the tools of `capsem-mcp`, for AI clients on this machine, and of the MCP server inside a VM"},
		{"[cli.md](cli.md)", "the commands of `capsem`"},
		{"[config.md](config.md)", "the keys of configuration files"},
		{"[event-fields.md](event-fields.md)", "what rules can read"},
		{"[ledger.md](ledger.md)", "the tables of a ledger"},
		{"[wire.md](wire.md)", "bounds, ports and codes of the protocols"},
	})
	return p.String()
}

// page is a page that is being written, in Markdown.
type page struct{ strings.Builder }

// newPage begins a page.
func newPage(title, about string) *page {
	p := &page{}
	p.text("<!-- Written by `just gen` from the code. Do not edit. -->")
	p.heading(1, title)
	p.text(about)
	return p
}

func (p *page) heading(level int, title string) {
	p.text(strings.Repeat("#", level) + " " + title)
}

// text writes a paragraph.
func (p *page) text(s string) {
	if p.Len() > 0 {
		p.WriteString("\n")
	}
	p.WriteString(strings.TrimSpace(s) + "\n")
}

// code writes a block of code.
func (p *page) code(s string) {
	p.text("```\n" + strings.Trim(s, "\n") + "\n```")
}

// rows writes a table.
func (p *page) rows(header []string, rows [][]string) {
	var b strings.Builder
	line := func(cells []string) {
		for _, c := range cells {
			fmt.Fprintf(&b, "| %s ", cell(c))
		}
		b.WriteString("|\n")
	}
	line(header)
	b.WriteString(strings.Repeat("|---", len(header)) + "|\n")
	for _, row := range rows {
		line(row)
	}
	p.text(b.String())
}

// cell makes text fit for a table.
func cell(s string) string {
	return strings.ReplaceAll(strings.Join(strings.Fields(s), " "), "|", `\|`)
}

// code is a name as code, "" for none.
func code(s string) string {
	if s == "" {
		return ""
	}
	return "`" + s + "`"
}

// yes is a word for true.
func yes(b bool, word string) string {
	if b {
		return word
	}
	return ""
}
