package reference

import (
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/capsem/capsem/internal/cli"
)

func cliPage() string {
	p := newPage("Command line", "The commands of `capsem`. A VM is meant by its name or its id. Every command takes `--json`, which prints the result as JSON and nothing else.")
	root := cli.Root(cli.Options{})
	for _, group := range root.Groups() {
		p.heading(2, strings.TrimSuffix(group.Title, ":"))
		for _, c := range root.Commands() {
			if c.GroupID == group.ID {
				p.command(c)
			}
		}
	}
	p.heading(2, "More")
	for _, c := range root.Commands() {
		if c.GroupID == "" && c.Name() != "help" {
			p.command(c)
		}
	}
	return p.String()
}

// command writes a command, and those below it.
func (p *page) command(c *cobra.Command) {
	if c.Hidden {
		return
	}
	p.heading(3, c.CommandPath())
	if c.Runnable() {
		p.code(c.UseLine())
	}
	about := c.Long
	if about == "" {
		about = c.Short + "."
	}
	if c.Runnable() || c.HasSubCommands() {
		p.text(about)
	} else {
		p.code(about) // a help topic, which is laid out already
	}
	if len(c.Aliases) > 0 {
		p.text("Also `" + strings.Join(c.Aliases, "`, `") + "`.")
	}
	if c.Example != "" {
		p.code(c.Example)
	}
	var rows [][]string
	c.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" || f.Name == "json" {
			return
		}
		value, usage := pflag.UnquoteUsage(f)
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		if value != "" {
			name += " " + value
		}
		rows = append(rows, []string{code(name), usage})
	})
	if len(rows) > 0 {
		p.rows([]string{"flag", "what"}, rows)
	}
	for _, sub := range c.Commands() {
		p.command(sub)
	}
}
