package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/bench/guest/wire"
	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/image"
	"github.com/capsem/capsem/internal/image/cpio"
	"github.com/capsem/capsem/internal/vm"
	"github.com/capsem/capsem/internal/vm/qemu"
)

// bootLimit is how long a floor's guest may take to call.
const bootLimit = 2 * time.Minute

// floorVM is a machine of Capsem's kernel, processors and memory whose guest is
// bench/guest/raw. It runs on Capsem's socket device, and has a virtio-serial
// port beside it.
type floorVM struct {
	machine vm.Machine
	// serial is the host's end of the virtio-serial port.
	serial net.Conn
	// lines accepts what `raw relay` carries.
	lines net.Listener
	// initrd and image are held open until the machine ends.
	initrd *os.File
	image  *image.Image
	// key is the private key that its sshd takes.
	key string
}

// raw returns the floors' machine, which it boots the first time.
func (l *lab) raw(ctx context.Context) (*floorVM, error) {
	if l.floor != nil {
		return l.floor, nil
	}
	f, err := l.bootRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("booting the floors' machine: %w", err)
	}
	l.floor = f
	return f, nil
}

func (l *lab) bootRaw(ctx context.Context) (f *floorVM, err error) {
	f = &floorVM{}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close(context.WithoutCancel(ctx)))
		}
	}()
	if f.image, err = l.openImage(); err != nil {
		return f, err
	}
	if err := l.makeInitrd(ctx, f); err != nil {
		return f, err
	}
	serial, theirs, err := socketpair()
	if err != nil {
		return f, err
	}
	f.serial = serial
	defer func() { err = errors.Join(err, theirs.Close()) }()
	backend, err := l.backend(serialPort(theirs))
	if err != nil {
		return f, err
	}
	if f.machine, err = backend.Create(ctx, l.spec(f.image.Kernel, f.initrd)); err != nil {
		return f, err
	}
	if f.lines, err = f.machine.Listen(wire.PortLines); err != nil {
		return f, err
	}
	return f, awaitCall(ctx, f.machine)
}

// spec is a machine with what Capsem's has.
func (l *lab) spec(kernel, initrd *os.File) vm.Spec {
	return vm.Spec{Name: "floor", CPUs: cpus, MemoryBytes: memoryBytes, Kernel: kernel, Initrd: initrd, Console: l.console()}
}

// console shows what a floor's guest says, where it is asked for.
func (l *lab) console() io.Writer {
	if l.log.Enabled(context.Background(), -4) {
		return os.Stderr
	}
	return io.Discard
}

// backend runs QEMU as Capsem does, with change made to its command line.
func (l *lab) backend(change func(*child.Command)) (*qemu.Backend, error) {
	return qemu.New(qemu.Config{
		Path: l.path, Accelerator: l.accelerator, Log: l.log,
		Start: func(ctx context.Context, cmd child.Command) (qemu.Process, error) {
			change(&cmd)
			return child.Start(ctx, cmd)
		},
	})
}

// serialPort gives QEMU a virtio-serial port whose other end is a socket.
func serialPort(theirs *os.File) func(*child.Command) {
	return func(cmd *child.Command) {
		const firstFile = 3
		cmd.Files = append(cmd.Files, theirs)
		cmd.Args = append(cmd.Args,
			"-device", "virtio-serial-pci,id=ser",
			"-chardev", fmt.Sprintf("socket,id=serial,fd=%d", firstFile+len(cmd.Files)-1),
			"-device", "virtserialport,bus=ser.0,chardev=serial,name=bench",
		)
	}
}

// awaitCall starts a machine and waits until its guest calls on PortFirst.
func awaitCall(ctx context.Context, m vm.Machine) error {
	first, err := m.Listen(wire.PortFirst)
	if err != nil {
		return err
	}
	if err := m.Start(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, bootLimit)
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		_ = first.Close() // ends Accept, which has the error
	})
	defer stop()
	conn, err := first.Accept()
	if err != nil {
		return fmt.Errorf("waiting for the guest's call: %w", errors.Join(err, ctx.Err()))
	}
	return conn.Close()
}

// socketpair is a connection and the file of its other end.
func socketpair() (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("making a socketpair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	conn, err := net.FileConn(ours)
	if err := errors.Join(err, ours.Close()); err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	return conn, theirs, nil
}

// makeInitrd puts the floors' guest over Capsem's initramfs: an archive that
// follows another one replaces its files.
func (l *lab) makeInitrd(ctx context.Context, f *floorVM) (err error) {
	guest, err := l.buildGuest(ctx, "raw")
	if err != nil {
		return err
	}
	body, err := os.ReadFile(guest)
	if err != nil {
		return fmt.Errorf("reading the guest's program: %w", err)
	}
	entries := []cpio.Entry{{Name: "init", Mode: cpio.File | 0o755, Body: body}}
	server, key, err := sshServer(ctx, l.dir)
	if err != nil {
		return err
	}
	f.key = key
	return f.writeInitrd(filepath.Join(l.dir, "raw.initrd"), append(entries, server...))
}

func (f *floorVM) writeInitrd(name string, over []cpio.Entry) (err error) {
	if f.initrd, err = os.Create(name); err != nil {
		return fmt.Errorf("making an initramfs: %w", err)
	}
	if _, err := io.Copy(f.initrd, io.NewSectionReader(f.image.Initrd, 0, 1<<40)); err != nil {
		return fmt.Errorf("making an initramfs: %w", err)
	}
	if err := cpio.Write(f.initrd, over); err != nil {
		return err
	}
	_, err = f.initrd.Seek(0, io.SeekStart)
	return err
}

// buildGuest builds one of bench/guest's programs and returns its path.
func (l *lab) buildGuest(ctx context.Context, name string) (string, error) {
	out := filepath.Join(l.dir, "guest-"+name)
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, "github.com/capsem/capsem/bench/guest/"+name)
	cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOFLAGS=")
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the guest's program: %w: %s", err, text)
	}
	return out, nil
}

// dial opens a connection to the raw guest.
func (f *floorVM) dial(ctx context.Context) (net.Conn, error) {
	return f.machine.Dial(ctx, wire.PortRaw)
}

// run runs a command in the raw guest and returns its stdout.
func (f *floorVM) run(ctx context.Context, argv ...string) ([]byte, error) {
	conn, err := f.dial(ctx)
	if err != nil {
		return nil, err
	}
	words := strings.Join(argv, "\x00") + "\x00"
	if _, err = conn.Write(append(wire.Request{Op: wire.Run, Size: uint32(len(words))}.Append(nil), words...)); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	var size [4]byte
	if _, err = io.ReadFull(conn, size[:]); err != nil {
		return nil, errors.Join(fmt.Errorf("%s in the floors' guest: %w", argv[0], err), conn.Close())
	}
	out := make([]byte, binary.BigEndian.Uint32(size[:]))
	_, err = io.ReadFull(conn, out)
	return out, errors.Join(err, conn.Close())
}

// close ends the machine.
func (f *floorVM) close(ctx context.Context) error {
	var errs []error
	if f.machine != nil {
		errs = append(errs, f.machine.Stop(ctx))
	}
	if f.serial != nil {
		errs = append(errs, f.serial.Close())
	}
	if f.initrd != nil {
		errs = append(errs, f.initrd.Close())
	}
	if f.image != nil {
		errs = append(errs, f.image.Close())
	}
	return errors.Join(errs...)
}
