package session

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"time"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/guest"
	"github.com/capsem/capsem/internal/guestproto"
	"github.com/capsem/capsem/internal/image"
	"github.com/capsem/capsem/internal/inspect"
	"github.com/capsem/capsem/internal/launch"
	"github.com/capsem/capsem/internal/vm"
	"github.com/capsem/capsem/internal/vm/qemu"
)

// bootTime is how long a guest gets to announce itself, before it is started
// once more; it is long, because a busy host that translates code is slow.
const bootTime = 40 * time.Second

// verification is the VM's image, which is read and compared with its digest
// while everything else that a boot needs is made ready.
type verification struct {
	done chan struct{} // closed when img and err are set
	img  *image.Image
	err  error
}

func (s *Session) verifyImage() *verification {
	v := &verification{done: make(chan struct{})}
	go func() {
		defer close(v.done)
		v.img, v.err = image.Open(s.opts.Home.Images(), image.Ref{Name: s.record.Spec.Image, Digest: s.record.Spec.ImageDigest})
	}()
	return v
}

// wait returns the image, which stays the verification's to close.
func (v *verification) wait() (*image.Image, error) {
	<-v.done
	return v.img, v.err
}

// close waits for the verification and closes the image. It is idempotent.
func (v *verification) close() error {
	img, err := v.wait()
	if err != nil || img == nil {
		return nil //nolint:nilerr // whoever waited for the image has the error
	}
	v.img = nil
	return img.Close()
}

// boot brings the guest up: verified image, accelerator that works, machine,
// agent. The notes are what the VM's user should know.
func (s *Session) boot(ctx context.Context, verified *verification, undo *closers) (notes []string, err error) {
	s.say(api.Progress{Step: "verifying the image"})
	img, err := verified.wait()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, verified.close()) }()
	backend, notes, err := s.backend(ctx, img)
	if err != nil {
		return nil, err
	}
	console, err := openConsole(s.opts.Home.SerialLog(s.opts.ID))
	if err != nil {
		return nil, err
	}
	undo.add(console.Close)
	spec := vm.Spec{
		Name: s.record.Name, CPUs: s.record.Spec.CPUs, MemoryBytes: s.record.Spec.MemoryBytes,
		Kernel: img.Kernel, Initrd: img.Initrd, Console: console,
	}
	detail := fmt.Sprintf("image %s@sha256:%s, %d cpus, %d MiB, accelerator %s",
		s.record.Spec.Image, s.record.Spec.ImageDigest, spec.CPUs, spec.MemoryBytes>>20, s.state.Accelerator)
	var failure error
	by, err := inspect.ParseInitiator(s.opts.Handover.Initiator)
	if err != nil {
		return nil, err
	}
	ev := s.caller(by).Boot(detail)
	verdict, out := s.gate.Do(ctx, ev, func(ctx context.Context) event.Outcome {
		s.say(api.Progress{Step: "booting"})
		failure = s.bringUp(ctx, backend, spec)
		if errors.Is(failure, errSilent) && ctx.Err() == nil {
			s.log.Warn("starting the guest once more", "error", failure)
			failure = s.bringUp(ctx, backend, spec)
		}
		if failure != nil {
			return event.Outcome{Status: event.Failed, CarriedOut: true, Error: &event.Error{Message: failure.Error()}}
		}
		return event.Outcome{Status: event.Done, CarriedOut: true}
	})
	if verdict.Decision != event.Allow {
		failure = errors.Join(failure, &api.Error{Code: api.CodeBlocked, Message: out.Error.Message, Rule: verdict.Rule})
	}
	if failure != nil {
		return nil, errors.Join(&api.Error{
			Code: api.AsError(failure).Code, Message: failure.Error() + console.tail(),
		}, s.takeDown(context.WithoutCancel(ctx)))
	}
	undo.add(func() error { return s.takeDown(context.WithoutCancel(ctx)) })
	return slices.Concat(notes, s.servers.notes(), s.imageNotes()), nil
}

// imageNotes are what there is to say of the image.
func (s *Session) imageNotes() []string {
	if s.record.Spec.Image == "tiny" && !s.record.Ephemeral {
		return []string{"what is written in a VM of the tiny image is lost when it stops"}
	}
	return nil
}

// errSilent says that a guest that was started did not announce itself.
var errSilent = errors.New("the guest did not announce itself")

