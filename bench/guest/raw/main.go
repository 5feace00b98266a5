//go:build linux

// Command raw is the benchmarks' own guest: what a virtual machine can do at
// best, without Capsem. As /init it answers requests (package wire) on a vsock
// port and on a virtio-serial port, with the same code and blocking system calls
// for both, and runs a `sshd -i` for each connection to the SSH port.
//
// It has two other roles. `raw relay` carries lines between its stdin and the
// host, as Capsem's relay does, without looking at them. `raw client` is an MCP
// client that measures how long the server that it starts takes to answer; it
// runs in Capsem's own guest too.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/relay/sysmon"
)

func main() {
	if os.Getpid() == 1 {
		fmt.Fprintln(os.Stderr, "raw:", serveGuest())
		fmt.Fprintln(os.Stderr, "raw:", unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART))
		return
	}
	if err := role(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "raw:", err)
		os.Exit(1)
	}
}

func role(args []string) error {
	switch {
	case len(args) == 1 && args[0] == "relay":
		return errors.Join(sysmon.Rest(), relay())
	case len(args) > 3 && args[0] == "client":
		return client(args[1], args[2], args[3:])
	}
	return errors.New("usage: raw relay | raw client COUNT BYTES SERVER [ARGUMENT…]")
}

// serveGuest does not return while all is well.
func serveGuest() error {
	for _, m := range []struct{ kind, target string }{
		{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}, {"tmpfs", "/tmp"},
	} {
		if err := unix.Mount(m.kind, m.target, m.kind, 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mounting %s: %w", m.target, err)
		}
	}
	// What Capsem's guest spares itself is no part of a floor.
	if err := errors.Join(sysmon.Rest(), loadModules()); err != nil {
		return err
	}
	ssh, err := listen(portSSH)
	if err != nil {
		return err
	}
	raw, err := listen(portRaw)
	if err != nil {
		return err
	}
	ended := make(chan error, 3)
	go func() { ended <- serveSerial() }()
	go func() { ended <- accept(ssh, serveSSH) }()
	go func() { ended <- accept(raw, serveRequests) }()
	if err := callHost(); err != nil {
		return err
	}
	return <-ended
}

// loadModules loads what Capsem's init loads, and the console's driver, which
// has the serial ports.
func loadModules() error {
	for _, list := range []string{"/lib/capsem/modules", "/lib/capsem/modules.available"} {
		b, err := os.ReadFile(list)
		if err != nil {
			return fmt.Errorf("reading the list of modules: %w", err)
		}
		for name := range strings.Lines(string(b)) {
			name = strings.TrimSpace(name)
			if strings.HasSuffix(list, ".available") && filepath.Base(name) != "virtio_console.ko" {
				continue
			}
			if err := loadModule(name); err != nil {
				return fmt.Errorf("loading %s: %w", name, err)
			}
		}
	}
	return nil
}

func loadModule(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	err = unix.FinitModule(int(f.Fd()), "", 0)
	if errors.Is(err, unix.EEXIST) {
		err = nil
	}
	return errors.Join(err, f.Close())
}
