//go:build linux

// Package command runs one command of a guest as a tree of processes that can
// be ended whole.
//
// A command starts in a session and, where the kernel has cgroup v2, in a
// cgroup of its own. Signals go to its process group; Kill reaches everything
// that ever descended from it, also what called setsid or lost its parents,
// because nobody leaves a cgroup by forking. Without cgroups Kill falls back to
// the process table, which misses a process that left both the tree and the
// session before anybody looked.
//
// Nothing here interprets a command: argv and environment are handed to execve
// as they came, no shell, no splitting, no re-encoding. A command that cannot
// be started is a *StartError with the exit code that a shell would give.
//
// The package reaps only the processes that it started, by pidfd, so that it
// can live beside other code that does the same.
package command

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/relay/sysmon"
)

// Spec is what to run.
type Spec struct {
	// Argv is the program and its arguments, at least one. A program without a
	// slash is looked for in the PATH of Env.
	Argv []string
	// Env is the whole environment, `name=value` each, handed over as it is.
	Env []string
	// Dir is the working directory, absolute.
	Dir string
	// User is whom the command runs as.
	User User
	// Stdin asks for a pipe to the command's standard input; without, it is
	// /dev/null.
	Stdin bool
	// Group is the cgroup that was made for the command, nil for none. The
	// command owns it from Start on, also when Start fails.
	Group *Group
}

// Status is how a command ended.
type Status struct {
	// Code is the exit status, 128+N where signal N ended it.
	Code int
	// Signal is the signal that ended it, 0 for none.
	Signal syscall.Signal
	// OOM says that the kernel killed a process of the command for want of
	// memory.
	OOM bool
}

// Command is a command that was started. Its methods may be called from any
// goroutine.
type Command struct {
	// PID is the process id of the command itself, which is also its session
	// and its process group.
	PID int
	// Stdin is nil unless it was asked for. The holder closes the three files;
	// they support deadlines.
	Stdin, Stdout, Stderr *os.File

	pidfd *os.File
	tree  tree

	mu     sync.Mutex // guards reaped: no signal may meet a recycled pid
	reaped bool
}

// Start runs the command. An error that the command itself caused is a
// *StartError.
func Start(spec Spec) (*Command, error) {
	c, err := start(spec)
	if err != nil {
		spec.Group.remove()
		return nil, err
	}
	return c, nil
}

func start(spec Spec) (*Command, error) {
	if err := validate(spec); err != nil {
		return nil, err
	}
	path, err := lookPath(spec.Argv[0], spec.Dir, spec.Env)
	if err != nil {
		return nil, err
	}
	pipes, err := openPipes(spec.Stdin, spec.User)
	if err != nil {
		return nil, err
	}
	defer pipes.closeChild()

	pidfd := -1
	attr := &syscall.ProcAttr{
		Dir:   spec.Dir,
		Env:   spec.Env,
		Files: pipes.child[:],
		Sys: &syscall.SysProcAttr{
			Setsid:     true,
			Credential: spec.User.credential(),
			PidFD:      &pidfd,
		},
	}
	if spec.Group != nil {
		attr.Sys.UseCgroupFD = true
		attr.Sys.CgroupFD = int(spec.Group.dir.Fd())
	}
	pid, err := fork(path, spec.Argv, attr)
	if err != nil {
		pipes.closeParent()
		return nil, startError(path, spec, err)
	}
	if pidfd < 0 {
		// A kernel without CLONE_PIDFD (before 5.2) is none that we support:
		// end what was started instead of running it without a handle.
		pipes.closeParent()
		return nil, errors.Join(errors.New("the kernel gave no pidfd"), abandon(pid))
	}
	if err := unix.SetNonblock(pidfd, true); err != nil {
		pipes.closeParent()
		return nil, errors.Join(fmt.Errorf("preparing a pidfd: %w", err), unix.Close(pidfd), abandon(pid))
	}
	return &Command{
		PID:    pid,
		Stdin:  pipes.stdin,
		Stdout: pipes.stdout,
		Stderr: pipes.stderr,
		pidfd:  os.NewFile(uintptr(pidfd), "pidfd"),
		tree:   tree{root: pid, group: spec.Group},
	}, nil
}

// fork starts a process that inherits nothing of the thread it was started by:
// that may be one with our own timer slack.
func fork(path string, argv []string, attr *syscall.ProcAttr) (pid int, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := sysmon.Restore(); err != nil {
		return 0, err
	}
	return syscall.ForkExec(path, argv, attr)
}

// abandon ends and reaps a process that cannot be kept.
func abandon(pid int) error {
	err := unix.Kill(pid, unix.SIGKILL)
	var status unix.WaitStatus
	_, werr := unix.Wait4(pid, &status, 0, nil)
	return errors.Join(err, werr)
}

// Wait blocks until the command itself has ended, whatever its children do. It
// is called once; after it signals are no longer sent.
func (c *Command) Wait() (Status, error) {
	if err := c.awaitExit(); err != nil {
		return Status{}, err
	}
	c.tree.note(true)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reaped = true
	var ws unix.WaitStatus
	for {
		_, err := unix.Wait4(c.PID, &ws, 0, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return Status{}, fmt.Errorf("reaping process %d: %w", c.PID, err)
		}
		break
	}
	st := Status{Code: ws.ExitStatus()}
	if ws.Signaled() {
		st.Signal = ws.Signal()
		st.Code = 128 + int(ws.Signal())
	}
	st.OOM = c.tree.group.oomKilled()
	return st, nil
}

// awaitExit returns when the process is a zombie, without reaping it. The
// pidfd is watched by the runtime's poller: a running command costs no thread.
func (c *Command) awaitExit() error {
	raw, err := c.pidfd.SyscallConn()
	if err != nil {
		return fmt.Errorf("watching process %d: %w", c.PID, err)
	}
	var waitErr error
	err = raw.Read(func(fd uintptr) bool {
		var info unix.Siginfo
		for {
			waitErr = unix.Waitid(unix.P_PIDFD, int(fd), &info, unix.WEXITED|unix.WNOWAIT|unix.WNOHANG, nil)
			if !errors.Is(waitErr, unix.EINTR) {
				break
			}
		}
		if errors.Is(waitErr, unix.EAGAIN) {
			return false
		}
		return waitErr != nil || info.Signo != 0
	})
	if err = errors.Join(err, waitErr); err != nil {
		return fmt.Errorf("waiting for process %d: %w", c.PID, err)
	}
	return nil
}

// Signal sends sig to the command's process group. After Wait it does nothing.
func (c *Command) Signal(sig syscall.Signal) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reaped {
		return nil
	}
	err := unix.Kill(-c.PID, sig)
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("sending %s to process group %d: %w", unix.SignalName(sig), c.PID, err)
	}
	return nil
}

// Terminate asks the command's process group to end, and notes its tree, so
// that a later Kill reaches what the command leaves behind when it obeys.
func (c *Command) Terminate() error {
	c.tree.note(false)
	return c.Signal(syscall.SIGTERM)
}

// Kill ends the command and everything that descended from it, also after
// Wait. It returns when the signals are sent; the processes end after.
func (c *Command) Kill() error {
	c.tree.note(false)
	return errors.Join(c.Signal(syscall.SIGKILL), c.tree.kill())
}

// Close releases what Wait needed and the command's cgroup, if nothing lives in
// it any more; a cgroup with background processes in it stays for a later
// Cgroups.Sweep. It does not end anything.
func (c *Command) Close() error {
	c.tree.group.remove()
	return c.pidfd.Close()
}
