//go:build linux

package relay

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/guestproto"
	"github.com/capsem/capsem/internal/relay/command"
)

// killAfter is how long a command whose time is over has between TERM and KILL.
// The host allows for it.
const killAfter = guestproto.KillAfter

// drainKilled is how long the pipes of a tree that was killed may take to close:
// its processes are ending, and what they wrote is still wanted.
const drainKilled = 2 * time.Second

// execution is one command and the connection that it belongs to.
type execution struct {
	c   *guestproto.StreamConn
	cmd *command.Command
	log interface {
		Warn(msg string, args ...any)
	}
	stdin bool
	// buffers are the pool of *[guestproto.MaxData]byte that the pumps share.
	buffers *sync.Pool

	out *guestproto.Credit // of what we send
	in  *guestproto.Intake // of what the command has not read yet

	exited chan struct{} // closed when the pumps are to finish
	lost   chan struct{} // closed when the reader has ended
	leaked atomic.Bool
}

// exec runs one command to its end.
func (s *streams) exec(conn net.Conn, c *guestproto.StreamConn, e *guestproto.Exec) error {
	cmd, err := s.start(e)
	if se, ok := errors.AsType[*command.StartError](err); ok {
		if err := c.Write(&guestproto.Stream{Exit: &guestproto.Exit{Code: se.Code, Message: se.Message}}); err != nil {
			return fmt.Errorf("reporting that a command did not start: %w", err)
		}
		return linger(conn, c)
	}
	if err != nil {
		return s.refuse(conn, c, &guestproto.Error{Code: "io", Message: err.Error()})
	}
	x := &execution{
		c: c, cmd: cmd, log: s.opts.Log, stdin: e.Stdin, buffers: &s.buffers,
		out: guestproto.NewCredit(), in: guestproto.NewIntake(),
		exited: make(chan struct{}), lost: make(chan struct{}),
	}
	if !s.add(x) {
		err := errors.Join(x.discard(), x.close())
		return errors.Join(err, s.refuse(conn, c, &guestproto.Error{Code: "busy", Message: "the guest is shutting down"}))
	}
	defer s.remove(x)
	return x.run(conn, time.Duration(e.TimeoutMS)*time.Millisecond)
}

// start looks up what the command needs and starts it.
func (s *streams) start(e *guestproto.Exec) (*command.Command, error) {
	user, err := s.users.Lookup(e.User)
	if err != nil {
		return nil, err
	}
	var base []string
	if env := s.env.Load(); env != nil {
		base = *env
	}
	spec := command.Spec{
		Argv:  byteStrings(e.Argv),
		Env:   user.Environ(base, byteStrings(e.Env)),
		Dir:   string(e.Cwd),
		User:  user,
		Stdin: e.Stdin,
	}
	if spec.Dir == "" {
		spec.Dir = user.Home
		if _, err := os.Stat(spec.Dir); err != nil {
			spec.Dir = "/" // as login(1) does for a home that is not there
		}
	}
	if spec.Group, err = s.group(); err != nil {
		return nil, err
	}
	return command.Start(spec)
}

func byteStrings(b [][]byte) []string {
	s := make([]string, len(b))
	for i := range b {
		s[i] = string(b[i])
	}
	return s
}

// discard ends a command that must not run after all.
func (x *execution) discard() error {
	err := x.cmd.Kill()
	_, werr := x.cmd.Wait()
	return errors.Join(err, werr)
}

