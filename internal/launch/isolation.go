package launch

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/confine"
)

// What Isolation begins with.
const (
	// Strict says that every program is in a jail of namespaces, with a file tree
	// of its own. What the kernel's Landlock is too old for comes after it.
	Strict = "strict"
	// Weak says that the host has no namespaces for us, and why. Programs whose
	// Jail accepts that are held by Landlock rules, a system call filter and a
	// subreaper; others are not started.
	Weak = "weak"
)

// jailUser is who a program is in its user namespace: nobody with any right. On
// the host it is the user who runs the launcher.
const jailUser = 1000

// isolation is how process trees are held together.
type isolation struct {
	// attr starts an init in its namespaces, nil where there are none.
	attr *syscall.SysProcAttr
	name string
	// missing is why attr is nil, with the setting to change.
	missing string
}

// namespaces are those of every jail, beside that of users.
const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS |
	unix.CLONE_NEWCGROUP

// probe finds out what the kernel lets this process do, by doing it: it forks
// into the namespaces and executes a program that does not exist.
func probe() isolation {
	attempts := []*syscall.SysProcAttr{userNamespace()}
	if os.Geteuid() == 0 {
		attempts = append(attempts, &syscall.SysProcAttr{Cloneflags: namespaces})
	}
	var reasons []string
	for _, attr := range attempts {
		err := tryNamespaces(*attr)
		if err == nil {
			return isolation{attr: attr, name: Strict + landlock(": ")}
		}
		reasons = append(reasons, err.Error())
	}
	missing := strings.Join(reasons, "; ")
	if setting := confine.WhyNoNamespaces(); setting != "" {
		missing += "; " + setting
	}
	return isolation{name: Weak + ": " + missing + landlock("; "), missing: missing}
}

// landlock is what is to be said of the kernel's Landlock, after sep.
func landlock(sep string) string {
	if loss := confine.LandlockLoss(confine.LandlockABI()); loss != "" {
		return sep + loss
	}
	return ""
}

// userNamespace maps one user and group to those of this process. Only the init
// gets to use the namespace's capabilities: the thread that starts the program
// has given them up.
func userNamespace() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | namespaces,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: jailUser, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: jailUser, HostID: os.Getegid(), Size: 1}},
		AmbientCaps: []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_SETPCAP, unix.CAP_NET_ADMIN},
	}
}

// tryNamespaces returns why a process cannot be started with attr.
func tryNamespaces(attr syscall.SysProcAttr) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	attr.Pdeathsig = syscall.SIGKILL
	var err error
	if dumpErr := dumpable(func() {
		_, err = os.StartProcess("", []string{"probe"}, &os.ProcAttr{Env: []string{}, Sys: &attr})
	}); dumpErr != nil {
		return dumpErr
	}
	var pathErr *os.PathError
	if errors.As(err, &pathErr) {
		err = pathErr.Err
	}
	if errors.Is(err, syscall.ENOENT) {
		return nil // it came as far as the exec
	}
	kind := "namespaces"
	if attr.Cloneflags&unix.CLONE_NEWUSER != 0 {
		kind = "user namespaces"
	}
	return fmt.Errorf("%s: %w", kind, err)
}

// dumpable runs fork while this process is dumpable. The child of one that is
// not belongs to root in /proc, where its parent has to write the id mappings of
// a user namespace; it is another program before it does anything.
func dumpable(fork func()) error {
	before, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	if err != nil {
		return fmt.Errorf("asking whether the process is dumpable: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("making the process dumpable: %w", err)
	}
	fork()
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, uintptr(before), 0, 0, 0); err != nil {
		return fmt.Errorf("making the process undumpable: %w", err)
	}
	return nil
}

// killRounds bounds killChildren. Each round kills one generation.
const killRounds = 256

// killChildren kills every child of this process but those that keep reports,
// then what they leave behind, which a subreaper inherits, until none is left.
// It reaps what it kills.
func killChildren(keep func(pid int) bool) error {
	for range killRounds {
		children, err := childrenOf(os.Getpid())
		if err != nil {
			return err
		}
		killed := 0
		for _, pid := range children {
			if keep(pid) {
				continue
			}
			// An error of either means that it was reaped in the meantime.
			_ = unix.Kill(pid, unix.SIGKILL)
			_, _ = unix.Wait4(pid, nil, 0, nil)
			killed++
		}
		if killed == 0 {
			return nil
		}
	}
	return fmt.Errorf("processes are started faster than they can be killed (%d rounds)", killRounds)
}

// childrenOf lists the direct children of a process. /proc/PID/stat is there on
// every kernel, unlike /proc/PID/task/TID/children.
func childrenOf(parent int) ([]int, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, fmt.Errorf("listing processes: %w", err)
	}
	names, err := dir.Readdirnames(-1)
	if err := errors.Join(err, dir.Close()); err != nil {
		return nil, fmt.Errorf("listing processes: %w", err)
	}
	var children []int
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if ppid, ok := parentOf(pid); ok && ppid == parent {
			children = append(children, pid)
		}
	}
	return children, nil
}

// parentOf reads the fourth field of /proc/PID/stat (proc_pid_stat(5)). The
// second, the command, may contain spaces and parentheses.
func parentOf(pid int) (ppid int, ok bool) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, false // it is gone
	}
	_, rest, found := cutLast(string(data), ") ")
	fields := strings.Fields(rest)
	if !found || len(fields) < 2 {
		return 0, false
	}
	ppid, err = strconv.Atoi(fields[1])
	return ppid, err == nil
}

func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}
