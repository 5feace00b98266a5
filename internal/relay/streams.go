//go:build linux

package relay

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/capsem/capsem/internal/guestproto"
	"github.com/capsem/capsem/internal/relay/command"
)

// Bounds of what the host can have under way at once.
const (
	// maxCommands is the number of commands; one more is answered "busy".
	maxCommands = 256
	// maxTransfers is the number of files read, written or looked at.
	maxTransfers = 64
	// maxConns is the number of connections, also those that have not said yet
	// what they are for; one more is closed.
	maxConns = maxCommands + maxTransfers + 64
)

// The times of a stream.
const (
	// firstMessage is how long a new connection may take to say what it is for.
	firstMessage = 10 * time.Second
	// lingerTime is how long an answered connection waits for the host to close
	// it, so that the answer is not lost to a reset.
	lingerTime = 5 * time.Second
)

// streams serves the connections of port 5005.
type streams struct {
	opts Options
	env  *atomic.Pointer[[]string]

	commands, transfers, conns chan struct{} // one element for each one under way
	// buffers are for the output of commands: one that has nothing to say costs
	// no 128 KiB of fresh memory.
	buffers sync.Pool
	users   command.Users

	mu      sync.Mutex // guards running and closing
	running map[*execution]struct{}
	closing bool
	// idle is closed once closing is set and nothing runs.
	idle chan struct{}
}

func newStreams(o Options, env *atomic.Pointer[[]string]) *streams {
	return &streams{
		opts:      o,
		env:       env,
		commands:  make(chan struct{}, maxCommands),
		transfers: make(chan struct{}, maxTransfers),
		conns:     make(chan struct{}, maxConns),
		running:   make(map[*execution]struct{}),
		idle:      make(chan struct{}),
		buffers:   sync.Pool{New: func() any { return new([guestproto.MaxData]byte) }},
	}
}

// serve accepts until ctx ends, and returns when every stream has ended.
func (s *streams) serve(ctx context.Context, l net.Listener) {
	stop := context.AfterFunc(ctx, func() {
		_ = l.Close() // unblocks Accept
	})
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			if err == nil {
				_ = conn.Close() // came too late
			}
			return
		}
		if err != nil {
			// A listener that fails for good would make the guest deaf: end, so
			// that whoever started us begins anew.
			s.opts.Log.Error("accepting a stream", "error", err)
			return
		}
		select {
		case s.conns <- struct{}{}:
		default:
			s.opts.Log.Warn("too many streams", "limit", maxConns)
			_ = conn.Close() // refused, nothing was said on it
			continue
		}
		wg.Go(func() {
			defer func() { <-s.conns }()
			s.one(ctx, conn)
		})
	}
}

// one serves one connection to its end.
func (s *streams) one(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() {
		_ = conn.Close() // unblocks whoever reads or writes it
	})
	defer stop()
	c := guestproto.NewStreamConn(conn)
	err := s.answer(conn, c)
	if err != nil && ctx.Err() == nil {
		s.opts.Log.Info("stream ended", "error", err)
	}
}

func (s *streams) answer(conn net.Conn, c *guestproto.StreamConn) error {
	if err := conn.SetReadDeadline(time.Now().Add(firstMessage)); err != nil {
		return fmt.Errorf("setting a deadline: %w", err)
	}
	m, err := c.Read()
	if err != nil {
		return fmt.Errorf("reading a stream's first message: %w", err)
	}
	if err := conn.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("clearing a deadline: %w", err)
	}
	slots := s.transfers
	if m.Exec != nil {
		slots = s.commands
	}
	select {
	case slots <- struct{}{}:
		defer func() { <-slots }()
	default:
		return s.refuse(conn, c, &guestproto.Error{Code: "busy", Message: fmt.Sprintf("%d of these are under way, and that is the limit", cap(slots))})
	}
	switch {
	case m.Exec != nil:
		return s.exec(conn, c, m.Exec)
	case m.ReadFile != nil:
		return s.readFile(conn, c, m.ReadFile)
	case m.WriteFile != nil:
		err = writeFile(c, m.WriteFile)
	case m.Stat != nil:
		err = statFile(c, m.Stat)
	default:
		err = &refusal{guestproto.Error{Code: "invalid", Message: "a stream begins with what it is for"}}
	}
	if r, ok := errors.AsType[*refusal](err); ok {
		return s.refuse(conn, c, &r.told)
	}
	if err != nil {
		return err
	}
	return linger(conn, c)
}

// refusal is a failure that the host is told.
type refusal struct{ told guestproto.Error }

// Error implements error.
func (r *refusal) Error() string { return r.told.Message }

// refuse sends the host an error as the last word.
func (s *streams) refuse(conn net.Conn, c *guestproto.StreamConn, e *guestproto.Error) error {
	if err := c.Write(&guestproto.Stream{Error: e}); err != nil {
		return fmt.Errorf("reporting an error: %w", err)
	}
	return linger(conn, c)
}

// linger lets the last message arrive: it ends our direction and drops what
// still comes until the host closes. Closing at once, with unread bytes on our
// side, would be a reset that can overtake the message.
func linger(conn net.Conn, c *guestproto.StreamConn) error {
	if err := closeWrite(conn); err != nil {
		return err
	}
	if err := conn.SetReadDeadline(time.Now().Add(lingerTime)); err != nil {
		return fmt.Errorf("setting a deadline: %w", err)
	}
	for {
		if _, err := c.Read(); err != nil {
			return nil // the host has closed, or took too long: either way it is over
		}
	}
}

// closeWrite ends our direction where the connection can.
func closeWrite(conn net.Conn) error {
	half, ok := conn.(interface{ CloseWrite() error })
	if !ok {
		return nil
	}
	if err := half.CloseWrite(); err != nil {
		return fmt.Errorf("ending a stream: %w", err)
	}
	return nil
}

// add registers a running command, unless the guest is shutting down.
func (s *streams) add(x *execution) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return false
	}
	s.running[x] = struct{}{}
	return true
}

func (s *streams) remove(x *execution) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.running, x)
	s.checkIdle()
}

// checkIdle is called with mu held.
func (s *streams) checkIdle() {
	if !s.closing || len(s.running) > 0 {
		return
	}
	select {
	case <-s.idle:
	default:
		close(s.idle)
	}
}

// shutDown refuses new commands, asks those that run to end, and returns when
// they have, when grace is over, or when ctx ends. What then still runs is ended
// by the return of Run.
func (s *streams) shutDown(ctx context.Context, grace time.Duration) {
	s.mu.Lock()
	s.closing = true
	for x := range s.running {
		if err := x.cmd.Terminate(); err != nil {
			s.opts.Log.Warn("ending a command", "error", err)
		}
	}
	s.checkIdle()
	s.mu.Unlock()
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-s.idle:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// group makes a cgroup for a command, nil where the kernel has none.
func (s *streams) group() (*command.Group, error) {
	if s.opts.Cgroups == nil {
		return nil, nil
	}
	s.opts.Cgroups.Sweep()
	return s.opts.Cgroups.New()
}
