package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/guestproto"
)

// ClientError means that the client of an attached command broke the protocol.
type ClientError struct{ What string }

// Error implements error.
func (e *ClientError) Error() string { return "the client broke the protocol: " + e.What }

// errClientGone is the cause of a stream whose client has left.
var errClientGone = errors.New("the client has left")

// Attach runs a command whose client speaks stream messages itself, on conn: the
// client has sent e, and goes on with data, eof, signals and acks. Attach hands
// the messages of both on, in their own pieces, after the checks that Exec makes
// of its guest's, and returns what Exec would. The client's flow control is the
// guest's: nothing is held here.
//
// The client's last message is the caller's to send, with Finish: how a command
// ended may still have to be judged.
func (g *Guest) Attach(ctx context.Context, conn net.Conn, e guestproto.Exec) (event.ExecResult, *Attached, error) {
	end := &Attached{client: guestproto.NewStreamConn(conn), conn: conn}
	if err := checkExec(&e); err != nil {
		end.code, end.why = "invalid", err
		return event.ExecResult{}, end, err
	}
	ctx, st, err := g.open(ctx, &guestproto.Stream{Exec: &e})
	if err != nil {
		end.code, end.why = "unreachable", err
		return event.ExecResult{}, end, err
	}
	a := &attachment{stream: st, client: end.client, clientConn: conn, stdin: e.Stdin}
	err = a.run(ctx, time.Duration(e.TimeoutMS)*time.Millisecond)
	end.exit, end.code, end.why = a.progress.exit, lastCode(err), err
	if errors.Is(err, errTimeout) {
		end.exit, end.why, err = timedOut(), nil, nil
	}
	return result(end.exit, a.stdout, a.stderr), end, err
}

// Attached is a command that has ended and whose client has not been told.
type Attached struct {
	client *guestproto.StreamConn
	conn   net.Conn
	exit   *guestproto.Exit
	// why there is no exit, and the code that goes with it.
	why  error
	code string
}

// Finish tells the client how the command ended, or with a refusal that instead,
// and closes the connection. It must be called once.
func (a *Attached) Finish(refusal error) error {
	defer a.conn.Close()
	if errors.Is(a.why, errClientGone) {
		return nil
	}
	if err := a.conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return fmt.Errorf("telling the client: %w", err)
	}
	last := &guestproto.Stream{Exit: a.exit}
	switch {
	case refusal != nil:
		last = &guestproto.Stream{Error: &guestproto.Error{Code: "blocked", Message: refusal.Error()}}
	case a.why != nil:
		last = &guestproto.Stream{Error: &guestproto.Error{Code: a.code, Message: a.why.Error()}}
	}
	if err := a.client.Write(last); err != nil {
		return fmt.Errorf("telling the client: %w", err)
	}
	a.linger()
	return nil
}

// linger lets the last word arrive: a client that is still sending acks would
// otherwise meet a closed connection before it reads on. It ends when the client
// closes, or takes too long.
func (a *Attached) linger() {
	half, ok := a.conn.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil || a.conn.SetReadDeadline(time.Now().Add(lingerTime)) != nil {
		return // the client has left
	}
	_, _ = io.Copy(io.Discard, a.conn) // what it says now does not matter
}

// lastCode names why a command has no exit.
func lastCode(why error) string {
	if refused, ok := errors.AsType[*Error](why); ok {
		return refused.Code
	}
	if errors.Is(why, ErrUnreachable) {
		return "unreachable"
	}
	return "io"
}

// attachment is one attached command.
type attachment struct {
	*stream
	client     *guestproto.StreamConn
	clientConn net.Conn
	stdin      bool

	progress       progress
	stdout, stderr int64
	// output and input are what is under way in either direction.
	output, input account
}

// account is how many bytes are under way in one direction.
type account struct {
	mu    sync.Mutex
	bytes int64
}

// send counts a Data message, and reports whether its sender may send it.
func (a *account) send(d *guestproto.Data) error {
	n := int64(len(d.Bytes))
	a.mu.Lock()
	defer a.mu.Unlock()
	if n == 0 || n > guestproto.MaxData || a.bytes+n > guestproto.Window {
		return fmt.Errorf("a data message of %d bytes where %d are unconfirmed", n, a.bytes)
	}
	a.bytes += n
	return nil
}

