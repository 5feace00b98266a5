package cli

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"github.com/spf13/cobra"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/client"
	"github.com/capsem/capsem/internal/config"
)

// createFlags are the flags of create, which run has too.
type createFlags struct {
	name, profile, image, memory string
	cpus                         int
	env                          []string
}

func (f *createFlags) add(cmd *cobra.Command, a *app) {
	fl := cmd.Flags()
	fl.StringVarP(&f.name, "name", "n", "", "its `name` (default: made up from the profile's)")
	fl.StringVarP(&f.profile, "profile", "p", "", "the `profile` it is made from (default: default)")
	fl.StringVar(&f.image, "image", "", "the `image` it boots (default: the profile's)")
	fl.IntVar(&f.cpus, "cpus", 0, "how many processors (default: the profile's)")
	fl.StringVarP(&f.memory, "memory", "m", "", "how much memory, as `512MiB` (default: the profile's)")
	fl.StringArrayVarP(&f.env, "env", "e", nil, "`NAME=VALUE` for every command in it; NAME alone takes the value from here")
	complete(cmd, "profile", a.profileNames)
}

// request is what the flags ask for.
func (f *createFlags) request(env config.Env) (api.CreateRequest, error) {
	req := api.CreateRequest{Name: f.name, Profile: f.profile, Image: f.image, CPUs: f.cpus}
	if f.memory != "" {
		size, err := config.ParseSize(f.memory)
		if err != nil {
			return req, usageError{fmt.Errorf("--memory: %w", err)}
		}
		req.MemoryBytes = int64(size)
	}
	pairs, err := readEnv(f.env, env)
	if err != nil {
		return req, err
	}
	if len(pairs) > 0 {
		req.Env = map[string]string{}
	}
	for _, p := range pairs {
		name, value, _ := strings.Cut(p, "=")
		req.Env[name] = value
	}
	return req, nil
}

// readEnv reads --env flags.
func readEnv(flags []string, env config.Env) ([]string, error) {
	var pairs []string
	for _, f := range flags {
		name, _, set := strings.Cut(f, "=")
		switch {
		case name == "":
			return nil, usageError{fmt.Errorf("--env %q has no name", f)}
		case set:
			pairs = append(pairs, f)
		default:
			value, ok := env(name)
			if !ok {
				return nil, usageError{fmt.Errorf("--env %s: there is no such variable here; give it a value with %s=VALUE", name, name)}
			}
			pairs = append(pairs, name+"="+value)
		}
	}
	return pairs, nil
}

func (a *app) create() *cobra.Command {
	var f createFlags
	cmd := &cobra.Command{
		Use:   "create [flags]",
		Short: "Make a VM and print its name",
		Long: `Make a VM from a profile and boot it. The name is printed when a command in it
would succeed. What is written in a VM of the tiny image is lost when it stops.`,
		Example: "  capsem create --name box --memory 1GiB\n  capsem exec box -- uname -a",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("a VM's name is given with --name: capsem create --name %s", args[0])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			req, err := f.request(a.Env)
			if err != nil {
				return err
			}
			return a.with(cmd.Context(), func(c *client.Client) error {
				vm, err := a.make(cmd.Context(), c, req)
				if err != nil {
					return err
				}
				return a.show(vm, line("%s", vm.Name))
			})
		},
	}
	f.add(cmd, a)
	return cmd
}

// make creates a VM and says what its user should know.
func (a *app) make(ctx context.Context, c *client.Client, req api.CreateRequest) (api.VM, error) {
	var vm api.VM
	if err := c.Follow(ctx, http.MethodPost, "/v1/vms", req, a.step, &vm); err != nil {
		return vm, err
	}
	for _, note := range vm.Notes {
		a.sayf("%s", note)
	}
	return vm, nil
}
