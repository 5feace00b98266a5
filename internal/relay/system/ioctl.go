//go:build linux

package system

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctlBytes calls ioctl(2) with a pointer to arg, which is not empty.
func ioctlBytes(f *os.File, request uintptr, arg []byte) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(&arg[0])))
	if errno != 0 {
		return errno
	}
	return nil
}
