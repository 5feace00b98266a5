// Package service is the registry of VMs and its HTTP API.
//
// The service knows which VMs exist, starts a host process for each that runs,
// and passes requests on to it; it touches neither guests nor MCP servers.
// Disk is the truth: what is known about a VM stands in its folder, a service
// that starts reads the folders and finds the processes that still run, and
// stopping or killing the service does no harm to any VM. What concerns no VM
// (a create that failed, a deletion) goes to the service's own ledger.
//
// Two sockets lead in. Which one a request came by decides who caused it: the
// command line speaks for a person, capsem-mcp for a host agent.
package service

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/gate"
	"github.com/capsem/capsem/internal/hosttool"
	"github.com/capsem/capsem/internal/inspect"
	"github.com/capsem/capsem/internal/ledger"
	"github.com/capsem/capsem/internal/policy"
)

// shutdownGrace is how long requests under way get when the service stops.
const shutdownGrace = 3 * time.Second

// Options are what a service is made of.
type Options struct {
	Home     config.Home
	Settings config.Settings
	// Executable is capsemd, which is started for each VM.
	Executable string
	// Env is the environment of the processes that are started.
	Env     []string
	Version string
	Log     *slog.Logger
	// Ready is called once requests are served.
	Ready func()
}

// Service serves one home. See Run.
type Service struct {
	opts     Options
	log      *slog.Logger
	gate     *gate.Gate
	ledger   *ledger.Ledger
	registry *registry
	reserve  *allowance
	// stop ends Run.
	stop context.CancelFunc
	// background has everything that outlives a request.
	background *errgroup.Group
	lifetime   context.Context //nolint:containedctx // the life of the service, which watchers of processes share
}

// Run serves until ctx ends, and leaves every VM running. A home that another
// service serves is an error.
func Run(ctx context.Context, o Options) (err error) {
	lock, err := lockHome(o.Home)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	s := &Service{opts: o, log: o.Log, stop: stop, reserve: &allowance{path: o.Home.Reserve(), log: o.Log}}
	s.background, s.lifetime = errgroup.WithContext(ctx)
	if err := s.openLedger(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.ledger.Close()) }()
	if s.registry, err = s.load(ctx); err != nil {
		return err
	}
	s.reserve.hold()
	if err := s.listen(ctx); err != nil {
		return err
	}
	s.background.Go(func() error { return s.homeRemoved(lock) })
	return s.background.Wait()
}

// lockHome makes this the one service of the home.
func lockHome(h config.Home) (*os.File, error) {
	f, err := os.OpenFile(h.ServiceLock(), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("locking %s: %w", h.Root(), err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("another service serves %s already", h.Root()), f.Close())
	}
	return f, nil
}

// homeLook is how often it is looked whether the home is the one that we serve.
const homeLook = 2 * time.Second

// homeRemoved ends the service with an error when its home is gone, or is another
// one: nobody finds its sockets any more.
func (s *Service) homeRemoved(lock *os.File) error {
	ours, err := lock.Stat()
	if err != nil {
		return fmt.Errorf("looking at the home's lock: %w", err)
	}
	tick := time.NewTicker(homeLook)
	defer tick.Stop()
	for {
		select {
		case <-s.lifetime.Done():
			return nil
		case <-tick.C:
		}
		there, err := os.Stat(s.opts.Home.ServiceLock())
		if errors.Is(err, fs.ErrNotExist) || err == nil && !os.SameFile(ours, there) {
			return fmt.Errorf("%s was removed while it was served", s.opts.Home.Root())
		}
	}
}

// openLedger opens the record of what concerns no VM, and the rules for it: the
// organisation's, which apply to everything.
func (s *Service) openLedger(ctx context.Context) error {
	corp, err := config.LoadCorp(s.opts.Home.Corp())
	if err != nil {
		return fmt.Errorf("loading the organisation's rules: %w", err)
	}
	rules, err := policy.Compile(policy.FromProfile(config.Profile{Default: config.DefaultAllow}, corp...))
	if err != nil {
		return fmt.Errorf("loading the organisation's rules: %w", err)
	}
	s.ledger, err = ledger.OpenService(ctx, s.opts.Home.ServiceLedger(), ledger.Options{Durability: ledger.Durability(s.opts.Settings.Durability.Value), Log: s.log})
	if err != nil {
		return err
	}
	s.gate = gate.New(rules, s.ledger)
	return nil
}

// door is one of the two ways in.
type door struct {
	kind event.InitiatorKind
	path string
}

// listen opens both sockets, then serves.
func (s *Service) listen(ctx context.Context) error {
	person, err := s.opts.Home.ServiceSocket()
	if err != nil {
		return err
	}
	agent, err := s.opts.Home.AgentSocket()
	if err != nil {
		return err
	}
	doors := []door{{event.Person, person}, {event.HostAgent, agent}}
	var listeners []net.Listener
	for _, d := range doors {
		l, err := ListenPrivate(ctx, d.path)
		if err != nil {
			for _, open := range listeners {
				err = errors.Join(err, open.Close())
			}
			return err
		}
		listeners = append(listeners, l)
	}
	for i, d := range doors {
		s.serve(listeners[i], s.handler(d.kind))
	}
	s.log.Info("serving", "home", s.opts.Home.Root(), "version", s.opts.Version)
	if s.opts.Ready != nil {
		s.opts.Ready()
	}
	return nil
}

// ListenPrivate listens on a Unix socket that this user alone can open. A
// socket file that nobody serves any more is replaced.
func ListenPrivate(ctx context.Context, path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("making the folder of %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("replacing the socket %s: %w", path, err)
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", path, err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("closing %s to others: %w", path, err), l.Close())
	}
	return l, nil
}

func (s *Service) serve(l net.Listener, h http.Handler) {
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 10 * time.Second,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
	s.background.Go(func() error {
		if err := srv.Serve(api.SameUser(l)); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serving %s: %w", l.Addr(), err)
		}
		return nil
	})
	s.background.Go(func() error {
		<-s.lifetime.Done()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(s.lifetime), shutdownGrace)
		defer cancel()
		if err := srv.Shutdown(ctx); err != nil {
			return srv.Close()
		}
		return nil
	})
}

// handler is the API as seen through one door.
func (s *Service) handler(kind event.InitiatorKind) http.Handler {
	who := func(r *http.Request) inspect.Caller {
		c := inspect.Caller{Initiator: event.Initiator{Kind: kind}, TraceID: r.Header.Get(api.HeaderTrace)}
		if kind == event.HostAgent {
			c.Initiator.ID = r.Header.Get(api.HeaderClient)
		}
		return c
	}
	routes := s.routes(kind)
	recorded := hosttool.Record(s.gate, who, routes)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// A trace is begun here and by nobody outside.
		r.Header.Del(api.HeaderTrace)
		r.Header.Del(api.HeaderInitiator)
		if kind != event.HostAgent {
			r.Header.Del(api.HeaderTool)
		}
		r = r.WithContext(withCaller(r.Context(), who))
		if servedByVM(r) {
			routes.ServeHTTP(w, r) // the VM's own process records the call
			return
		}
		recorded.ServeHTTP(w, r)
	})
}
