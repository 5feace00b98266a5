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
)

// PIDNamespace is what Isolation says when each program runs in a pid namespace
// of its own. Otherwise it says "subreaper: " and the reason.
const PIDNamespace = "pid-namespace"

// isolation is how process trees are held together.
type isolation struct {
	// attr starts an init in its namespaces, nil where there are none.
	attr *syscall.SysProcAttr
	name string
}

// probe finds out what the kernel lets this process do, by doing it: it forks
// into the namespaces and executes a program that does not exist.
func probe() isolation {
	var attempts []*syscall.SysProcAttr
	if os.Geteuid() == 0 {
		attempts = append(attempts, &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS})
	}
	attempts = append(attempts, userNamespace())

	var reasons []string
	for _, attr := range attempts {
		err := tryNamespaces(*attr)
		if err == nil {
			return isolation{attr: attr, name: PIDNamespace}
		}
		reasons = append(reasons, err.Error())
	}
	return isolation{name: "subreaper: " + strings.Join(reasons, "; ")}
}

// userNamespace maps the user and group to themselves, so that files belong to
// whom they belong outside. Only the init gets to use the namespace's
// capabilities: it clears them before it starts its program.
func userNamespace() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: os.Geteuid(), HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: os.Getegid(), HostID: os.Getegid(), Size: 1}},
		AmbientCaps: []uintptr{unix.CAP_SYS_ADMIN},
	}
}

// tryNamespaces returns why a process cannot be started with attr.
func tryNamespaces(attr syscall.SysProcAttr) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	attr.Pdeathsig = syscall.SIGKILL
	_, err := os.StartProcess("", []string{"probe"}, &os.ProcAttr{Env: []string{}, Sys: &attr})
	var pathErr *os.PathError
	if errors.As(err, &pathErr) {
		err = pathErr.Err
	}
	if errors.Is(err, syscall.ENOENT) {
		return nil // it came as far as the exec
	}
	kind := "pid and mount namespaces"
	if attr.Cloneflags&unix.CLONE_NEWUSER != 0 {
		kind = "user, pid and mount namespaces"
	}
	return fmt.Errorf("%s: %w", kind, err)
}

// mountProc gives the namespace a /proc that shows its own processes alone.
func mountProc() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("detaching mounts: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mounting /proc: %w", err)
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
