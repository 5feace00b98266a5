// Package aggregator is the jailed side of one external MCP server: it holds the
// server, over stdio or streamable HTTP, and speaks toolproto with the
// supervisor.
//
// It is an MCP client that decides nothing. What the supervisor asks becomes a
// JSON-RPC request with the params as they are; what the server says goes back
// whole, as it came. The server is hostile: whatever it writes, the bounds of
// this package hold, other calls go on, and a call fails with an error that says
// what was wrong. Policy is the supervisor's, which trusts this process no more
// than the server in it.
//
// The server's environment, its headers and its address are known to this
// process alone and appear in no log and no error.
package aggregator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/capsem/capsem/internal/toolproto"
)

// defaultStart bounds connecting to a server and its initialize where Configure
// does not say.
const defaultStart = 30 * time.Second

// errShutdown ends a run in the orderly way.
var errShutdown = errors.New("asked to shut down")

// Run is the whole program: it announces itself on out, takes the server's
// definition from in, starts it, and carries messages until in ends, Shutdown
// comes, ctx ends, or the server is gone. The first three are no error. It closes
// in, which must unblock a read of it.
func Run(ctx context.Context, in io.ReadCloser, out io.Writer, log *slog.Logger) error {
	conn := toolproto.NewConn(in, out)
	config, err := handshake(conn)
	if err != nil {
		return errors.Join(err, in.Close())
	}
	ctx, stop := context.WithCancelCause(ctx)
	s := newSession(config.Server, conn, stop)
	tr, err := newTransport(config.Server, s)
	if err != nil {
		s.gone(err)
		return errors.Join(err, in.Close())
	}
	s.transport = tr

	reading := make(chan struct{})
	go func() {
		defer close(reading)
		stop(s.serve())
	}()
	err = s.start(ctx)
	if err == nil {
		<-ctx.Done()
		err = context.Cause(ctx)
	} else if ctx.Err() == nil {
		s.gone(err)
	} else {
		err = context.Cause(ctx)
	}
	tr.close()
	s.finish()
	closeErr := in.Close()
	<-reading
	if errors.Is(err, errShutdown) || errors.Is(err, io.EOF) || errors.Is(err, context.Canceled) {
		err = nil
	}
	log.Debug("server is closed", "server", config.Server.Name)
	return errors.Join(err, closeErr)
}

// handshake says hello and waits for the server's definition.
func handshake(conn *toolproto.Conn) (*toolproto.Configure, error) {
	if err := conn.Write(&toolproto.Message{Hello: &toolproto.Hello{Version: toolproto.Version}}); err != nil {
		return nil, fmt.Errorf("saying hello: %w", err)
	}
	m, err := conn.Read()
	switch {
	case err != nil:
		return nil, fmt.Errorf("waiting for the server's definition: %w", err)
	case m.Configure == nil:
		return nil, errors.New("the supervisor's first message is no configure")
	case m.Configure.Version != toolproto.Version:
		return nil, fmt.Errorf("the supervisor speaks version %d, this program %d", m.Configure.Version, toolproto.Version)
	}
	return m.Configure, nil
}

// transport carries messages to one server. What the server says it gives to its
// session, one message at a time for each stream.
type transport interface {
	// start connects. It returns when messages can be sent.
	start(ctx context.Context) error
	// opened tells the version that the server chose, and sends
	// notifications/initialized ahead of everything that comes later.
	opened(ctx context.Context, version string, initialized []byte) error
	// request passes on the request that is call id, and notify a message that
	// is no call: a notification or an answer. Neither waits for the server to
	// take it. A failure of a request that shows later is given to the session.
	// The transport owns message from then on.
	request(id uint64, message []byte) *toolproto.Error
	notify(message []byte) *toolproto.Error
	// abandon says that nobody waits for the answer to call id any more.
	abandon(id uint64)
	// close ends the connection, within 5 s, and returns when nothing of it is
	// left. It may be called once, also when start failed.
	close()
}

func newTransport(server toolproto.Server, s *session) (transport, error) {
	switch {
	case server.Command != "" && server.URL != "":
		return nil, errors.New("its definition has both a command and a URL")
	case server.Command != "":
		return newStdio(server, s), nil
	case server.URL != "":
		return newHTTP(server, s)
	}
	return nil, errors.New("its definition has neither a command nor a URL")
}
