package service

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/config"
)

// registry is every VM that is not deleted, by id and by name. A name belongs
// to one VM from before its folder exists until after it is gone.
type registry struct {
	mu     sync.Mutex
	byID   map[string]*machine
	byName map[string]*machine
}

// load reads every VM's folder and takes up what it finds: processes that still
// run are watched again, the death of others is recorded, and deletions that
// were interrupted are finished.
func (s *Service) load(ctx context.Context) (*registry, error) {
	r := &registry{byID: map[string]*machine{}, byName: map[string]*machine{}}
	entries, err := os.ReadDir(s.opts.Home.VMs())
	if err != nil {
		return nil, fmt.Errorf("listing VMs: %w", err)
	}
	for _, e := range entries {
		id := e.Name()
		if !config.IsID(id) {
			continue
		}
		record, err := config.ReadVMRecord(s.opts.Home.VMRecord(id))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			// A create that ended before the record was written made nothing
			// but an empty folder.
			if err := os.Remove(s.opts.Home.VMDir(id)); err != nil {
				s.log.Warn("a folder without a VM is left alone", "folder", s.opts.Home.VMDir(id), "error", err)
			}
			continue
		case err != nil:
			record = config.VMRecord{ID: id, Name: "broken-" + id, State: config.Failed, Reason: err.Error()}
		}
		m := s.newMachine(record)
		r.byID[id], r.byName[record.Name] = m, m
	}
	for _, m := range r.byID {
		s.takeUp(ctx, m)
	}
	for id, m := range r.byID {
		if m.gone {
			delete(r.byID, id)
			delete(r.byName, m.name)
		}
	}
	return r, nil
}

// reserve gives a name to a VM that does not exist yet, one made up from its
// profile's where it has none. Where an earlier request of the same key made a
// VM, that one is returned instead.
func (r *registry) reserve(m *machine) (earlier *machine, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if key := m.key; key != "" {
		for _, other := range r.byID {
			if other.key == key {
				return other, nil
			}
		}
	}
	if m.name == "" {
		m.name = r.freeName(m.profile)
		m.record.Name = m.name
	}
	if other, taken := r.byName[m.name]; taken {
		return nil, &api.Error{
			Code: api.CodeExists, VM: other.id,
			Message: fmt.Sprintf("there is a VM called %s already (%s)", m.name, other.id),
			Hint:    fmt.Sprintf("choose another --name, or remove it with capsem delete %s", m.name),
		}
	}
	if _, taken := r.byID[m.id]; taken {
		return nil, &api.Error{Code: api.CodeExists, Message: "the id " + m.id + " is taken; try again"}
	}
	r.byID[m.id], r.byName[m.name] = m, m
	return nil, nil
}

// release forgets a VM.
func (r *registry) release(m *machine) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.byID, m.id)
	if r.byName[m.name] == m {
		delete(r.byName, m.name)
	}
}

// find returns the VM of that id or name.
func (r *registry) find(ref string) (*machine, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m, ok := r.byID[ref]; ok {
		return m, nil
	}
	if m, ok := r.byName[ref]; ok {
		return m, nil
	}
	var names []string
	for name := range r.byName {
		names = append(names, name)
	}
	e := &api.Error{Code: api.CodeNotFound, Message: fmt.Sprintf("there is no VM called %q", ref), Hint: "capsem list shows them all"}
	if near := config.Nearest(ref, names); near != "" {
		e.Hint = fmt.Sprintf("did you mean %s?", near)
	}
	return nil, e
}

// all returns every VM, oldest first.
func (r *registry) all() []*machine {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := make([]*machine, 0, len(r.byID))
	for _, m := range r.byID {
		list = append(list, m)
	}
	slices.SortFunc(list, func(a, b *machine) int {
		if c := a.created.Compare(b.created); c != 0 {
			return c
		}
		return strings.Compare(a.id, b.id)
	})
	return list
}

// freeName makes up a name from a profile's. The caller holds the lock.
func (r *registry) freeName(profile string) string {
	for n := 1; ; n++ {
		name := fmt.Sprintf("%s-%d", profile, n)
		if _, taken := r.byName[name]; !taken {
			return name
		}
	}
}
