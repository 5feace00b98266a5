package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/egress"
	"github.com/capsem/capsem/internal/endpoint"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/inspect"
	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/launch"
	"github.com/capsem/capsem/internal/ledger"
	"github.com/capsem/capsem/internal/route"
	"github.com/capsem/capsem/internal/toolproto"
	"github.com/capsem/capsem/internal/upstream"
)

// refreshTime bounds fetching a server's tools, and refreshPause is the least time
// between two fetches, however often the server says that they have changed.
const (
	refreshTime  = 30 * time.Second
	refreshPause = time.Second
)

// servers are the VM's MCP servers and the catalogue of their tools: the
// endpoint's Catalog.
type servers struct {
	s    *Session
	list []*server
	// wg has the goroutines that fetch lists and those that serve ways out.
	wg     sync.WaitGroup
	ctx    context.Context //nolint:containedctx // the life of the servers, which callbacks without one share
	cancel context.CancelFunc
	// changed is told each new catalogue.
	changed func(*route.Table)

	mu    sync.Mutex
	table *route.Table
}

// server is one of them.
type server struct {
	name   string
	up     *upstream.Upstream
	offers func(tool string) bool
	// proxy is the server's way out, nil for the built-in tools.
	proxy *egress.Proxy
	// first is closed when the first start has come to an end, good or bad.
	first     chan struct{}
	firstOnce sync.Once
	// started is closed once up is set.
	started chan struct{}
	// tools are as last fetched; servers.mu guards them, and what is wrong with
	// them.
	tools    []route.Tool
	problems []string
	fetch    pace
}

// startServers starts the launcher, and through it every server at the same
// time. It waits for none of them: one that hangs delays nobody.
func (s *Session) startServers(ctx context.Context, undo *closers) (err error) {
	if s.launcher, err = launch.Start(ctx, s.opts.Executable); err != nil {
		return fmt.Errorf("starting the launcher: %w", err)
	}
	undo.add(s.launcher.Close)
	s.state.Isolation = s.launcher.Isolation()
	allow := make([]string, 0, len(s.profile.HTTPAllow))
	for _, hp := range s.profile.HTTPAllow {
		allow = append(allow, hp.String())
	}
	s.egress = egress.New(egress.Options{Gate: s.gate, Allow: allow, Via: config.BuiltinServer})
	undo.add(func() error { s.egress.Close(); return nil })

	set := &servers{s: s}
	set.ctx, set.cancel = context.WithCancel(context.WithoutCancel(ctx))
	set.table, _ = route.New(nil)
	s.servers = set
	s.endpoint = endpoint.New(endpoint.Options{
		Caller: s.caller(event.Initiator{Kind: event.GuestAgent}), Gate: s.gate, Catalog: set,
		Refuse: s.refused, Version: s.opts.Version, More: true, Log: s.log,
	})
	set.changed = s.endpoint.Changed
	undo.add(func() error { set.close(); return nil })

	everything := func(string) bool { return true }
	weak := s.profile.Isolation == config.IsolationWeak
	definitions := []definition{{
		toolproto.Server{Name: config.BuiltinServer}, "capsem-builtin", launch.Jail{Profile: launch.Builtin, Weak: weak}, everything, nil,
	}}
	for _, declared := range s.profile.Servers {
		def, err := s.define(declared)
		if err != nil {
			return err
		}
		jail, err := s.jail(declared, def)
		if err != nil {
			return err
		}
		jail.Weak = weak
		definitions = append(definitions, definition{def, "capsem-aggregator", jail, declared.Offers, s.wayOut(declared)})
	}
	for _, d := range definitions {
		set.list = append(set.list, &server{name: d.server.Name, offers: d.offers, proxy: d.proxy, first: make(chan struct{}), started: make(chan struct{})})
	}
	for i, d := range definitions {
		set.start(ctx, set.list[i], d)
	}
	return nil
}

// definition is a server before it is started: what it is, the program that
// holds it, that program's jail, which of its tools are offered, and its way out.
type definition struct {
	server  toolproto.Server
	program string
	jail    launch.Jail
	offers  func(tool string) bool
	proxy   *egress.Proxy
}

// serverVariables are what an external server gets of our environment; the rest
// is declared in the profile.
var serverVariables = []string{"LANG", "LOGNAME", "PATH", "SHELL", "TERM", "USER"}

// define puts a server's declaration and its secrets together.
func (s *Session) define(c config.Server) (toolproto.Server, error) {
	def := toolproto.Server{Name: c.Name, Command: c.Command, Args: c.Args, URL: c.URL}
	get := func(name string) (config.Secret, error) {
		secret, ok := s.opts.Handover.Secrets[name]
		if !ok {
			return config.Secret{}, fmt.Errorf("server %s needs the secret %s, which was not handed over", c.Name, name)
		}
		return secret, nil
	}
	for name, t := range c.Headers {
		value, err := t.Expand(get)
		if err != nil {
			return def, err
		}
		def.Headers = append(def.Headers, toolproto.Header{Name: name, Value: []byte(value.Reveal())})
	}
	if c.Command == "" {
		if s.jailed() {
			def.Proxy = proxyURL
		}
		return def, nil
	}
	env := map[string]string{"HOME": s.opts.Home.ServerHome(s.record.ID, c.Name)}
	for _, name := range serverVariables {
		if value, set := s.opts.Env(name); set {
			env[name] = value
		}
	}
	for name, value := range c.Env {
		env[name] = value
	}
	for variable, name := range c.Secrets {
		secret, err := get(name)
		if err != nil {
			return def, err
		}
		env[variable] = secret.Reveal()
	}
	if s.jailed() {
		env = withProxy(env)
	}
	for name, value := range env {
		def.Env = append(def.Env, toolproto.EnvVar{Name: name, Value: []byte(value)})
	}
	return def, nil
}

