package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/guestproto"
)

// IO is what a command is connected to.
type IO struct {
	// Stdin is read until its end; nil gives the command an empty input. Exec
	// returns when the command has ended, whatever Stdin does: a Read that is
	// under way then is left to end by itself, and what it gives is lost.
	Stdin io.Reader
	// Stdout and Stderr take the command's output as it comes; nil drops it. A
	// writer that is slow makes the command wait. They are never called at the
	// same time.
	Stdout, Stderr io.Writer
	// Signals are names (guestproto.Signals) to send to the command's process
	// group.
	Signals <-chan string
}

// errTimeout is the cause of a stream that we ended because the guest did not.
var errTimeout = errors.New("the guest did not end the command in time")

// Exec runs a command and returns how it ended: what the guest says of it, and
// how many bytes of output were handed on. The Stdin member of e is set from
// that of s.
//
// A command that could not be started is no error: it has the exit code 126 or
// 127, and the reason is written to Stderr. An error means that the end of the
// command is not known: *ProtocolError, *Error, ErrUnreachable, ErrClosed, what a
// writer returned, or the cause of ctx. The guest then kills the command's whole
// tree, as it does when ctx ends.
func (g *Guest) Exec(ctx context.Context, e guestproto.Exec, s IO) (event.ExecResult, error) {
	e.Stdin = s.Stdin != nil
	if err := checkExec(&e); err != nil {
		return event.ExecResult{}, err
	}
	_, st, err := g.open(ctx, &guestproto.Stream{Exec: &e})
	if err != nil {
		return event.ExecResult{}, err
	}
	x := &execution{
		stream: st, io: s, done: make(chan struct{}),
		in: guestproto.NewIntake(), out: guestproto.NewCredit(),
	}
	return x.run(time.Duration(e.TimeoutMS) * time.Millisecond)
}

// execution is one command under way.
type execution struct {
	*stream
	io   IO
	done chan struct{} // closed when the command has ended for us

	in  *guestproto.Intake // output that is not written yet
	out *guestproto.Credit // of standard input

	progress       progress
	stdout, stderr atomic.Int64
	// undelivered is why output could not be handed on; it is deliver's until
	// that has ended.
	undelivered error
	// busy says that output waits for a writer: the guest is not to blame for
	// what takes long.
	busy atomic.Bool
}

func (x *execution) run(timeout time.Duration) (event.ExecResult, error) {
	var tasks sync.WaitGroup
	tasks.Go(x.deliver)
	if x.io.Signals != nil {
		tasks.Go(x.forwardSignals)
	}
	if timeout > 0 {
		tasks.Go(func() { x.enforce(timeout) })
	}
	if x.io.Stdin != nil {
		// Not waited for: it may be in a Read that nobody can end.
		go x.forwardInput()
	}
	err := x.hear()
	if err == nil {
		// A guest that has said its last word need not read any more: what is
		// still being told to it must not hold us up.
		_ = x.conn.SetWriteDeadline(time.Now().Add(writeTimeout)) // a closed connection holds nobody up
	} else {
		x.cancel(err) // at once, also while a writer of ours takes its time
	}
	x.in.End()
	x.out.Close()
	close(x.done)
	tasks.Wait()
	x.close()
	if err == nil {
		// The end is known; whatever ended the context since then came late.
		err = x.undelivered
	}
	return x.outcome(err)
}

// outcome says how it ended.
func (x *execution) outcome(err error) (event.ExecResult, error) {
	exit := x.progress.exit
	if errors.Is(err, errTimeout) {
		x.g.opts.Log.Warn("a guest did not end a command in time", "error", err)
		exit, err = timedOut(), nil
	}
	if err == nil && exit.Message != "" {
		// Where a shell would say it.
		n, werr := writeOut(x.io.Stderr, []byte("capsem: "+exit.Message+"\n"))
		x.stderr.Add(int64(n))
		err = werr
	}
	return result(exit, x.stdout.Load(), x.stderr.Load()), err
}

// timedOut stands for the word of a guest that did not say it.
func timedOut() *guestproto.Exit {
	return &guestproto.Exit{Code: 137, Signal: "KILL", TimedOut: true}
}

