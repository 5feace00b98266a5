package debian

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Bounds on the programs that are run.
const (
	// maxOutput is how much of an apt program's answer is read: one package's
	// stanza has 2 kB.
	maxOutput = 1 << 20
	// maxMessage is how much of the end of a program's messages goes into an
	// error.
	maxMessage = 2 << 10
	// exitDelay is how long a program that was told to end may take.
	exitDelay = 5 * time.Second
	// aptFailed is apt's exit status for every failure.
	aptFailed = 100
)

// exitError is a program that ran and failed.
type exitError struct {
	program string
	code    int
	message string
}

func (e *exitError) Error() string {
	if e.message == "" {
		return fmt.Sprintf("%s ended with status %d", e.program, e.code)
	}
	return fmt.Sprintf("%s ended with status %d: %s", e.program, e.code, e.message)
}

func (a *Archive) apt(ctx context.Context, program string, args ...string) ([]byte, error) {
	return a.aptIn(ctx, a.dir, program, args...)
}

// aptIn runs an apt program in the folder dir. Its parsed index is kept with the
// packages, because an ordinary user may not write apt's own and some systems
// have none: it saves most of a second on each call.
func (a *Archive) aptIn(ctx context.Context, dir, program string, args ...string) ([]byte, error) {
	options := []string{
		"--quiet",
		"-o", "Dir::Cache::pkgcache=" + filepath.Join(a.dir, "apt-index.bin"),
		"-o", "Dir::Cache::srcpkgcache=",
		"-o", "APT::Get::AllowUnauthenticated=false",
		"-o", "Acquire::AllowInsecureRepositories=false",
		"-o", "Acquire::Retries=2",
		"-o", "Acquire::http::Timeout=30",
		"-o", "Acquire::https::Timeout=30",
		// The user that root's downloads are handed to cannot enter our folder.
		"-o", "APT::Sandbox::User=root",
	}
	cmd, err := command(ctx, program, append(options, args...)...)
	if err != nil {
		return nil, err
	}
	out, messages := &head{limit: maxOutput}, &tail{limit: maxMessage}
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, out, messages
	if err := run(ctx, cmd, messages); err != nil {
		return nil, err
	}
	if out.dropped {
		return nil, fmt.Errorf("%s answered with more than %d bytes", program, maxOutput)
	}
	return out.b, nil
}

// command prepares a program in a process group of its own, all of which a
// cancelled ctx ends: apt works through child processes.
func command(ctx context.Context, program string, args ...string) (*exec.Cmd, error) {
	file, err := exec.LookPath(program)
	if err != nil {
		return nil, fmt.Errorf("%s is not on this machine: images are built from Debian's packages, with apt-get, apt-cache and dpkg-deb, on Debian 12 or later: %w", program, err)
	}
	cmd := exec.CommandContext(ctx, file, args...)
	cmd.Env = append(cmd.Environ(), "LC_ALL=C")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = exitDelay
	return cmd, nil
}

func run(ctx context.Context, cmd *exec.Cmd, messages *tail) error {
	err := cmd.Run()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return explain(err, cmd, messages)
}

// explain turns an exit status into an error with the program's last words.
func explain(err error, cmd *exec.Cmd, messages *tail) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return &exitError{filepath.Base(cmd.Path), exit.ExitCode(), messages.String()}
	}
	if err != nil {
		return fmt.Errorf("running %s: %w", filepath.Base(cmd.Path), err)
	}
	return nil
}

// head keeps the first bytes that are written to it.
type head struct {
	b       []byte
	limit   int
	dropped bool
}

func (h *head) Write(p []byte) (int, error) {
	keep := p[:min(len(p), h.limit-len(h.b))]
	h.dropped = h.dropped || len(keep) < len(p)
	h.b = append(h.b, keep...)
	return len(p), nil
}

// tail keeps the last bytes that are written to it.
type tail struct {
	b     []byte
	limit int
}

func (t *tail) Write(p []byte) (int, error) {
	t.b = append(t.b, p[max(0, len(p)-t.limit):]...)
	t.b = append(t.b[:0], t.b[max(0, len(t.b)-t.limit):]...)
	return len(p), nil
}

// String is what was kept on one line.
func (t *tail) String() string {
	return strings.Join(strings.FieldsFunc(string(t.b), func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
}