// jail is what a server's jail shows beside the system's programs.
func (s *Session) jail(c config.Server, def toolproto.Server) (launch.Jail, error) {
	j := launch.Jail{Profile: launch.Aggregator}
	if c.Command == "" {
		return j, nil
	}
	home := s.opts.Home.ServerHome(s.record.ID, c.Name)
	if err := makeServerHome(home); err != nil {
		return j, fmt.Errorf("making a home for server %s: %w", c.Name, err)
	}
	var env []string
	for _, v := range def.Env {
		env = append(env, v.Name+"="+string(v.Value))
	}
	j.Read = existing(append(visible(c, env, s.opts.Env.Get("HOME"), s.opts.Home.Root()), c.Read...))
	j.Write = append(existing(c.Write), home)
	return j, nil
}

// start begins to keep a server's process running.
func (set *servers) start(ctx context.Context, one *server, d definition) {
	s := set.s
	log := s.log.With("server", one.name)
	one.up = upstream.Start(ctx, upstream.Options{
		Server:  d.server,
		Command: child.Command{Path: s.program(d.program), Dir: "/"},
		StartProcess: func(ctx context.Context, cmd child.Command) (upstream.Process, error) {
			p, err := s.launcher.Start(ctx, d.jail, cmd)
			if err != nil {
				return nil, err
			}
			set.open(one, p.Proxy())
			return p, nil
		},
		Log: log,
		OnState: func(state upstream.State, reason error) {
			log.Info("server", "state", string(state), "reason", reason)
			switch state {
			case upstream.Ready:
				set.renew(one)
			case upstream.Failed, upstream.Backoff:
				one.firstDone()
			case upstream.Starting:
			}
		},
		OnNotify: func(n toolproto.Notify) {
			if n.Method == "notifications/tools/list_changed" {
				set.renew(one)
			}
		},
		OnEvent: func(e toolproto.Event) {
			log.Info("server says", "kind", string(e.Kind), "text", s.redact.Text(e.Text), "left_out", e.Count)
			if e.Kind == toolproto.EventJunk {
				set.junk(one)
			}
		},
		HTTP: s.httpFor,
	})
	close(one.started)
}

// junk records that a server has sent what is no message, or answers nothing.
// What it was is in the process's log: it was shown to nobody.
func (set *servers) junk(one *server) {
	err := set.s.refused(set.ctx, endpoint.Refused{
		Caller: set.s.caller(event.Initiator{Kind: event.GuestAgent}), ToClient: true, Server: one.name, Detail: "server: no message",
	})
	if err != nil {
		set.s.log.Error("recording what a server sent", "server", one.name, "error", err)
	}
}

func (one *server) firstDone() { one.firstOnce.Do(func() { close(one.first) }) }

// close ends every server, at the same time.
func (set *servers) close() {
	set.cancel()
	var wg sync.WaitGroup
	for _, one := range set.list {
		if one.up != nil {
			wg.Go(one.up.Close)
		}
	}
	wg.Wait()
	set.wg.Wait()
}

// renew has a server's tools fetched, in the background.
func (set *servers) renew(one *server) {
	if one.fetch.ask() {
		set.wg.Go(func() {
			defer one.firstDone()
			one.fetch.do(set.ctx, refreshPause, func() { set.refresh(one) })
		})
	}
}

// refresh fetches a server's tools and makes the new catalogue.
func (set *servers) refresh(one *server) {
	<-one.started
	ctx, cancel := context.WithTimeout(set.ctx, refreshTime)
	defer cancel()
	raw, err := one.up.ListTools(ctx)
	var tools []route.Tool
	var problems []string
	if err != nil {
		problems = append(problems, "listing its tools: "+err.Error())
	}
	for _, def := range raw {
		name, ok := toolName(def)
		if !ok {
			problems = append(problems, "it lists a tool without a name")
			continue
		}
		if one.offers(name) {
			tools = append(tools, route.Tool{Name: name, Definition: def, ReadOnly: readOnly(def)})
		}
	}
	set.mu.Lock()
	if err == nil {
		one.tools = tools
	}
	one.problems = problems
	all := make([]route.Server, len(set.list))
	for i, each := range set.list {
		all[i] = route.Server{Name: each.name, Tools: each.tools}
	}
	table, conflicts := route.New(all)
	set.table = table
	set.mu.Unlock()
	for _, c := range conflicts {
		set.s.log.Warn("a tool is not offered", "reason", c.Error())
	}
	set.changed(table)
}

