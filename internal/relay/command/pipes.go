//go:build linux

package command

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// pipes are a command's standard files: ours are non-blocking, so that they
// have deadlines; the command's are blocking, as programs expect.
type pipes struct {
	stdin, stdout, stderr *os.File
	child                 [3]uintptr
}

func openPipes(withStdin bool, user User) (*pipes, error) {
	p := &pipes{}
	const none = ^uintptr(0)
	p.child = [3]uintptr{none, none, none}
	err := p.open(withStdin, user)
	if err != nil {
		p.closeParent()
		p.closeChild()
		return nil, fmt.Errorf("opening the command's pipes: %w", err)
	}
	return p, nil
}

func (p *pipes) open(withStdin bool, user User) error {
	var err error
	if withStdin {
		var r, w int
		if r, w, err = newPipe(user); err != nil {
			return err
		}
		p.child[0] = uintptr(r)
		if p.stdin, err = ours(w, "stdin"); err != nil {
			return err
		}
	} else {
		fd, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("opening %s: %w", os.DevNull, err)
		}
		p.child[0] = uintptr(fd)
	}
	for i, f := range []**os.File{&p.stdout, &p.stderr} {
		r, w, err := newPipe(user)
		if err != nil {
			return err
		}
		p.child[i+1] = uintptr(w)
		if *f, err = ours(r, "output"); err != nil {
			return err
		}
	}
	return nil
}

// newPipe makes a pipe that belongs to user, so that a command which is not
// root can open /dev/stdout.
func newPipe(user User) (r, w int, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return 0, 0, err
	}
	if user.switches() {
		if err := unix.Fchown(fds[0], int(user.UID), int(user.GID)); err != nil {
			return 0, 0, errors.Join(err, unix.Close(fds[0]), unix.Close(fds[1]))
		}
	}
	return fds[0], fds[1], nil
}

// ours wraps our end of a pipe. It takes the descriptor over.
func ours(fd int, name string) (*os.File, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), name), nil
}

// closeChild closes the command's ends, which only the command may hold: as
// long as we do, there is no end of file.
func (p *pipes) closeChild() {
	for _, fd := range p.child {
		if fd != ^uintptr(0) {
			_ = unix.Close(int(fd)) // a pipe end that was never written to has nothing to lose
		}
	}
}

func (p *pipes) closeParent() {
	for _, f := range []*os.File{p.stdin, p.stdout, p.stderr} {
		if f != nil {
			_ = f.Close() // nothing was read or written yet
		}
	}
}
