package launch

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/child"
)

// Client is the per-VM process's side of its launcher. Its methods may be called
// from any goroutine.
type Client struct {
	sock      *socket
	launcher  *child.Process
	isolation string
	done      chan struct{} // closed when the reading goroutine has ended
	closeOnce sync.Once

	mu      sync.Mutex
	err     error // why nothing can be started any more
	next    uint64
	pending map[uint64]*startCall
	running map[uint64]*Process
}

// startCall is a start request that was not answered yet.
type startCall struct {
	path    string
	result  chan startResult // buffered
	dropped bool             // nobody waits: kill what was started
}

type startResult struct {
	process *Process
	err     error
}

// Start starts executable as the launcher, which needs it to run Serve for
// ServeCommand and Init for InitCommand. It returns when the launcher is ready;
// ctx bounds that alone. The launcher's log goes to this process's stderr.
func Start(ctx context.Context, executable string) (*Client, error) {
	sock, theirs, err := socketpair()
	if err != nil {
		return nil, fmt.Errorf("starting the launcher: %w", err)
	}
	launcher, err := child.Start(ctx, child.Command{
		Path: executable, Args: []string{ServeCommand}, Stderr: os.Stderr, Files: []*os.File{theirs},
	})
	if err := errors.Join(err, theirs.Close()); err != nil {
		return nil, errors.Join(fmt.Errorf("starting the launcher: %w", err), sock.close())
	}
	c := &Client{
		sock: sock, launcher: launcher, done: make(chan struct{}),
		pending: make(map[uint64]*startCall), running: make(map[uint64]*Process),
	}
	ready := make(chan hello, 1)
	go c.read(ready)
	select {
	case h := <-ready:
		c.isolation = h.Isolation
		return c, nil
	case <-c.done:
		return nil, errors.Join(fmt.Errorf("starting the launcher: %w", c.failure()), c.Close())
	case <-ctx.Done():
		return nil, errors.Join(fmt.Errorf("starting the launcher: %w", ctx.Err()), c.Close())
	}
}

// Isolation says how programs are confined: it begins with Strict or Weak, and
// says what is missing on this host.
func (c *Client) Isolation() string { return c.isolation }

// Start starts cmd in a jail. It returns once the program runs. ctx bounds the
// start alone. cmd.Attr must be nil. The errors are those of child.Start, and
// one that says what of the jail this host does not have.
func (c *Client) Start(ctx context.Context, jail Jail, cmd child.Command) (*Process, error) {
	if cmd.Attr != nil {
		return nil, fmt.Errorf("starting %s: process attributes are the profile's", cmd.Path)
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", cmd.Path, err)
	}
	defer closeAll([]*os.File{null})
	files := append([]*os.File{cmd.Stdin, cmd.Stdout, cmd.Stderr}, cmd.Files...)
	for i, f := range files {
		if f == nil {
			files[i] = null
		}
	}
	req := &startRequest{
		Profile: jail.Profile, Weak: jail.Weak, KVM: jail.KVM, Read: toBytes(jail.Read), Write: toBytes(jail.Write),
		Path: []byte(cmd.Path), Args: toBytes(cmd.Args), Env: toBytes(cmd.Env), Dir: []byte(cmd.Dir),
	}
	if err := req.check(len(files)); err != nil {
		return nil, fmt.Errorf("starting %s: %w", cmd.Path, err)
	}
	call, err := c.register(cmd.Path, req)
	if err != nil {
		return nil, err
	}
	if err := c.sock.send(message{Start: req}, files...); err != nil {
		c.forget(req.ID)
		return nil, fmt.Errorf("starting %s: %w", cmd.Path, err)
	}
	select {
	case r := <-call.result:
		return r.process, r.err
	case <-ctx.Done():
		return c.abandon(ctx, req.ID, call)
	}
}

func (c *Client) register(path string, req *startRequest) (*startCall, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return nil, fmt.Errorf("starting %s: %w", path, c.err)
	}
	c.next++
	req.ID = c.next
	call := &startCall{path: path, result: make(chan startResult, 1)}
	c.pending[req.ID] = call
	return call, nil
}

