package upstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/toolproto"
)

// Bounds of one life of a process.
const (
	// maxQueuedMessages is how many messages may wait to be read by it.
	maxQueuedMessages = 4096
	// overhead is what a message counts for beside its payload, in bytes.
	overhead = 256
	// stallWait is how long it may leave a message unread.
	stallWait = 30 * time.Second
	// floodBurst messages that answer no call may come at once, and floodRate a
	// second after that.
	floodBurst = 20000
	floodRate  = 5000
)

// life is one process from its start to its end.
type life struct {
	u       *Upstream
	process Process
	conn    *toolproto.Conn
	stdin   *os.File
	stdout  *os.File
	stderr  *os.File
	tasks   sync.WaitGroup
	stop    context.CancelFunc // ends what the process has asked for
	ended   chan struct{}      // closed when the process has ended
	endErr  error              // how; set before ended is closed
	ready   chan struct{}      // closed when Ready has come
	failed  chan struct{}      // closed after err is set
	once    sync.Once
	err     error
	queue   chan *toolproto.Message
	asks    chan struct{} // a token for each request of the server
	fetches chan struct{} // a token for each HTTP request

	initializeResult json.RawMessage // set before ready is closed

	// Of the reading goroutine alone:
	greeted  bool
	lastWord string // what its exit event said
	tokens   float64
	filled   time.Time

	// writing is held while a message is written. Who holds both locks has taken
	// mu first.
	writing sync.Mutex

	mu     sync.Mutex
	calls  map[uint64]*call
	bytes  int // of params of calls
	queued int // bytes in queue and in the write
}

// newLife starts the goroutines that speak with a process that has been started.
// files are its stdin, stdout and stderr.
func (u *Upstream) newLife(ctx context.Context, process Process, files [3]*os.File) *life {
	ctx, stop := context.WithCancel(ctx)
	l := &life{
		u: u, process: process, conn: toolproto.NewConn(files[1], files[0]),
		stdin: files[0], stdout: files[1], stderr: files[2], stop: stop,
		ended: make(chan struct{}), ready: make(chan struct{}), failed: make(chan struct{}),
		queue: make(chan *toolproto.Message, maxQueuedMessages),
		asks:  make(chan struct{}, MaxRequests), fetches: make(chan struct{}, MaxRequests),
		tokens: floodBurst, filled: time.Now(), calls: make(map[uint64]*call),
	}
	l.tasks.Go(func() {
		l.endErr = process.Wait()
		close(l.ended)
	})
	l.tasks.Go(l.writeQueue)
	l.tasks.Go(func() { l.read(ctx) })
	l.tasks.Go(func() { drainLog(l.stderr, u.opts.Log, u.Name()) })
	return l
}

// fail ends a life: every call fails, and nothing is sent any more. The first
// reason stands.
func (l *life) fail(reason error) {
	l.once.Do(func() {
		l.mu.Lock()
		l.err = reason
		calls := l.calls
		l.calls = nil
		l.mu.Unlock()
		close(l.failed)
		l.stop()
		for _, c := range calls {
			c.settle(outcome{err: l.u.exited(reason)})
		}
	})
}

// shutdown asks the process to end in order, and waits for that.
func (l *life) shutdown() {
	// If it does not take the message, it is killed.
	_ = l.send(&toolproto.Message{Shutdown: &toolproto.Shutdown{}}, 0)
	l.await(shutdownWait)
	l.fail(errClosed)
}

func (l *life) await(limit time.Duration) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-l.ended:
	case <-timer.C:
	}
}

// end makes sure that nothing of a life is left. The life has failed.
func (l *life) end() {
	select {
	case <-l.ended:
	default:
		var broken *protocolError
		var final *finalError
		if !errors.As(l.err, &broken) && !errors.As(l.err, &final) && !errors.Is(l.err, errClosed) {
			l.await(endWait) // it is about to end by itself
		}
	}
	if err := l.process.Kill(); err != nil {
		l.u.opts.Log.Error("killing a tool process failed", "server", l.u.Name(), "error", err)
	}
	// Each of these unblocks a goroutine; what is in the pipes is not wanted.
	_ = l.stdin.Close()
	_ = l.stdout.Close()
	_ = l.stderr.Close()
	l.tasks.Wait()
}

// send passes on a message of about size bytes, at once where that cannot block,
// else by way of the queue. Messages keep their order.
func (l *life) send(m *toolproto.Message, size int) *event.Error {
	if size > toolproto.MaxPayload {
		return l.u.failure(jsonrpc.CodeTransport, "a message of %d bytes for server %s is over the limit of %d", size, l.u.Name(), toolproto.MaxPayload)
	}
	size += overhead
	l.mu.Lock()
	if l.queued == 0 && size <= child.PipeRoom-overhead && l.writing.TryLock() {
		if child.HasRoom(l.stdin) {
			l.queued += size // whoever comes now goes behind this one
			l.mu.Unlock()
			l.write(m, size)
			l.writing.Unlock()
			return nil
		}
		l.writing.Unlock()
	}
	defer l.mu.Unlock()
	if l.queued+size > MaxQueued {
		return l.u.failure(jsonrpc.CodeTimeout, "server %s is busy: %d bytes wait for it", l.u.Name(), l.queued)
	}
	select {
	case l.queue <- m:
		l.queued += size
		return nil
	default:
		return l.u.failure(jsonrpc.CodeTimeout, "server %s is busy: %d messages wait for it", l.u.Name(), len(l.queue))
	}
}