// close releases the command's files.
func (x *execution) close() error {
	errs := []error{x.cmd.Stdout.Close(), x.cmd.Stderr.Close(), x.cmd.Close()}
	if x.cmd.Stdin != nil {
		if err := x.cmd.Stdin.Close(); !errors.Is(err, os.ErrClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// run carries the command's bytes and reports its end.
func (x *execution) run(conn net.Conn, timeout time.Duration) (err error) {
	defer func() { err = errors.Join(err, x.close()) }()
	if err := x.c.Write(&guestproto.Stream{Started: &guestproto.Started{PID: x.cmd.PID}}); err != nil {
		return errors.Join(fmt.Errorf("reporting a command's start: %w", err), x.discard())
	}
	var reader, feeder, pumps sync.WaitGroup
	var readErr error
	reader.Go(func() { readErr = x.read() })
	if x.stdin {
		feeder.Go(x.feed)
	}
	pumps.Go(func() { x.pump(x.cmd.Stdout, guestproto.Out) })
	pumps.Go(func() { x.pump(x.cmd.Stderr, guestproto.Err) })

	exit, err := x.await(timeout)
	pumps.Wait()
	exit.Leaked = x.leaked.Load()

	// Nothing but the last word is left to say. Standard input that nobody
	// will read any more is dropped, so that the feeder ends.
	x.in.End()
	if x.cmd.Stdin != nil {
		_ = x.cmd.Stdin.SetWriteDeadline(time.Now()) // a pipe has deadlines; the feeder ends with it
	}
	feeder.Wait()
	select {
	case <-x.lost:
	default:
		err = errors.Join(err, x.report(conn, exit))
	}
	reader.Wait()
	return errors.Join(err, readErr)
}

// report says the last word and gives the host time to take it.
func (x *execution) report(conn net.Conn, exit *guestproto.Exit) error {
	if err := x.c.Write(&guestproto.Stream{Exit: exit}); err != nil {
		// The connection broke before the host knew the end: as if in mid-run.
		return errors.Join(fmt.Errorf("reporting a command's end: %w", err), x.cmd.Kill(), conn.Close())
	}
	return errors.Join(closeWrite(conn), conn.SetReadDeadline(time.Now().Add(lingerTime)))
}

// await returns when the command has ended by itself, by its timeout or because
// its connection is gone. When it returns, the pumps know that they are to
// finish.
func (x *execution) await(timeout time.Duration) (*guestproto.Exit, error) {
	type end struct {
		st  command.Status
		err error
	}
	ended := make(chan end, 1)
	go func() {
		st, err := x.cmd.Wait()
		ended <- end{st, err}
	}()
	var expired <-chan time.Time
	if timeout > 0 {
		timer := time.NewTimer(timeout)
		defer timer.Stop()
		expired = timer.C
	}
	var e end
	exit := &guestproto.Exit{}
	wait := time.Duration(0) // for the pipes to close
	select {
	case e = <-ended:
	case <-x.lost:
		err := x.cmd.Kill()
		e = <-ended
		e.err = errors.Join(err, e.err)
		wait = drainKilled
	case <-expired:
		exit.TimedOut = true
		err := x.cmd.Terminate()
		grace := time.NewTimer(killAfter)
		defer grace.Stop()
		var gone bool
		select {
		case e = <-ended:
			gone = true
		case <-grace.C:
		case <-x.lost:
		}
		// Also where the command obeyed: its time is over for all of its tree.
		err = errors.Join(err, x.cmd.Kill())
		if !gone {
			e = <-ended
		}
		e.err = errors.Join(err, e.err)
		wait = drainKilled
	}
	close(x.exited)
	limit := time.Now().Add(wait)
	err := errors.Join(e.err, x.cmd.Stdout.SetReadDeadline(limit), x.cmd.Stderr.SetReadDeadline(limit))
	exit.Code, exit.OOM = e.st.Code, e.st.OOM
	if e.st.Signal != 0 {
		exit.Signal = signalName(e.st.Signal)
	}
	return exit, err
}

// read takes in what the host sends, until the connection ends. It never waits
// for the command: a signal is not to queue behind input that nobody reads.
func (x *execution) read() error {
	defer close(x.lost)
	defer x.in.End()
	defer x.out.Close()
	for {
		m, err := x.c.Read()
		if err != nil {
			select {
			case <-x.exited:
				return nil // the host closes after Exit
			default:
			}
			return fmt.Errorf("reading from the host: %w", err)
		}
		if err := x.take(m); err != nil {
			return err
		}
	}
}

func (x *execution) take(m *guestproto.Stream) error {
	switch {
	case m.Data != nil && m.Data.Stream == guestproto.In && x.stdin:
		err := x.in.Receive(m.Data)
		select {
		case <-x.exited:
			return nil // it crossed the end of the command
		default:
			return err
		}
	case m.EOF != nil && m.EOF.Stream == guestproto.In && x.stdin:
		x.in.End()
		return nil
	case m.Ack != nil:
		return x.out.Confirm(*m.Ack)
	case m.Signal != nil:
		sig, ok := signalNumber(m.Signal.Name)
		if !ok {
			return fmt.Errorf("the host sent the signal %.20q, which has no number here", m.Signal.Name)
		}
		if err := x.cmd.Signal(sig); err != nil {
			x.log.Warn("signalling a command", "error", err)
		}
		return nil
	}
	return errors.New("the host sent a message that has no place in a running command")
}

// feed writes to the command's standard input what has arrived. Once the
// command does not read any more, the rest is dropped but confirmed: the host
// must not wait for a reader that is gone.
func (x *execution) feed() {
	open := true
	for {
		d, ok := x.in.Next()
		if !ok {
			break
		}
		if open {
			if _, err := x.cmd.Stdin.Write(d.Bytes); err != nil {
				open = false // EPIPE: the command closed its input, or it has ended
				_ = x.cmd.Stdin.Close()
			}
		}
		if ack := x.in.Consume(len(d.Bytes)); ack != nil {
			if err := x.c.Write(&guestproto.Stream{Ack: ack}); err != nil {
				break // the reader reports a lost connection
			}
		}
	}
	_ = x.cmd.Stdin.Close() // end of input; a second close changes nothing
}

// pump sends one output of the command: until its end, or, once the command has
// ended, until what was in the pipe at that moment is sent.
func (x *execution) pump(f *os.File, stream guestproto.StreamID) {
	b := x.buffers.Get().(*[guestproto.MaxData]byte) // the pool has nothing else
	defer x.buffers.Put(b)
	buf := b[:]
	for {
		n, err := f.Read(buf)
		if !x.send(stream, buf[:n]) {
			return
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			x.drain(f, stream, buf)
			return
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				x.log.Warn("reading a command's output", "error", err)
			}
			return
		}
	}
}

// drain sends what is in the pipe now. Others may hold the pipe and go on
// writing: they are not waited for.
func (x *execution) drain(f *os.File, stream guestproto.StreamID, buf []byte) {
	raw, err := f.SyscallConn()
	if err != nil {
		x.log.Warn("draining a command's output", "error", err)
		return
	}
	var left int
	var askErr error
	err = raw.Control(func(fd uintptr) { left, askErr = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	for err = errors.Join(err, askErr); err == nil; {
		// One byte more than there was: it tells an end of file from a pipe
		// that others hold.
		most := min(left+1, len(buf))
		var n int
		var readErr error
		err = raw.Control(func(fd uintptr) { n, readErr = retryRead(int(fd), buf[:most]) })
		if readErr != nil || left < n {
			x.leaked.Store(true) // EAGAIN, or bytes that came after
		}
		if readErr != nil || n <= 0 {
			return
		}
		left -= n
		if !x.send(stream, buf[:n]) || left < 0 {
			return
		}
	}
	x.log.Warn("draining a command's output", "error", err)
}

func retryRead(fd int, p []byte) (int, error) {
	for {
		n, err := unix.Read(fd, p)
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// send sends bytes as the window allows, and reports whether the connection
// still takes them.
func (x *execution) send(stream guestproto.StreamID, p []byte) bool {
	for len(p) > 0 {
		n := x.out.Take(len(p))
		if n == 0 {
			return false
		}
		if err := x.c.Write(&guestproto.Stream{Data: &guestproto.Data{Stream: stream, Bytes: p[:n]}}); err != nil {
			return false // the reader reports a lost connection
		}
		p = p[n:]
	}
	return true
}

// signalNumber translates a name that may be on the wire.
func signalNumber(name string) (syscall.Signal, bool) {
	for _, known := range guestproto.Signals() {
		if known == name {
			return unix.SignalNum("SIG" + name), true
		}
	}
	return 0, false
}

// signalName is the name of any signal that can end a command, without "SIG".
func signalName(sig syscall.Signal) string {
	if name := unix.SignalName(sig); len(name) > 3 {
		return name[3:]
	}
	return fmt.Sprintf("RT%d", int(sig)) // real-time signals have numbers only
}
