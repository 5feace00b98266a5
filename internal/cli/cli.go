// Package cli is the command line: what a person types, one file for each family
// of commands.
//
// Results go to stdout, everything else to stderr. With --json a result is one
// JSON value as package api has it, and nothing else. Guest text that reaches a
// terminal has its control characters escaped, unless it is the output of a
// command that the person asked for.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/client"
	"github.com/capsem/capsem/internal/config"
)

// Exit statuses of capsem itself. A command that runs in a VM passes its own
// status through, and Own says that Capsem failed rather than the command.
const (
	ExitOK      = 0
	ExitFailure = 1
	ExitUsage   = 2
	ExitOwn     = 125
)

// Options are what the program gives the command line.
type Options struct {
	In       *os.File
	Out, Err io.Writer
	Env      config.Env
	Version  string
}

// app is one run of the command line.
type app struct {
	Options
	json bool
	// status is what the program exits with when no error says otherwise.
	status int
	// own says that a failure of Capsem must not look like one of the guest's
	// command.
	own bool
	// unknown is the complaint about a command that there is not, which cobra
	// would answer with help and success.
	unknown error
}

// Main runs the command line and returns the exit status.
func Main(ctx context.Context, args []string, o Options) int {
	a := &app{Options: o}
	root := a.root()
	root.SetArgs(args)
	root.SetOut(o.Out)
	root.SetErr(o.Err)
	err := root.ExecuteContext(ctx)
	if err == nil {
		err = a.unknown
	}
	if err == nil {
		return a.status
	}
	var usage usageError
	a.report(err)
	switch {
	case a.own:
		return ExitOwn
	case errors.As(err, &usage):
		return ExitUsage
	}
	return ExitFailure
}

// Root is the command line as a tree of commands, for the documentation.
func Root(o Options) *cobra.Command { return (&app{Options: o}).root() }

// usageError is a command line that cannot be understood.
type usageError struct{ error }

func (u usageError) Unwrap() error { return u.error }

// report tells a person, or with --json a program, what went wrong.
func (a *app) report(err error) {
	if a.json {
		a.print(api.ErrorBody{Error: api.AsError(err)})
		return
	}
	var e *api.Error
	if errors.As(err, &e) {
		a.sayf("%s", e.Message)
		if e.Hint != "" {
			a.sayf("  %s", e.Hint)
		}
		return
	}
	a.sayf("%s", err)
}

// sayf tells a person something on stderr.
func (a *app) sayf(format string, args ...any) {
	if _, err := fmt.Fprintln(a.Err, "capsem: "+Escape(fmt.Sprintf(format, args...), true)); err != nil {
		return // there is nobody to tell
	}
}

// print writes a result as JSON.
func (a *app) print(v any) {
	enc := json.NewEncoder(a.Out)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		a.sayf("writing the result: %s", err)
		a.status = ExitFailure
	}
}

// show prints a result: as JSON where that was asked for, else as text.
func (a *app) show(v any, text func(w io.Writer) error) error {
	if a.json {
		a.print(v)
		return nil
	}
	return text(a.Out)
}

// line prints one line of text.
func line(format string, args ...any) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := fmt.Fprintf(w, format+"\n", args...)
		return err
	}
}

// step shows progress, to a person only.
func (a *app) step(s string) {
	if f, ok := a.Err.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		a.sayf("%s ...", s)
	}
}

// service returns a client of the service, which it starts if need be.
func (a *app) service(ctx context.Context) (*client.Client, error) {
	home, err := config.OpenHome(a.Env)
	if err != nil {
		return nil, err
	}
	socket, err := home.ServiceSocket()
	if err != nil {
		return nil, err
	}
	capsemd, err := client.FindCapsemd()
	if err != nil {
		return nil, err
	}
	return client.Starter{
		Home: home, Executable: capsemd, Env: a.Env.Daemon(), Version: a.Version,
		Say: func(s string) { a.sayf("%s", s) },
	}.Ensure(ctx, socket)
}

