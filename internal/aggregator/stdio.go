package aggregator

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/toolproto"
)

// Bounds of a server on stdio.
const (
	// maxLine is the longest line that is taken from a server, in bytes.
	maxLine = toolproto.MaxPayload
	// maxQueued is how many bytes wait for a server that does not read, and
	// maxQueuedMessages how many messages.
	maxQueued         = 32 << 20
	maxQueuedMessages = 4096
	// maxJunkLines and maxJunkBytes in a row, without one message between them,
	// and the server is given up.
	maxJunkLines = 1000
	maxJunkBytes = 1 << 20
	// closeWait is how long a server may take to end when its stdin is closed.
	closeWait = 2 * time.Second
	// drainWait is how long the pipes of a server that has ended are read, when
	// something else still holds them.
	drainWait = time.Second
)

// errInputClosed is the fault of a server that lives on without a stdin.
var errInputClosed = errors.New("it closed its stdin")

// stdio runs a server as a child, with messages as lines on its stdin and
// stdout. It speaks to one pipe from one goroutine each.
type stdio struct {
	server  toolproto.Server
	session *session

	proc                  *child.Process
	stdin, stdout, stderr *os.File
	sending               sync.Mutex // held while a message is sent or queued
	queue                 chan []byte
	queued                atomic.Int64 // bytes in queue and in its writer's write
	closing               chan struct{}
	closed                sync.Once
	tasks                 sync.WaitGroup
	readDone, stderrDone  chan struct{}

	mu       sync.Mutex
	lastLine string // of stderr, cut
	fault    error  // why the server was given up
	exited   bool   // by itself: its status says more than its stdin
}

func newStdio(server toolproto.Server, s *session) *stdio {
	return &stdio{
		server: server, session: s,
		queue: make(chan []byte, maxQueuedMessages), closing: make(chan struct{}),
		readDone: make(chan struct{}), stderrDone: make(chan struct{}),
	}
}

func (t *stdio) start(ctx context.Context) error {
	env := make([]string, 0, len(t.server.Env))
	for _, v := range t.server.Env {
		env = append(env, v.Name+"="+string(v.Value))
	}
	pipes, err := newPipes()
	if err != nil {
		return err
	}
	t.proc, err = child.Start(ctx, child.Command{
		Path: t.server.Command, Args: t.server.Args, Env: env,
		Stdin: pipes.theirs[0], Stdout: pipes.theirs[1], Stderr: pipes.theirs[2],
	})
	pipes.closeTheirs()
	if err != nil {
		pipes.closeOurs()
		return err
	}
	t.stdin, t.stdout, t.stderr = pipes.ours[0], pipes.ours[1], pipes.ours[2]
	t.tasks.Go(t.writeQueue)
	t.tasks.Go(t.read)
	t.tasks.Go(t.drain)
	t.tasks.Go(t.watch)
	return nil
}

// pipes are a child's stdin, stdout and stderr, both ends of each.
type pipes struct {
	ours, theirs [3]*os.File
}

func newPipes() (*pipes, error) {
	var p pipes
	for i := range p.ours {
		r, w, err := os.Pipe()
		if err != nil {
			p.closeOurs()
			p.closeTheirs()
			return nil, fmt.Errorf("making a pipe: %w", err)
		}
		p.ours[i], p.theirs[i] = r, w
		if i == 0 {
			p.ours[i], p.theirs[i] = w, r
		}
	}
	return &p, nil
}

// closeOurs and closeTheirs close ends of pipes through which nothing was sent
// from here: closing them cannot lose anything.
func (p *pipes) closeOurs()   { closePipes(p.ours[:]) }
func (p *pipes) closeTheirs() { closePipes(p.theirs[:]) }

func closePipes(files []*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close() // as said above, or what is in it is not wanted any more
		}
	}
}

func (t *stdio) opened(_ context.Context, _ string, initialized []byte) error {
	if failure := t.notify(initialized); failure != nil {
		return errors.New(failure.Message)
	}
	return nil
}

func (t *stdio) abandon(uint64) {}

func (t *stdio) request(_ uint64, message []byte) *toolproto.Error { return t.notify(message) }

// notify passes on a message, at once where that cannot block, else by way of the
// queue. Messages keep their order.
func (t *stdio) notify(message []byte) *toolproto.Error {
	line := append(jsonrpc.Line(message), '\n')
	size := int64(len(line))
	t.sending.Lock()
	defer t.sending.Unlock()
	if size <= child.PipeRoom && t.queued.Load() == 0 && child.HasRoom(t.stdin) {
		// The queue is empty, and nobody can fill it or the pipe while sending
		// is held.
		t.write(line)
		return nil
	}
	if t.queued.Load()+size > maxQueued {
		return t.stuck()
	}
	select {
	case t.queue <- line:
		t.queued.Add(size)
		return nil
	default:
		return t.stuck()
	}
}

func (t *stdio) stuck() *toolproto.Error {
	return &toolproto.Error{Code: jsonrpc.CodeTransport, Message: "server " + t.server.Name + " does not read its input"}
}