// hear takes in the guest's messages up to the last. It never waits for a writer.
func (x *execution) hear() error {
	for {
		m, err := x.next()
		if err != nil {
			return err
		}
		if err := x.progress.take(m); err != nil {
			return err
		}
		switch {
		case m.Data != nil:
			if err := x.in.Receive(m.Data); err != nil {
				return &ProtocolError{err.Error()}
			}
		case m.Ack != nil:
			if err := x.out.Confirm(*m.Ack); err != nil {
				return &ProtocolError{err.Error()}
			}
		case m.Exit != nil:
			return x.lastWord()
		}
	}
}

// lastWord makes sure that exit was the last word, as far as that can be known
// without waiting: it looks at what came together with it.
func (x *execution) lastWord() error {
	if err := x.conn.SetReadDeadline(time.Now()); err != nil {
		return nil // closed already: nothing more can come
	}
	m, err := x.c.Read()
	if err != nil {
		return nil // nothing came
	}
	return x.progress.take(m)
}

// deliver writes the output where it belongs.
func (x *execution) deliver() {
	for {
		d, ok := x.in.Next()
		if !ok {
			return
		}
		w, count := x.io.Stdout, &x.stdout
		if d.Stream == guestproto.Err {
			w, count = x.io.Stderr, &x.stderr
		}
		x.busy.Store(true)
		n, err := writeOut(w, d.Bytes)
		x.busy.Store(false)
		count.Add(int64(n))
		if err != nil {
			x.undelivered = fmt.Errorf("handing on a command's output: %w", err)
			x.cancel(x.undelivered)
			return
		}
		if ack := x.in.Consume(len(d.Bytes)); ack != nil {
			x.tell(&guestproto.Stream{Ack: ack})
		}
	}
}

// writeOut writes to w, nil for nowhere.
func writeOut(w io.Writer, p []byte) (int, error) {
	if w == nil {
		return len(p), nil
	}
	n, err := w.Write(p)
	if err == nil && n < len(p) {
		err = io.ErrShortWrite
	}
	return n, err
}

// tell sends a message beside those that are waited for. A connection that does
// not take it is reported by its reader.
func (x *execution) tell(m *guestproto.Stream) {
	if err := x.c.Write(m); err != nil {
		x.g.opts.Log.Debug("a message did not reach the guest", "error", err)
	}
}

// forwardInput sends standard input as the guest takes it.
func (x *execution) forwardInput() {
	buf := make([]byte, guestproto.MaxData)
	for {
		n, err := x.io.Stdin.Read(buf)
		if sent := sendData(x.c, x.out, buf[:n]); sent != nil {
			return // the command has ended, or the reader reports why not
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				x.cancel(fmt.Errorf("reading a command's input: %w", err))
				return
			}
			x.tell(&guestproto.Stream{EOF: &guestproto.EOF{Stream: guestproto.In}})
			return
		}
	}
}

// errNoCredit means that the stream has ended.
var errNoCredit = errors.New("the stream has ended")

// sendData sends bytes to the guest as its window allows.
func sendData(c *guestproto.StreamConn, credit *guestproto.Credit, p []byte) error {
	for len(p) > 0 {
		n := credit.Take(min(len(p), guestproto.MaxData))
		if n == 0 {
			return errNoCredit
		}
		if err := c.Write(&guestproto.Stream{Data: &guestproto.Data{Stream: guestproto.In, Bytes: p[:n]}}); err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// forwardSignals sends signals until the command has ended.
func (x *execution) forwardSignals() {
	for {
		select {
		case <-x.done:
			return
		case name, ok := <-x.io.Signals:
			if !ok {
				return
			}
			if !slices.Contains(guestproto.Signals(), name) {
				x.g.opts.Log.Warn("no such signal", "name", name)
				continue
			}
			x.tell(&guestproto.Stream{Signal: &guestproto.Signal{Name: name}})
		}
	}
}

// enforce ends the wait for a command whose guest did not end it. Time in which
// the output waited for a writer of ours is the guest's too: it cannot report an
// end before its last byte is taken.
func (x *execution) enforce(timeout time.Duration) {
	timer := time.NewTimer(timeout + guestproto.KillAfter + hostGrace)
	defer timer.Stop()
	for {
		select {
		case <-x.done:
			return
		case <-timer.C:
		}
		if !x.busy.Load() {
			x.cancel(errTimeout)
			return
		}
		timer.Reset(hostGrace)
	}
}
