package session

import (
	"context"
	"fmt"
	"reflect"
	"sync/atomic"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/policy"
)

// rules are those in force: the gate's judge. Putting others in force reaches
// the next event, whatever connection it comes by.
type rules struct {
	current atomic.Pointer[policy.Policy]
}

// Judge asks the rules that are in force.
func (r *rules) Judge(ctx context.Context, ev *event.Event, phase event.Phase, out *event.Outcome) event.Verdict {
	return r.current.Load().Judge(ctx, ev, phase, out)
}

func loadRules(home config.Home, p config.Profile) (*rules, error) {
	compiled, err := compile(home, p)
	if err != nil {
		return nil, err
	}
	r := &rules{}
	r.current.Store(compiled)
	return r, nil
}

// compile joins a profile's rules with the organisation's.
func compile(home config.Home, p config.Profile) (*policy.Policy, error) {
	corp, err := config.LoadCorp(home.Corp())
	if err != nil {
		return nil, fmt.Errorf("loading the organisation's rules: %w", err)
	}
	return policy.Compile(policy.FromProfile(p, corp...))
}

// reloadRules reads the profile anew and puts its rules and default in force.
// With a mistake anywhere, the old ones stay.
func (s *Session) reloadRules(ctx context.Context) (api.ReloadResult, error) {
	s.reload.Lock()
	defer s.reload.Unlock()
	p, err := config.LoadProfile(s.opts.Home, s.record.Profile)
	if err != nil {
		return api.ReloadResult{}, &api.Error{Code: api.CodeInvalid, Message: err.Error(), Hint: "the old rules stay in force"}
	}
	compiled, err := compile(s.opts.Home, p)
	if err != nil {
		return api.ReloadResult{}, &api.Error{Code: api.CodeInvalid, Message: err.Error(), Hint: "the old rules stay in force"}
	}
	// The record comes first: no event may be judged by rules of which the
	// ledger knows nothing.
	if err := s.ledger.VMEvent(ctx, "policy_reload", fmt.Sprintf("%d rules, digest %s", compiled.Len(), compiled.Digest())); err != nil {
		return api.ReloadResult{}, err
	}
	s.rules.current.Store(compiled)
	return api.ReloadResult{Digest: compiled.Digest(), Rules: compiled.Len(), Waiting: waiting(s.profile, p)}, nil
}

// waiting names the keys that differ and are read only when a VM starts.
func waiting(started, now config.Profile) []string {
	var keys []string
	for _, k := range []struct {
		name string
		a, b any
	}{
		{"image", started.Image, now.Image},
		{"cpus", started.CPUs, now.CPUs},
		{"memory", started.Memory, now.Memory},
		{"env", started.Env, now.Env},
		{"record_blocked", started.RecordBlocked, now.RecordBlocked},
		{"http_allow", started.HTTPAllow, now.HTTPAllow},
		{"mcp.servers", unplaced(started.Servers), unplaced(now.Servers)},
	} {
		if !reflect.DeepEqual(k.a, k.b) {
			keys = append(keys, k.name)
		}
	}
	return keys
}

// unplaced are servers without where in the file they stand.
func unplaced(servers []config.Server) []config.Server {
	out := make([]config.Server, len(servers))
	for i, s := range servers {
		s.Position = config.Position{}
		out[i] = s
	}
	return out
}
