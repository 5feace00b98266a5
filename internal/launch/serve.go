package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/child"
)

// initWait bounds how long an init may take from its own start to the start of
// its program.
const initWait = 10 * time.Second

// server is the launcher.
type server struct {
	sock      *socket
	log       *slog.Logger
	isolation isolation

	tasks sync.WaitGroup // one for each program

	mu      sync.Mutex // also held while an init is forked, see killStrays
	running map[uint64]*tree
}

// tree is one program with everything below it.
type tree struct {
	init  *child.Process
	pidfd *os.File // of init; for the client
	line  *socket
}

// Serve is the whole program `launch`: it starts programs on request from the
// socket, by default that on SocketFD, which it takes over, until ctx ends or
// the other side closes; then it kills all of them and returns.
func Serve(ctx context.Context, file *os.File, log *slog.Logger) error {
	sock, err := newSocket(file)
	if err != nil {
		return err
	}
	s := &server{sock: sock, log: log, isolation: probe(), running: make(map[uint64]*tree)}
	if s.isolation.attr == nil {
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			return errors.Join(fmt.Errorf("becoming a subreaper: %w", err), sock.close())
		}
	}
	// Closing unblocks the receive; a second close is no failure.
	stop := context.AfterFunc(ctx, func() {
		_ = sock.close() // receive ends with an error that says so
	})
	defer stop()

	err = sock.send(message{Hello: &hello{Isolation: s.isolation.name}})
	if err == nil {
		err = s.receive()
	}
	s.killAll()
	s.tasks.Wait()
	s.killStrays()
	_ = sock.close() // nothing is buffered in a socket of packets
	if ctx.Err() != nil || errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// receive takes requests until the socket ends. It never waits for a program.
func (s *server) receive() error {
	for {
		m, files, err := s.sock.receive()
		switch {
		case err != nil:
			return err
		case m.Start != nil:
			if err := s.accept(m.Start, files); err != nil {
				closeAll(files)
				if err := s.sock.send(message{Started: failure(m.Start.ID, err)}); err != nil {
					return err
				}
			}
		case m.Kill != nil:
			closeAll(files)
			s.kill(m.Kill.ID)
		default:
			closeAll(files)
			return errors.New("a message that is no request")
		}
	}
}

// accept checks a request and starts its program in the background.
func (s *server) accept(req *startRequest, files []*os.File) error {
	if err := req.check(len(files)); err != nil {
		return fmt.Errorf("refusing to start %s: %w", req.Path, err)
	}
	if s.isolation.attr == nil && !req.Weak {
		return fmt.Errorf("refusing to start %s: this host has no jail for it: %s; `isolation = \"weak\"` in the profile accepts less", req.Path, s.isolation.missing)
	}
	t, err := s.fork(req)
	if err != nil {
		return err
	}
	s.tasks.Go(func() { s.run(t, req, files) })
	return nil
}

// fork starts an init and records it in one step, so that killStrays never
// takes it for a stray.
func (s *server) fork(req *startRequest) (*tree, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, taken := s.running[req.ID]; taken {
		return nil, fmt.Errorf("refusing to start %s: id %d is in use", req.Path, req.ID)
	}
	if len(s.running) >= MaxProcesses {
		return nil, fmt.Errorf("refusing to start %s: %d programs are running already", req.Path, MaxProcesses)
	}
	line, theirs, err := socketpair()
	if err != nil {
		return nil, err
	}
	var init *child.Process
	dumpErr := dumpable(func() {
		init, err = child.Start(context.Background(), child.Command{
			Path: "/proc/self/exe", Args: []string{InitCommand}, Dir: "/",
			Stderr: os.Stderr, Files: []*os.File{theirs}, Attr: s.isolation.attr,
		})
	})
	if err := errors.Join(err, dumpErr, theirs.Close()); err != nil {
		return nil, errors.Join(fmt.Errorf("starting an init for %s: %w", req.Path, err), line.close())
	}
	// Now: a program that ends at once takes its init with it before it is
	// reported.
	pidfd, err := init.PidFD()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("starting an init for %s: %w", req.Path, err), init.Kill(), line.close())
	}
	t := &tree{init: init, pidfd: pidfd, line: line}
	s.running[req.ID] = t
	return t, nil
}

