package service

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/image"
	"github.com/capsem/capsem/internal/policy"
)

// probeTime is how long a VM's own process gets to add to an answer.
const probeTime = time.Second

// progress answers a request that takes a while: as a stream of steps where the
// client takes one, else with the result alone.
func progress(w http.ResponseWriter, r *http.Request, do func(step func(string)) (any, error)) error {
	if !strings.Contains(r.Header.Get("Accept"), "application/x-ndjson") {
		v, err := do(func(string) {})
		if err != nil {
			return err
		}
		api.WriteJSON(w, http.StatusOK, v)
		return nil
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	lines, flush := json.NewEncoder(w), http.NewResponseController(w)
	send := func(p api.Progress) {
		if err := lines.Encode(p); err != nil {
			return // the client is gone; the request's context says so too
		}
		if err := flush.Flush(); err != nil {
			return // a recorder that holds the answer back has nothing to flush
		}
	}
	v, err := do(func(step string) { send(api.Progress{Step: step}) })
	if err != nil {
		send(api.Progress{Error: api.AsError(err)})
		return nil
	}
	result, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encoding the answer: %w", err)
	}
	send(api.Progress{Result: result})
	return nil
}

func (s *Service) serveCreate(w http.ResponseWriter, r *http.Request) error {
	var req api.CreateRequest
	if err := api.ReadJSON(r, &req); err != nil {
		return err
	}
	return progress(w, r, func(step func(string)) (any, error) {
		m, err := s.create(r, req, step)
		if err != nil {
			return nil, err
		}
		return m.view(), nil
	})
}

