// Hostile is a program that tries one way out of its jail. It exits with 0 if
// that worked, and otherwise with 3 and the reason on stdout. Run outside of a
// jail, each way works where the kernel and the user's rights allow it at all:
// that is the control of the test.
package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func main() {
	if len(os.Args) < 2 {
		os.Exit(2)
	}
	attack, known := attacks[os.Args[1]]
	if !known {
		fmt.Println("unknown attack")
		os.Exit(2)
	}
	if err := attack(append(os.Args[2:], "", "")); err != nil {
		fmt.Println(err)
		if errors.Is(err, unix.ENOSYS) {
			os.Exit(4)
		}
		os.Exit(3)
	}
}

var attacks = map[string]func(args []string) error{
	"nothing": func([]string) error { return nil },
	"victim":  victim,

	"read":     func(a []string) error { _, err := os.ReadFile(a[0]); return err },
	"list":     func(a []string) error { _, err := os.ReadDir(a[0]); return err },
	"write":    func(a []string) error { return os.WriteFile(a[0], []byte("x"), 0o600) },
	"sysctl":   func([]string) error { return overwrite("/proc/sys/kernel/core_pattern") },
	"disk":     fillDisk,
	"pids":     fillPIDs,
	"fds":      inherited,
	"exec":     func([]string) error { return unix.Exec(os.Args[0], []string{"hostile", "nothing"}, nil) },
	"fork":     func([]string) error { return spawn(0) },
	"environ":  func(a []string) error { _, err := os.ReadFile("/proc/" + a[0] + "/environ"); return err },
	"mem":      func(a []string) error { return peek("/proc/" + a[0] + "/mem") },
	"ptrace":   func(a []string) error { return ptrace(number(a[0])) },
	"vmread":   func(a []string) error { return vmRead(number(a[0])) },
	"signal":   func(a []string) error { return unix.Kill(number(a[0]), unix.SIGCONT) },
	"pidfd":    pidfd,
	"unix":     func(a []string) error { return dial("unix", a[0]) },
	"abstract": func(a []string) error { return dial("unix", "@"+a[0]) },
	"tcp":      func(a []string) error { return dial("tcp", a[0]) },
	"udp":      udp,
	"vsock":    func([]string) error { return socket(unix.AF_VSOCK, unix.SOCK_STREAM) },
	"netlink":  func([]string) error { return socket(unix.AF_NETLINK, unix.SOCK_RAW) },
	"packet":   func([]string) error { return socket(unix.AF_PACKET, unix.SOCK_RAW) },
	"alg":      func([]string) error { return socket(unix.AF_ALG, unix.SOCK_SEQPACKET) },
	"userns":   func([]string) error { return spawn(unix.CLONE_NEWUSER) },
	"mountns":  func([]string) error { return spawn(unix.CLONE_NEWNS) },
	"mount":    mount,
	"opentree": func([]string) error {
		fd, err := unix.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE)
		return closing(fd, err)
	},
	"chroot": func([]string) error { return unix.Chroot("/") },
	"mknod":  func(a []string) error { return unix.Mknod(a[0], unix.S_IFBLK|0o600, int(unix.Mkdev(7, 0))) },
	"setuid": func([]string) error { return unix.Setuid(0) },
	"bpf":    bpf,
	"iouring": func([]string) error {
		var p [120]byte
		return newFD(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&p)))
	},
	"keyctl": func([]string) error {
		_, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_PROCESS_KEYRING, true)
		return err
	},
	"perf": perf,
	"uffd": func([]string) error { return newFD(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|1, 0) },
	"personality": func([]string) error {
		_, _, errno := unix.Syscall(unix.SYS_PERSONALITY, 0x0040000, 0, 0)
		return code(errno)
	},
	"int80": func([]string) error { return foreign(int80GetPID()) },
	"x32": func([]string) error {
		_, _, errno := unix.RawSyscall(0x40000000|unix.SYS_GETPID, 0, 0, 0)
		return x32Works(errno)
	},
}

func number(s string) int { n, _ := strconv.Atoi(s); return n }

func code(errno syscall.Errno) error {
	if errno != 0 {
		return errno
	}
	return nil
}

