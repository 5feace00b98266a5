//go:build linux

// Command first is the /init of the machine that booting is compared with: it
// opens one vsock connection to its host and does nothing else. It uses no more
// of Go's runtime than system calls, so that what is measured is the kernel and
// the virtual machine.
package main

import (
	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/bench/guest/wire"
)

// hostCID is VMADDR_CID_HOST.
const hostCID = 2

func main() {
	// Whatever fails: the host sees no connection and says so.
	if loadModules() == nil && call() == nil {
		_ = unix.Pause() // the host ends the machine
	}
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART) // there is nobody to tell
}

// loadModules loads /modules/0, /modules/1 and so on.
func loadModules() error {
	name := []byte("/modules/0")
	for {
		fd, err := unix.Open(string(name), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == unix.ENOENT {
			return nil
		}
		if err != nil {
			return err
		}
		if err := unix.FinitModule(fd, "", 0); err != nil {
			return err
		}
		name[len(name)-1]++
	}
}

// call opens the connection.
func call() error {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.Connect(fd, &unix.SockaddrVM{CID: hostCID, Port: wire.PortFirst})
}
