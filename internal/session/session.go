// Package session is one VM from boot to shutdown: the whole of `capsemd vm`.
//
// It puts the parts together and decides nothing itself. It opens the VM's
// ledger and compiles its rules, starts the launcher and through it the MCP
// servers, boots the guest, serves the guest's connections and the VM's own
// socket, and takes all of it down again in the reverse order. Everything below
// it dies with it; if it is killed, the service has the ledger recovered and
// says so.
package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/egress"
	"github.com/capsem/capsem/internal/endpoint"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/gate"
	"github.com/capsem/capsem/internal/guest"
	"github.com/capsem/capsem/internal/inspect"
	"github.com/capsem/capsem/internal/launch"
	"github.com/capsem/capsem/internal/ledger"
	"github.com/capsem/capsem/internal/vm"
)

// Options are what a session is made of.
type Options struct {
	Home config.Home
	// ID is the VM's.
	ID string
	// Handover is what the service gave along.
	Handover config.Handover
	// Progress hears, as api.Progress lines, what is done until a command would
	// succeed, and then the notes for the VM's user or the failure.
	Progress io.Writer
	// Executable is capsemd; the tool programs are beside it.
	Executable string
	Env        config.Env
	Version    string
	Log        *slog.Logger
}

// Session is one VM that runs.
type Session struct {
	opts    Options
	log     *slog.Logger
	record  config.VMRecord
	profile config.Profile
	state   config.VMState
	began   time.Time

	ledger *ledger.Ledger
	rules  *rules
	gate   *gate.Gate
	// redact keeps secrets out of the log; the ledger does so itself.
	redact   *ledger.Redactor
	launcher *launch.Client
	egress   *egress.Client
	servers  *servers
	endpoint *endpoint.Endpoint
	machine  vm.Machine
	guest    *guest.Guest
	// unserve ends the answering of MCP connections, nil while nobody does.
	unserve func()

	// stopping is closed once, by whoever wants the VM to end; grace is then
	// how long the guest gets.
	stopOnce sync.Once
	stopping chan struct{}
	grace    time.Duration
	// life ends when the session does.
	life context.Context //nolint:containedctx // for connections that were taken over and outlive their request
	// reload is held by the one request that changes the rules.
	reload sync.Mutex
}

// Run boots the VM and serves it until it ends: by its own wish, by a request,
// or because ctx ended, which pulls the plug. The error says why a VM that was
// not stopped in order ended; state.json says it as well.
func Run(ctx context.Context, o Options) error {
	s := &Session{opts: o, log: o.Log.With("vm", o.ID), began: time.Now(), stopping: make(chan struct{})}
	err := s.run(ctx)
	s.state.Phase = config.Exited
	if err != nil {
		s.state.ExitReason = err.Error()
		s.say(api.Progress{Error: api.AsError(err)})
	}
	return errors.Join(err, s.writeState())
}

// closers undo what was set up, the last first.
type closers []func() error

func (c *closers) add(f func() error) { *c = append(*c, f) }

func (c closers) close() error {
	var errs []error
	for i := len(c) - 1; i >= 0; i-- {
		errs = append(errs, c[i]())
	}
	return errors.Join(errs...)
}

func (s *Session) run(ctx context.Context) (err error) {
	if err := s.identify(); err != nil {
		return err
	}
	var end context.CancelFunc
	s.life, end = context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	var undo closers
	defer func() { err = errors.Join(err, undo.close()) }()
	verified := s.verifyImage()
	undo.add(verified.close)
	if err := s.openLedger(ctx, &undo); err != nil {
		return err
	}
	s.say(api.Progress{Step: "starting the tool servers"})
	if err := s.startServers(ctx, &undo); err != nil {
		return err
	}
	notes, err := s.boot(ctx, verified, &undo)
	if err != nil {
		return err
	}
	if err := s.serveAPI(ctx, &undo); err != nil {
		return err
	}
	if err := s.ready(ctx, notes); err != nil {
		return err
	}
	return s.wait(ctx)
}

// identify reads who the VM is and says who we are.
func (s *Session) identify() (err error) {
	if s.record, err = config.ReadVMRecord(s.opts.Home.VMRecord(s.opts.ID)); err != nil {
		return err
	}
	if s.profile, err = config.LoadProfile(s.opts.Home, s.record.Profile); err != nil {
		return err
	}
	id, err := config.IdentifyProcess(os.Getpid())
	if err != nil {
		return err
	}
	s.state = config.VMState{Incarnation: s.record.Incarnation, Phase: config.Starting, Process: id}
	return s.writeState()
}

func (s *Session) writeState() error {
	if s.state.Incarnation == 0 {
		return nil // there is no VM to have a state
	}
	return config.WriteVMState(s.opts.Home.VMState(s.opts.ID), s.state)
}

// say tells the service how far we are. A service that is gone does not keep a
// VM from starting.
func (s *Session) say(p api.Progress) {
	if err := json.NewEncoder(s.opts.Progress).Encode(p); err != nil {
		s.log.Debug("nobody hears the progress", "error", err)
	}
}

