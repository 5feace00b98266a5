package cli

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/config"
)

// completionTime is how long a press of the tab key may wait for the service.
const completionTime = 2 * time.Second

func (a *app) completion() *cobra.Command {
	return &cobra.Command{
		Use: "completion SHELL", Short: "Print a completion script for bash, zsh or fish", Args: exactly(1),
		ValidArgs: []string{"bash", "zsh", "fish"},
		Example:   "  source <(capsem completion bash)",
		RunE: func(cmd *cobra.Command, args []string) error {
			switch args[0] {
			case "bash":
				return cmd.Root().GenBashCompletionV2(a.Out, true)
			case "zsh":
				return cmd.Root().GenZshCompletion(a.Out)
			case "fish":
				return cmd.Root().GenFishCompletion(a.Out, true)
			}
			return usageError{fmt.Errorf("there is no completion for %q; there is for bash, zsh and fish", args[0])}
		},
	}
}

// complete completes the value of a flag, which the command must have.
func complete(cmd *cobra.Command, flag string, f cobra.CompletionFunc) {
	if err := cmd.RegisterFlagCompletionFunc(flag, f); err != nil {
		panic(err) // the flag was added by the caller, once
	}
}

// oneVM completes a VM's name where nothing precedes it.
func (a *app) oneVM(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.vmNames(cmd, args, prefix)
}

// vmNames completes names of VMs. It asks a service that runs and starts none:
// looking for a name is no reason to.
func (a *app) vmNames(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	c, _, err := a.runningService()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTime)
	defer cancel()
	var list api.VMList
	if err := c.Do(ctx, http.MethodGet, "/v1/vms", nil, &list); err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var found []string
	for _, vm := range list.VMs {
		found = append(found, vm.Name)
	}
	return withPrefix(found, prefix), cobra.ShellCompDirectiveNoFileComp
}

// profileNames completes names of profiles, from the home.
func (a *app) profileNames(_ *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	home, err := config.OpenHome(a.Env)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	names, err := config.ProfileNames(home)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return withPrefix(names, prefix), cobra.ShellCompDirectiveNoFileComp
}

// words completes one of a few fixed words.
func words(of ...string) cobra.CompletionFunc {
	return cobra.FixedCompletions(of, cobra.ShellCompDirectiveNoFileComp)
}

func withPrefix(names []string, prefix string) []string {
	var found []string
	for _, n := range names {
		if strings.HasPrefix(n, prefix) {
			found = append(found, n)
		}
	}
	return found
}
