package service

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/inspect"
)

// process is a VM's host process. It is no child to care for: it outlives the
// service, and another service takes it up by its identity.
type process struct {
	identity config.ProcessIdentity
	// pidfd becomes readable when the process ends.
	pidfd *os.File
	// progress is what the process says while it starts, nil for one that was
	// taken up.
	progress *os.File
	// ended is closed when the end of the process is recorded.
	ended chan struct{}
}

// openProcess takes up a process that runs.
func openProcess(id config.ProcessIdentity) (*process, error) {
	opened, err := id.Open()
	if err != nil {
		return nil, err
	}
	defer opened.Close() // a duplicate of it is used from here on
	fd, err := unix.FcntlInt(opened.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("watching process %d: %w", id.PID, err)
	}
	// Non-blocking, so that the runtime's poller waits for it.
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(fmt.Errorf("watching process %d: %w", id.PID, err), unix.Close(fd))
	}
	return &process{identity: id, pidfd: os.NewFile(uintptr(fd), "pidfd"), ended: make(chan struct{})}, nil
}

// wait blocks until the process has ended, or returns ctx's error.
func (p *process) wait(ctx context.Context) error {
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() {
		// The past unblocks the wait below.
		if err := p.pidfd.SetReadDeadline(time.Unix(1, 0)); err != nil {
			return
		}
	})
	defer stop()
	err = raw.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return err == nil && n == 1
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return errors.Join(err, p.pidfd.Close())
}

// terminate asks the process to end; it pulls the plug of its VM. kill ends it.
func (p *process) terminate() { p.signal(unix.SIGTERM) }
func (p *process) kill()      { p.signal(unix.SIGKILL) }

func (p *process) signal(sig syscall.Signal) {
	if err := p.identity.Signal(sig); err != nil && !errors.Is(err, config.ErrProcessGone) {
		return // the process cannot be signalled, and whoever waits for its end times out
	}
}

// ready reads what the starting process says until a command would succeed.
func (p *process) ready(ctx context.Context, step func(string)) (notes []string, err error) {
	defer func() { err = errors.Join(err, p.progress.Close()) }()
	stop := context.AfterFunc(ctx, func() {
		if err := p.progress.SetReadDeadline(time.Unix(1, 0)); err != nil {
			return
		}
	})
	defer stop()
	lines := json.NewDecoder(p.progress)
	for {
		var line api.Progress
		if err := lines.Decode(&line); err != nil {
			if ctx.Err() != nil {
				return nil, &api.Error{
					Code: api.CodeTimeout, Message: "the VM did not become ready: " + context.Cause(ctx).Error(),
					Hint: "capsem logs shows how far it came",
				}
			}
			return nil, &api.Error{
				Code: api.CodeFailed, Message: "the VM's host process ended before the VM was ready",
				Hint: "capsem logs --source process shows why",
			}
		}
		switch {
		case line.Error != nil:
			return nil, line.Error
		case line.Step != "":
			step(line.Step)
		default:
			if err := json.Unmarshal(line.Result, &notes); err != nil {
				return nil, fmt.Errorf("reading what the VM's process says: %w", err)
			}
			return notes, nil
		}
	}
}

// spawn starts the VM's process, for whom by says. It gets its secrets and says how it goes
// through pipes, 3 and 4.
func (s *Service) spawn(ctx context.Context, m *machine, by event.Initiator) (_ *process, err error) {
	secrets, err := s.secretsFor(m.profile)
	if err != nil {
		return nil, err
	}
	var files closer
	defer func() { err = errors.Join(err, files.close()) }()
	handover, secretsIn, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("starting the VM's process: %w", err)
	}
	files.add(handover, secretsIn)
	progress, progressIn, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("starting the VM's process: %w", err)
	}
	files.add(progressIn)
	log, err := os.OpenFile(s.opts.Home.ProcessLog(m.id), os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("opening the VM's log: %w", err), progress.Close())
	}
	files.add(log)

	cmd := exec.Command(s.opts.Executable, "vm", m.id) //nolint:noctx // it outlives this request and this service
	cmd.Env, cmd.Stdout, cmd.Stderr, cmd.Dir = s.opts.Env, log, log, "/"
	cmd.ExtraFiles = []*os.File{handover, progressIn}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("starting the VM's process: %w", err), progress.Close())
	}
	s.reap(cmd)
	proc, err := identify(cmd)
	if err != nil {
		return nil, errors.Join(err, progress.Close(), cmd.Process.Kill())
	}
	proc.progress = progress
	if err := (config.Handover{Initiator: inspect.FormatInitiator(by), Secrets: secrets}).Write(secretsIn); err != nil {
		proc.kill()
		return nil, errors.Join(err, progress.Close())
	}
	return proc, ctx.Err()
}

func identify(cmd *exec.Cmd) (*process, error) {
	id, err := config.IdentifyProcess(cmd.Process.Pid)
	if err != nil {
		return nil, fmt.Errorf("identifying the VM's process: %w", err)
	}
	return openProcess(id)
}

// reap collects the exit status of a child, so that it is no zombie. What the
// process has to say about its end stands in its state file.
func (s *Service) reap(cmd *exec.Cmd) {
	go func() {
		if err := cmd.Wait(); err != nil {
			s.log.Info("a VM's process ended", "pid", cmd.Process.Pid, "how", err.Error())
		}
	}()
}

// secretsFor collects the secrets that a profile's servers refer to.
func (s *Service) secretsFor(profile string) (map[string]config.Secret, error) {
	p, err := s.loadProfile(profile)
	if err != nil {
		return nil, err
	}
	store, secrets := s.opts.Home.SecretStore(), map[string]config.Secret{}
	for _, server := range p.Servers {
		for _, name := range server.SecretNames() {
			value, err := store.Get(name)
			if errors.Is(err, config.ErrNoSecret) {
				err = errors.New("there is none of that name") // the hint says the rest
			}
			if err != nil {
				return nil, &api.Error{
					Code:    api.CodeInvalid,
					Message: fmt.Sprintf("server %s of profile %s needs the secret %s: %v", server.Name, profile, name, err),
					Hint:    "capsem secret set " + name,
				}
			}
			secrets[name] = value
		}
	}
	return secrets, nil
}

// loadProfile reads a profile, and says where one that is missing would be.
func (s *Service) loadProfile(name string) (config.Profile, error) {
	p, err := config.LoadProfile(s.opts.Home, name)
	if err == nil {
		return p, nil
	}
	e := &api.Error{Code: api.CodeInvalid, Message: err.Error()}
	if errors.Is(err, os.ErrNotExist) {
		e.Message = fmt.Sprintf("there is no profile called %q", name)
		e.Hint = "it would be " + s.opts.Home.Profile(name) + "; capsem profile list shows those that there are"
		names, err := config.ProfileNames(s.opts.Home)
		if near := config.Nearest(name, append(names, config.DefaultProfile)); err == nil && near != "" {
			e.Hint = fmt.Sprintf("did you mean %s?", near)
		}
	}
	return config.Profile{}, e
}

// recoverLedger has a process of its own bring the ledger of a VM whose process
// was killed in order: the service never writes a VM's ledger.
func (s *Service) recoverLedger(ctx context.Context, id string) error {
	if _, err := os.Stat(s.opts.Home.Ledger(id)); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, s.opts.Executable, "vm", "--recover", id)
	cmd.Env, cmd.Dir = s.opts.Env, "/"
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// closer closes files together.
type closer []*os.File

func (c *closer) add(f ...*os.File) { *c = append(*c, f...) }

func (c *closer) close() error {
	var errs []error
	for _, f := range *c {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}
