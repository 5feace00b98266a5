package child

import (
	"os"

	"golang.org/x/sys/unix"
)

// PipeRoom is how many bytes a pipe takes at once when HasRoom says so, in bytes:
// PIPE_BUF of pipe(7).
const PipeRoom = 4096

// HasRoom reports whether PipeRoom bytes can be written to a pipe now without
// blocking. It holds until somebody writes. With it, a writer can hand over a
// small message on its own goroutine, and leave only what could block to another.
func HasRoom(pipe *os.File) bool {
	raw, err := pipe.SyscallConn()
	if err != nil {
		return false
	}
	room := false
	err = raw.Control(func(fd uintptr) {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		n, err := unix.Poll(fds, 0)
		room = err == nil && n == 1 && fds[0].Revents == unix.POLLOUT
	})
	return err == nil && room
}
