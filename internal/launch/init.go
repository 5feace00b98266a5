package launch

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// forwarded are the signals that an init passes on to its program's group.
func forwarded() []os.Signal {
	return []os.Signal{
		syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT,
		syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGWINCH, syscall.SIGCONT,
	}
}

// Init is the whole program `launch-init`: process 1 of a program's namespace,
// or its subreaper. It takes one start request from the socket on SocketFD,
// starts the program, forwards signals to it, reaps everything, and returns the
// program's status once nothing is left below it. When the socket breaks, the
// launcher is gone, and so is everything here.
//
// It must be called from main's goroutine, and the process exit with what it
// returns.
func Init(stderr io.Writer) int {
	// becomeSubreaper is for the thread that was told to die with its parent: the
	// process's first, on which main is as long as nothing has blocked.
	runtime.LockOSThread()
	code, err := runInit()
	if err != nil {
		// stderr is the launcher's log; there is nobody else to tell.
		_, _ = fmt.Fprintf(stderr, "launch-init: %v\n", err)
	}
	return code
}

func runInit() (int, error) {
	sock, err := newSocket(os.NewFile(SocketFD, "launcher socket"))
	if err != nil {
		return 1, err
	}
	req, files, err := receiveStart(sock)
	if err != nil {
		return 1, err
	}
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, forwarded()...)

	b, err := build(req)
	if err != nil {
		closeAll(files)
		return 1, sock.send(message{Started: failure(req.ID, err)})
	}
	proc, err := b.start(req, files)
	closeAll(files)
	if err != nil {
		return 1, sock.send(message{Started: failure(req.ID, err)})
	}
	if err := sock.send(message{Started: &started{ID: req.ID, Note: b.note}}, b.passed...); err != nil {
		return 1, errors.Join(err, tearDown(req))
	}
	closeAll(b.passed)
	// Both goroutines end with the process, which is about to end whenever
	// this function returns.
	go forward(signals, proc.Pid)
	go dieWithLauncher(sock, req)

	status, err := reapUntil(proc.Pid)
	if errors.Is(err, unix.ECHILD) {
		select {} // dieWithLauncher has reaped the program, and ends this process
	}
	if err != nil {
		return 1, errors.Join(err, tearDown(req))
	}
	err = tearDown(req)
	report := exited{ID: req.ID, Code: status.ExitStatus()}
	code := report.Code
	if status.Signaled() {
		report.Code, report.Signal = -1, status.Signal()
		code = 128 + int(status.Signal())
	}
	return code, errors.Join(err, sock.send(message{Exited: &report}))
}

func receiveStart(sock *socket) (*startRequest, []*os.File, error) {
	m, files, err := sock.receive()
	if err != nil {
		return nil, nil, fmt.Errorf("waiting for what to start: %w", err)
	}
	if m.Start == nil {
		closeAll(files)
		return nil, nil, errors.New("the first message is no start request")
	}
	if err := m.Start.check(len(files)); err != nil {
		closeAll(files)
		return nil, nil, err
	}
	return m.Start, files, nil
}

// becomeSubreaper makes this process the one that inherits what its descendants
// leave behind. It must then outlive the launcher long enough to kill them, so
// it gives up its own parent-death signal: the socket tells it.
func becomeSubreaper() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("becoming a subreaper: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("clearing the parent-death signal: %w", err)
	}
	return nil
}

// reapUntil reaps every child until main is among them, and returns its status.
func reapUntil(main int) (unix.WaitStatus, error) {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return 0, fmt.Errorf("reaping: %w", err)
		case pid == main:
			return status, nil
		}
	}
}

// tearDown ends what is left below this process. The kernel does it for a pid
// namespace when its first process exits.
func tearDown(req *startRequest) error {
	if req.Namespace {
		return nil
	}
	return killChildren(func(int) bool { return false })
}

func forward(signals <-chan os.Signal, main int) {
	for sig := range signals {
		if s, ok := sig.(syscall.Signal); ok {
			// An error means that the group is gone, and so soon is this process.
			_ = unix.Kill(-main, s)
		}
	}
}

// dieWithLauncher ends this process, with all below it, when the launcher closes
// its end of the socket: by its own will to kill the program, or by dying.
func dieWithLauncher(sock *socket, req *startRequest) {
	for {
		_, files, err := sock.receive()
		closeAll(files)
		if err != nil {
			break
		}
	}
	if err := tearDown(req); err != nil {
		os.Exit(1)
	}
	os.Exit(128 + int(syscall.SIGKILL))
}

// failure describes err for the other end of the socket.
func failure(id uint64, err error) *started {
	s := &started{ID: id, Error: err.Error()}
	var errno syscall.Errno
	switch {
	case errors.As(err, &errno):
		s.Errno = errno
	case errors.Is(err, os.ErrNotExist):
		s.Errno = syscall.ENOENT
	case errors.Is(err, os.ErrPermission):
		s.Errno = syscall.EACCES
	}
	return s
}