// with runs do with a client of the service.
func (a *app) with(ctx context.Context, do func(*client.Client) error) error {
	c, err := a.service(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	return do(c)
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "capsem",
		Short: "Run agents in disposable virtual machines, judged and recorded",
		Long: `Capsem runs agents in disposable virtual machines. Nothing passes between an
agent and the world that was not judged by rules and recorded in a ledger.

  capsem run -- uname -a                 one command in a VM of its own
  capsem create --name box               a VM that stays
  capsem exec box -- sh -c 'id; ls /'    a command in it
  capsem timeline box                    what happened
  capsem sql box "SELECT tool_name, decision FROM tool_calls"

A VM is meant by its name or its id.`,
		// Words that are no command arrive at the help function, which says so.
		Args: cobra.ArbitraryArgs, Version: a.Version,
		SilenceUsage: true, SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},
	}
	root.SetVersionTemplate("capsem {{.Version}}\n")
	root.PersistentFlags().BoolVar(&a.json, "json", false, "print the result as JSON")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())}
	})
	root.AddGroup(
		&cobra.Group{ID: "vm", Title: "VMs:"},
		&cobra.Group{ID: "evidence", Title: "Evidence:"},
		&cobra.Group{ID: "rules", Title: "Rules and secrets:"},
		&cobra.Group{ID: "machine", Title: "This machine:"},
	)
	for group, commands := range map[string][]*cobra.Command{
		"vm": {
			a.create(), a.run(), a.exec(), a.list(), a.info(), a.start(), a.stop(), a.restart(), a.remove(), a.purge(),
		},
		"evidence": {a.timeline(), a.sql(), a.logs()},
		"rules":    {a.policy(), a.profile(), a.secret(), a.mcp()},
		"machine":  {a.image(), a.doctor(), a.serviceCommand(), a.version(), a.completion()},
	} {
		for _, c := range commands {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	root.AddCommand(exitCodes())
	a.setHelp(root)
	return root
}

// setHelp makes help of a command that there is not a mistake, for each family
// of commands and for help itself.
func (a *app) setHelp(root *cobra.Command) {
	help := root.HelpFunc()
	root.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		if words := cmd.Flags().Args(); cmd.HasAvailableSubCommands() && len(words) > 0 {
			a.unknown = unknownCommand(cmd, words[0])
			return
		}
		help(cmd, args)
	})
	root.SetHelpCommand(&cobra.Command{
		Use: "help [COMMAND]", Short: "Explain a command", GroupID: "machine",
		RunE: func(_ *cobra.Command, args []string) error {
			cmd, rest, err := root.Find(args)
			if err != nil {
				return usageError{err}
			}
			if len(rest) > 0 {
				return unknownCommand(cmd, rest[0])
			}
			return cmd.Help()
		},
	})
}

// unknownCommand says that a family has no such command, and which it may have
// meant.
func unknownCommand(family *cobra.Command, name string) error {
	var names []string
	for _, c := range family.Commands() {
		names = append(append(names, c.Name()), c.Aliases...)
	}
	text := fmt.Sprintf("%s has no command %q", family.CommandPath(), name)
	if near := config.Nearest(name, names); near != "" {
		return usageError{fmt.Errorf("%s: did you mean %s?", text, near)}
	}
	return usageError{fmt.Errorf("%s; see %s --help", text, family.CommandPath())}
}

// exactly wants n arguments, and says how a command is used otherwise.
func exactly(n int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != n {
			return usageError{fmt.Errorf("usage: %s", cmd.UseLine())}
		}
		return nil
	}
}

// exitCodes documents what the statuses mean.
func exitCodes() *cobra.Command {
	return &cobra.Command{
		Use:   "exit-codes",
		Short: "What exit statuses mean",
		Long: `0    it worked
1    it failed; the reason is on stderr
2    the command line was not understood

capsem run and capsem exec exit with the status of the command in the VM:
124  its time was over (--timeout)
126  it cannot be executed
127  there is no such program
128+N signal N ended it
125  Capsem itself failed, or refused; the reason is on stderr`,
	}
}