// bringUp starts the machine and waits for its agent. After an error nothing of
// it is left.
func (s *Session) bringUp(ctx context.Context, backend vm.Backend, spec vm.Spec) (err error) {
	machine, err := backend.Create(ctx, spec)
	if err != nil {
		return err
	}
	s.machine = machine
	defer func() {
		if err != nil {
			err = errors.Join(err, s.takeDown(context.WithoutCancel(ctx)))
		}
	}()
	mcp, err := machine.Listen(guestproto.PortMCP)
	if err != nil {
		return fmt.Errorf("listening for the guest's MCP clients: %w", err)
	}
	if s.guest, err = guest.New(machine, s.identity()); err != nil {
		return err
	}
	s.serveGuest(ctx, mcp)
	if err := machine.Start(ctx); err != nil {
		return err
	}
	wait, cancel := context.WithTimeoutCause(ctx, bootTime, fmt.Errorf("%w within %s", errSilent, bootTime))
	defer cancel()
	died := make(chan struct{})
	go func() {
		defer close(died)
		if err := machine.Wait(); err != nil {
			s.log.Info("the machine ended", "reason", err)
		}
		cancel()
	}()
	if err := s.guest.Ready(wait); err != nil {
		select {
		case <-died:
			return fmt.Errorf("the machine ended while it booted: %w", errors.Join(machine.Wait(), err))
		default:
		}
		return errors.Join(context.Cause(wait), err)
	}
	return nil
}

// serveGuest answers the guest's MCP connections until the machine is gone.
func (s *Session) serveGuest(ctx context.Context, l net.Listener) {
	served := make(chan struct{})
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.unserve = func() {
		cancel()
		<-served
	}
	go func() {
		defer close(served)
		if err := s.endpoint.Serve(ctx, l); err != nil {
			s.log.Error("serving the guest's MCP clients", "error", err)
		}
	}()
}

// takeDown ends the machine and all that serves it.
func (s *Session) takeDown(ctx context.Context) error {
	var errs []error
	if s.machine != nil {
		errs = append(errs, s.machine.Stop(ctx))
	}
	if s.unserve != nil {
		s.unserve()
	}
	if s.guest != nil {
		errs = append(errs, s.guest.Close())
	}
	s.machine, s.guest, s.unserve = nil, nil, nil
	return errors.Join(errs...)
}

// identity is who the guest is told to be.
func (s *Session) identity() guest.Options {
	sum := sha256.Sum256([]byte("machine-id " + s.record.ID))
	o := guest.Options{
		Hostname: s.record.Name, MachineID: hex.EncodeToString(sum[:16]), More: true,
		OnShutdownRequest: func() { s.stop(api.DefaultStop) }, Log: s.log,
	}
	for name, value := range s.record.Spec.Env {
		o.Env = append(o.Env, []byte(name+"="+value))
	}
	sort.Slice(o.Env, func(i, k int) bool { return string(o.Env[i]) < string(o.Env[k]) })
	return o
}

// backend is QEMU with the accelerator that the VM asks for, or that works.
func (s *Session) backend(ctx context.Context, img *image.Image) (vm.Backend, []string, error) {
	c := qemu.Config{
		Path: s.opts.Env.Get("PATH"), Log: s.log,
	}
	c.Start = func(ctx context.Context, cmd child.Command) (qemu.Process, error) {
		return s.launcher.Start(ctx, launch.Jail{
			Profile: launch.VMM, KVM: c.Accelerator != qemu.TCG, Weak: s.profile.Isolation == config.IsolationWeak,
		}, cmd)
	}
	var notes []string
	c.Accelerator = s.record.Spec.Accelerator
	if c.Accelerator == config.AcceleratorAuto {
		found, fresh, err := s.probe(ctx, c, img.Kernel)
		if err != nil {
			return nil, nil, err
		}
		c.Accelerator = found.Accelerator
		if fresh && found.Accelerator == qemu.TCG {
			notes = append(notes, "hardware acceleration does not work here, guests run in software emulation and slower; capsem doctor says why (this is said once)")
		}
	}
	s.state.Accelerator = c.Accelerator
	b, err := qemu.New(c)
	return b, notes, err
}

// probe finds what accelerates guests, from memory where this boot of the host
// and this QEMU have answered before.
func (s *Session) probe(ctx context.Context, c qemu.Config, kernel *os.File) (found qemu.Acceleration, fresh bool, err error) {
	now, err := qemu.Current(ctx, c)
	if err != nil {
		return found, false, err
	}
	path := s.opts.Home.AccelCache()
	b, err := os.ReadFile(path)
	if err == nil && json.Unmarshal(b, &found) == nil && found.BootID == now.BootID && found.QEMUVersion == now.QEMUVersion {
		return found, false, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return found, false, fmt.Errorf("reading what accelerates guests: %w", err)
	}
	s.say(api.Progress{Step: "finding out whether hardware acceleration works"})
	if found, err = qemu.Probe(ctx, c, kernel); err != nil {
		return found, false, err
	}
	if b, err = json.MarshalIndent(found, "", "  "); err != nil {
		return found, false, fmt.Errorf("encoding what accelerates guests: %w", err)
	}
	next := filepath.Join(filepath.Dir(path), ".accel-"+rand.Text())
	if err := errors.Join(os.WriteFile(next, b, 0o600), os.Rename(next, path)); err != nil {
		return found, false, fmt.Errorf("remembering what accelerates guests: %w", err)
	}
	return found, true, nil
}
