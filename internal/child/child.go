// Package child starts, watches and stops one subprocess.
//
// What a child gets is what the Command says and nothing else: the descriptors
// 0, 1, 2 and those of Files, the variables of Env, a session and process group
// of its own. Nothing is inherited by accident, whatever else this process has
// open at the time.
//
// A child does not outlive its parent. It is started with the parent-death
// signal SIGKILL, which the kernel sends when the *thread* that forked ends; so
// each child has one locked thread in its parent, which forks it, blocks until
// it exits, and is given back only then. The signal reaches the direct child
// alone: to take down what a child has started in turn, across setsid and double
// forks, start it through package launch.
//
// When a child exits, whatever is left in its process group is killed before
// the child is reaped, so that a process id is never signalled after it could
// have been given to somebody else.
package child

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Grace is how long Stop waits after SIGTERM before it sends SIGKILL.
const Grace = 2 * time.Second

// killWait is how long Stop waits for a killed process to go. A process in an
// uninterruptible system call can take arbitrarily long.
const killWait = 5 * time.Second

// Command describes a subprocess.
type Command struct {
	// Path is the program. A name without a slash is looked up in the PATH of
	// Env; relative entries of that PATH are ignored.
	Path string
	// Args are its arguments, without argv[0], which is Path.
	Args []string
	// Env is its whole environment, nil for an empty one.
	Env []string
	// Dir is its working directory, "" for that of this process.
	Dir string
	// Stdin, Stdout and Stderr are its descriptors 0, 1 and 2, nil for the null
	// device. They and Files stay the caller's to close, and may be closed once
	// Start has returned.
	Stdin, Stdout, Stderr *os.File
	// Files become its descriptors 3, 4, ... in order.
	Files []*os.File
	// Attr are further attributes: namespaces, id mappings, ambient
	// capabilities. Setsid and Pdeathsig are set in any case. It is not
	// modified; nil is allowed.
	Attr *syscall.SysProcAttr
}

// Process is a subprocess that was started. Its methods may be called from any
// goroutine, also after it has ended.
type Process struct {
	proc *os.Process
	path string

	// mu is held while the process is signalled and while it is reaped, so that
	// no signal is sent to a process id that was given back.
	mu     sync.Mutex
	reaped bool

	done chan struct{} // closed after err is set
	err  error
}

// ExitError says how a process ended that did not end with status 0.
type ExitError struct {
	// Program is the Path of the Command.
	Program string
	// Code is the exit status, -1 when a signal ended the process.
	Code int
	// Signal is the signal that ended it, 0 for none.
	Signal syscall.Signal
}

// Error says what happened in words for people.
func (e *ExitError) Error() string { return e.Program + ": " + e.Reason() }

// Reason is Error without the program.
func (e *ExitError) Reason() string {
	if e.Signal != 0 {
		return fmt.Sprintf("killed by signal %d (%s)", int(e.Signal), e.Signal)
	}
	return fmt.Sprintf("exit status %d", e.Code)
}

// Start starts cmd. ctx bounds the start alone: the process lives on when it is
// cancelled. Errors match fs.ErrNotExist for a program that is not there and
// fs.ErrPermission for one that must not be executed.
//
// A process is reaped when it exits, whether or not anybody waits for it; until
// then it holds one thread of its parent.
func Start(ctx context.Context, cmd Command) (*Process, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", cmd.Path, err)
	}
	p := &Process{path: cmd.Path, done: make(chan struct{})}
	started := make(chan error, 1)
	go p.run(cmd, started)
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// run is the life of the thread that is the process's parent. It ends when the
// process has ended.
func (p *Process) run(cmd Command, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	proc, err := Fork(cmd)
	if err != nil {
		started <- err
		return
	}
	p.proc = proc
	started <- nil

	p.err = p.reap()
	close(p.done)
}

// Fork starts cmd as Start does, as a child of the calling thread, and leaves it
// to the caller to reap it. The caller has locked the thread, which must live
// as long as the child shall. It is for a process that reaps everything, as an
// init does.
func Fork(cmd Command) (*os.Process, error) {
	path, err := Lookup(cmd.Path, cmd.Env)
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", cmd.Path, err)
	}
	files, closeNull, err := descriptors(cmd)
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", cmd.Path, err)
	}
	defer closeNull()

	// The fork copies every descriptor that is not close-on-exec. Ours all
	// are, but for those that this process was itself started with.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return nil, fmt.Errorf("starting %s: marking descriptors close-on-exec: %w", cmd.Path, err)
	}
	var sys syscall.SysProcAttr
	if cmd.Attr != nil {
		sys = *cmd.Attr
	}
	sys.Setsid = true
	sys.Pdeathsig = syscall.SIGKILL
	env := cmd.Env
	if env == nil {
		env = []string{} // nil would mean: inherit
	}
	proc, err := os.StartProcess(path, append([]string{cmd.Path}, cmd.Args...), &os.ProcAttr{
		Dir: cmd.Dir, Env: env, Files: files, Sys: &sys,
	})
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", cmd.Path, explain(err, path))
	}
	return proc, nil
}

