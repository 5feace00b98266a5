package confine

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Filter says which system calls may be made. What it says in numbers is for the
// architecture that the program is built for: a call through another one's entry
// (`int 0x80`, x32), for which the numbers mean something else, kills the
// process.
type Filter struct {
	// Allow lists all that may be called. Empty, everything may be called that
	// is not in Deny.
	Allow []uint32
	// Deny lists what fails with EPERM.
	Deny []uint32
	// Families lists the address families that socket(2) takes. Others fail with
	// EAFNOSUPPORT. Connected pairs of Unix sockets can always be made.
	Families []uint32
	// Once lets the thread start one program, and nothing after that start
	// another process or execute another program, see Filter.Install.
	Once bool
}

// Offsets in struct seccomp_data (linux/seccomp.h). Arguments are 64 bits wide;
// of those that are looked at here, the kernel takes the lower half.
const (
	offsetNumber = 0
	offsetArch   = 4
	offsetArgs   = 16
)

// x32Bit marks system calls of the x32 ABI, which has the same architecture
// value as x86-64.
const x32Bit = 0x40000000

// namespaceFlags are those of clone(2) that make namespaces.
const namespaceFlags = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
	unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

// Instructions of classic BPF, as linux/filter.h builds them.

func load(offset uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
}

func ret(action uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: action}
}

// unless skips n instructions if the test of the loaded value against k fails.
func unless(test uint16, k uint32, n int) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_K | test, K: k, Jf: uint8(n)}
}

func fails(errno unix.Errno) unix.SockFilter {
	return ret(unix.SECCOMP_RET_ERRNO | uint32(errno))
}

// call applies block to one system call. In block an argument may be loaded; the
// number is loaded again behind it.
func call(number uint32, block ...unix.SockFilter) []unix.SockFilter {
	block = append(block, load(offsetNumber))
	return append([]unix.SockFilter{unless(unix.BPF_JEQ, number, len(block))}, block...)
}

func argument(n uint32) unix.SockFilter { return load(offsetArgs + 8*n) }

// program is the filter's code.
func (f Filter) program() []unix.SockFilter {
	p := []unix.SockFilter{
		load(offsetArch),
		unless(unix.BPF_JEQ, auditArch, 1),
		{Code: unix.BPF_JMP | unix.BPF_JA, K: 1},
		ret(unix.SECCOMP_RET_KILL_PROCESS),
		load(offsetNumber),
	}
	if auditArch == unix.AUDIT_ARCH_X86_64 {
		p = append(p, unless(unix.BPF_JGE, x32Bit, 1), ret(unix.SECCOMP_RET_KILL_PROCESS))
	}
	p = append(p, f.sockets()...)
	p = append(p, f.processes()...)
	p = append(p, call(unix.SYS_IOCTL,
		argument(1),
		unless(unix.BPF_JEQ, unix.TIOCSTI, 1), fails(unix.EPERM), // types into somebody's terminal
		unless(unix.BPF_JEQ, tioclinux, 1), fails(unix.EPERM),
	)...)
	for _, number := range f.Deny {
		p = append(p, unless(unix.BPF_JEQ, number, 1), fails(unix.EPERM))
	}
	if len(f.Allow) == 0 {
		return append(p, ret(unix.SECCOMP_RET_ALLOW))
	}
	for _, number := range f.Allow {
		p = append(p, unless(unix.BPF_JEQ, number, 1), ret(unix.SECCOMP_RET_ALLOW))
	}
	return append(p, fails(unix.EPERM))
}

// tioclinux is the ioctl TIOCLINUX, which pastes into a virtual terminal.
const tioclinux = 0x541c

func (f Filter) sockets() []unix.SockFilter {
	block := []unix.SockFilter{argument(0)}
	for _, family := range f.Families {
		block = append(block, unless(unix.BPF_JEQ, family, 1), ret(unix.SECCOMP_RET_ALLOW))
	}
	p := call(unix.SYS_SOCKET, append(block, fails(unix.EAFNOSUPPORT))...)
	return append(p, call(unix.SYS_SOCKETPAIR,
		argument(0), unless(unix.BPF_JEQ, unix.AF_UNIX, 1), ret(unix.SECCOMP_RET_ALLOW), fails(unix.EAFNOSUPPORT),
	)...)
}