// openLedger opens the record and the rules, and joins them to the gate.
func (s *Session) openLedger(ctx context.Context, undo *closers) error {
	secrets := make([]string, 0, len(s.opts.Handover.Secrets))
	for _, secret := range s.opts.Handover.Secrets {
		secrets = append(secrets, secret.Reveal())
	}
	redactor, err := ledger.NewRedactor(secrets...)
	if err != nil {
		return err
	}
	s.redact = redactor
	if s.rules, err = loadRules(s.opts.Home, s.profile); err != nil {
		return err
	}
	s.ledger, err = ledger.Open(ctx, s.opts.Home.Ledger(s.opts.ID), ledger.Options{
		Durability:    ledger.Durability(s.record.Spec.Durability),
		RecordBlocked: s.profile.RecordBlocked,
		Redactor:      redactor,
		Log:           s.log,
	})
	if err != nil {
		return err
	}
	undo.add(s.ledger.Close)
	s.gate = gate.New(s.rules, s.ledger)
	return nil
}

// caller is someone who acts on this VM.
func (s *Session) caller(i event.Initiator) inspect.Caller {
	return inspect.Caller{
		VM:        event.VM{ID: s.record.ID, Name: s.record.Name, Profile: s.record.Profile},
		Initiator: i,
	}
}

// program is a path beside our own executable.
func (s *Session) program(name string) string {
	return filepath.Join(filepath.Dir(s.opts.Executable), name)
}

// ready says that a command would succeed now.
func (s *Session) ready(ctx context.Context, notes []string) error {
	took := time.Since(s.began)
	s.state.Phase, s.state.ReadyAt, s.state.BootMS = config.Ready, time.Now().UTC(), took.Milliseconds()
	if err := s.writeState(); err != nil {
		return err
	}
	detail := fmt.Sprintf("accelerator %s, isolation %s, image %s@sha256:%s, %d ms",
		s.state.Accelerator, s.state.Isolation, s.record.Spec.Image, s.record.Spec.ImageDigest, took.Milliseconds())
	if err := s.ledger.VMEvent(ctx, "ready", detail); err != nil {
		return err
	}
	raw, err := json.Marshal(append([]string{}, notes...))
	if err != nil {
		return fmt.Errorf("encoding notes: %w", err)
	}
	s.say(api.Progress{Result: raw})
	s.log.Info("ready", "boot_ms", took.Milliseconds(), "accelerator", s.state.Accelerator)
	return nil
}

// stop asks for the VM's end. Only the first wish counts.
func (s *Session) stop(grace time.Duration) {
	s.stopOnce.Do(func() {
		s.grace = grace
		close(s.stopping)
	})
}

// wait blocks until the VM ends, and ends it in order where that is asked.
func (s *Session) wait(ctx context.Context) error {
	ended := make(chan error, 1)
	go func() { ended <- s.machine.Wait() }()
	record := context.WithoutCancel(ctx)
	removed, unwatch := s.folderRemoved()
	defer unwatch()
	select {
	case err := <-ended:
		s.state.Phase = config.Stopping
		return errors.Join(s.writeState(), s.ended(record, err, "the guest powered off"))
	case <-ctx.Done():
		s.state.Phase = config.Stopping
		return errors.Join(s.writeState(), s.machine.Stop(record), s.ledger.VMEvent(record, "stopped", "the plug was pulled"))
	case <-removed:
		return errors.Join(errors.New("the VM's folder was removed while it ran"), s.machine.Stop(record))
	case <-s.stopping:
	}
	s.state.Phase = config.Stopping
	if err := s.writeState(); err != nil {
		return err
	}
	return s.shutDown(ctx, ended)
}

// folderLook is how often it is looked whether the VM's folder is there.
const folderLook = 2 * time.Second

// folderRemoved tells when somebody has removed the VM's folder. Nobody could find
// or end such a VM any more, and its ledger has no name.
func (s *Session) folderRemoved() (removed <-chan struct{}, stop func()) {
	gone, quit, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(folderLook)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
			}
			if _, err := os.Stat(s.opts.Home.VMRecord(s.opts.ID)); errors.Is(err, fs.ErrNotExist) {
				close(gone)
				return
			}
		}
	}()
	return gone, func() {
		close(quit)
		<-done
	}
}

// shutDown has the guest power off, and pulls the plug when it does not.
func (s *Session) shutDown(ctx context.Context, ended <-chan error) error {
	record := context.WithoutCancel(ctx)
	asked, cancel := context.WithTimeout(ctx, s.grace)
	defer cancel()
	refused := s.guest.Shutdown(asked, s.grace/2)
	if refused == nil {
		select {
		case err := <-ended:
			return s.ended(record, err, "stopped on request")
		case <-asked.Done():
			refused = fmt.Errorf("the guest did not power off within %s", s.grace)
		}
	}
	s.log.Warn("pulling the plug", "reason", refused)
	return errors.Join(s.machine.Stop(record), s.ledger.VMEvent(record, "stopped", "the plug was pulled: "+refused.Error()))
}

func (s *Session) ended(ctx context.Context, err error, inOrder string) error {
	if err == nil {
		return s.ledger.VMEvent(ctx, "stopped", inOrder)
	}
	err = fmt.Errorf("the machine ended: %w", err)
	return errors.Join(err, s.ledger.VMEvent(ctx, "crashed", err.Error()))
}

// Recover brings the ledger of a VM whose process was killed in order.
func Recover(ctx context.Context, home config.Home, id string) error {
	_, err := ledger.Recover(ctx, home.Ledger(id))
	return err
}
