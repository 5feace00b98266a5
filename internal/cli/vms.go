package cli

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/client"
	"github.com/capsem/capsem/internal/config"
)

func (a *app) list() *cobra.Command {
	var quiet bool
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls", "ps"}, Short: "List the VMs", Args: exactly(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.with(cmd.Context(), func(c *client.Client) error {
				var list api.VMList
				if err := c.Do(cmd.Context(), http.MethodGet, "/v1/vms", nil, &list); err != nil {
					return err
				}
				return a.show(list, func(w io.Writer) error { return listText(w, list.VMs, quiet) })
			})
		},
	}
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "print the names alone")
	return cmd
}

func listText(w io.Writer, vms []api.VM, quiet bool) error {
	if quiet {
		for _, vm := range vms {
			if _, err := fmt.Fprintln(w, vm.Name); err != nil {
				return err
			}
		}
		return nil
	}
	var rows [][]string
	for _, vm := range vms {
		rows = append(rows, []string{vm.Name, vm.ID, string(vm.State), vm.Profile, age(vm.CreatedAt), vm.Reason})
	}
	return table(w, []string{"NAME", "ID", "STATE", "PROFILE", "AGE", "REASON"}, rows)
}

func age(t time.Time) string {
	d := time.Since(t)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

func (a *app) info() *cobra.Command {
	return &cobra.Command{
		Use: "info VM", Aliases: []string{"inspect"}, Short: "Show one VM", Args: exactly(1), ValidArgsFunction: a.oneVM,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.with(cmd.Context(), func(c *client.Client) error {
				var vm api.VM
				if err := c.Do(cmd.Context(), http.MethodGet, vmPath(args[0]), nil, &vm); err != nil {
					return err
				}
				return a.show(vm, func(w io.Writer) error { return infoText(w, vm) })
			})
		},
	}
}

func infoText(w io.Writer, vm api.VM) error {
	rows := [][2]string{
		{"name", vm.Name},
		{"id", vm.ID},
		{"state", string(vm.State)},
		{"reason", vm.Reason},
		{"profile", vm.Profile},
		{"image", vm.Image},
		{"cpus", fmt.Sprint(vm.CPUs)},
		{"memory", config.Size(vm.MemoryBytes).String()},
		{"created", vm.CreatedAt.Format(time.RFC3339)},
		{"incarnation", fmt.Sprint(vm.Incarnation)},
	}
	if vm.PID != 0 {
		rows = append(rows,
			[2]string{"pid", fmt.Sprint(vm.PID)}, [2]string{"accelerator", vm.Accelerator},
			[2]string{"isolation", vm.Isolation}, [2]string{"boot", fmt.Sprintf("%d ms", vm.BootMS)})
	}
	for _, s := range vm.Servers {
		rows = append(rows, [2]string{"server", strings.TrimSpace(fmt.Sprintf("%s  %s  %s  %s", s.Name, s.State, count(s.Tools, "tool"), s.Detail))})
	}
	for _, n := range vm.Notes {
		rows = append(rows, [2]string{"note", n})
	}
	for _, r := range rows {
		if r[1] == "" {
			continue
		}
		if _, err := fmt.Fprintf(w, "%-12s %s\n", r[0], Escape(r[1], false)); err != nil {
			return err
		}
	}
	return nil
}

func (a *app) start() *cobra.Command {
	return &cobra.Command{
		Use: "start VM", Short: "Boot a VM that is stopped or failed", Args: exactly(1), ValidArgsFunction: a.oneVM,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.with(cmd.Context(), func(c *client.Client) error {
				var vm api.VM
				if err := c.Follow(cmd.Context(), http.MethodPost, vmPath(args[0])+"/start", nil, a.step, &vm); err != nil {
					return err
				}
				return a.show(vm, line("%s", vm.Name))
			})
		},
	}
}