// run sees one program from its start to the end of its tree.
func (s *server) run(t *tree, req *startRequest, files []*os.File) {
	req.Namespace = s.isolation.attr != nil
	reply, passed, err := t.start(req, files)
	closeAll(files)
	if err != nil {
		closeAll([]*os.File{t.pidfd})
		s.end(t, req.ID)
		s.tell(message{Started: failure(req.ID, err)})
		return
	}
	if reply.Note != "" {
		s.log.Info("program runs without part of its isolation", "program", string(req.Path), "reason", reply.Note)
	}
	s.tell(message{Started: &started{ID: req.ID, PID: t.init.PID()}}, passed...)
	closeAll(passed)

	report := t.await(req.ID)
	s.end(t, req.ID)
	s.tell(message{Exited: report})
}

// start hands the request to the init, which answers when the program runs. It
// returns a pidfd of the init and what the init passed on.
func (t *tree) start(req *startRequest, files []*os.File) (reply *started, passed []*os.File, err error) {
	if err := t.line.send(message{Start: req}, files...); err != nil {
		return nil, nil, err
	}
	if err := t.line.conn.SetReadDeadline(time.Now().Add(initWait)); err != nil {
		return nil, nil, err
	}
	m, passed, err := t.line.receive()
	defer func() {
		if err != nil {
			closeAll(passed)
		}
	}()
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, nil, fmt.Errorf("starting %s: its init did not answer within %s", req.Path, initWait)
	case err != nil:
		return nil, nil, fmt.Errorf("starting %s: its init died: %w", req.Path, err)
	case m.Started == nil:
		return nil, nil, fmt.Errorf("starting %s: its init sent something else", req.Path)
	case m.Started.Error != "":
		return nil, nil, &StartError{Text: m.Started.Error, Errno: m.Started.Errno}
	}
	if err := t.line.conn.SetReadDeadline(time.Time{}); err != nil {
		return nil, nil, err
	}
	return m.Started, append([]*os.File{t.pidfd}, passed...), nil
}

// await blocks until the program has ended and returns how.
func (t *tree) await(id uint64) *exited {
	m, extra, err := t.line.receive()
	closeAll(extra)
	waitErr := t.init.Wait()
	if err == nil && m.Exited != nil {
		m.Exited.ID = id
		return m.Exited
	}
	// Without a report, the init was killed: by us, or by somebody else.
	report := &exited{ID: id, Code: -1, Signal: syscall.SIGKILL}
	var exit *child.ExitError
	if !errors.As(waitErr, &exit) || (exit.Signal != syscall.SIGKILL && exit.Code != 128+int(syscall.SIGKILL)) {
		report.Lost = fmt.Sprintf("its init ended unexpectedly: %v", waitErr)
	}
	return report
}

// end makes sure that nothing of a tree is left, and forgets it.
func (s *server) end(t *tree, id uint64) {
	s.stop(t)
	s.mu.Lock()
	delete(s.running, id)
	s.mu.Unlock()
	s.killStrays()
}

// stop kills a tree and waits for its init.
func (s *server) stop(t *tree) {
	s.cut(t)
	limit := time.NewTimer(killWait)
	defer limit.Stop()
	select {
	case <-t.init.Done():
		return
	case <-limit.C:
	}
	s.log.Warn("an init does not end and is killed", "pid", t.init.PID())
	if err := t.init.Kill(); err != nil {
		s.log.Error("killing an init failed", "pid", t.init.PID(), "error", err)
		return
	}
	<-t.init.Done()
}

// cut makes a tree end, without waiting for it. In a namespace the kernel does
// the work; a subreaper does it when its line breaks.
func (s *server) cut(t *tree) {
	_ = t.line.close() // a second close is no failure
	if s.isolation.attr == nil {
		return
	}
	if err := t.init.Kill(); err != nil {
		s.log.Error("killing an init failed", "pid", t.init.PID(), "error", err)
	}
}

func (s *server) kill(id uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t := s.running[id]; t != nil { // else it has ended by itself
		s.cut(t)
	}
}

func (s *server) killAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.running {
		s.cut(t)
	}
}

// killStrays kills what an init left behind that was killed itself: the launcher
// inherits it where there are no namespaces.
func (s *server) killStrays() {
	if s.isolation.attr != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	inits := make(map[int]bool, len(s.running))
	for _, t := range s.running {
		inits[t.init.PID()] = true
	}
	if err := killChildren(func(pid int) bool { return inits[pid] }); err != nil {
		s.log.Error("killing stray processes failed", "error", err)
	}
}

// tell sends to the client. When that fails the client is gone, which the
// receiving goroutine sees as well and acts on.
func (s *server) tell(m message, files ...*os.File) {
	if err := s.sock.send(m, files...); err != nil {
		s.log.Debug("the client is gone", "error", err)
	}
}
