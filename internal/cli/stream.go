package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/guestproto"
)

// forceWithin is how soon a second Ctrl-C must follow the first to end a
// command rather than ask it again.
const forceWithin = time.Second

// stream is our end of a command that runs in a VM.
type stream struct {
	conn     net.Conn
	in       *os.File
	out, err io.Writer
	// stdin says that the command reads ours.
	stdin bool

	wire   *guestproto.StreamConn
	intake *guestproto.Intake
	credit *guestproto.Credit
}

// run carries the streams until the command has ended, and closes the
// connection. It does not wait for our stdin: a command that ends ends us.
func (s *stream) run(ctx context.Context) (exit guestproto.Exit, err error) {
	s.wire = guestproto.NewStreamConn(s.conn)
	s.intake, s.credit = guestproto.NewIntake(), guestproto.NewCredit()
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(ctx, func() { s.conn.Close() }) //nolint:errcheck // the reader sees it
	copied := make(chan error, 1)
	go func() { copied <- s.copyOut() }()
	signals := s.forwardSignals(ctx)
	if s.stdin {
		go s.copyIn()
	}
	exit, err = s.receive()
	s.intake.End()
	err = errors.Join(err, <-copied)
	s.credit.Close()
	cancel()
	stop()
	<-signals
	if cerr := s.conn.Close(); cerr != nil && !errors.Is(cerr, net.ErrClosed) {
		err = errors.Join(err, cerr)
	}
	return exit, err
}

// receive reads until the command's last message.
func (s *stream) receive() (guestproto.Exit, error) {
	for {
		m, err := s.wire.Read()
		if err != nil {
			return guestproto.Exit{}, fmt.Errorf("the connection to the command was lost: %w", err)
		}
		switch {
		case m.Data != nil:
			err = s.intake.Receive(m.Data)
		case m.Ack != nil:
			err = s.credit.Confirm(*m.Ack)
		case m.Exit != nil:
			return *m.Exit, nil
		case m.Error != nil:
			return guestproto.Exit{}, &api.Error{Code: api.Code(m.Error.Code), Message: m.Error.Message}
		}
		if err != nil {
			return guestproto.Exit{}, fmt.Errorf("reading the command's streams: %w", err)
		}
	}
}

// copyOut writes what arrived. The command waits for us when we are slow.
func (s *stream) copyOut() error {
	var failed error
	for {
		d, ok := s.intake.Next()
		if !ok {
			return failed
		}
		w := s.out
		if d.Stream == guestproto.Err {
			w = s.err
		}
		if failed == nil {
			if _, err := w.Write(d.Bytes); err != nil {
				// Nobody reads: end the command, as a closed pipe would.
				failed = fmt.Errorf("writing the command's output: %w", err)
				if err := s.wire.Write(&guestproto.Stream{Signal: &guestproto.Signal{Name: "KILL"}}); err != nil {
					return failed
				}
			}
		}
		if ack := s.intake.Consume(len(d.Bytes)); ack != nil {
			if err := s.wire.Write(&guestproto.Stream{Ack: ack}); err != nil {
				return failed
			}
		}
	}
}

// copyIn sends our stdin. It ends with the program: a read of a terminal or a
// pipe cannot be called off.
func (s *stream) copyIn() {
	buf := make([]byte, guestproto.MaxData)
	for {
		n := s.credit.Take(len(buf))
		if n == 0 {
			return
		}
		got, err := s.in.Read(buf[:n])
		s.credit.Return(n - got)
		if got > 0 {
			if s.wire.Write(&guestproto.Stream{Data: &guestproto.Data{Stream: guestproto.In, Bytes: buf[:got]}}) != nil {
				return
			}
		}
		if err != nil {
			if s.wire.Write(&guestproto.Stream{EOF: &guestproto.EOF{Stream: guestproto.In}}) != nil {
				return
			}
			return
		}
	}
}

// forwardSignals passes signals on by name; a second Ctrl-C kills.
func (s *stream) forwardSignals(ctx context.Context) <-chan struct{} {
	got, done := make(chan os.Signal, 8), make(chan struct{})
	signal.Notify(got, os.Interrupt, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
	go func() {
		defer close(done)
		defer signal.Stop(got)
		var last time.Time
		for {
			var name string
			select {
			case <-ctx.Done():
				return
			case sig := <-got:
				name = signalNames[sig]
				if sig == os.Interrupt && time.Since(last) < forceWithin {
					name = "KILL"
				}
				if sig == os.Interrupt {
					last = time.Now()
				}
			}
			if s.wire.Write(&guestproto.Stream{Signal: &guestproto.Signal{Name: name}}) != nil {
				return
			}
		}
	}()
	return done
}

var signalNames = map[os.Signal]string{
	os.Interrupt: "INT", syscall.SIGQUIT: "QUIT", syscall.SIGUSR1: "USR1", syscall.SIGUSR2: "USR2",
}
