package client

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/config"
)

// startTime is how long a service gets until it answers.
const startTime = 15 * time.Second

// Starter starts the service where it does not run.
type Starter struct {
	Home config.Home
	// Executable is capsemd.
	Executable string
	// Env is the service's environment.
	Env []string
	// Version is this build's.
	Version string
	// Say is told, in words, what a person should know: that a service was
	// started, or that the one that runs is another build's.
	Say func(string)
}

// Ensure returns a client of the service behind socket, which it starts if
// nobody answers there. Of several programs that find no service at the same
// time, one starts it.
func (s Starter) Ensure(ctx context.Context, socket string) (*Client, error) {
	c := New(socket)
	err := s.greet(ctx, c)
	if !errors.Is(err, ErrNotRunning) {
		return c, err
	}
	lock, err := os.OpenFile(s.Home.ServiceLock()+".start", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("starting the service: %w", err)
	}
	defer lock.Close() // nothing is written to it
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return nil, fmt.Errorf("starting the service: %w", err)
	}
	if err = s.greet(ctx, c); !errors.Is(err, ErrNotRunning) {
		return c, err
	}
	if err := s.start(ctx); err != nil {
		return nil, err
	}
	return c, s.greet(ctx, c)
}

func (s Starter) greet(ctx context.Context, c *Client) error {
	var info api.ServiceInfo
	if err := c.Do(ctx, "GET", "/v1/version", nil, &info); err != nil {
		return err
	}
	if info.API != api.Version {
		return fmt.Errorf("the running service (%s) speaks another protocol than this program (%s): stop it with capsem service stop", info.Version, s.Version)
	}
	if info.Version != s.Version {
		s.Say(fmt.Sprintf("the running service is version %s, this program %s: capsem service stop ends it, and the next command starts its own", info.Version, s.Version))
	}
	return nil
}

// start runs the service in the background, and returns when it serves. It
// says "ready" on its descriptor 3, or on its log why it is not.
func (s Starter) start(ctx context.Context) (err error) {
	log, err := os.OpenFile(s.Home.ServiceLog(), os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("opening the service's log: %w", err)
	}
	defer func() { err = errors.Join(err, log.Close()) }()
	before, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return fmt.Errorf("opening the service's log: %w", err)
	}
	ready, readyIn, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("starting the service: %w", err)
	}
	defer func() { err = errors.Join(err, ready.Close()) }()
	cmd := exec.Command(s.Executable, "serve") //nolint:noctx // the service outlives this program
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr = s.Env, "/", log, log
	cmd.ExtraFiles = []*os.File{readyIn}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	startErr := cmd.Start()
	if err := errors.Join(startErr, readyIn.Close()); err != nil {
		return fmt.Errorf("starting the service: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		if err := ready.SetReadDeadline(time.Unix(1, 0)); err != nil {
			return // the read below then ends with the service
		}
	})
	defer stop()
	line, err := bufio.NewReader(ready).ReadString('\n')
	if strings.TrimSpace(line) != "ready" {
		return fmt.Errorf("starting the service: %s", lastLine(log, before, err))
	}
	s.Say(fmt.Sprintf("started the service (pid %d)", cmd.Process.Pid))
	return cmd.Process.Release()
}

// AwaitEnd blocks until no service serves the home any more: one that was told
// to stop has then closed its files, and another can start.
func AwaitEnd(ctx context.Context, home config.Home) error {
	lock, err := os.OpenFile(home.ServiceLock(), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("waiting for the service's end: %w", err)
	}
	free := make(chan error, 1)
	go func() {
		// The lock goes with the file, also where nobody waits for it any more.
		free <- errors.Join(unix.Flock(int(lock.Fd()), unix.LOCK_EX), lock.Close())
	}()
	select {
	case err = <-free:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("waiting for the service's end: %w", err)
	}
	return nil
}

// lastLine is the last thing that the service wrote to its log.
func lastLine(log *os.File, from int64, otherwise error) string {
	b, err := io.ReadAll(io.NewSectionReader(log, from, maxError))
	text := strings.TrimSpace(string(b))
	if err != nil || text == "" {
		return fmt.Sprintf("it did not become ready: %v", otherwise)
	}
	return text[strings.LastIndexByte(text, '\n')+1:]
}

// FindCapsemd finds capsemd: beside the running program, else in PATH.
func FindCapsemd() (string, error) {
	self, err := os.Executable()
	if err == nil {
		if self, err = filepath.EvalSymlinks(self); err == nil {
			beside := filepath.Join(filepath.Dir(self), "capsemd")
			if _, err := os.Stat(beside); err == nil {
				return beside, nil
			}
		}
	}
	path, err := exec.LookPath("capsemd")
	if err != nil {
		return "", fmt.Errorf("capsemd is neither beside %s nor in PATH", self)
	}
	return path, nil
}
