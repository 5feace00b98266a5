// Package vm says what a hypervisor must do for Capsem, without naming one.
//
// A Backend turns a Spec into a Machine: a guest that has not run yet. The
// supervisor listens on the vsock ports that it serves, starts the machine, and
// from then on knows it only through connections and through Wait. Exec, files
// and everything else that needs the guest's cooperation belong to package
// guest; a Machine offers bytes in and out, nothing that the guest could lie
// about.
//
// Every backend passes the suite in vm/vmtest.
package vm

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"time"
)

// HostCID is the context id under which a guest reaches its host
// (VMADDR_CID_HOST in linux/vm_sockets.h).
const HostCID = 2

// ErrStopped is returned by operations on a machine that no longer runs.
var ErrStopped = errors.New("the machine has stopped")

// Backend creates machines of one kind.
type Backend interface {
	// Create prepares a machine without starting it. The files in spec stay the
	// caller's to close, and may be closed once Start has returned. A machine
	// that is created must be stopped, also when it was never started.
	Create(ctx context.Context, spec Spec) (Machine, error)
}

// Machine is one guest, from before its first instruction to after its last.
// Its methods may be called from any goroutine.
type Machine interface {
	// Listen accepts the guest's connections to port. It is called before Start
	// for every port that the host serves, so that no first connection is lost;
	// a connection to any other port is refused with a reset. Closing the
	// listener refuses the port from then on. Accepted connections are
	// full-duplex, support deadlines and CloseWrite (half-close).
	Listen(port uint32) (net.Listener, error)

	// Dial connects to a port on which the guest listens. A port without a
	// listener is an error that matches syscall.ECONNRESET.
	Dial(ctx context.Context, port uint32) (net.Conn, error)

	// Start runs the guest. It returns when the hypervisor runs, which says
	// nothing about the guest: it is ready when it announces itself.
	Start(ctx context.Context) error

	// Wait blocks until the guest and its hypervisor are gone, and returns why:
	// nil for an orderly power-off, else an error that says what happened.
	// It may be called by several goroutines; all get the same answer.
	Wait() error

	// Stop ends the machine at once, as pulling the plug would, and returns
	// when the hypervisor and all its resources are gone. It is idempotent.
	// An orderly shutdown is asked of the guest, not of the machine.
	Stop(ctx context.Context) error
}

// Snapshotter is implemented by machines that can be suspended. It is found by
// type assertion.
type Snapshotter interface {
	// Suspend writes the machine's memory and devices to w and stops it.
	Suspend(ctx context.Context, w io.Writer) error
}

// Inspector is implemented by machines that can say what runs them. It is found
// by type assertion.
type Inspector interface {
	// Accelerator is how guest code runs: "kvm", "tcg", or "none" for a fake.
	Accelerator() string
	// PID is the hypervisor's process id on the host, 0 before Start.
	PID() int
}

// Spec is what a machine is made of.
type Spec struct {
	// Name labels the hypervisor's process for people; it has no other effect.
	Name string
	// CPUs is the number of virtual processors, at least 1.
	CPUs int
	// MemoryBytes is the size of guest RAM, a multiple of 1 MiB.
	MemoryBytes int64
	// Kernel is an uncompressed ELF vmlinux (PVH), and Initrd a cpio archive.
	// Both were verified by the caller; a backend reads them by descriptor and
	// never by path.
	Kernel, Initrd *os.File
	// Cmdline is appended to the kernel command line that the backend needs.
	Cmdline string
	// Console receives what the guest writes to its serial console. Bytes are
	// the guest's: a writer must bound what it keeps. A nil Console discards.
	Console io.Writer
	// BootTimeout is how long the backend lets the hypervisor itself take to
	// come up, 0 for the backend's default. Waiting for the guest is the
	// caller's.
	BootTimeout time.Duration
}
