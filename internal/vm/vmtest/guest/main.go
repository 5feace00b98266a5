//go:build linux

// Command guest is the /init of the machines that package vmtest boots: it loads
// the kernel's modules, runs the guest's half of the suite, and powers off.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/vm"
	"github.com/capsem/capsem/internal/vm/vmtest"
)

func main() {
	err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "guest:", err)
	}
	// A guest that fails resets, which the host tells from a power-off.
	how := unix.LINUX_REBOOT_CMD_POWER_OFF
	if err != nil {
		how = unix.LINUX_REBOOT_CMD_RESTART
	}
	fmt.Fprintln(os.Stderr, "guest: reboot:", unix.Reboot(how))
}

func run() error {
	if err := loadModules(); err != nil {
		return err
	}
	return vmtest.Guest(context.Background(), network{})
}

// loadModules loads the modules of the list in its order.
func loadModules() error {
	list, err := os.Open("/" + vmtest.ModuleList)
	if err != nil {
		return fmt.Errorf("reading the list of modules: %w", err)
	}
	defer func() { _ = list.Close() }() // it was only read
	names := bufio.NewScanner(list)
	for names.Scan() {
		f, err := os.Open("/" + names.Text())
		if err != nil {
			return fmt.Errorf("opening a module: %w", err)
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		if err := errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("loading %s: %w", names.Text(), err)
		}
	}
	return names.Err()
}

// network is the guest's vsock.
type network struct{}

func (network) Listen(port uint32) (net.Listener, error) {
	return vsock.ListenContextID(unix.VMADDR_CID_ANY, port, nil)
}

func (network) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	return vsock.DialContext(ctx, vm.HostCID, port, nil)
}
