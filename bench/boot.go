package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/image"
	"github.com/capsem/capsem/internal/image/cpio"
)

func bootBenchmark() benchmark {
	return benchmark{
		name: "boot",
		about: "`capsem create` (image tiny, cold, the service runs) until it returns; the floor is the same QEMU command, kernel, " +
			"processors and memory with an init that loads the same modules, opens one vsock connection and does nothing else",
		run: benchBoot,
	}
}

func benchBoot(ctx context.Context, l *lab) (rows []row, err error) {
	if _, err := l.serve(ctx); err != nil {
		return nil, err
	}
	img, err := l.openImage()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, img.Close()) }()
	initrd, err := l.firstInitrd(ctx, img)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, initrd.Close()) }()
	var own series // what the VM's process says that it took
	create := func(ctx context.Context) (float64, error) {
		took, boot, err := l.create(ctx)
		own = append(own, boot)
		return took, err
	}
	all, err := alternate(ctx, l.rounds(9), create, func(ctx context.Context) (float64, error) { return l.bootFirst(ctx, img, initrd) })
	if err != nil {
		return nil, err
	}
	return []row{
		compare("create to ready", "ms", all[0], all[1], atMost(1.15), ""),
		absolute("create: the part of the VM's own process", "ms", own[1:], nil, ""),
	}, nil
}

// create makes a machine with the command line and removes it. It returns what
// the command took, and what of that the machine's process did.
func (l *lab) create(ctx context.Context) (took, own float64, err error) {
	began := time.Now()
	if err := l.capsem(ctx, "create", "--name", "cold", "--image", imageName); err != nil {
		return 0, 0, err
	}
	took = millis(time.Since(began))
	var vm struct {
		BootMS int64 `json:"boot_ms"`
	}
	err = l.service.Do(ctx, "GET", "/v1/vms/cold", nil, &vm)
	return took, float64(vm.BootMS), errors.Join(err, l.capsem(ctx, "delete", "--force", "cold"))
}

// bootFirst boots the floor's guest and returns what it took until it called.
func (l *lab) bootFirst(ctx context.Context, img *image.Image, initrd *os.File) (took float64, err error) {
	backend, err := l.backend(func(*child.Command) {})
	if err != nil {
		return 0, err
	}
	began := time.Now()
	m, err := backend.Create(ctx, l.spec(img.Kernel, initrd))
	if err != nil {
		return 0, err
	}
	err = awaitCall(ctx, m)
	took = millis(time.Since(began))
	return took, errors.Join(err, m.Stop(context.WithoutCancel(ctx)))
}

// firstInitrd is the initramfs of bench/guest/first: the program and the modules
// that Capsem's init loads.
func (l *lab) firstInitrd(ctx context.Context, img *image.Image) (*os.File, error) {
	guest, err := l.buildGuest(ctx, "first")
	if err != nil {
		return nil, err
	}
	program, err := os.ReadFile(guest)
	if err != nil {
		return nil, fmt.Errorf("reading the guest's program: %w", err)
	}
	entries := []cpio.Entry{
		{Name: ".", Mode: cpio.Dir | 0o755},
		{Name: "dev", Mode: cpio.Dir | 0o755},
		{Name: "dev/console", Mode: cpio.Char | 0o600, Major: 5, Minor: 1},
		{Name: "init", Mode: cpio.File | 0o755, Body: program},
		{Name: "modules", Mode: cpio.Dir | 0o755},
	}
	for i, name := range img.Manifest.Modules {
		body, err := os.ReadFile(filepath.Join(l.home.Images(), imageName, img.Ref.Digest, filepath.FromSlash(name)))
		if err != nil {
			return nil, fmt.Errorf("reading a module: %w", err)
		}
		entries = append(entries, cpio.Entry{Name: "modules/" + string(rune('0'+i)), Mode: cpio.File | 0o644, Body: body})
	}
	f, err := os.Create(filepath.Join(l.dir, "first.initrd"))
	if err != nil {
		return nil, fmt.Errorf("making an initramfs: %w", err)
	}
	if err := cpio.Write(f, entries); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
