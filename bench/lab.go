package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/client"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/image"
	"github.com/capsem/capsem/internal/vm/qemu"
)

// The machine that stands for any: a virtual machine as `capsem create` makes it.
const (
	imageName   = "tiny"
	profileName = "bench"
	cpus        = 1
	memoryBytes = 512 << 20
	// ruleCount is how many rules judge a call.
	ruleCount = 20
)

// lab is what benchmarks share: a home folder of their own with the image in it,
// Capsem's service, one virtual machine of Capsem's, and one of the floors'.
// What is dear is made when it is first asked for.
type lab struct {
	log   *slog.Logger
	scale float64
	// dir is a scratch folder, programs has Capsem's, path is PATH.
	dir, programs, path string
	// self is this program, to be started in a role.
	self        string
	home        config.Home
	env         config.Env
	accelerator string

	service *client.Client // nil until the service is asked for
	vm      *api.VM        // nil until it is asked for
	floor   *floorVM       // nil until it is asked for
}

func openLab(ctx context.Context, programs string, scale float64, log *slog.Logger) (l *lab, err error) {
	l = &lab{log: log, scale: scale, path: config.OSEnv().Get("PATH")}
	if l.programs, err = filepath.Abs(programs); err != nil {
		return nil, fmt.Errorf("finding the programs: %w", err)
	}
	if l.self, err = os.Executable(); err != nil {
		return nil, fmt.Errorf("finding this program: %w", err)
	}
	if l.dir, err = os.MkdirTemp("", "capsem-bench-"); err != nil {
		return nil, fmt.Errorf("making a scratch folder: %w", err)
	}
	if err := l.furnish(ctx); err != nil {
		return nil, errors.Join(err, os.RemoveAll(l.dir))
	}
	return l, nil
}

// furnish makes the home folder: the user's image, and a profile with rules.
func (l *lab) furnish(ctx context.Context) error {
	user, err := config.OpenHome(config.OSEnv())
	if err != nil {
		return err
	}
	root := filepath.Join(l.dir, "home")
	if err := os.Mkdir(root, 0o700); err != nil {
		return fmt.Errorf("making a home folder: %w", err)
	}
	l.env = func(name string) (string, bool) {
		if name == config.EnvHome {
			return root, true
		}
		return config.OSEnv()(name)
	}
	if l.home, err = config.OpenHome(l.env); err != nil {
		return err
	}
	err = os.CopyFS(filepath.Join(l.home.Images(), imageName), os.DirFS(filepath.Join(user.Images(), imageName)))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the image %s is not built: capsem image build %s", imageName, imageName)
	}
	if err != nil {
		return fmt.Errorf("copying the image: %w", err)
	}
	if err := os.WriteFile(l.home.Profile(profileName), []byte(profile()), 0o600); err != nil {
		return fmt.Errorf("writing the profile: %w", err)
	}
	return l.accelerate(ctx)
}

// profile has rules of the usual form, each of which looks at the call that is
// measured and lets it pass.
func profile() string {
	var b strings.Builder
	b.WriteString("default = \"allow\"\n")
	for i := range ruleCount {
		fmt.Fprintf(&b, "[rules.r%d]\nmatch = 'mcp.server.name == \"builtin\" && mcp.request.arguments.text.startsWith(\"forbidden %d\")'\naction = \"block\"\n", i, i)
	}
	return b.String()
}

// accelerate finds what accelerates guests, as Capsem does.
func (l *lab) accelerate(ctx context.Context) error {
	settings, err := config.LoadSettings(l.home.Settings(), l.env)
	if err != nil {
		return err
	}
	if l.accelerator = settings.Accelerator.Value; l.accelerator != config.AcceleratorAuto {
		return nil
	}
	img, err := l.openImage()
	if err != nil {
		return err
	}
	found, err := qemu.Probe(ctx, qemu.Config{Path: l.path, Start: startChild, Log: l.log}, img.Kernel)
	l.accelerator = found.Accelerator
	return errors.Join(err, img.Close())
}

func (l *lab) openImage() (*image.Image, error) {
	return image.Open(l.home.Images(), image.Ref{Name: imageName})
}

// rounds is how many rounds to make where n is the usual number.
func (l *lab) rounds(n int) int { return max(1, int(float64(n)*l.scale+0.5)) }

// program is one of Capsem's.
func (l *lab) program(name string) string { return filepath.Join(l.programs, name) }

// capsem runs the command line.
func (l *lab) capsem(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, l.program("capsem"), args...)
	cmd.Env = append(cmd.Environ(), config.EnvHome+"="+l.home.Root())
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("running capsem %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// serve returns a client of the service, which it starts the first time.
func (l *lab) serve(ctx context.Context) (*client.Client, error) {
	if l.service != nil {
		return l.service, nil
	}
	socket, err := l.home.ServiceSocket()
	if err != nil {
		return nil, err
	}
	l.service, err = client.Starter{
		Home: l.home, Executable: l.program("capsemd"), Env: l.env.Daemon(),
		Say: func(string) {}, // that it is another build is no news here
	}.Ensure(ctx, socket)
	return l.service, err
}

// machine returns Capsem's machine, which it creates the first time.
func (l *lab) machine(ctx context.Context) (*api.VM, error) {
	if l.vm != nil {
		return l.vm, nil
	}
	service, err := l.serve(ctx)
	if err != nil {
		return nil, err
	}
	var vm api.VM
	req := api.CreateRequest{Name: "box", Profile: profileName, Image: imageName, CPUs: cpus, MemoryBytes: memoryBytes}
	if err := service.Do(ctx, http.MethodPost, "/v1/vms", req, &vm); err != nil {
		return nil, err
	}
	l.vm = &vm
	return l.vm, nil
}

// remember makes a machine that the service finds when it starts.
func (l *lab) remember(record config.VMRecord) error {
	if err := os.MkdirAll(l.home.VMDir(record.ID), 0o700); err != nil {
		return fmt.Errorf("making a machine's folder: %w", err)
	}
	return config.WriteVMRecord(l.home.VMRecord(record.ID), record)
}

// exec runs a command in Capsem's machine.
func (l *lab) exec(ctx context.Context, argv ...string) (api.ExecResult, error) {
	var result api.ExecResult
	m, err := l.machine(ctx)
	if err != nil {
		return result, err
	}
	var req api.ExecRequest
	for _, arg := range argv {
		req.Argv = append(req.Argv, []byte(arg))
	}
	err = l.service.Do(ctx, http.MethodPost, "/v1/vms/"+m.ID+"/exec", req, &result)
	if err == nil && result.ExitCode != 0 {
		err = fmt.Errorf("%s ended with status %d: %s", argv[0], result.ExitCode, result.Stderr)
	}
	return result, err
}

// close ends everything that was started.
func (l *lab) close(ctx context.Context) error {
	var errs []error
	if l.floor != nil {
		errs = append(errs, l.floor.close(ctx))
	}
	if l.service != nil {
		errs = append(errs, l.service.Do(ctx, http.MethodPost, "/v1/purge", api.PurgeRequest{All: true}, nil))
		l.service.Close()
		errs = append(errs, l.capsem(ctx, "service", "stop"))
	}
	return errors.Join(append(errs, os.RemoveAll(l.dir))...)
}
