package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"unicode/utf8"

	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/guestproto"
)

// maxExec is what argv, environment and the rest of a command may have together:
// one message, with room for its own structure.
const maxExec = guestproto.MaxMessage - 64<<10

// stream is one connection to the guest's port for commands and files.
type stream struct {
	g    *Guest
	conn net.Conn
	c    *guestproto.StreamConn
	// cancel ends the stream, and cause is why it has ended, nil as long as it
	// has not.
	cancel context.CancelCauseFunc
	cause  func() error
	leave  func()
	stop   func() bool
}

// open begins a stream. Its context ends when the stream must. The caller closes
// it.
func (g *Guest) open(ctx context.Context, first *guestproto.Stream) (context.Context, *stream, error) {
	ctx, leave, err := g.enter(ctx)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	s := &stream{g: g, cancel: cancel, cause: func() error { return context.Cause(ctx) }, leave: leave}
	s.conn, err = g.dial(ctx)
	if err != nil {
		err = s.because(fmt.Errorf("connecting to the guest's agent: %w", err))
		cancel(nil)
		leave()
		return nil, nil, err
	}
	s.c = guestproto.NewStreamConn(s.conn)
	s.stop = context.AfterFunc(ctx, func() {
		_ = s.conn.Close() // unblocks whoever reads or writes; cause has the reason
	})
	if err := s.c.Write(first); err != nil {
		err = s.because(fmt.Errorf("asking the guest's agent: %w", err))
		s.close()
		return nil, nil, err
	}
	return ctx, s, nil
}

// close ends the stream; a command that runs on it is killed by the guest.
func (s *stream) close() {
	s.stop()
	_ = s.conn.Close() // all that was wanted has been read
	s.cancel(nil)
	s.leave()
}

// because prefers the reason for which the stream has ended to what that did to
// its connection.
func (s *stream) because(err error) error {
	if cause := s.cause(); cause != nil {
		return cause
	}
	return err
}

// next reads the guest's next message.
func (s *stream) next() (*guestproto.Stream, error) {
	m, err := s.c.Read()
	if err != nil {
		return nil, s.broken(err)
	}
	s.g.heard()
	return m, nil
}

// broken words the end of a connection that should not have ended.
func (s *stream) broken(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = &ProtocolError{"the connection ended before its last word"}
	} else if _, isNet := errors.AsType[net.Error](err); !isNet {
		err = &ProtocolError{clean(err.Error(), maxText)}
	} else {
		err = fmt.Errorf("hearing the guest's agent: %w", err)
	}
	return s.because(err)
}

// progress is what a command's guest has said so far. Its take is where every
// message of a running command is checked.
type progress struct {
	started bool
	ended   [3]bool // by stream
	// exit is the last word.
	exit *guestproto.Exit
}

// take checks one message against what came before. A report of a failure is
// returned as an *Error.
func (p *progress) take(m *guestproto.Stream) error {
	switch {
	case p.exit != nil:
		return &ProtocolError{"a message after exit"}
	case m.Error != nil:
		return reported(m.Error)
	case m.Exit != nil:
		exit, err := checkExit(m.Exit)
		p.exit = exit
		return err
	case m.Started != nil:
		if p.started || m.Started.PID <= 0 {
			return &ProtocolError{"a command that starts twice, or as process 0"}
		}
		p.started = true
		return nil
	case m.Ack != nil:
		return nil // its number is checked by who sends
	case !p.started:
		return &ProtocolError{"output of a command that has not started"}
	case m.Data != nil:
		return p.output(m.Data.Stream)
	case m.EOF != nil:
		if err := p.output(m.EOF.Stream); err != nil {
			return err
		}
		p.ended[m.EOF.Stream] = true
		return nil
	}
	return &ProtocolError{"a message that has no place in a running command"}
}

// output says whether a command may send on this stream now.
func (p *progress) output(id guestproto.StreamID) error {
	if id != guestproto.Out && id != guestproto.Err {
		return &ProtocolError{fmt.Sprintf("output on stream %d", id)}
	}
	if p.ended[id] {
		return &ProtocolError{"output after the end of its stream"}
	}
	return nil
}

// checkExit bounds what the guest says of a command's end.
func checkExit(e *guestproto.Exit) (*guestproto.Exit, error) {
	if e.Code < 0 || e.Code > 255 {
		return nil, &ProtocolError{fmt.Sprintf("an exit status of %d", e.Code)}
	}
	if len(e.Signal) > maxWord || !utf8.ValidString(e.Signal) {
		return nil, &ProtocolError{"a signal whose name is no name"}
	}
	out := *e
	out.Signal, out.Message = clean(e.Signal, maxWord), clean(e.Message, maxText)
	return &out, nil
}

// result is what the ledger knows of a command's end.
func result(e *guestproto.Exit, stdout, stderr int64) event.ExecResult {
	r := event.ExecResult{StdoutBytes: stdout, StderrBytes: stderr}
	if e != nil {
		r.ExitCode, r.Signal, r.TimedOut, r.OOM, r.Leaked = e.Code, e.Signal, e.TimedOut, e.OOM, e.Leaked
	}
	return r
}

// checkExec refuses a command that could not be sent.
func checkExec(e *guestproto.Exec) error {
	if len(e.Argv) == 0 {
		return errors.New("the command is empty")
	}
	size := len(e.Cwd) + len(e.User) + len(e.ID)
	for _, s := range slices.Concat(e.Argv, e.Env) {
		size += len(s) + 5 // the most that MessagePack puts before it
	}
	if size > maxExec {
		return fmt.Errorf("the command's arguments and environment have %d bytes, over the limit of %d: send them on standard input or in a file", size, maxExec)
	}
	if e.TimeoutMS < 0 {
		return fmt.Errorf("a timeout of %d ms is negative: 0 means none", e.TimeoutMS)
	}
	return nil
}