// writeQueue writes what is queued, until the connection is closed.
func (t *stdio) writeQueue() {
	for {
		select {
		case line := <-t.queue:
			t.write(line)
			t.queued.Add(-int64(len(line)))
		case <-t.closing:
			return
		}
	}
}

func (t *stdio) write(line []byte) {
	if _, err := t.stdin.Write(line); err != nil {
		// The server has closed its stdin, most likely by ending: its status says
		// more. If it lives on, it will never be asked again.
		t.giveUp(errInputClosed)
	}
}

// read is the only reader of the server's stdout.
func (t *stdio) read() {
	defer close(t.readDone)
	lines := newLineReader(t.stdout, maxLine)
	var junk, junkBytes int
	for {
		line, err := lines.next()
		var long *tooLongError
		switch {
		case errors.As(err, &long):
			t.tooLong(long)
			continue
		case err != nil:
			return
		}
		line = bytes.TrimSpace(line)
		if len(line) == 0 {
			continue
		}
		if line[0] != '{' {
			t.session.events.report(toolproto.EventJunk, string(line[:min(len(line), toolproto.MaxEventText)]))
		} else if t.session.receive(line) {
			junk, junkBytes = 0, 0
			continue
		}
		junk++
		junkBytes += len(line)
		if junk > maxJunkLines || junkBytes > maxJunkBytes && junk > 1 {
			t.giveUp(fmt.Errorf("it writes no MCP to its stdout: %d lines of something else", junk))
			return
		}
	}
}

func (t *stdio) tooLong(long *tooLongError) {
	if id, ok := long.answers(); ok {
		t.session.fail(id, jsonrpc.CodeTransport, "its answer of %d bytes is over the limit of %d", long.size, maxLine)
	}
	t.session.events.report(toolproto.EventJunk, fmt.Sprintf("%s, over the limit of %d: %s", long.Error(), maxLine, long.head))
}

// drain reads the server's stderr, always: a server whose stderr is not read
// blocks. Lines end in LF or CR; of a longer one the beginning is kept.
func (t *stdio) drain() {
	defer close(t.stderrDone)
	buf := make([]byte, 32<<10)
	line := make([]byte, 0, toolproto.MaxEventText)
	for {
		n, err := t.stderr.Read(buf)
		for rest := buf[:n]; len(rest) > 0; {
			end := bytes.IndexAny(rest, "\r\n")
			part := rest
			if end >= 0 {
				part, rest = rest[:end], rest[end+1:]
			} else {
				rest = nil
			}
			line = append(line, part[:min(len(part), cap(line)-len(line))]...)
			if end >= 0 {
				t.stderrLine(line)
				line = line[:0]
			}
		}
		if err != nil {
			t.stderrLine(line)
			return
		}
	}
}

func (t *stdio) stderrLine(line []byte) {
	text := string(bytes.TrimSpace(line))
	if text == "" {
		return
	}
	t.mu.Lock()
	t.lastLine = cut(text, maxErrorText)
	t.mu.Unlock()
	t.session.events.report(toolproto.EventStderr, text)
}

// giveUp ends a server that is of no use any more. The first reason stands.
func (t *stdio) giveUp(reason error) {
	t.mu.Lock()
	if t.fault == nil {
		t.fault = reason
	}
	t.mu.Unlock()
	t.closed.Do(t.closeInput)
}

func (t *stdio) closeInput() {
	close(t.closing)
	// Unblocks the writer; a line that it was writing is lost with its server.
	_ = t.stdin.Close()
}

// watch waits for the server's end, sees to it that it comes once there is a
// reason, and tells the session.
func (t *stdio) watch() {
	select {
	case <-t.proc.Done():
	case <-t.closing:
		t.await(closeWait)
	case <-t.readDone: // no answer can come any more
		t.await(drainWait)
	}
	select {
	case <-t.proc.Done():
		t.exitedItself()
	default:
	}
	if err := t.proc.Stop(context.Background()); err != nil {
		t.session.gone(err)
		return
	}
	// What it said last is read, but not what somebody else says who holds its
	// pipes. A pipe that is closed already needs no deadline.
	deadline := time.Now().Add(drainWait)
	_ = t.stdout.SetReadDeadline(deadline)
	_ = t.stderr.SetReadDeadline(deadline)
	<-t.readDone
	<-t.stderrDone
	t.session.gone(t.reason())
}

// exitedItself notes that the server has ended without being stopped.
func (t *stdio) exitedItself() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.exited = true
}

func (t *stdio) await(limit time.Duration) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-t.proc.Done():
	case <-timer.C:
	}
}

// reason says why the server ended, with the last line of its stderr.
func (t *stdio) reason() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	err := t.proc.Wait()
	var exit *child.ExitError
	text := "exit status 0"
	switch {
	case t.fault != nil && !(t.exited && errors.Is(t.fault, errInputClosed)):
		text = t.fault.Error()
	case errors.As(err, &exit):
		text = exit.Reason()
	case err != nil:
		text = err.Error()
	}
	if t.lastLine != "" {
		text += ": " + t.lastLine
	}
	return errors.New(text)
}

func (t *stdio) close() {
	if t.proc == nil {
		return
	}
	t.closed.Do(t.closeInput)
	t.tasks.Wait()
	closePipes([]*os.File{t.stdout, t.stderr})
}