// reap blocks until the process has exited, kills what is left of its group,
// and collects its status.
func (p *Process) reap() error {
	waitErr := awaitExit(p.proc)

	p.mu.Lock()
	defer p.mu.Unlock()
	// The leader is a zombie still, so its group's id is still its own. An error
	// means that nobody is left in the group.
	_ = unix.Kill(-p.proc.Pid, unix.SIGKILL)
	state, err := p.proc.Wait()
	p.reaped = true
	if err := errors.Join(waitErr, err); err != nil {
		return fmt.Errorf("waiting for %s: %w", p.path, err)
	}
	if state.Success() {
		return nil
	}
	exit := &ExitError{Program: p.path, Code: state.ExitCode()}
	if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		exit.Code, exit.Signal = -1, ws.Signal()
	}
	return exit
}

// awaitExit blocks the calling thread until proc has exited, and leaves it a
// zombie.
func awaitExit(proc *os.Process) error {
	for {
		err := unix.Waitid(unix.P_PID, proc.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if err != unix.EINTR {
			return err
		}
	}
}

// PID is the process's id, which is also the id of its group and session.
func (p *Process) PID() int { return p.proc.Pid }

// PidFD returns a new descriptor that refers to the process (pidfd_open(2)), for
// the caller to close. Once it has ended, the error matches os.ErrProcessDone.
func (p *Process) PidFD() (*os.File, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reaped {
		return nil, os.ErrProcessDone
	}
	fd, err := unix.PidfdOpen(p.proc.Pid, 0)
	if err != nil {
		return nil, fmt.Errorf("opening a pidfd of %s (pid %d): %w", p.path, p.proc.Pid, err)
	}
	return os.NewFile(uintptr(fd), "pidfd"), nil
}

// Done is closed when the process has ended and was reaped.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait blocks until the process has ended and says how: nil for status 0, an
// *ExitError for any other end. It may be called any number of times.
func (p *Process) Wait() error {
	<-p.done
	return p.err
}

// Signal sends sig to the process alone. Once it has ended, the error matches
// os.ErrProcessDone.
func (p *Process) Signal(sig syscall.Signal) error {
	return p.signal(p.proc.Pid, sig)
}

// SignalGroup sends sig to the process and everything in its group.
func (p *Process) SignalGroup(sig syscall.Signal) error {
	return p.signal(-p.proc.Pid, sig)
}

// Kill sends SIGKILL to the process's group. It does not wait. A process that
// has ended is no error.
func (p *Process) Kill() error {
	if err := p.SignalGroup(syscall.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

func (p *Process) signal(target int, sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reaped {
		return os.ErrProcessDone
	}
	if err := unix.Kill(target, sig); err != nil {
		return fmt.Errorf("signalling %s (pid %d): %w", p.path, p.proc.Pid, err)
	}
	return nil
}

// Stop ends the process: SIGTERM to its group, SIGKILL after Grace or as soon as
// ctx ends. It returns nil once the process is gone, however it ended, and an
// error when it cannot be killed within 5 s more. A process that would end by
// itself when its stdin is closed should have it closed first, by the caller.
func (p *Process) Stop(ctx context.Context) error {
	if err := p.SignalGroup(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	grace := time.NewTimer(Grace)
	defer grace.Stop()
	select {
	case <-p.done:
		return nil
	case <-grace.C:
	case <-ctx.Done():
	}
	if err := p.Kill(); err != nil {
		return err
	}
	limit := time.NewTimer(killWait)
	defer limit.Stop()
	select {
	case <-p.done:
		return nil
	case <-limit.C:
		return fmt.Errorf("stopping %s (pid %d): still there %s after SIGKILL", p.path, p.proc.Pid, killWait)
	}
}

// descriptors returns what becomes 0, 1, 2, 3, ... in the child, with the null
// device where the command names nothing.
func descriptors(cmd Command) (files []*os.File, closeNull func(), err error) {
	files = append([]*os.File{cmd.Stdin, cmd.Stdout, cmd.Stderr}, cmd.Files...)
	if !slices.Contains(files, nil) {
		return files, func() {}, nil
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("opening the null device: %w", err)
	}
	for i, f := range files {
		if f == nil {
			files[i] = null
		}
	}
	return files, func() {
		_ = null.Close() // a null device cannot lose anything
	}, nil
}
