// Package qemu runs machines in QEMU, one process for each.
//
// QEMU is given descriptors, not paths: kernel and initramfs are files that the
// caller has opened and verified, and its monitor, its serial console and its
// socket device are connections with this process. The only files that it finds
// by itself are its program, libraries and firmware. It runs under its own
// seccomp filter (-sandbox on), may not start anything, and has no network.
//
// The guest's sockets end in this process (package vhostvsock). A QEMU that has
// lost the other end of that connection would go on with a guest that nobody can
// reach, so it is killed when the connection closes; and it is started by a
// function of the caller's that has to make sure that it dies with this process
// (child.Start does).
//
// Nothing here knows what the guest runs. What the guest writes to its console
// goes to Spec.Console; why a machine ended is what QEMU says in its monitor's
// SHUTDOWN event, not what the guest says.
package qemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"time"

	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/vm"
)

// The accelerators: the processor's own virtualisation, and QEMU's translator.
const (
	KVM = "kvm"
	TCG = "tcg"
)

// Program is the QEMU that is used where Config names none.
const Program = "qemu-system-x86_64"

// guestCID is the context id of every guest. It has a meaning between a guest
// and its own device only.
const guestCID = 3

// defaultBootTimeout is how long QEMU may take until its monitor answers.
const defaultBootTimeout = 10 * time.Second

// Process is a QEMU that was started.
type Process interface {
	// PID is its process id.
	PID() int
	// Wait blocks until it has ended, and returns nil for exit status 0.
	Wait() error
	// Kill ends it without delay and does not wait.
	Kill() error
}

// Config says how machines are run.
type Config struct {
	// Start starts QEMU. The process must not outlive this one. ctx bounds the
	// start alone.
	Start func(ctx context.Context, cmd child.Command) (Process, error)
	// Program is QEMU's name or path, "" for Program.
	Program string
	// Path is where a Program without a slash is looked for, as in PATH.
	Path string
	// Accelerator is KVM or TCG. Probe finds out which of them works.
	Accelerator string
	// Log receives what a machine's operator should know; nil discards.
	Log *slog.Logger
}

// Backend is a vm.Backend.
type Backend struct {
	config Config
}

// New returns a backend. It starts nothing.
func New(config Config) (*Backend, error) {
	if config.Accelerator != KVM && config.Accelerator != TCG {
		return nil, fmt.Errorf("accelerator %q is neither %q nor %q", config.Accelerator, KVM, TCG)
	}
	if config.Start == nil {
		return nil, errors.New("a QEMU backend needs a function that starts QEMU")
	}
	if config.Program == "" {
		config.Program = Program
	}
	if config.Log == nil {
		config.Log = slog.New(slog.DiscardHandler)
	}
	return &Backend{config: config}, nil
}

// Create prepares a machine. Its socket device is there at once; QEMU is started
// by Start.
func (b *Backend) Create(_ context.Context, spec vm.Spec) (vm.Machine, error) {
	if err := check(spec); err != nil {
		return nil, fmt.Errorf("creating machine %s: %w", spec.Name, err)
	}
	if spec.BootTimeout == 0 {
		spec.BootTimeout = defaultBootTimeout
	}
	if spec.Console == nil {
		spec.Console = io.Discard
	}
	m, err := newMachine(b.config, spec)
	if err != nil {
		return nil, fmt.Errorf("creating machine %s: %w", spec.Name, err)
	}
	return m, nil
}

// check says what in spec cannot be run.
func check(spec vm.Spec) error {
	const mib = 1 << 20
	switch {
	case spec.CPUs < 1 || spec.CPUs > maxCPUs:
		return fmt.Errorf("%d processors: a machine has 1 to %d", spec.CPUs, maxCPUs)
	case spec.MemoryBytes < minMemory || spec.MemoryBytes%mib != 0:
		return fmt.Errorf("%d bytes of memory: a machine has at least %d MiB, in whole MiB", spec.MemoryBytes, minMemory/mib)
	case spec.Kernel == nil:
		return errors.New("it has no kernel")
	}
	return nil
}

// start starts QEMU with args, whose files are numbered from 3.
func (c *Config) start(ctx context.Context, args []string, output *os.File, files []*os.File) (Process, error) {
	process, err := c.Start(ctx, child.Command{
		Path:   c.Program,
		Args:   args,
		Env:    []string{"PATH=" + c.Path},
		Dir:    "/",
		Stdout: output,
		Stderr: output,
		Files:  files,
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("QEMU is missing: there is no %s in PATH %q; on Debian and Ubuntu, `apt-get install qemu-system-x86` installs it: %w", c.Program, c.Path, err)
	}
	if err != nil {
		return nil, fmt.Errorf("starting QEMU: %w", err)
	}
	return process, nil
}
