// Capsemd has the programs that run in the background: the service, the host
// process of each VM, its launcher, and the building of images. People use
// capsem, which starts what is needed.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/images"
	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/endpoint"
	"github.com/capsem/capsem/internal/image"
	"github.com/capsem/capsem/internal/launch"
	"github.com/capsem/capsem/internal/service"
	"github.com/capsem/capsem/internal/session"
)

// version is set by the build.
var version = "dev"

const usage = `usage: capsemd serve                 the service
       capsemd vm [--recover] ID     the host process of a VM; its ledger after a crash
       capsemd image build NAME      build an image
       capsemd version
People use capsem, which starts these.`

func main() {
	// Nothing here may be dumped or read by another process: it holds secrets.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		fmt.Fprintln(os.Stderr, "capsemd:", err)
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, &boundedLog{file: os.Stderr})
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	log := slog.New(slog.NewJSONHandler(stderr, nil))
	var err error
	switch {
	case len(args) == 1 && args[0] == "serve":
		err = serve(ctx, log)
	case len(args) == 2 && args[0] == "vm":
		err = runVM(ctx, args[1], log)
	case len(args) == 3 && args[0] == "vm" && args[1] == "--recover":
		err = recoverVM(ctx, args[2])
	case len(args) == 3 && args[0] == "image" && args[1] == "build":
		return buildImage(ctx, args[2], stdout)
	case len(args) == 1 && args[0] == launch.ServeCommand:
		err = launch.Serve(ctx, os.NewFile(launch.SocketFD, "launcher"), log)
	case len(args) == 1 && args[0] == launch.InitCommand:
		return launch.Init(stderr)
	case len(args) == 1 && args[0] == "version":
		_, err = fmt.Fprintln(stdout, "capsemd", version)
	default:
		fmt.Fprintln(stderr, usage)
		return 2
	}
	if err != nil {
		fmt.Fprintln(stderr, "capsemd:", err)
		return 1
	}
	return 0
}

// executable is this program's own path, free of symbolic links: the other
// programs are beside it.
func executable() (string, error) {
	path, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("finding this program: %w", err)
	}
	return filepath.EvalSymlinks(path)
}

// serve runs the service. It says "ready" on descriptor 3 where whoever started
// it listens there.
func serve(ctx context.Context, log *slog.Logger) error {
	env := config.OSEnv()
	home, err := config.OpenHome(env)
	if err != nil {
		return err
	}
	settings, err := config.LoadSettings(home.Settings(), env)
	if err != nil {
		return err
	}
	self, err := executable()
	if err != nil {
		return err
	}
	return service.Run(ctx, service.Options{
		Home: home, Settings: settings, Executable: self, Env: env.Daemon(), Version: version, Log: log,
		Ready: func() {
			if f := inherited(3); f != nil {
				if _, err := io.WriteString(f, "ready\n"); err != nil {
					log.Debug("nobody waits for the service", "error", err)
				}
				if err := f.Close(); err != nil {
					log.Debug("closing the ready pipe", "error", err)
				}
			}
		},
	})
}

// inherited returns a pipe that this program was started with, or nil.
func inherited(fd int) *os.File {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFIFO {
		return nil
	}
	unix.CloseOnExec(fd)
	return os.NewFile(uintptr(fd), "pipe")
}

// memoryTarget is the size in bytes above which a VM's process collects garbage
// as often as it must: what it may hold for its guest, and what it needs itself.
const memoryTarget = endpoint.MaxHeld + 128<<20

// runVM runs a VM. What the service hands over comes on descriptor 3, progress
// goes to 4.
func runVM(ctx context.Context, id string, log *slog.Logger) error {
	pipe, progress := inherited(3), inherited(4)
	if pipe == nil || progress == nil || !config.IsID(id) {
		return errors.New("capsemd vm is started by the service, for a VM's id")
	}
	handover, err := config.ReadHandover(pipe)
	if err := errors.Join(err, pipe.Close()); err != nil {
		return err
	}
	env := config.OSEnv()
	home, err := config.OpenHome(env)
	if err != nil {
		return err
	}
	self, err := executable()
	if err != nil {
		return err
	}
	// What a guest may have us hold lives beside twice that much garbage unless
	// the collector is told where to stop.
	debug.SetMemoryLimit(memoryTarget)
	return session.Run(ctx, session.Options{
		Home: home, ID: id, Handover: handover, Progress: progress, Executable: self, Env: env, Version: version, Log: log,
	})
}

func recoverVM(ctx context.Context, id string) error {
	if !config.IsID(id) {
		return fmt.Errorf("%q is not a VM's id", id)
	}
	home, err := config.OpenHome(config.OSEnv())
	if err != nil {
		return err
	}
	return session.Recover(ctx, home, id)
}

// buildImage builds an image and says how it goes, as api.Progress lines.
func buildImage(ctx context.Context, name string, stdout io.Writer) int {
	lines := json.NewEncoder(stdout)
	say := func(p api.Progress) bool { return lines.Encode(p) == nil }
	built, err := func() (api.Image, error) {
		home, err := config.OpenHome(config.OSEnv())
		if err != nil {
			return api.Image{}, err
		}
		m, err := image.Build(ctx, image.Options{
			Name: name, Recipes: images.FS, Images: home.Images(), Cache: home.Cache(),
			Progress: func(step string) { say(api.Progress{Step: step}) },
		})
		if err != nil {
			return api.Image{}, err
		}
		ref, err := m.Ref()
		return api.Image{Name: ref.Name, Digest: "sha256:" + ref.Digest, Kernel: m.KernelRelease, SizeBytes: m.Size(), Current: true}, err
	}()
	if err != nil {
		say(api.Progress{Error: api.AsError(err)})
		return 1
	}
	result, err := json.Marshal(built)
	if err != nil || !say(api.Progress{Result: result}) {
		return 1
	}
	return 0
}