// confirm counts an Ack, and reports whether there was as much to confirm.
func (a *account) confirm(ack *guestproto.Ack) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if ack.Bytes <= 0 || ack.Bytes > a.bytes {
		return fmt.Errorf("an ack of %d bytes where %d are under way", ack.Bytes, a.bytes)
	}
	a.bytes -= ack.Bytes
	return nil
}

// run carries the messages, up to exit or what prevents one.
func (a *attachment) run(ctx context.Context, timeout time.Duration) error {
	// Whatever ends the stream ends both connections, so that both readers end.
	stop := context.AfterFunc(ctx, func() {
		// Its reader ends at once, its writer soon.
		now := time.Now()
		_ = errors.Join(a.clientConn.SetReadDeadline(now), a.clientConn.SetWriteDeadline(now.Add(writeTimeout))) // closed is as good
	})
	defer stop()
	done := make(chan struct{})
	var tasks sync.WaitGroup
	tasks.Go(a.fromClient)
	if timeout > 0 {
		tasks.Go(func() { a.enforce(timeout, done) })
	}
	err := a.fromGuest()
	close(done)
	a.cancel(err) // a nil error still ends the client's reader
	tasks.Wait()
	a.close()
	return err
}

// fromGuest hands the guest's messages on, up to exit.
func (a *attachment) fromGuest() error {
	for {
		m, err := a.next()
		if err != nil {
			return err
		}
		if err := a.progress.take(m); err != nil {
			return err
		}
		switch {
		case m.Data != nil:
			if err := a.output.send(m.Data); err != nil {
				return &ProtocolError{err.Error()}
			}
		case m.Ack != nil:
			if err := a.input.confirm(m.Ack); err != nil {
				return &ProtocolError{err.Error()}
			}
		case m.Exit != nil:
			return nil
		}
		if err := a.client.Write(m); err != nil {
			return a.because(fmt.Errorf("%w: %w", errClientGone, err))
		}
		switch {
		case m.Data != nil && m.Data.Stream == guestproto.Out:
			a.stdout += int64(len(m.Data.Bytes))
		case m.Data != nil:
			a.stderr += int64(len(m.Data.Bytes))
		}
	}
}

// fromClient hands the client's messages on until it leaves or the command ends.
func (a *attachment) fromClient() {
	for {
		m, err := a.client.Read()
		if a.cause() != nil {
			return
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				err = fmt.Errorf("%w: %w", errClientGone, err)
			} else {
				err = errClientGone
			}
			a.cancel(err)
			return
		}
		if err := a.takeClient(m); err != nil {
			a.cancel(&ClientError{err.Error()})
			return
		}
		if err := a.c.Write(m); err != nil {
			return // the guest's reader reports it
		}
	}
}

// takeClient checks one message of the client.
func (a *attachment) takeClient(m *guestproto.Stream) error {
	switch {
	case m.Data != nil && m.Data.Stream == guestproto.In && a.stdin:
		return a.input.send(m.Data)
	case m.EOF != nil && m.EOF.Stream == guestproto.In && a.stdin:
		return nil
	case m.Ack != nil:
		return a.output.confirm(m.Ack)
	case m.Signal != nil && slices.Contains(guestproto.Signals(), m.Signal.Name):
		return nil
	}
	return errors.New("a message that has no place in a running command")
}

// enforce ends a command that the guest did not end in time. A client that takes
// the output slowly holds up its guest's last word, and is waited for.
func (a *attachment) enforce(timeout time.Duration, done <-chan struct{}) {
	timer := time.NewTimer(timeout + guestproto.KillAfter + hostGrace)
	defer timer.Stop()
	for {
		select {
		case <-done:
			return
		case <-timer.C:
		}
		a.output.mu.Lock()
		waiting := a.output.bytes >= guestproto.Window/2
		a.output.mu.Unlock()
		if !waiting {
			a.cancel(errTimeout)
			return
		}
		timer.Reset(hostGrace)
	}
}
