package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/client"
	"github.com/capsem/capsem/internal/config"
)

func (a *app) image() *cobra.Command {
	cmd := &cobra.Command{Use: "image", Short: "Build and list images"}
	cmd.AddCommand(&cobra.Command{
		Use: "build NAME", Short: "Build an image", Args: exactly(1), Example: "  capsem image build tiny",
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.with(cmd.Context(), func(c *client.Client) error {
				var built api.Image
				step := func(s string) { a.sayf("%s ...", s) }
				if err := c.Follow(cmd.Context(), http.MethodPost, "/v1/images", api.ImageBuildRequest{Name: args[0]}, step, &built); err != nil {
					return err
				}
				return a.show(built, line("%s@%s", built.Name, built.Digest))
			})
		},
	}, &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the built images", Args: exactly(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.with(cmd.Context(), func(c *client.Client) error {
				var list api.ImageList
				if err := c.Do(cmd.Context(), http.MethodGet, "/v1/images", nil, &list); err != nil {
					return err
				}
				return a.show(list, func(w io.Writer) error {
					var rows [][]string
					for _, i := range list.Images {
						current := ""
						if i.Current {
							current = "current"
						}
						rows = append(rows, []string{i.Name, i.Digest, i.Kernel, fmt.Sprintf("%d MiB", i.SizeBytes>>20), age(i.BuiltAt), current})
					}
					return table(w, []string{"NAME", "DIGEST", "KERNEL", "SIZE", "AGE", ""}, rows)
				})
			})
		},
	})
	return cmd
}

func (a *app) doctor() *cobra.Command {
	return &cobra.Command{
		Use: "doctor", Short: "Say what this machine offers and what it lacks", Args: exactly(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.with(cmd.Context(), func(c *client.Client) error {
				var report api.DoctorReport
				if err := c.Do(cmd.Context(), http.MethodGet, "/v1/doctor", nil, &report); err != nil {
					return err
				}
				for _, check := range report.Checks {
					if !check.OK {
						a.status = ExitFailure
					}
				}
				return a.show(report, func(w io.Writer) error { return doctorText(w, report) })
			})
		},
	}
}

func doctorText(w io.Writer, report api.DoctorReport) error {
	for _, c := range report.Checks {
		mark, hint := "ok  ", ""
		if !c.OK {
			mark, hint = "FAIL", c.Hint
		}
		if _, err := fmt.Fprintf(w, "%s  %-12s %s\n", mark, c.Name, Escape(strings.ReplaceAll(c.Detail, "\n", "\n                   "), true)); err != nil {
			return err
		}
		if hint == "" {
			continue
		}
		if _, err := fmt.Fprintf(w, "                   -> %s\n", hint); err != nil {
			return err
		}
	}
	return nil
}

// runningService returns a client of the service without starting one, and the
// home that it serves.
func (a *app) runningService() (*client.Client, config.Home, error) {
	home, err := config.OpenHome(a.Env)
	if err != nil {
		return nil, home, err
	}
	socket, err := home.ServiceSocket()
	if err != nil {
		return nil, home, err
	}
	return client.New(socket), home, nil
}

func (a *app) serviceCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "service", Short: "Start and stop the background service",
		Long: `The service keeps track of VMs. Commands start it where it does not run; VMs go
on when it stops, and the next service finds them.`,
	}
	cmd.AddCommand(&cobra.Command{
		Use: "start", Short: "Start the service", Args: exactly(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.with(cmd.Context(), func(c *client.Client) error { return a.serviceInfo(cmd, c) })
		},
	}, &cobra.Command{
		Use: "stop", Short: "Stop the service; VMs go on", Args: exactly(0),
		RunE: func(cmd *cobra.Command, _ []string) error { return a.stopService(cmd.Context()) },
	}, &cobra.Command{
		Use: "status", Short: "Say whether the service runs; exits 1 if not", Args: exactly(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, _, err := a.runningService()
			if err != nil {
				return err
			}
			defer c.Close()
			return a.serviceInfo(cmd, c)
		},
	})
	return cmd
}

// stopTime is how long a service gets to end; it gives requests that are under
// way some seconds of it.
const stopTime = 30 * time.Second

// stopService returns when the service has ended, so that what follows can start
// another one or remove its files.
func (a *app) stopService(ctx context.Context) error {
	c, home, err := a.runningService()
	if err != nil {
		return err
	}
	defer c.Close()
	err = c.Do(ctx, http.MethodPost, "/v1/shutdown", nil, nil)
	switch {
	case errors.Is(err, client.ErrNotRunning):
		return a.show(struct{}{}, line("the service is not running"))
	case err != nil:
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, stopTime)
	defer cancel()
	if err := client.AwaitEnd(ctx, home); err != nil {
		return err
	}
	return a.show(struct{}{}, line("stopped"))
}

func (a *app) serviceInfo(cmd *cobra.Command, c *client.Client) error {
	var info api.ServiceInfo
	if err := c.Do(cmd.Context(), http.MethodGet, "/v1/version", nil, &info); err != nil {
		return err
	}
	return a.show(info, line("running: pid %d, version %s, home %s", info.PID, info.Version, info.Home))
}

func (a *app) version() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print this program's version", Args: exactly(0),
		RunE: func(*cobra.Command, []string) error {
			return a.show(map[string]any{"version": a.Version, "api": api.Version}, line("capsem %s", a.Version))
		},
	}
}