func closing(fd int, err error) error {
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

func newFD(call, a, b uintptr) error {
	fd, _, errno := unix.Syscall(call, a, b, 0)
	return closing(int(fd), code(errno))
}

// victim is what others are attacked as: it says its name and waits.
func victim([]string) error {
	fmt.Println(os.Getpid())
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	<-stop
	return nil
}

func overwrite(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	return f.Close() // opening was enough
}

// fillDisk takes 512 MiB of a folder that it can write to.
func fillDisk(args []string) error {
	var reasons []error
	for _, dir := range []string{args[0], "/tmp", "/dev/shm", "/", "/dev", "/run"} {
		name := dir + "/hostile-fill"
		fd, err := unix.Open(name, unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
		if err == nil {
			err = unix.Fallocate(fd, 0, 0, 512<<20)
			err = errors.Join(err, unix.Unlink(name), unix.Close(fd))
		}
		if err == nil {
			return nil
		}
		reasons = append(reasons, fmt.Errorf("%s: %w", dir, err))
	}
	return errors.Join(reasons...)
}

// fillPIDs forks 1000 processes that do nothing.
func fillPIDs([]string) (err error) {
	var pids []int
	for range 1000 {
		pid, _, errno := unix.RawSyscall(unix.SYS_FORK, 0, 0, 0)
		if errno != 0 {
			err = fmt.Errorf("after %d processes: %w", len(pids), errno)
			break
		}
		if pid == 0 {
			for {
				_, _, _ = unix.RawSyscall(unix.SYS_PAUSE, 0, 0, 0)
			}
		}
		pids = append(pids, int(pid))
	}
	for _, pid := range pids {
		_ = unix.Kill(pid, unix.SIGKILL)
		_, _ = unix.Wait4(pid, nil, 0, nil)
	}
	return err
}

// inherited looks for a descriptor that nobody gave it.
func inherited([]string) error {
	for fd := 3; fd < 256; fd++ {
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG {
			return nil
		}
	}
	return errors.New("nothing is open")
}

// spawn starts itself in new namespaces.
func spawn(flags uintptr) error {
	p, err := os.StartProcess(os.Args[0], []string{"hostile", "nothing"}, &os.ProcAttr{Sys: &syscall.SysProcAttr{Cloneflags: flags}})
	if err != nil {
		return err
	}
	_, err = p.Wait()
	return err
}

func peek(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return f.Close()
}

func ptrace(pid int) error {
	if err := unix.PtraceSeize(pid); err != nil {
		return err
	}
	return nil // this process ends, which lets go of it
}

func vmRead(pid int) error {
	var buf [8]byte
	local := []unix.Iovec{{Base: &buf[0], Len: 8}}
	_, err := unix.ProcessVMReadv(pid, local, []unix.RemoteIovec{{Base: 0x400000, Len: 8}}, 0)
	return err
}

func pidfd(args []string) error {
	fd, err := unix.PidfdOpen(number(args[0]), 0)
	if err != nil {
		return err
	}
	theirs, err := unix.PidfdGetfd(fd, 1, 0)
	return errors.Join(closing(theirs, err), unix.Close(fd))
}

func dial(network, address string) error {
	c, err := net.Dial(network, address)
	if err != nil {
		return err
	}
	return c.Close()
}

func udp(args []string) error {
	c, err := net.Dial("udp", args[0])
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }() // nothing is left to send
	if _, err := c.Write([]byte("x")); err != nil {
		return err
	}
	if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	_, err = c.Read(make([]byte, 1)) // whoever is attacked answers
	return err
}

func socket(family, kind int) error { fd, err := unix.Socket(family, kind, 0); return closing(fd, err) }

func mount(args []string) error {
	if err := unix.Mount("tmpfs", args[0], "tmpfs", 0, ""); err != nil {
		return err
	}
	return unix.Unmount(args[0], 0)
}

func bpf([]string) error {
	attr := struct{ kind, key, value, max uint32 }{2, 4, 4, 1} // BPF_MAP_TYPE_ARRAY
	fd, _, errno := unix.Syscall(unix.SYS_BPF, 0, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	return closing(int(fd), code(errno))
}

func perf([]string) error {
	attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_SOFTWARE, Size: unix.PERF_ATTR_SIZE_VER0, Config: unix.PERF_COUNT_SW_TASK_CLOCK}
	fd, err := unix.PerfEventOpen(&attr, 0, -1, -1, 0)
	return closing(fd, err)
}

// int80GetPID is getpid through the entry of 32-bit programs.
func int80GetPID() int32

func foreign(pid int32) error {
	if int(pid) != os.Getpid() {
		return fmt.Errorf("int 0x80 says %d: %w", pid, unix.ENOSYS)
	}
	return nil
}

// x32Works takes a kernel without x32 for one that does not mind the attempt.
func x32Works(errno syscall.Errno) error {
	if errno != 0 && errno != unix.ENOSYS {
		return errno
	}
	return nil
}