func toolName(def json.RawMessage) (string, bool) {
	raw, ok := jsonrpc.Member(def, "name")
	if !ok {
		return "", false
	}
	name, ok := jsonrpc.String(raw)
	return name, ok && name != ""
}

func readOnly(def json.RawMessage) bool {
	annotations, ok := jsonrpc.Member(def, "annotations")
	if !ok {
		return false
	}
	hint, ok := jsonrpc.Member(annotations, "readOnlyHint")
	return ok && string(hint) == "true"
}

// Table is the catalogue. It waits for servers in their first start until ctx
// ends.
func (set *servers) Table(ctx context.Context) *route.Table {
	for _, one := range set.list {
		select {
		case <-one.first:
		case <-ctx.Done():
		}
	}
	return set.current()
}

func (set *servers) current() *route.Table {
	set.mu.Lock()
	defer set.mu.Unlock()
	return set.table
}

// Resolve finds a tool. A name that only a server in its first start could have
// waits for that start, and says so where the server did not come up.
func (set *servers) Resolve(ctx context.Context, name string) (route.Entry, error) {
	if e, ok := set.current().Tool(name); ok {
		return e, nil
	}
	var down *event.Error
	for _, one := range set.list {
		if !route.Owner(one.name, name) {
			continue
		}
		select {
		case <-one.first:
		case <-ctx.Done():
		}
		if state, _ := one.up.State(); state != upstream.Ready { // the reason is not for the guest
			down = &event.Error{Code: jsonrpc.CodeInternal, Message: fmt.Sprintf("server %s is not up (%s)", one.name, state)}
		}
	}
	if e, ok := set.current().Tool(name); ok {
		return e, nil
	}
	if down != nil {
		return route.Entry{}, down
	}
	return route.Entry{}, endpoint.ErrUnknownTool
}

// notes say which servers are not up, to whoever starts the VM. They wait for
// none: a server that is still starting is not among them.
func (set *servers) notes() []string {
	var notes []string
	for _, one := range set.view() {
		if one.State == string(upstream.Backoff) || one.State == string(upstream.Failed) {
			notes = append(notes, fmt.Sprintf("server %s is not up: %s", one.Name, one.Detail))
		}
	}
	return notes
}

// Call asks a server.
func (set *servers) Call(ctx context.Context, name, method string, params json.RawMessage) (json.RawMessage, error) {
	for _, one := range set.list {
		if one.name == name {
			return one.up.Call(ctx, method, params, endpoint.CallTimeout)
		}
	}
	return nil, &event.Error{Code: jsonrpc.CodeInternal, Message: fmt.Sprintf("there is no server %s", name)}
}

// view is how the servers are, for people.
func (set *servers) view() []api.Server {
	set.mu.Lock()
	defer set.mu.Unlock()
	list := make([]api.Server, 0, len(set.list))
	for _, one := range set.list {
		state, reason := one.up.State()
		v := api.Server{Name: one.name, State: string(state), Tools: len(one.tools)}
		if reason != nil {
			v.Detail = reason.Error()
		}
		for _, p := range one.problems {
			v.Detail = strings.TrimPrefix(v.Detail+"; "+p, "; ")
		}
		list = append(list, v)
	}
	return list
}

// httpFor makes a request for a built-in tool, on behalf of whoever called it.
func (s *Session) httpFor(ctx context.Context, q toolproto.HTTPRequest) toolproto.HTTPResult {
	result := toolproto.HTTPResult{ID: q.ID}
	caller, ok := inspect.CallerFrom(ctx)
	if !ok {
		result.Error = "no tool call stands behind this request"
		return result
	}
	headers := http.Header{}
	for _, h := range q.Headers {
		headers.Add(h.Name, string(h.Value))
	}
	resp, err := s.egress.Do(ctx, caller, egress.Request{
		Method: q.Method, URL: q.URL, Headers: headers, Body: q.Body,
		Timeout: time.Duration(q.TimeoutMS) * time.Millisecond, MaxBytes: q.MaxBytes,
	})
	if err != nil {
		var blocked *egress.BlockedError
		result.Error, result.Blocked = err.Error(), errors.As(err, &blocked)
		return result
	}
	result.Status, result.URL, result.Body, result.Truncated = resp.Status, resp.URL, resp.Body, resp.Truncated
	for name, values := range resp.Headers {
		for _, v := range values {
			result.Headers = append(result.Headers, toolproto.Header{Name: name, Value: []byte(v)})
		}
	}
	return result
}

// refused records input that the protocol refuses.
func (s *Session) refused(ctx context.Context, r endpoint.Refused) error {
	direction := ledger.ToServer
	if r.ToClient {
		direction = ledger.ToClient
	}
	return s.ledger.Protocol(ctx, ledger.ProtocolEvent{
		Direction: direction, Initiator: r.Caller.Initiator, Process: r.Caller.Process,
		Method: r.Method, RequestID: r.ID, Server: r.Server, ErrorCode: r.Code, Detail: r.Detail,
	})
}
