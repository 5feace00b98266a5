package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
)

// maxReply is the longest line that the monitor takes from QEMU, in bytes.
const maxReply = 1 << 20

// errMonitor is what commands fail with when QEMU has closed its monitor.
var errMonitor = errors.New("QEMU has closed its monitor")

// event is something that QEMU reports by itself.
type event struct {
	Name string          `json:"event"`
	Data json.RawMessage `json:"data"`
}

// monitor is a client of QEMU's machine protocol (QMP; QEMU,
// docs/interop/qmp-spec.rst), one JSON object a line.
type monitor struct {
	conn    io.ReadWriteCloser
	onEvent func(event) // called by run, in order

	busy sync.Mutex // held while a command is under way
	last uint64     // the last command's id, guarded by busy

	ready   chan struct{} // gets one when QEMU has greeted
	replies chan reply    // of the command that is under way
	ended   chan struct{} // closed when run has returned
}

// reply is any object that QEMU sends.
type reply struct {
	event
	ID       *uint64         `json:"id"`
	Return   json.RawMessage `json:"return"`
	Error    *commandError   `json:"error"`
	Greeting json.RawMessage `json:"QMP"`
}

// commandError is QEMU's refusal of a command.
type commandError struct {
	Class       string `json:"class"`
	Description string `json:"desc"`
}

func (e *commandError) Error() string { return e.Description }

// newMonitor returns a client on conn, which it owns. The caller runs run.
func newMonitor(conn io.ReadWriteCloser, onEvent func(event)) *monitor {
	return &monitor{
		conn: conn, onEvent: onEvent,
		ready: make(chan struct{}, 1), replies: make(chan reply, 1), ended: make(chan struct{}),
	}
}

// run reads what QEMU sends until the connection ends. An orderly end is nil.
func (m *monitor) run() error {
	defer close(m.ended)
	lines := bufio.NewScanner(m.conn)
	lines.Buffer(nil, maxReply)
	for lines.Scan() {
		var r reply
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return fmt.Errorf("reading QEMU's monitor: %w", err)
		}
		switch {
		case r.Greeting != nil:
			offer(m.ready, struct{}{})
		case r.Name != "":
			m.onEvent(r.event)
		default:
			offer(m.replies, r)
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("reading QEMU's monitor: %w", err)
	}
	return nil
}

// offer puts v into c, which has room for one, in place of what nobody took.
func offer[T any](c chan T, v T) {
	for {
		select {
		case c <- v:
			return
		default:
		}
		select {
		case <-c:
		default:
		}
	}
}

// negotiate waits for QEMU's greeting and makes it take commands.
func (m *monitor) negotiate(ctx context.Context) error {
	select {
	case <-m.ready:
	case <-m.ended:
		return errMonitor
	case <-ctx.Done():
		return fmt.Errorf("waiting for QEMU's monitor: %w", ctx.Err())
	}
	_, err := m.execute(ctx, "qmp_capabilities", nil)
	return err
}

// execute runs one command and returns what it returns.
func (m *monitor) execute(ctx context.Context, command string, arguments any) (json.RawMessage, error) {
	m.busy.Lock()
	defer m.busy.Unlock()
	m.last++
	line, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        uint64 `json:"id"`
	}{command, arguments, m.last})
	if err != nil {
		return nil, fmt.Errorf("encoding the monitor command %s: %w", command, err)
	}
	if _, err := m.conn.Write(append(line, '\n')); err != nil {
		return nil, fmt.Errorf("sending the monitor command %s: %w", command, err)
	}
	for {
		r, err := m.reply(ctx)
		switch {
		case err != nil:
			return nil, fmt.Errorf("monitor command %s: %w", command, err)
		case r.ID == nil || *r.ID != m.last:
			continue // of a command that was given up
		case r.Error != nil:
			return nil, fmt.Errorf("monitor command %s: %w", command, r.Error)
		}
		return r.Return, nil
	}
}

// reply waits for the next reply. One that QEMU gave as its last is not lost.
func (m *monitor) reply(ctx context.Context) (reply, error) {
	select {
	case r := <-m.replies:
		return r, nil
	case <-ctx.Done():
		return reply{}, ctx.Err()
	case <-m.ended:
	}
	select {
	case r := <-m.replies:
		return r, nil
	default:
		return reply{}, errMonitor
	}
}
