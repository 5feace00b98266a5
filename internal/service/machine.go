package service

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/client"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/event"
)

// machine is one VM: its record, and its process while it runs.
type machine struct {
	s *Service
	// id, name, created, profile, ephemeral and key are as in the record, and do
	// not change once the VM is reserved.
	id, name, profile, key string
	created                time.Time
	ephemeral              bool
	// turn is held by whoever changes the VM's life (start, stop, delete): one
	// at a time, in the order of arrival.
	turn chan struct{}

	mu sync.Mutex
	// record is as it stands on disk.
	record config.VMRecord
	// proc is the VM's process, nil while it has none.
	proc *process
	// begun says that it had one since this service knows it.
	begun bool
	// notes are what its start had to say.
	notes []string
	// killed is why we killed the process, "" where we did not.
	killed string
	// gone says that nothing of the VM is left.
	gone bool
	// made is closed when the request that creates the VM is over.
	made chan struct{}
}

func (s *Service) newMachine(r config.VMRecord) *machine {
	return &machine{
		s: s, id: r.ID, name: r.Name, profile: r.Profile, key: r.RequestKey, created: r.CreatedAt, ephemeral: r.Ephemeral,
		record: r, turn: make(chan struct{}, 1), made: make(chan struct{}),
	}
}

// take waits for the VM's turn; done gives it back.
func (m *machine) take(ctx context.Context) (done func(), err error) {
	select {
	case m.turn <- struct{}{}:
		return func() { <-m.turn }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// set changes the record, on disk first. Where somebody has removed the VM's
// folder there is nothing to change but what we know.
func (m *machine) set(change func(*config.VMRecord)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	next := m.record
	change(&next)
	if err := config.WriteVMRecord(m.s.opts.Home.VMRecord(next.ID), next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("recording the state of %s: %w", next.Name, err)
	}
	m.record = next
	return nil
}

func (m *machine) snapshot() (config.VMRecord, *process) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.record, m.proc
}

// running returns a client of the VM's process, or why there is none.
func (m *machine) running() (*client.Client, error) {
	record, proc := m.snapshot()
	if proc == nil || record.State != config.Running {
		e := &api.Error{Code: api.CodeState, Message: fmt.Sprintf("%s is %s", record.Name, record.State), VM: record.ID}
		switch record.State {
		case config.Stopped, config.Failed:
			e.Hint = "capsem start " + record.Name
			if record.Reason != "" {
				e.Message += ": " + record.Reason
			}
		case config.Creating, config.Running, config.Suspended, config.Deleting:
		}
		return nil, e
	}
	socket, err := m.s.opts.Home.VMSocket(record.ID)
	if err != nil {
		return nil, err
	}
	return client.New(socket), nil
}

// view is the VM as the API shows it. It asks nobody: a guest or a process that
// hangs cannot hold up a list.
func (m *machine) view() api.VM {
	record, proc := m.snapshot()
	v := api.VM{
		ID: record.ID, Name: record.Name, State: api.State(record.State), Reason: record.Reason,
		Profile: record.Profile, Image: record.Spec.Image, CreatedAt: record.CreatedAt,
		CPUs: record.Spec.CPUs, MemoryBytes: record.Spec.MemoryBytes,
		Incarnation: record.Incarnation, Ephemeral: record.Ephemeral,
	}
	if record.Spec.ImageDigest != "" {
		v.Image += "@sha256:" + record.Spec.ImageDigest
	}
	if proc == nil {
		return v
	}
	v.PID = proc.identity.PID
	m.mu.Lock()
	v.Notes = m.notes
	m.mu.Unlock()
	state, err := config.ReadVMState(m.s.opts.Home.VMState(record.ID))
	if err == nil && state.Incarnation == record.Incarnation {
		v.Accelerator, v.Isolation = state.Accelerator, state.Isolation
		if !state.ReadyAt.IsZero() {
			v.StartedAt, v.BootMS = &state.ReadyAt, state.BootMS
		}
	}
	return v
}

// takeUp brings a VM whose record an earlier service wrote in line with what is
// there now.
func (s *Service) takeUp(ctx context.Context, m *machine) {
	close(m.made)
	record, _ := m.snapshot()
	state, err := config.ReadVMState(s.opts.Home.VMState(m.id))
	if err == nil && state.Incarnation == record.Incarnation {
		if proc, err := openProcess(state.Process); err == nil {
			m.proc = proc
			s.watch(m, proc)
			if record.State == config.Creating {
				s.seeThrough(m, proc)
			}
			return
		}
	} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.log.Warn("reading a VM's state", "vm", m.id, "error", err)
	}
	switch record.State {
	case config.Deleting:
		if err := s.erase(ctx, m); err != nil {
			s.log.Error("finishing a deletion", "vm", m.id, "error", err)
		}
	case config.Creating, config.Running:
		m.ended(ctx)
	case config.Stopped, config.Suspended, config.Failed:
	}
}

