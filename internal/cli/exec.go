package cli

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/client"
)

// execFlags are the flags of exec, which run has too.
type execFlags struct {
	stdin     bool
	timeout   time.Duration
	env       []string
	cwd, user string
}

func (f *execFlags) add(cmd *cobra.Command, withEnv bool) {
	fl := cmd.Flags()
	fl.BoolVarP(&f.stdin, "interactive", "i", false, "let the command read this program's stdin")
	fl.DurationVar(&f.timeout, "timeout", 0, "end the command and all it started after this `time` (default: never)")
	fl.StringVarP(&f.cwd, "cwd", "w", "", "the command's working `folder` (default: the user's home)")
	fl.StringVarP(&f.user, "user", "u", "", "the `user` it runs as (default: root)")
	if withEnv {
		fl.StringArrayVarP(&f.env, "env", "e", nil, "`NAME=VALUE` for the command; NAME alone takes the value from here")
	}
	// What follows the first argument is the command's, flags included.
	fl.SetInterspersed(false)
}

func (f *execFlags) request(a *app, argv []string) (api.ExecRequest, error) {
	env, err := readEnv(f.env, a.Env)
	if err != nil {
		return api.ExecRequest{}, err
	}
	req := api.ExecRequest{Cwd: f.cwd, User: f.user, OpenStdin: f.stdin, TimeoutMS: f.timeout.Milliseconds()}
	if f.timeout < 0 || f.timeout > 0 && req.TimeoutMS == 0 {
		return req, usageError{fmt.Errorf("--timeout %s: the least is 1ms, and 0 is never", f.timeout)}
	}
	for _, arg := range argv {
		req.Argv = append(req.Argv, []byte(arg))
	}
	for _, e := range env {
		req.Env = append(req.Env, []byte(e))
	}
	return req, nil
}

func (a *app) exec() *cobra.Command {
	var f execFlags
	cmd := &cobra.Command{
		Use:   "exec [flags] VM -- CMD [ARG...]",
		Short: "Run a command in a VM",
		Long: `Run a command in a VM that is running. Its stdout, stderr and exit status become
this program's (see capsem exit-codes). No shell reads the command: for one, run
sh -c. Without -i the command's stdin is empty. Ctrl-C is sent to the command; a
second one within a second ends it. With --json its output is captured, and is
part of the result in base64.`,
		ValidArgsFunction: a.oneVM,
		Example:           "  capsem exec box -- sh -c 'cat /etc/os-release | head -1'\n  tar c . | capsem exec -i box -- tar x -C /tmp",
		RunE: func(cmd *cobra.Command, args []string) error {
			vm, argv := splitCommand(args)
			switch {
			case vm == "" || len(argv) == 0:
				return usageError{fmt.Errorf("usage: %s", cmd.UseLine())}
			case strings.HasPrefix(args[1], "-") && args[1] != "--":
				return usageError{fmt.Errorf("%s stands after the VM: flags of capsem exec go before it, and the command after --", args[1])}
			}
			req, err := f.request(a, argv)
			if err != nil {
				return err
			}
			a.own = true
			return a.with(cmd.Context(), func(c *client.Client) error { return a.command(cmd.Context(), c, vm, req) })
		},
	}
	f.add(cmd, true)
	return cmd
}

// splitCommand takes `VM -- CMD ARG...` apart; the dashes may be left out.
func splitCommand(args []string) (vm string, argv []string) {
	if len(args) == 0 {
		return "", nil
	}
	vm, argv = args[0], args[1:]
	if len(argv) > 0 && argv[0] == "--" {
		argv = argv[1:]
	}
	return vm, argv
}

func (a *app) run() *cobra.Command {
	var create createFlags
	var f execFlags
	cmd := &cobra.Command{
		Use:   "run [flags] -- CMD [ARG...]",
		Short: "Run one command in a VM of its own",
		Long: `Make a VM, run one command in it as capsem exec does, and remove the VM. Its
ledger is kept: capsem timeline and capsem sql take the VM's name, so give it one
with --name where you want to look later.`,
		Example: "  capsem run -- uname -r\n  capsem run --profile work --timeout 1m -- sh -c 'make test'",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usageError{fmt.Errorf("usage: %s", cmd.UseLine())}
			}
			req, err := create.request(a.Env)
			if err != nil {
				return err
			}
			req.Ephemeral = true
			exec, err := f.request(a, args)
			if err != nil {
				return err
			}
			exec.StopAfter = true
			a.own = true
			return a.with(cmd.Context(), func(c *client.Client) error { return a.runOnce(cmd.Context(), c, req, exec) })
		},
	}
	create.add(cmd, a)
	f.add(cmd, false)
	return cmd
}

// runOnce makes a VM, runs the command and sees the VM go. If this program is
// killed, the VM ends with the command's connection.
func (a *app) runOnce(ctx context.Context, c *client.Client, req api.CreateRequest, exec api.ExecRequest) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	making, stopMaking := signal.NotifyContext(ctx, os.Interrupt)
	vm, err := a.make(making, c, req)
	interrupted := making.Err() != nil
	stopMaking()
	if err != nil && interrupted {
		return errors.New("interrupted before the command began; its VM is being removed")
	}
	if err != nil {
		return err
	}
	err = a.command(ctx, c, vm.ID, exec)
	gone := c.Do(context.WithoutCancel(ctx), http.MethodDelete, vmPath(vm.ID)+"?"+api.DeleteForce+"=true", nil, nil)
	var e *api.Error
	if errors.As(gone, &e) && e.Code == api.CodeNotFound {
		gone = nil // it went by itself already
	}
	return errors.Join(err, gone)
}

// command runs one command and sets the exit status.
func (a *app) command(ctx context.Context, c *client.Client, vm string, req api.ExecRequest) error {
	if a.json {
		return a.captured(ctx, c, vm, req)
	}
	conn, err := c.Stream(ctx, vmPath(vm)+"/exec", req)
	if err != nil {
		return err
	}
	s := stream{conn: conn, in: a.In, out: a.Out, err: a.Err, stdin: req.OpenStdin}
	exit, err := s.run(ctx)
	if err != nil {
		return err
	}
	a.status = exit.Code
	switch {
	case exit.Message != "":
		a.sayf("%s", exit.Message)
	case exit.TimedOut:
		a.status = 124
		a.sayf("the command was ended after %s", time.Duration(req.TimeoutMS)*time.Millisecond)
	}
	return nil
}

// captured runs a command whose output is part of a JSON result.
func (a *app) captured(ctx context.Context, c *client.Client, vm string, req api.ExecRequest) error {
	if req.OpenStdin {
		return usageError{errors.New("--json captures the command's output and cannot be used with -i")}
	}
	var result api.ExecResult
	if err := c.Do(ctx, http.MethodPost, vmPath(vm)+"/exec", req, &result); err != nil {
		return err
	}
	a.status = result.ExitCode
	a.print(result)
	return nil
}

func vmPath(vm string) string { return "/v1/vms/" + url.PathEscape(strings.TrimSpace(vm)) }