func (a *app) stop() *cobra.Command {
	var req api.StopRequest
	var timeout time.Duration
	cmd := &cobra.Command{
		Use: "stop VM", Short: "Shut a VM down", Args: exactly(1), ValidArgsFunction: a.oneVM,
		RunE: func(cmd *cobra.Command, args []string) error {
			req.TimeoutMS = timeout.Milliseconds()
			return a.with(cmd.Context(), func(c *client.Client) error {
				var vm api.VM
				if err := c.Do(cmd.Context(), http.MethodPost, vmPath(args[0])+"/stop", req, &vm); err != nil {
					return err
				}
				return a.show(vm, line("%s", vm.Name))
			})
		},
	}
	cmd.Flags().DurationVarP(&timeout, "timeout", "t", api.DefaultStop, "how long the guest gets before the plug is pulled")
	cmd.Flags().BoolVarP(&req.Force, "force", "f", false, "pull the plug at once")
	return cmd
}

func (a *app) restart() *cobra.Command {
	return &cobra.Command{
		Use: "restart VM", Short: "Stop a VM and start it again", Args: exactly(1), ValidArgsFunction: a.oneVM,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.with(cmd.Context(), func(c *client.Client) error {
				var vm api.VM
				if err := c.Do(cmd.Context(), http.MethodPost, vmPath(args[0])+"/stop", api.StopRequest{}, &vm); err != nil {
					return err
				}
				if err := c.Follow(cmd.Context(), http.MethodPost, vmPath(args[0])+"/start", nil, a.step, &vm); err != nil {
					return err
				}
				return a.show(vm, line("%s", vm.Name))
			})
		},
	}
}

func (a *app) remove() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use: "delete VM...", Aliases: []string{"rm"}, Short: "Remove VMs; their ledgers are kept", ValidArgsFunction: a.vmNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usageError{fmt.Errorf("usage: %s", cmd.UseLine())}
			}
			return a.with(cmd.Context(), func(c *client.Client) error {
				list := api.VMList{VMs: []api.VM{}}
				var failed error
				for _, ref := range args {
					var vm api.VM
					failed = c.Do(cmd.Context(), http.MethodDelete, fmt.Sprintf("%s?%s=%v", vmPath(ref), api.DeleteForce, force), nil, &vm)
					if failed != nil {
						break
					}
					list.VMs = append(list.VMs, vm)
				}
				if failed != nil && a.json {
					return failed // one JSON value is printed, and the error is what must be known
				}
				// Those that are gone are named also where one after them could not go.
				return errors.Join(a.show(list, func(w io.Writer) error { return listText(w, list.VMs, true) }), failed)
			})
		},
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "also one that is running")
	return cmd
}

func (a *app) purge() *cobra.Command {
	var all, yes, dryRun bool
	cmd := &cobra.Command{
		Use: "purge", Short: "Remove all VMs that do not run; their ledgers are kept", Args: exactly(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.with(cmd.Context(), func(c *client.Client) error {
				var would api.Purged
				if err := c.Do(cmd.Context(), http.MethodPost, "/v1/purge", api.PurgeRequest{All: all, DryRun: true}, &would); err != nil {
					return err
				}
				if dryRun || len(would.VMs) == 0 {
					return a.show(would, func(w io.Writer) error { return names(w, would.VMs) })
				}
				ok, err := a.confirm(yes, fmt.Sprintf("Remove %s?", strings.Join(would.VMs, ", ")))
				if err != nil || !ok {
					return err
				}
				var done api.Purged
				if err := c.Do(cmd.Context(), http.MethodPost, "/v1/purge", api.PurgeRequest{All: all}, &done); err != nil {
					return err
				}
				return a.show(done, func(w io.Writer) error { return names(w, done.VMs) })
			})
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "also those that run")
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "only say what would go")
	return cmd
}

func names(w io.Writer, list []string) error {
	for _, n := range list {
		if _, err := fmt.Fprintln(w, n); err != nil {
			return err
		}
	}
	return nil
}

// confirm asks a person. Without a terminal the answer is no.
func (a *app) confirm(yes bool, question string) (bool, error) {
	if yes {
		return true, nil
	}
	if !term.IsTerminal(int(a.In.Fd())) {
		return false, usageError{fmt.Errorf("%s Say --yes: there is no terminal to ask on", question)}
	}
	if _, err := fmt.Fprint(a.Err, Escape(question, false)+" [y/N] "); err != nil {
		return false, err
	}
	answer, err := bufio.NewReader(a.In).ReadString('\n')
	if err != nil {
		return false, fmt.Errorf("reading the answer: %w", err)
	}
	answer = strings.ToLower(strings.TrimSpace(answer))
	return answer == "y" || answer == "yes", nil
}
