package service

import (
	"context"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/hosttool"
	"github.com/capsem/capsem/internal/inspect"
)

// routes are all requests that the service serves, as one door shows them.
// What a person alone may do (secrets) is not there for a host agent.
func (s *Service) routes(kind event.InitiatorKind) http.Handler {
	mux := http.NewServeMux()
	on := func(pattern string, serve func(http.ResponseWriter, *http.Request) error) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if err := serve(w, r); err != nil {
				api.WriteError(w, err)
			}
		})
	}
	on("GET /v1/version", s.serveVersion)
	on("GET /v1/doctor", s.serveDoctor)
	on("POST /v1/shutdown", s.serveShutdown)
	on("GET /v1/vms", s.serveList)
	on("POST /v1/vms", s.serveCreate)
	on("POST /v1/run", s.serveRun)
	on("POST /v1/purge", s.servePurge)
	on("GET /v1/vms/{vm}", s.serveInfo)
	on("DELETE /v1/vms/{vm}", s.serveDelete)
	on("POST /v1/vms/{vm}/start", s.serveStart)
	on("POST /v1/vms/{vm}/stop", s.serveStop)
	on("POST /v1/vms/{vm}/sql", s.serveSQL)
	on("GET /v1/vms/{vm}/timeline", s.serveTimeline)
	on("GET /v1/vms/{vm}/logs", s.serveLogs)
	on("GET /v1/images", s.serveImages)
	on("POST /v1/images", s.serveImageBuild)
	on("GET /v1/profiles", s.serveProfiles)
	pass := s.passer()
	for _, part := range vmRoutes {
		on(part.method+" /v1/vms/{vm}/"+part.path, pass)
	}
	if kind == event.Person {
		on("GET /v1/secrets", s.serveSecrets)
		on("PUT /v1/secrets/{name}", s.serveSecretSet)
		on("DELETE /v1/secrets/{name}", s.serveSecretRemove)
	}
	on("/", func(_ http.ResponseWriter, r *http.Request) error {
		return &api.Error{Code: api.CodeNotFound, Message: "the service has no " + r.Method + " " + r.URL.Path}
	})
	return mux
}

// vmRoutes are served by a VM's own process; the service passes them on.
var vmRoutes = []struct{ method, path string }{
	{"POST", "exec"}, {"GET", "files"}, {"PUT", "files"}, {"POST", "policy/reload"}, {"GET", "mcp"},
}

func servedByVM(r *http.Request) bool {
	_, rest, ok := strings.Cut(strings.TrimPrefix(r.URL.Path, "/v1/vms/"), "/")
	if !ok || !strings.HasPrefix(r.URL.Path, "/v1/vms/") {
		return false
	}
	for _, part := range vmRoutes {
		if part.method == r.Method && part.path == rest {
			return true
		}
	}
	return false
}

type callerKey struct{}

// withCaller keeps how to tell who makes a request.
func withCaller(ctx context.Context, who hosttool.Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, who)
}

func caller(r *http.Request) inspect.Caller {
	who, ok := r.Context().Value(callerKey{}).(hosttool.Caller)
	if !ok {
		return inspect.Caller{}
	}
	c := who(r)
	c.TraceID = r.Header.Get(api.HeaderTrace)
	return c
}

// admin takes what is done to a VM through the service's gate, as a row of the
// service's ledger.
func (s *Service) admin(r *http.Request, detail string, act func(context.Context) error) error {
	ev := caller(r).Admin(detail)
	var failure error
	verdict, out := s.gate.Do(r.Context(), ev, func(ctx context.Context) event.Outcome {
		if failure = act(ctx); failure != nil {
			return event.Outcome{Status: event.Failed, CarriedOut: true, Error: &event.Error{Message: failure.Error()}}
		}
		return event.Outcome{Status: event.Done, CarriedOut: true}
	})
	if verdict.Decision != event.Allow {
		return &api.Error{Code: api.CodeBlocked, Message: out.Error.Message, Rule: verdict.Rule}
	}
	return failure
}

func (s *Service) serveVersion(w http.ResponseWriter, _ *http.Request) error {
	api.WriteJSON(w, http.StatusOK, api.ServiceInfo{API: api.Version, Version: s.opts.Version, PID: os.Getpid(), Home: s.opts.Home.Root()})
	return nil
}

// serveShutdown ends the service, not the VMs.
func (s *Service) serveShutdown(w http.ResponseWriter, _ *http.Request) error {
	api.WriteJSON(w, http.StatusOK, struct{}{})
	s.stop()
	return nil
}

func (s *Service) serveList(w http.ResponseWriter, _ *http.Request) error {
	list := api.VMList{VMs: []api.VM{}}
	for _, m := range s.registry.all() {
		list.VMs = append(list.VMs, m.view())
	}
	api.WriteJSON(w, http.StatusOK, list)
	return nil
}

func (s *Service) serveInfo(w http.ResponseWriter, r *http.Request) error {
	m, err := s.registry.find(r.PathValue("vm"))
	if err != nil {
		if v, ok := s.deletedVM(r.PathValue("vm")); ok {
			api.WriteJSON(w, http.StatusOK, v)
			return nil
		}
		return err
	}
	v := m.view()
	if c, err := m.running(); err == nil {
		defer c.Close()
		ctx, cancel := context.WithTimeout(r.Context(), probeTime)
		defer cancel()
		// What the VM's process adds is of use and not needed: one that hangs
		// must not hide the rest.
		if err := c.Do(ctx, http.MethodGet, "/v1/mcp", nil, &v.Servers); err != nil {
			v.Notes = append(v.Notes, "its process does not answer: "+err.Error())
		}
	}
	api.WriteJSON(w, http.StatusOK, v)
	return nil
}

