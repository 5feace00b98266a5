package qemu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/vm"
)

// ProbeLimit is how long Probe tries a guest under KVM: with everything around
// it, the answer is there in 3 s.
const ProbeLimit = 2800 * time.Millisecond

// booted is what a kernel prints that has come to its end of booting and has no
// root file system. Everything that an accelerator could get wrong lies before.
const booted = "VFS: Unable to mount root fs"

// Acceleration is what Probe found. It holds for this boot of the host and this
// QEMU; the caller may keep it as long as both are the same.
type Acceleration struct {
	// Accelerator is KVM or TCG.
	Accelerator string `json:"accelerator"`
	// Reason says why, for people.
	Reason string `json:"reason"`
	// BootID names the host's boot (/proc/sys/kernel/random/boot_id).
	BootID string `json:"boot_id"`
	// QEMUVersion is what QEMU says of itself.
	QEMUVersion string `json:"qemu_version"`
}

// Current is an Acceleration without an answer: what a kept one must agree with
// in BootID and QEMUVersion to be still true.
func Current(ctx context.Context, config Config) (Acceleration, error) {
	id, err := bootID()
	if err != nil {
		return Acceleration{}, err
	}
	version, err := Version(ctx, config)
	return Acceleration{BootID: id, QEMUVersion: version}, err
}

// Probe finds out whether KVM works by booting kernel under it, for ProbeLimit
// at most: a /dev/kvm that can be opened proves nothing. KVM that does not work
// is an answer, TCG, and no error. config's Accelerator is not used.
func Probe(ctx context.Context, config Config, kernel *os.File) (Acceleration, error) {
	found, err := Current(ctx, config)
	if err != nil {
		return Acceleration{}, fmt.Errorf("probing the acceleration: %w", err)
	}
	found.Accelerator = KVM
	if err := tryKVM(ctx, config, kernel); err != nil {
		if ctx.Err() != nil {
			return Acceleration{}, fmt.Errorf("probing the acceleration: %w", ctx.Err())
		}
		found.Accelerator, found.Reason = TCG, strings.ReplaceAll(err.Error(), "\n", "; ")
		return found, nil
	}
	found.Reason = "a kernel boots under KVM"
	return found, nil
}

// tryKVM says why KVM cannot be used, or nil.
func tryKVM(ctx context.Context, config Config, kernel *os.File) error {
	if err := unix.Access("/dev/kvm", unix.R_OK|unix.W_OK); err != nil {
		switch {
		case errors.Is(err, unix.ENOENT):
			return errors.New("this machine has no /dev/kvm")
		case errors.Is(err, unix.EACCES):
			return errors.New("this user may not open /dev/kvm; members of group kvm may")
		}
		return fmt.Errorf("/dev/kvm: %w", err)
	}
	config.Accelerator = KVM
	ctx, cancel := context.WithTimeout(ctx, ProbeLimit)
	defer cancel()
	return tryBoot(ctx, config, kernel)
}

// tryBoot boots kernel until it looks for a root file system, and says why it did
// not get there before ctx ended.
func tryBoot(ctx context.Context, config Config, kernel *os.File) error {
	backend, err := New(config)
	if err != nil {
		return err
	}
	console := &watch{wanted: booted, seen: make(chan struct{})}
	m, err := backend.Create(ctx, vm.Spec{Name: "probe", CPUs: 1, MemoryBytes: 128 << 20, Kernel: kernel, Console: console})
	if err != nil {
		return err
	}
	if err := m.Start(ctx); err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("QEMU did not come up within %s", ProbeLimit)
		}
		return errors.Join(err, m.Stop(context.WithoutCancel(ctx)))
	}
	ended := make(chan struct{})
	var end error
	go func() {
		defer close(ended)
		end = m.Wait()
	}()
	select {
	case <-console.seen:
	case <-ended:
		if !console.found() { // else it has reset itself, as it was told
			err = end
		}
	case <-ctx.Done():
		err = fmt.Errorf("a guest under %s did not boot within %s", strings.ToUpper(config.Accelerator), ProbeLimit)
	}
	err = errors.Join(err, m.Stop(context.WithoutCancel(ctx)))
	<-ended
	return err
}

// watch is a writer that waits for a text.
type watch struct {
	wanted string
	seen   chan struct{} // closed when it was written

	mu   sync.Mutex
	done bool
	end  []byte // the end of what was written, shorter than wanted
}

func (w *watch) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.done {
		return len(b), nil
	}
	w.end = append(w.end, b...)
	if bytes.Contains(w.end, []byte(w.wanted)) {
		w.done, w.end = true, nil
		close(w.seen)
		return len(b), nil
	}
	if over := len(w.end) - len(w.wanted) + 1; over > 0 {
		w.end = append(w.end[:0], w.end[over:]...)
	}
	return len(b), nil
}

func (w *watch) found() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.done
}

// Version asks QEMU for its version.
func Version(ctx context.Context, config Config) (string, error) {
	if config.Program == "" {
		config.Program = Program
	}
	read, write, err := os.Pipe()
	if err != nil {
		return "", fmt.Errorf("asking QEMU for its version: %w", err)
	}
	defer func() { _ = read.Close() }() // it was only read from
	process, err := config.start(ctx, []string{"--version"}, write, nil)
	if err := errors.Join(err, write.Close()); err != nil {
		return "", err
	}
	defer context.AfterFunc(ctx, func() { _ = process.Kill() })() //nolint:errcheck // Wait says how it ended
	output := new(tail)
	_, err = io.Copy(output, read)
	if err := errors.Join(err, process.Wait()); err != nil {
		return "", fmt.Errorf("asking QEMU for its version: %w; it printed: %s", err, output)
	}
	line, _, _ := strings.Cut(output.String(), "\n")
	return strings.TrimPrefix(line, "QEMU emulator version "), nil
}