// seeThrough finishes, in the background, the start of a VM whose service ended
// meanwhile. The pipe on which the process says how it goes went with that
// service, so its state file is looked at now and then. The VM's turn is held, as
// in any start.
func (s *Service) seeThrough(m *machine, proc *process) {
	m.turn <- struct{}{} // free: nobody else knows the VM yet
	s.background.Go(func() error {
		defer func() { <-m.turn }()
		tick := time.NewTicker(lookEvery)
		defer tick.Stop()
		late := time.NewTimer(startedWithin)
		defer late.Stop()
		for {
			record, _ := m.snapshot()
			state, err := config.ReadVMState(s.opts.Home.VMState(m.id))
			if err == nil && state.Incarnation == record.Incarnation && state.Phase == config.Ready {
				if err := m.set(func(r *config.VMRecord) { r.State, r.Reason = config.Running, "" }); err != nil {
					s.log.Error("taking up a VM", "vm", m.id, "error", err)
				}
				return nil
			}
			select {
			case <-tick.C:
			case <-late.C:
				m.giveUp("it did not become ready")
				return nil
			case <-proc.ended:
				return nil
			case <-s.lifetime.Done():
				return nil
			}
		}
	})
}

// lookEvery is how often seeThrough looks.
const lookEvery = 100 * time.Millisecond

// giveUp kills the VM's process, and says why in the VM's record.
func (m *machine) giveUp(why string) {
	m.mu.Lock()
	proc := m.proc
	m.killed = why
	m.mu.Unlock()
	if proc != nil {
		proc.kill()
	}
}

// watch waits for the end of a VM's process, in the background.
func (s *Service) watch(m *machine, proc *process) {
	s.background.Go(func() error {
		if err := proc.wait(s.lifetime); err != nil {
			return nil // the service ends, and the process goes on
		}
		m.ended(context.WithoutCancel(s.lifetime))
		close(proc.ended)
		return nil
	})
}

// ended records how the VM's process came to its end, and brings its ledger in
// order where the process could not.
func (m *machine) ended(ctx context.Context) {
	home := m.s.opts.Home
	record, _ := m.snapshot()
	next, reason := config.Failed, ""
	state, err := config.ReadVMState(home.VMState(m.id))
	switch {
	case err == nil && state.Incarnation == record.Incarnation && state.Phase == config.Exited:
		reason = state.ExitReason
		if reason == "" {
			next = config.Stopped
		}
	default:
		reason = fmt.Sprintf("its host process ended unexpectedly; capsem logs %s --source process has its last words", m.name)
		m.mu.Lock()
		if m.killed != "" {
			reason = m.killed + ", and its host process was killed"
		}
		m.mu.Unlock()
	}
	if next == config.Failed {
		if err := m.s.recoverLedger(ctx, m.id); err != nil {
			m.s.log.Error("recovering a ledger", "vm", m.id, "error", err)
			reason += "; and its ledger could not be recovered: " + err.Error()
		}
	}
	m.mu.Lock()
	m.proc, m.killed = nil, ""
	m.mu.Unlock()
	err = m.set(func(r *config.VMRecord) {
		if r.State != config.Deleting {
			r.State, r.Reason = next, reason
		}
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.s.log.Error("recording the end of a VM", "vm", m.id, "error", err)
	}
	if m.ephemeral && next == config.Stopped {
		m.s.background.Go(func() error {
			if err := m.remove(ctx, false); err != nil {
				m.s.log.Error("removing an ephemeral VM", "vm", m.id, "error", err)
			}
			return nil
		})
	}
}

// startedWithin is how long a VM gets until a command would succeed.
const startedWithin = 2 * time.Minute

// start runs the VM's process and waits until a command would succeed. The
// caller has the VM's turn.
func (m *machine) start(ctx context.Context, by event.Initiator, step func(string)) error {
	record, proc := m.snapshot()
	if proc != nil && m.ending(record) {
		select {
		case <-proc.ended:
		case <-time.After(stopMargin):
		case <-ctx.Done():
			return ctx.Err()
		}
		record, proc = m.snapshot()
	}
	if proc != nil {
		return &api.Error{Code: api.CodeState, Message: record.Name + " runs already", VM: record.ID}
	}
	if err := m.set(func(r *config.VMRecord) {
		r.State, r.Reason = config.Creating, ""
		r.Incarnation++
	}); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startedWithin)
	defer cancel()
	proc, err := m.s.spawn(ctx, m, by)
	if err != nil {
		return errors.Join(err, m.set(func(r *config.VMRecord) { r.State, r.Reason = config.Failed, err.Error() }))
	}
	m.mu.Lock()
	m.proc, m.begun = proc, true
	m.mu.Unlock()
	m.s.watch(m, proc)
	notes, err := proc.ready(ctx, step)
	if err != nil {
		proc.kill()
		<-proc.ended
		return errors.Join(err, m.set(func(r *config.VMRecord) { r.State, r.Reason = config.Failed, api.AsError(err).Message }))
	}
	m.mu.Lock()
	m.notes = notes
	m.mu.Unlock()
	return m.set(func(r *config.VMRecord) { r.State, r.Reason = config.Running, "" })
}

