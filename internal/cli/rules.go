package cli

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/client"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/policy"
)

func (a *app) policy() *cobra.Command {
	cmd := &cobra.Command{Use: "policy", Short: "Check and reload rules"}
	cmd.AddCommand(a.policyCheck(), a.policyReload())
	return cmd
}

func (a *app) policyCheck() *cobra.Command {
	return &cobra.Command{
		Use:   "check FILE...",
		Short: "Say what is wrong with profiles and their rules",
		Long: `Read profiles and compile their rules, without a VM. Mistakes are told with file,
line and column; rules that can never match and the like are told as warnings.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usageError{fmt.Errorf("usage: %s", cmd.UseLine())}
			}
			report := policy.Check(args...)
			if !report.OK {
				a.status = ExitFailure
			}
			return a.show(report, func(w io.Writer) error { return reportText(w, report) })
		},
	}
}

func reportText(w io.Writer, report policy.Report) error {
	for _, f := range report.Files {
		for _, finding := range f.Findings {
			if _, err := fmt.Fprintln(w, Escape(finding.String(), false)); err != nil {
				return err
			}
		}
		if f.Digest == "" {
			continue
		}
		if _, err := fmt.Fprintf(w, "%s: %s, ok\n", Escape(f.File, false), count(f.Rules, "rule")); err != nil {
			return err
		}
	}
	return nil
}

func (a *app) policyReload() *cobra.Command {
	return &cobra.Command{
		Use:   "reload [VM]",
		Short: "Let running VMs take their profile's rules anew",
		Long: `Read the profile of a VM, or of every VM that runs, and put its rules and default
in force, also on connections that are open. A profile with a mistake changes
nothing. Other keys of a profile wait for the next start; they are named.`,
		ValidArgsFunction: a.oneVM,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.with(cmd.Context(), func(c *client.Client) error {
				if len(args) == 0 {
					var list api.VMList
					if err := c.Do(cmd.Context(), http.MethodGet, "/v1/vms", nil, &list); err != nil {
						return err
					}
					for _, vm := range list.VMs {
						if vm.State == api.StateRunning {
							args = append(args, vm.Name)
						}
					}
				}
				results := map[string]api.ReloadResult{}
				var failures error
				for _, ref := range args {
					var r api.ReloadResult
					if err := c.Do(cmd.Context(), http.MethodPost, vmPath(ref)+"/policy/reload", nil, &r); err != nil {
						failures = errors.Join(failures, fmt.Errorf("%s: %w", ref, err))
						continue
					}
					results[ref] = r
				}
				if failures != nil {
					return failures
				}
				return a.show(results, func(w io.Writer) error { return reloadText(w, args, results) })
			})
		},
	}
}

func reloadText(w io.Writer, order []string, results map[string]api.ReloadResult) error {
	for _, ref := range order {
		r := results[ref]
		text := fmt.Sprintf("%s: %s in force", ref, count(r.Rules, "rule"))
		if len(r.Waiting) > 0 {
			text += "; " + strings.Join(r.Waiting, ", ") + " changed and wait for the next start"
		}
		if _, err := fmt.Fprintln(w, text); err != nil {
			return err
		}
	}
	return nil
}

func (a *app) profile() *cobra.Command {
	cmd := &cobra.Command{Use: "profile", Short: "List profiles"}
	cmd.AddCommand(&cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the profiles that a VM can be made from", Args: exactly(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.with(cmd.Context(), func(c *client.Client) error {
				var list api.ProfileList
				if err := c.Do(cmd.Context(), http.MethodGet, "/v1/profiles", nil, &list); err != nil {
					return err
				}
				return a.show(list, func(w io.Writer) error {
					var rows [][]string
					for _, p := range list.Profiles {
						rows = append(rows, []string{
							p.Name, p.Image, strconv.Itoa(p.CPUs), config.Size(p.MemoryBytes).String(), p.Default,
							strconv.Itoa(p.Servers), strconv.Itoa(p.Rules), first(p.Error, p.File, "built in"),
						})
					}
					return table(w, []string{"NAME", "IMAGE", "CPUS", "MEMORY", "DEFAULT", "SERVERS", "RULES", "FROM"}, rows)
				})
			})
		},
	})
	return cmd
}

// first returns the first text that is not empty.
func first(texts ...string) string {
	for _, t := range texts {
		if t != "" {
			return t
		}
	}
	return ""
}

func (a *app) secret() *cobra.Command {
	cmd := &cobra.Command{
		Use: "secret", Short: "Keep secrets for MCP servers",
		Long: `Keep secrets, by name. A profile refers to them (secrets = { TOKEN = "name" },
or ${name} in a header); their values reach the one server that needs them, and
no argument list, log or ledger.`,
	}
	cmd.AddCommand(a.secretSet(), a.secretList(), a.secretRemove())
	return cmd
}

func (a *app) secretSet() *cobra.Command {
	return &cobra.Command{
		Use: "set NAME", Short: "Keep a secret, read from the terminal or stdin", Args: exactly(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			value, err := a.readSecret(args[0])
			if err != nil {
				return err
			}
			return a.with(cmd.Context(), func(c *client.Client) error {
				var list api.SecretList
				if err := c.Put(cmd.Context(), "/v1/secrets/"+url.PathEscape(args[0]), value, &list); err != nil {
					return err
				}
				return a.show(list, func(w io.Writer) error { return names(w, list.Names) })
			})
		},
	}
}

// readSecret asks on a terminal, without echo, and else reads all of stdin but
// for one line break at its end.
func (a *app) readSecret(name string) ([]byte, error) {
	if fd := int(a.In.Fd()); term.IsTerminal(fd) {
		if _, err := fmt.Fprintf(a.Err, "value of %s: ", name); err != nil {
			return nil, err
		}
		value, err := term.ReadPassword(fd)
		if _, nlErr := fmt.Fprintln(a.Err); nlErr != nil {
			return nil, nlErr
		}
		if err != nil {
			return nil, fmt.Errorf("reading the secret: %w", err)
		}
		return value, nil
	}
	value, err := io.ReadAll(a.In)
	if err != nil {
		return nil, fmt.Errorf("reading the secret: %w", err)
	}
	return []byte(strings.TrimSuffix(string(value), "\n")), nil
}

func (a *app) secretList() *cobra.Command {
	return &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the names of the secrets", Args: exactly(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.with(cmd.Context(), func(c *client.Client) error {
				var list api.SecretList
				if err := c.Do(cmd.Context(), http.MethodGet, "/v1/secrets", nil, &list); err != nil {
					return err
				}
				return a.show(list, func(w io.Writer) error { return names(w, list.Names) })
			})
		},
	}
}

func (a *app) secretRemove() *cobra.Command {
	return &cobra.Command{
		Use: "remove NAME", Aliases: []string{"rm"}, Short: "Forget a secret", Args: exactly(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.with(cmd.Context(), func(c *client.Client) error {
				var list api.SecretList
				if err := c.Do(cmd.Context(), http.MethodDelete, "/v1/secrets/"+url.PathEscape(args[0]), nil, &list); err != nil {
					return err
				}
				return a.show(list, func(w io.Writer) error { return names(w, list.Names) })
			})
		},
	}
}

func (a *app) mcp() *cobra.Command {
	cmd := &cobra.Command{Use: "mcp", Short: "Look at a VM's MCP servers"}
	cmd.AddCommand(&cobra.Command{
		Use: "servers VM", Short: "List a VM's MCP servers and how they are", Args: exactly(1), ValidArgsFunction: a.oneVM,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.with(cmd.Context(), func(c *client.Client) error {
				var servers []api.Server
				if err := c.Do(cmd.Context(), http.MethodGet, vmPath(args[0])+"/mcp", nil, &servers); err != nil {
					return err
				}
				return a.show(servers, func(w io.Writer) error {
					var rows [][]string
					for _, s := range servers {
						rows = append(rows, []string{s.Name, s.State, strconv.Itoa(s.Tools), s.Detail})
					}
					return table(w, []string{"NAME", "STATE", "TOOLS", "DETAIL"}, rows)
				})
			})
		},
	})
	return cmd
}