// takeOverTime is how long a VM's process may take until it has taken over a
// connection that carries a command's streams. One that hangs would never.
const takeOverTime = 15 * time.Second

// idleConns and idleTime bound the connections to a VM's own process that are
// kept for the next request.
const (
	idleConns = 4
	idleTime  = time.Minute
)

// passer returns what hands a request to the VM's own process, with who makes it.
// Connections are kept: opening one costs both processes a good part of what a
// short command takes.
func (s *Service) passer() func(http.ResponseWriter, *http.Request) error {
	transport := &http.Transport{
		MaxIdleConnsPerHost: idleConns, IdleConnTimeout: idleTime,
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			id, _, err := net.SplitHostPort(addr) // a VM's id stands for its host
			if err != nil {
				return nil, err
			}
			socket, err := s.opts.Home.VMSocket(id)
			if err != nil {
				return nil, err
			}
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
	}
	context.AfterFunc(s.lifetime, transport.CloseIdleConnections)
	return func(w http.ResponseWriter, r *http.Request) error { return s.pass(w, r, transport) }
}

// pass hands a request to the VM's own process.
func (s *Service) pass(w http.ResponseWriter, r *http.Request, transport *http.Transport) error {
	m, err := s.registry.find(r.PathValue("vm"))
	if err != nil {
		return err
	}
	c, err := m.running()
	if err != nil {
		return err
	}
	c.Close()
	if r.Header.Get("Upgrade") != "" {
		// The process takes such a connection over before it does anything
		// that may last. It is not kept.
		transport = transport.Clone()
		transport.ResponseHeaderTimeout = takeOverTime
		defer transport.CloseIdleConnections()
	}
	who := caller(r)
	proxy := &httputil.ReverseProxy{
		Transport:     transport,
		FlushInterval: -1,
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL = &url.URL{Scheme: "http", Host: m.id, RawQuery: p.In.URL.RawQuery}
			_, rest, _ := strings.Cut(strings.TrimPrefix(p.In.URL.Path, "/v1/vms/"), "/")
			p.Out.URL.Path = "/v1/" + rest
			p.Out.Host = "vm"
			p.Out.Header.Set(api.HeaderInitiator, inspect.FormatInitiator(who.Initiator))
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			api.WriteError(w, &api.Error{Code: api.CodeUnavailable, Message: m.name + "'s host process does not answer: " + err.Error(), VM: m.id})
		},
	}
	proxy.ServeHTTP(w, r)
	return nil
}

func (s *Service) serveStart(w http.ResponseWriter, r *http.Request) error {
	m, err := s.registry.find(r.PathValue("vm"))
	if err != nil {
		return err
	}
	return progress(w, r, func(step func(string)) (any, error) {
		err := s.admin(r, "start "+m.name, func(ctx context.Context) error {
			done, err := m.take(ctx)
			if err != nil {
				return err
			}
			defer done()
			return m.start(ctx, caller(r).Initiator, step)
		})
		return m.view(), err
	})
}

func (s *Service) serveStop(w http.ResponseWriter, r *http.Request) error {
	m, err := s.registry.find(r.PathValue("vm"))
	if err != nil {
		return err
	}
	var req api.StopRequest
	if err := api.ReadJSON(r, &req); err != nil {
		return err
	}
	err = s.reserve.with(func() error {
		return s.admin(r, "stop "+m.name, func(ctx context.Context) error {
			done, err := m.take(ctx)
			if err != nil {
				return err
			}
			defer done()
			return m.stop(ctx, req)
		})
	})
	if err != nil {
		return err
	}
	api.WriteJSON(w, http.StatusOK, m.view())
	return nil
}

func (s *Service) serveDelete(w http.ResponseWriter, r *http.Request) error {
	m, err := s.registry.find(r.PathValue("vm"))
	if err != nil {
		return err
	}
	force := r.URL.Query().Get(api.DeleteForce) == "true"
	v := m.view()
	err = s.reserve.with(func() error {
		return s.admin(r, "delete "+m.name, func(ctx context.Context) error { return m.remove(ctx, force) })
	})
	if err != nil {
		return err
	}
	v.State, v.PID = api.StateDeleted, 0
	api.WriteJSON(w, http.StatusOK, v)
	return nil
}

func (s *Service) servePurge(w http.ResponseWriter, r *http.Request) error {
	var req api.PurgeRequest
	if err := api.ReadJSON(r, &req); err != nil {
		return err
	}
	result := api.Purged{VMs: []string{}, DryRun: req.DryRun}
	for _, m := range s.registry.all() {
		v := m.view()
		if (v.State == api.StateRunning || v.State == api.StateCreating) && !req.All {
			continue
		}
		if !req.DryRun {
			err := s.reserve.with(func() error {
				return s.admin(r, "purge "+v.Name, func(ctx context.Context) error { return m.remove(ctx, req.All) })
			})
			if err != nil {
				return err
			}
		}
		result.VMs = append(result.VMs, v.Name)
	}
	api.WriteJSON(w, http.StatusOK, result)
	return nil
}