// create makes a VM and starts it. One that fails before there is a process
// leaves nothing but a row in the service's ledger; after that, the VM stays,
// failed, with its logs.
func (s *Service) create(r *http.Request, req api.CreateRequest, step func(string)) (*machine, error) {
	var m *machine
	detail := fmt.Sprintf("create %s from profile %s", orWord(req.Name, "a VM"), orWord(req.Profile, config.DefaultProfile))
	err := s.admin(r, detail, func(ctx context.Context) error {
		record, err := s.plan(req)
		if err != nil {
			return err
		}
		fresh := s.newMachine(record)
		earlier, err := s.registry.reserve(fresh)
		if err != nil {
			return err
		}
		if earlier != nil {
			m = earlier
			select {
			case <-earlier.made:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		m = fresh
		defer close(m.made)
		return s.bringUp(ctx, m, caller(r).Initiator, step)
	})
	return m, err
}

// bringUp makes a reserved VM's folder and starts it.
func (s *Service) bringUp(ctx context.Context, m *machine, by event.Initiator, step func(string)) error {
	done, err := m.take(ctx)
	if err != nil {
		s.registry.release(m)
		return err
	}
	defer done()
	dir := s.opts.Home.VMDir(m.id)
	err = os.Mkdir(dir, 0o700)
	if err == nil {
		err = m.set(func(*config.VMRecord) {})
	}
	if err == nil {
		err = m.start(ctx, by, step)
	}
	if err == nil {
		return nil
	}
	begun := m.hadProcess()
	leave := begun && ctx.Err() == nil && !m.ephemeral
	if leave {
		e := *api.AsError(err)
		e.VM = m.id
		if e.Hint == "" {
			e.Hint = fmt.Sprintf("capsem logs %s; capsem delete %s", m.name, m.name)
		}
		return &e
	}
	// There was no process yet, or nobody wants the VM any more.
	if begun {
		return errors.Join(err, s.erase(context.WithoutCancel(ctx), m))
	}
	s.registry.release(m)
	if rmErr := os.RemoveAll(dir); rmErr != nil && !errors.Is(rmErr, fs.ErrNotExist) {
		err = errors.Join(err, rmErr)
	}
	return err
}

// plan puts command line, profile and settings together into a record.
func (s *Service) plan(req api.CreateRequest) (config.VMRecord, error) {
	if req.Name != "" {
		if err := config.CheckName(req.Name); err != nil {
			return config.VMRecord{}, &api.Error{Code: api.CodeInvalid, Message: err.Error()}
		}
	}
	if req.Profile == "" {
		req.Profile = config.DefaultProfile
	}
	p, err := s.loadProfile(req.Profile)
	if err != nil {
		return config.VMRecord{}, err
	}
	if err := s.checkRules(p); err != nil {
		return config.VMRecord{}, err
	}
	spec := config.VMSpec{
		Image: first(req.Image, p.Image, "tiny"), CPUs: first(req.CPUs, p.CPUs),
		MemoryBytes: first(req.MemoryBytes, int64(p.Memory)), Env: map[string]string{},
		Accelerator: s.opts.Settings.Accelerator.Value, Durability: s.opts.Settings.Durability.Value,
	}
	for _, env := range []map[string]string{p.Env, req.Env} {
		for name, value := range env {
			if err := config.CheckEnv(name, value); err != nil {
				return config.VMRecord{}, &api.Error{Code: api.CodeInvalid, Message: err.Error()}
			}
			spec.Env[name] = value
		}
	}
	err = errors.Join(config.CheckCPUs(spec.CPUs), config.CheckMemory(config.Size(spec.MemoryBytes)))
	if err != nil {
		return config.VMRecord{}, &api.Error{Code: api.CodeInvalid, Message: err.Error()}
	}
	ref, err := s.pin(spec.Image)
	if err != nil {
		return config.VMRecord{}, err
	}
	spec.Image, spec.ImageDigest = ref.Name, ref.Digest
	return config.VMRecord{
		ID: config.NewID(), Name: req.Name, State: config.Creating, CreatedAt: time.Now().UTC(),
		Profile: req.Profile, Spec: spec, Ephemeral: req.Ephemeral, RequestKey: req.RequestKey,
	}, nil
}

// checkRules compiles a profile's rules, so that a mistake in one is told before
// there is a VM. The VM's process compiles them again: they are its to enforce.
func (s *Service) checkRules(p config.Profile) error {
	corp, err := config.LoadCorp(s.opts.Home.Corp())
	if err == nil {
		_, err = policy.Compile(policy.FromProfile(p, corp...))
	}
	if err != nil {
		return &api.Error{Code: api.CodeInvalid, Message: err.Error(), Hint: "capsem policy check FILE says when it is mended"}
	}
	return nil
}

// pin is the built image that a name stands for now. Its content is verified by
// the VM's process before it boots.
func (s *Service) pin(name string) (image.Ref, error) {
	ref, err := image.ParseRef(name)
	if err != nil {
		return image.Ref{}, &api.Error{Code: api.CodeInvalid, Message: err.Error()}
	}
	stored, err := image.List(s.opts.Home.Images())
	if err != nil {
		return image.Ref{}, err
	}
	for _, i := range stored {
		if i.Ref.Name == ref.Name && (i.Ref.Digest == ref.Digest || ref.Digest == "" && i.Current) {
			return i.Ref, i.Err
		}
	}
	return image.Ref{}, &api.Error{
		Code: api.CodeNotFound, Message: fmt.Sprintf("the image %s is not built", name),
		Hint: "capsem image build " + ref.Name,
	}
}

// first returns the first value that is set.
func first[T comparable](values ...T) T {
	var unset T
	for _, v := range values {
		if v != unset {
			return v
		}
	}
	return unset
}

func orWord(s, word string) string { return first(s, word) }

// serveRun makes a VM, runs one command in it, captured, and removes it.
func (s *Service) serveRun(w http.ResponseWriter, r *http.Request) error {
	var req api.RunRequest
	if err := api.ReadJSON(r, &req); err != nil {
		return err
	}
	req.Create.Ephemeral = true
	return progress(w, r, func(step func(string)) (any, error) {
		m, err := s.create(r, req.Create, step)
		if err != nil {
			return nil, err
		}
		var result api.RunResult
		result.VM = m.view()
		err = s.execOnce(r, m, req.Exec, &result.Exec)
		// The VM goes also when the caller is gone already.
		return result, errors.Join(err, m.remove(context.WithoutCancel(r.Context()), true))
	})
}

func (s *Service) execOnce(r *http.Request, m *machine, req api.ExecRequest, out *api.ExecResult) error {
	c, err := m.running()
	if err != nil {
		return err
	}
	defer c.Close()
	return c.As(caller(r)).Do(r.Context(), http.MethodPost, "/v1/exec", req, out)
}
