package upstream

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"time"

	"github.com/capsem/capsem/internal/toolproto"
)

const (
	// healthy is how long a process must have been ready for the next delay to
	// be the first one again.
	healthy = 30 * time.Second
	// startMargin is what a process may take beyond the time that it gives its
	// server.
	startMargin = 5 * time.Second
	// shutdownWait is how long a process may take to stop its server and end.
	shutdownWait = 6 * time.Second
	// endWait is how long a process that has said its last word may take to end.
	endWait = time.Second
)

// finalError marks what starting again does not help against.
type finalError struct{ err error }

func (e *finalError) Error() string { return e.err.Error() }
func (e *finalError) Unwrap() error { return e.err }

// run keeps the process running until ctx ends.
func (u *Upstream) run(ctx context.Context) {
	delay := FirstDelay
	for {
		u.set(Starting, nil, nil)
		readyFor, err := u.live(ctx)
		var final *finalError
		switch {
		case ctx.Err() != nil:
			u.set(Failed, nil, errClosed)
			return
		case errors.As(err, &final):
			u.opts.Log.Error("server cannot run", "server", u.Name(), "error", err)
			u.set(Failed, nil, err)
			return
		}
		if readyFor >= healthy {
			delay = FirstDelay
		}
		u.opts.Log.Warn("server ended and is started again", "server", u.Name(), "error", err, "delay", delay)
		u.set(Backoff, nil, err)
		timer := time.NewTimer(delay)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			u.set(Failed, nil, errClosed)
			return
		}
		delay = min(2*delay, LastDelay)
	}
}

// live starts the process once and sees it through to its end. It returns for how
// long it was ready, and why it ended.
func (u *Upstream) live(ctx context.Context) (readyFor time.Duration, err error) {
	l, err := u.start(ctx)
	if err != nil {
		return 0, err
	}
	defer l.end()

	wait := u.opts.Server.StartTimeout
	if wait <= 0 {
		wait = StartWait
	}
	deadline := time.NewTimer(wait + startMargin)
	defer deadline.Stop()
	select {
	case <-l.ready:
	case <-l.failed:
		return 0, l.err
	case <-deadline.C:
		l.fail(fmt.Errorf("it was not ready within %s", wait))
		return 0, l.err
	case <-ctx.Done():
		l.shutdown()
		return 0, errClosed
	}
	began := time.Now()
	u.set(Ready, l, nil)
	select {
	case <-l.failed:
	case <-ctx.Done():
		l.shutdown()
	}
	return time.Since(began), l.err
}

// start starts the process and the goroutines that speak with it.
func (u *Upstream) start(ctx context.Context) (*life, error) {
	var ours, theirs [3]*os.File
	closeAll := func(files []*os.File) {
		for _, f := range files {
			if f != nil {
				_ = f.Close() // nothing was written through it
			}
		}
	}
	for i := range ours {
		r, w, err := os.Pipe()
		if err != nil {
			closeAll(ours[:])
			closeAll(theirs[:])
			return nil, fmt.Errorf("making a pipe: %w", err)
		}
		ours[i], theirs[i] = r, w
		if i == 0 {
			ours[i], theirs[i] = w, r
		}
	}
	cmd := u.opts.Command
	cmd.Stdin, cmd.Stdout, cmd.Stderr = theirs[0], theirs[1], theirs[2]
	process, err := u.opts.StartProcess(ctx, cmd)
	closeAll(theirs[:])
	if err != nil {
		closeAll(ours[:])
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
			return nil, &finalError{err}
		}
		return nil, err
	}
	return u.newLife(ctx, process, ours), nil
}

// drainLog passes on what the process writes to its stderr, which is a log. It
// is read always, and passed on up to maxLog bytes in one life.
func drainLog(stderr *os.File, log *slog.Logger, server string) {
	const maxLog = 256 << 10
	buf := make([]byte, 4<<10)
	total := 0
	for {
		n, err := stderr.Read(buf)
		if n > 0 && total < maxLog {
			log.Info("from a tool process", "server", server, "text", string(buf[:n]))
		}
		total += n
		if err != nil {
			return
		}
	}
}

// configure is the first frame to a process.
func (u *Upstream) configure() *toolproto.Message {
	return &toolproto.Message{Configure: &toolproto.Configure{Version: toolproto.Version, Server: u.opts.Server}}
}