// ending reports whether the VM's process is about to end by itself: its guest has
// powered off.
func (m *machine) ending(record config.VMRecord) bool {
	state, err := config.ReadVMState(m.s.opts.Home.VMState(m.id))
	return err == nil && state.Incarnation == record.Incarnation && (state.Phase == config.Stopping || state.Phase == config.Exited)
}

// stop ends the VM's process: in an orderly way, or at once. The caller has the
// VM's turn.
func (m *machine) stop(ctx context.Context, req api.StopRequest) error {
	_, proc := m.snapshot()
	if proc == nil {
		return nil
	}
	grace := api.DefaultStop
	if req.TimeoutMS > 0 {
		grace = time.Duration(req.TimeoutMS) * time.Millisecond
	}
	if !req.Force {
		if c, err := m.running(); err == nil {
			defer c.Close()
			asked, cancel := context.WithTimeout(ctx, grace+stopMargin)
			defer cancel()
			if err := c.Do(asked, "POST", "/v1/stop", req, nil); err != nil {
				m.s.log.Warn("asking a VM to stop", "vm", m.id, "error", err)
				m.giveUp("it did not answer when it was asked to stop")
			}
		} else {
			m.giveUp("it was stopped before it was ready")
		}
	} else {
		proc.terminate()
	}
	select {
	case <-proc.ended:
		return nil
	case <-time.After(grace + stopMargin):
		m.giveUp("it did not stop in time")
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-proc.ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// stopMargin is how much longer than its guest a VM's process gets to end.
const stopMargin = 5 * time.Second

// remove deletes the VM and keeps its ledger. A VM that runs is an error
// without force.
func (m *machine) remove(ctx context.Context, force bool) error {
	done, err := m.take(ctx)
	if err != nil {
		return err
	}
	defer done()
	record, proc := m.snapshot()
	if m.isGone() {
		return nil
	}
	if proc != nil {
		if !force {
			return &api.Error{
				Code: api.CodeState, VM: record.ID, Message: record.Name + " is running",
				Hint: fmt.Sprintf("capsem stop %s, or capsem delete --force %s", record.Name, record.Name),
			}
		}
		if err := m.stop(ctx, api.StopRequest{Force: true}); err != nil {
			return err
		}
	}
	// From here on the deletion is finished, whatever becomes of the caller.
	ctx = context.WithoutCancel(ctx)
	if err := m.set(func(r *config.VMRecord) { r.State = config.Deleting }); err != nil {
		return err
	}
	return m.s.erase(ctx, m)
}

func (m *machine) hadProcess() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.begun
}

func (m *machine) isGone() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.gone
}

// erase seals the ledger, moves it to where sealed ones are kept, and removes
// everything else. It can be repeated after it was interrupted anywhere.
func (s *Service) erase(ctx context.Context, m *machine) error {
	home, id := s.opts.Home, m.id
	if err := s.seal(ctx, m); err != nil {
		return fmt.Errorf("keeping the ledger of %s: %w", m.name, err)
	}
	if socket, err := home.VMSocket(id); err == nil {
		if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("removing %s: %w", m.name, err)
		}
	}
	if err := os.RemoveAll(home.VMDir(id)); err != nil {
		return fmt.Errorf("removing %s: %w", m.name, err)
	}
	m.mu.Lock()
	m.gone = true
	m.mu.Unlock()
	if s.registry != nil {
		s.registry.release(m)
	}
	return nil
}
