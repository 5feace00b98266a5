package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/hosttool"
	"github.com/capsem/capsem/internal/inspect"
)

// serveAPI serves the VM's own socket, for the service.
func (s *Session) serveAPI(ctx context.Context, undo *closers) error {
	path, err := s.opts.Home.VMSocket(s.opts.ID)
	if err != nil {
		return err
	}
	l, err := listenPrivate(ctx, path)
	if err != nil {
		return err
	}
	// Requests end with the VM, not with the service that made them.
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	srv := &http.Server{
		Handler: hosttool.Record(s.gate, s.requester, s.routes()), ReadHeaderTimeout: 10 * time.Second,
		BaseContext: func(net.Listener) context.Context { return ctx },
		ErrorLog:    slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(api.SameUser(l)) }()
	undo.add(func() error {
		cancel()
		err := srv.Close()
		if served := <-served; !errors.Is(served, http.ErrServerClosed) {
			err = errors.Join(err, served)
		}
		return err
	})
	return nil
}

// listenPrivate listens on a Unix socket that this user alone can open. What an
// earlier process of this VM left there is replaced.
func listenPrivate(ctx context.Context, path string) (net.Listener, error) {
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

// requester is who makes a request, as the service that passes it on says: it
// knows by which of its sockets the request came.
func (s *Session) requester(r *http.Request) inspect.Caller {
	i, err := inspect.ParseInitiator(r.Header.Get(api.HeaderInitiator))
	if err != nil {
		// Somebody asks past the service: whoever can open this socket is the
		// VM's user, and is not taken for more than a host agent.
		i = event.Initiator{Kind: event.HostAgent, ID: "direct"}
	}
	c := s.caller(i)
	c.TraceID = r.Header.Get(api.HeaderTrace)
	return c
}

func (s *Session) routes() http.Handler {
	mux := http.NewServeMux()
	on := func(pattern string, serve func(http.ResponseWriter, *http.Request) error) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if err := serve(w, r); err != nil {
				api.WriteError(w, apiError(err))
			}
		})
	}
	on("POST /v1/exec", s.serveExec)
	on("GET /v1/files", s.serveReadFile)
	on("PUT /v1/files", s.serveWriteFile)
	on("POST /v1/stop", s.serveStop)
	on("POST /v1/policy/reload", s.serveReload)
	on("GET /v1/mcp", s.serveServers)
	return mux
}

func (s *Session) serveStop(w http.ResponseWriter, r *http.Request) error {
	var req api.StopRequest
	if err := api.ReadJSON(r, &req); err != nil {
		return err
	}
	grace := api.DefaultStop
	if req.TimeoutMS > 0 {
		grace = time.Duration(req.TimeoutMS) * time.Millisecond
	}
	if err := s.admin(r, "stop", func(context.Context) error { return nil }); err != nil {
		return err
	}
	api.WriteJSON(w, http.StatusAccepted, struct{}{})
	s.stop(grace)
	return nil
}

func (s *Session) serveReload(w http.ResponseWriter, r *http.Request) error {
	var result api.ReloadResult
	err := s.admin(r, "reload the policy", func(ctx context.Context) (err error) {
		result, err = s.reloadRules(context.WithoutCancel(ctx))
		return err
	})
	if err != nil {
		return err
	}
	api.WriteJSON(w, http.StatusOK, result)
	return nil
}

func (s *Session) serveServers(w http.ResponseWriter, _ *http.Request) error {
	api.WriteJSON(w, http.StatusOK, s.servers.view())
	return nil
}

// admin takes what is done to the VM through its gate.
func (s *Session) admin(r *http.Request, detail string, act func(context.Context) error) error {
	var failure error
	verdict, out := s.gate.Do(r.Context(), s.requester(r).Admin(detail), func(ctx context.Context) event.Outcome {
		if failure = act(ctx); failure != nil {
			return event.Outcome{Status: event.Failed, CarriedOut: true, Error: &event.Error{Message: failure.Error()}}
		}
		return event.Outcome{Status: event.Done, CarriedOut: true}
	})
	if verdict.Decision != event.Allow {
		return blocked(out)
	}
	return failure
}

func blocked(out event.Outcome) error {
	return &api.Error{Code: api.CodeBlocked, Message: out.Error.Message, Rule: out.Error.Rule}
}