// size is what send has counted for m.
func size(m *toolproto.Message) int {
	switch {
	case m.Call != nil:
		return overhead + len(m.Call.Params)
	case m.Notify != nil:
		return overhead + len(m.Notify.Params)
	case m.ServerResult != nil:
		return overhead + len(m.ServerResult.Message)
	case m.HTTPResult != nil:
		return overhead + len(m.HTTPResult.Body)
	}
	return overhead
}

// writeQueue writes what is queued, until the life ends.
func (l *life) writeQueue() {
	for {
		select {
		case m := <-l.queue:
			l.writing.Lock()
			l.write(m, size(m))
			l.writing.Unlock()
		case <-l.failed:
			return
		}
	}
}

// write writes one message, for which send has counted size bytes. The caller
// holds writing.
func (l *life) write(m *toolproto.Message, size int) {
	err := l.stdin.SetWriteDeadline(time.Now().Add(stallWait))
	if err == nil {
		err = l.conn.Write(m)
	}
	l.mu.Lock()
	l.queued -= size
	l.mu.Unlock()
	switch {
	case err == nil:
	case errors.Is(err, os.ErrDeadlineExceeded):
		l.fail(&protocolError{fmt.Sprintf("it has not read its input for %s", stallWait)})
	case errors.Is(err, syscall.EPIPE):
		// The reader learns why.
	default:
		l.fail(fmt.Errorf("its process cannot be told anything: %w", err))
	}
}

// protocolError is what only a broken or hostile process does.
type protocolError struct{ text string }

func (e *protocolError) Error() string { return e.text }

// read takes the process's messages until they end, and the life with them.
func (l *life) read(ctx context.Context) {
	for {
		m, err := l.conn.Read()
		if err == nil {
			err = l.take(ctx, m)
		}
		if err != nil {
			l.fail(l.reason(err))
			return
		}
	}
}

// reason says why a life ended whose last read gave err.
func (l *life) reason(err error) error {
	var final *finalError
	var broken *protocolError
	switch {
	case errors.As(err, &final), errors.As(err, &broken):
		return err
	case l.lastWord != "":
		return errors.New(l.lastWord)
	case !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, os.ErrClosed):
		return &protocolError{fmt.Sprintf("its process broke the protocol: %v", err)}
	}
	l.await(endWait)
	select {
	case <-l.ended:
		var exit *child.ExitError
		switch {
		case errors.As(l.endErr, &exit):
			// The program's path is the host's affair, and this is told to
			// whoever called.
			return errors.New("its process ended: " + exit.Reason())
		case l.endErr != nil:
			return fmt.Errorf("its process ended: %w", l.endErr)
		}
		return errors.New("its process ended")
	default:
		return &protocolError{"its process closed the connection"}
	}
}

// take handles one message. An error ends the life.
func (l *life) take(ctx context.Context, m *toolproto.Message) error {
	if m.Hello != nil {
		return l.hello(m.Hello)
	}
	if !l.greeted {
		return &protocolError{"its process did not say hello first"}
	}
	if m.Result != nil {
		return l.result(m.Result)
	}
	if !l.afford() {
		return &protocolError{fmt.Sprintf("it floods: over %d messages a second", floodRate)}
	}
	switch {
	case m.Ready != nil:
		return l.becomeReady(m.Ready)
	case m.Notify != nil:
		l.notified(m.Notify)
	case m.Event != nil:
		if m.Event.Kind == toolproto.EventExit {
			l.lastWord = m.Event.Text
		}
		if l.u.opts.OnEvent != nil {
			l.u.opts.OnEvent(*m.Event)
		}
	case m.ServerRequest != nil:
		l.serverRequest(ctx, m.ServerRequest)
	case m.HTTPRequest != nil:
		l.fetch(m.HTTPRequest)
	default:
		return &protocolError{"its process sent what only the supervisor sends"}
	}
	return nil
}

func (l *life) hello(h *toolproto.Hello) error {
	if l.greeted {
		return &protocolError{"its process said hello twice"}
	}
	if h.Version != toolproto.Version {
		return &finalError{fmt.Errorf("its process speaks version %d, this one %d: they are of different builds", h.Version, toolproto.Version)}
	}
	l.greeted = true
	if err := l.send(l.u.configure(), 0); err != nil {
		return err
	}
	return nil
}

func (l *life) becomeReady(r *toolproto.Ready) error {
	if l.initializeResult != nil {
		return &protocolError{"its process was ready twice"}
	}
	l.initializeResult = append(json.RawMessage{}, r.InitializeResult...)
	close(l.ready)
	return nil
}

// afford takes a token for a message that answers no call.
func (l *life) afford() bool {
	now := time.Now()
	l.tokens = min(floodBurst, l.tokens+floodRate*now.Sub(l.filled).Seconds())
	l.filled = now
	l.tokens--
	return l.tokens >= 0
}