func (c *Client) forget(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pending, id)
}

// abandon gives up a start, unless its answer has just come.
func (c *Client) abandon(ctx context.Context, id uint64, call *startCall) (*Process, error) {
	c.mu.Lock()
	if _, waiting := c.pending[id]; waiting {
		call.dropped = true
		c.mu.Unlock()
		return nil, fmt.Errorf("starting %s: %w", call.path, ctx.Err())
	}
	c.mu.Unlock()
	r := <-call.result
	return r.process, r.err
}

// read takes the launcher's messages until its socket ends.
func (c *Client) read(ready chan<- hello) {
	defer close(c.done)
	for {
		m, files, err := c.sock.receive()
		if err != nil {
			c.lost(fmt.Errorf("the launcher is gone: %w", err))
			return
		}
		switch {
		case m.Hello != nil:
			select {
			case ready <- *m.Hello:
			default: // said twice: nobody needs it
			}
		case m.Started != nil && len(files) > 0:
			c.started(m.Started, files[0], files[1:])
			files = nil
		case m.Started != nil:
			c.started(m.Started, nil, nil)
		case m.Exited != nil:
			c.exited(m.Exited)
		}
		closeAll(files)
	}
}

// started settles a start request. It owns pidfd and the listener in more.
func (c *Client) started(s *started, pidfd *os.File, more []*os.File) {
	defer closeAll(more)
	c.mu.Lock()
	call := c.pending[s.ID]
	delete(c.pending, s.ID)
	if call == nil || pidfd == nil {
		c.mu.Unlock()
		if pidfd != nil {
			closeAll([]*os.File{pidfd})
		}
		if call != nil {
			call.result <- startResult{err: &StartError{Text: s.Error, Errno: s.Errno}}
		}
		return
	}
	p := &Process{client: c, id: s.ID, pid: s.PID, path: call.path, pidfd: pidfd, done: make(chan struct{})}
	var err error
	if len(more) == 1 {
		if p.proxy, err = net.FileListener(more[0]); err != nil {
			err = fmt.Errorf("starting %s: taking over its way out: %w", call.path, err)
		}
	}
	c.running[s.ID] = p
	dropped := call.dropped || err != nil
	c.mu.Unlock()

	if err != nil {
		call.result <- startResult{err: err}
	} else {
		call.result <- startResult{process: p}
	}
	if dropped {
		// When the launcher cannot be told it is gone, and so is the program.
		_ = p.Kill()
	}
}

func (c *Client) exited(e *exited) {
	c.mu.Lock()
	p := c.running[e.ID]
	delete(c.running, e.ID)
	c.mu.Unlock()
	if p == nil {
		return
	}
	switch {
	case e.Lost != "":
		p.end(fmt.Errorf("%s: %s", p.path, e.Lost))
	case e.Signal != 0 || e.Code != 0:
		p.end(&child.ExitError{Program: p.path, Code: e.Code, Signal: e.Signal})
	default:
		p.end(nil)
	}
}

// lost fails everything that waits for the launcher. What it started dies with
// it; Wait says so only when that is true.
func (c *Client) lost(err error) {
	c.mu.Lock()
	c.err = err
	pending, running := c.pending, c.running
	c.pending, c.running = nil, nil
	c.mu.Unlock()

	for _, call := range pending {
		call.result <- startResult{err: fmt.Errorf("starting %s: %w", call.path, err)}
	}
	deadline := time.Now().Add(killWait)
	for _, p := range running {
		p.end(errors.Join(fmt.Errorf("%s: %w", p.path, err), p.awaitGone(deadline)))
	}
}

func (c *Client) failure() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the launcher and everything that it started, and returns when all
// of it is gone. It is idempotent.
func (c *Client) Close() error {
	c.closeOnce.Do(func() {
		_ = c.sock.close() // nothing is buffered in a socket of packets
	})
	limit := time.NewTimer(2 * killWait)
	defer limit.Stop()
	select {
	case <-c.launcher.Done():
	case <-limit.C:
		if err := c.launcher.Kill(); err != nil {
			return fmt.Errorf("stopping the launcher: %w", err)
		}
		<-c.launcher.Done()
	}
	<-c.done
	return nil
}