// processes decides on clone, fork and exec.
func (f Filter) processes() []unix.SockFilter {
	// The flags of clone3 are in memory, which no filter sees: libraries fall
	// back to clone when it is not there.
	p := call(unix.SYS_CLONE3, fails(unix.ENOSYS))
	clone := []unix.SockFilter{
		argument(0),
		unless(unix.BPF_JSET, namespaceFlags, 1), fails(unix.EPERM),
	}
	if !f.Once {
		return append(p, call(unix.SYS_CLONE, append(clone, ret(unix.SECCOMP_RET_ALLOW))...)...)
	}
	clone = append(clone,
		unless(unix.BPF_JSET, unix.CLONE_THREAD, 1), ret(unix.SECCOMP_RET_ALLOW),
		ret(unix.SECCOMP_RET_USER_NOTIF))
	p = append(p, call(unix.SYS_CLONE, clone...)...)
	p = append(p, call(unix.SYS_EXECVE, ret(unix.SECCOMP_RET_USER_NOTIF))...)
	p = append(p, call(unix.SYS_EXECVEAT, fails(unix.EPERM))...)
	for _, number := range forks {
		p = append(p, call(number, fails(unix.EPERM))...)
	}
	return p
}

// Installed is a filter in force that waits for one program to be started. Its
// Close must be called once that is done, or has failed.
type Installed struct {
	stop *os.File      // closing it ends the goroutine
	done chan struct{} // closed when it has ended
	err  error
}

// Install puts the filter in force for the calling thread and what it starts.
// The thread must have no_new_privs.
//
// Of a filter with Once, the forks and the first execve are asked about, on a
// descriptor that this process holds. A goroutine says yes to them; after the
// first execve it closes the descriptor, and from then on the kernel fails every
// fork and execve, for there is nobody to ask. So the program itself can start,
// which a filter that is already in force would otherwise forbid, and nothing
// after it. The goroutine ends at that point, and at the latest with Close.
func (f Filter) Install() (*Installed, error) {
	code := f.program()
	prog := unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]}
	var flags uintptr
	var stopRead, stopWrite *os.File
	if f.Once {
		flags = unix.SECCOMP_FILTER_FLAG_NEW_LISTENER
		var err error
		if stopRead, stopWrite, err = os.Pipe(); err != nil {
			return nil, fmt.Errorf("installing a system call filter: %w", err)
		}
	}
	listener, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&prog)))
	runtime.KeepAlive(code)
	if errno != 0 {
		return nil, fmt.Errorf("installing a system call filter: %w; the kernel needs CONFIG_SECCOMP_FILTER", errno)
	}
	in := &Installed{done: make(chan struct{})}
	if !f.Once {
		close(in.done)
		return in, nil
	}
	in.stop = stopWrite
	go in.answer(int(listener), stopRead)
	return in, nil
}

// Close waits for the goroutine. It is an error if no program was started and
// the reason was here.
func (in *Installed) Close() error {
	if in.stop == nil {
		return nil
	}
	_ = in.stop.Close() // nothing was written to it
	<-in.done
	return in.err
}

// notification and answer are struct seccomp_notif and seccomp_notif_resp.
type (
	notification struct {
		id          uint64
		pid, flags  uint32
		number      int32
		arch        uint32
		instruction uint64
		args        [6]uint64
	}
	answer struct {
		id           uint64
		value        int64
		error, flags int32
	}
)

// answer says yes until something was executed.
func (in *Installed) answer(listener int, stop *os.File) {
	defer close(in.done)
	defer func() {
		_ = unix.Close(listener) // closing is what it is for; it cannot fail here
		_ = stop.Close()         // a pipe that was only waited for
	}()
	for {
		fds := []unix.PollFd{{Fd: int32(listener), Events: unix.POLLIN}, {Fd: int32(stop.Fd()), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, -1); err != nil {
			if err == unix.EINTR {
				continue
			}
			in.err = fmt.Errorf("waiting for the program's start: %w", err)
			return
		}
		if fds[0].Revents&unix.POLLIN == 0 {
			return // told to stop, or everybody with this filter is gone
		}
		executed, err := approve(listener)
		if err != nil {
			in.err = err
		}
		if executed || err != nil {
			return
		}
	}
}

// approve lets one call go on that waits at the listener.
func approve(listener int) (executed bool, err error) {
	var n notification
	if err := ioctl(listener, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&n)); err != nil {
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINTR) {
			return false, nil // whoever asked is gone, or a signal came
		}
		return false, fmt.Errorf("approving the program's start: %w", err)
	}
	a := answer{id: n.id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}
	if err := ioctl(listener, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&a)); err != nil && !errors.Is(err, unix.ENOENT) {
		return false, fmt.Errorf("approving the program's start: %w", err)
	}
	return n.number == unix.SYS_EXECVE, nil
}

func ioctl(fd int, request uintptr, arg unsafe.Pointer) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
	if errno != 0 {
		return errno
	}
	return nil
}