// Process is a program that the launcher started, with everything below it. Its
// methods may be called from any goroutine.
type Process struct {
	client *Client
	id     uint64
	pid    int
	path   string
	proxy  net.Listener  // nil if the profile has none
	done   chan struct{} // closed after err is set
	err    error

	mu    sync.Mutex
	pidfd *os.File // nil once it has ended
}

// Proxy is the listener at ProxyAddress inside the program's network, of which
// this process accepts the connections; they are all that the program can reach.
// It is nil if the profile has another network. It is closed when the program has
// ended; whoever closes it before cuts the program off.
func (p *Process) Proxy() net.Listener { return p.proxy }

// PID is the id of the program's init in the host's numbering.
func (p *Process) PID() int { return p.pid }

// Done is closed when the program and everything below it is gone.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait blocks until the program and everything below it is gone, and says how
// the program ended: nil for status 0, else an *child.ExitError, or an error
// that says why that is not known. It may be called any number of times.
func (p *Process) Wait() error {
	<-p.done
	return p.err
}

// Signal sends a signal to the program's process group, by way of its init. Once
// it has ended the error matches os.ErrProcessDone. SIGKILL and SIGSTOP would
// reach only the init: they are refused, see Kill.
func (p *Process) Signal(sig syscall.Signal) error {
	if sig == syscall.SIGKILL || sig == syscall.SIGSTOP {
		return fmt.Errorf("signalling %s: signal %d cannot be passed on", p.path, int(sig))
	}
	return p.signal(sig)
}

func (p *Process) signal(sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pidfd == nil {
		return os.ErrProcessDone
	}
	err := unix.PidfdSendSignal(int(p.pidfd.Fd()), sig, nil, 0)
	switch {
	case errors.Is(err, unix.ESRCH):
		return os.ErrProcessDone
	case err != nil:
		return fmt.Errorf("signalling %s (pid %d): %w", p.path, p.pid, err)
	}
	return nil
}

// Kill ends the program and everything below it. It does not wait. A program
// that has ended is no error.
func (p *Process) Kill() error {
	select {
	case <-p.done:
		return nil
	default:
	}
	err := p.client.sock.send(message{Kill: &kill{ID: p.id}})
	if err == nil {
		return nil
	}
	// Without the launcher, the init is the next best to kill.
	if sigErr := p.signal(syscall.SIGKILL); sigErr != nil && !errors.Is(sigErr, os.ErrProcessDone) {
		return errors.Join(err, sigErr)
	}
	return nil
}

// Stop is child.Process.Stop: SIGTERM to the program's group, and after
// child.Grace, or as soon as ctx ends, Kill. It returns nil once everything is
// gone.
func (p *Process) Stop(ctx context.Context) error {
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	grace := time.NewTimer(child.Grace)
	defer grace.Stop()
	select {
	case <-p.done:
		return nil
	case <-grace.C:
	case <-ctx.Done():
	}
	if err := p.Kill(); err != nil {
		return err
	}
	limit := time.NewTimer(2 * killWait)
	defer limit.Stop()
	select {
	case <-p.done:
		return nil
	case <-limit.C:
		return fmt.Errorf("stopping %s (pid %d): still there %s after it was killed", p.path, p.pid, 2*killWait)
	}
}

// end records how the program ended. It is called once.
func (p *Process) end(err error) {
	p.mu.Lock()
	closeAll([]*os.File{p.pidfd})
	p.pidfd = nil
	p.mu.Unlock()
	if p.proxy != nil {
		_ = p.proxy.Close() // a second close is no failure
	}
	p.err = err
	close(p.done)
}

// awaitGone blocks until the init is gone.
func (p *Process) awaitGone(deadline time.Time) error {
	for {
		left := max(0, time.Until(deadline))
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(p.pidfd.Fd()), Events: unix.POLLIN}}, int(left.Milliseconds()))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return fmt.Errorf("waiting for pid %d: %w", p.pid, err)
		case n == 0:
			return fmt.Errorf("pid %d is still there", p.pid)
		default:
			return nil
		}
	}
}
