//go:build linux

package relay

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"github.com/capsem/capsem/internal/guestproto"
)

// Bounds of what one connection remembers.
const (
	// maxPending is the number of requests under way. The host answers "busy"
	// long before.
	maxPending = 4096
	// maxHostRequests is the number of the host's requests that the client has
	// not answered.
	maxHostRequests = 1024
)

// codeBusy is the JSON-RPC error of a request over the limit.
const codeBusy = -32000

// mcpLink is one connection to the host's MCP port.
type mcpLink struct {
	relay *mcpRelay
	conn  net.Conn
	w     *guestproto.MCPWriter
	read  chan struct{} // closed when the reader has ended

	mu sync.Mutex // guards what follows
	// settled is signalled whenever one of the following may let drained go on.
	settled *sync.Cond
	// pending are the requests under way by stream, and settling the number of
	// those that are just being answered.
	pending  map[uint32]members
	settling int
	// asked are the host's requests by id, and the stream of each.
	asked map[string]uint32
	next  uint32
	err   error // why the connection is lost
}

// newMCPLink takes conn over and reads it.
func newMCPLink(r *mcpRelay, conn net.Conn, more bool) *mcpLink {
	l := &mcpLink{
		relay: r, conn: conn, w: guestproto.NewMCPWriter(conn, more), read: make(chan struct{}),
		pending: make(map[uint32]members), asked: make(map[string]uint32), next: 1,
	}
	l.settled = sync.NewCond(&l.mu)
	go func() {
		defer close(l.read)
		l.lose(l.readFrames(more))
	}()
	return l
}

// usable reports whether the connection can take another request.
func (l *mcpLink) usable() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err == nil && l.next <= lastGuestStream
}

// close ends the connection, and returns when its reader has ended.
func (l *mcpLink) close() {
	_ = l.conn.Close() // the reader has the error, if anybody still asks
	<-l.read
}

// notify sends a notification.
func (l *mcpLink) notify(text []byte, m members) {
	err := l.write(guestproto.MCPFrame{Notification: true, Process: l.relay.opts.Process, Payload: text})
	if err != nil {
		l.relay.opts.Log.Warn("a notification is lost", "method", m.Method, "error", err)
	}
}

// request sends a request on a stream of its own. If it cannot be sent, it is
// answered here; if the connection breaks, lose answers it.
func (l *mcpLink) request(text []byte, m members) {
	l.mu.Lock()
	if l.err != nil {
		err := l.err
		l.mu.Unlock()
		l.relay.out.lost(m, err)
		return
	}
	if len(l.pending) >= maxPending {
		l.mu.Unlock()
		l.relay.out.fault(m.ID, codeBusy, fmt.Sprintf("busy: %d requests are under way, and that is the limit", maxPending))
		return
	}
	stream := l.next
	l.next++
	// Before it is sent: the answer may be faster than we are.
	l.pending[stream] = m
	l.mu.Unlock()
	err := l.write(guestproto.MCPFrame{Stream: stream, Process: l.relay.opts.Process, Payload: text})
	if fe, ok := errors.AsType[*guestproto.FrameError](err); ok {
		l.settle(stream, func(m members) {
			l.relay.out.fault(m.ID, codeTransport, fmt.Sprintf("the message has %d bytes, over the limit of %d of this host", fe.Size, fe.Max))
		})
	}
}

// answer sends the client's answer on the stream of the host's request, and
// reports whether there was one.
func (l *mcpLink) answer(text, id []byte) bool {
	l.mu.Lock()
	key := idKey(id)
	stream, ok := l.asked[key]
	delete(l.asked, key)
	l.mu.Unlock()
	if !ok {
		return false
	}
	if err := l.write(guestproto.MCPFrame{Stream: stream, Process: l.relay.opts.Process, Payload: text}); err != nil {
		l.relay.opts.Log.Warn("the client's answer is lost", "error", err)
		if _, tooLarge := errors.AsType[*guestproto.FrameError](err); tooLarge {
			l.refuse(stream, id, err.Error())
		}
	}
	return true
}

// refuse answers a request of the host in the client's place.
func (l *mcpLink) refuse(stream uint32, id []byte, why string) {
	err := l.write(guestproto.MCPFrame{Stream: stream, Process: l.relay.opts.Process, Payload: faultMessage(id, codeTransport, why)})
	if err != nil {
		l.relay.opts.Log.Warn("answering for the client", "error", err)
	}
}

// write sends a frame. An error of the connection ends it, so that the reader
// answers what is under way.
func (l *mcpLink) write(f guestproto.MCPFrame) error {
	err := l.w.Write(f)
	if _, refused := errors.AsType[*guestproto.FrameError](err); err != nil && !refused {
		_ = l.conn.Close() // the reader reports it
	}
	return err
}

// readFrames hands the host's messages to the client until the connection ends.
func (l *mcpLink) readFrames(more bool) error {
	r := guestproto.NewMCPReader(bufio.NewReaderSize(l.conn, 64<<10), more)
	defer r.Close()
	for {
		f, err := r.Read()
		if fe, ok := errors.AsType[*guestproto.FrameError](err); ok && !fe.Fatal {
			l.relay.opts.Log.Warn("a frame of the host is refused", "error", err)
			l.settle(fe.Stream, func(m members) { l.relay.out.lost(m, err) })
			continue
		}
		if errors.Is(err, io.EOF) {
			return errors.New("the host closed the connection")
		}
		if err != nil {
			return err
		}
		l.deliver(f)
	}
}

// deliver hands one message of the host to the client.
func (l *mcpLink) deliver(f guestproto.MCPFrame) {
	switch {
	case f.Notification:
		l.relay.out.write(f.Payload)
	case f.Stream >= guestproto.FirstHostStream:
		l.ask(f)
	default:
		known := l.settle(f.Stream, func(members) {
			if len(f.Payload) > 0 { // without, the host says that no answer will come
				l.relay.out.write(f.Payload)
			}
		})
		if !known {
			l.relay.opts.Log.Warn("the host answers a request that nobody made", "stream", f.Stream)
		}
	}
}

// ask hands a request of the host to the client, if it can still answer.
func (l *mcpLink) ask(f guestproto.MCPFrame) {
	_, m := classify(f.Payload)
	if m.ID == nil {
		l.relay.opts.Log.Warn("a request of the host has no id", "stream", f.Stream)
		return
	}
	l.mu.Lock()
	full := len(l.asked) >= maxHostRequests
	if !full {
		l.asked[idKey(m.ID)] = f.Stream
	}
	l.mu.Unlock()
	switch {
	case full:
		l.refuse(f.Stream, m.ID, "the client has too many requests to answer")
	case l.relay.inputEnded():
		l.refuseHost()
	default:
		l.relay.out.write(f.Payload)
	}
}

// refuseHost answers what the client has been asked and will not answer, because
// its input has ended.
func (l *mcpLink) refuseHost() {
	l.mu.Lock()
	asked := l.asked
	l.asked = make(map[string]uint32)
	l.mu.Unlock()
	for id, stream := range asked {
		l.refuse(stream, []byte(id), "the client has closed its input")
	}
}

// settle ends a request that is under way: it calls answer, which writes what the
// client is told, and only then counts the request as done. It reports whether
// there was one; each is settled once.
func (l *mcpLink) settle(stream uint32, answer func(members)) bool {
	l.mu.Lock()
	m, ok := l.pending[stream]
	if !ok {
		l.mu.Unlock()
		return false
	}
	delete(l.pending, stream)
	l.settling++
	l.mu.Unlock()
	answer(m)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.settling--
	l.settled.Broadcast()
	return true
}

// lose ends the link: what is under way is answered with why.
func (l *mcpLink) lose(why error) {
	_ = l.conn.Close() // it is lost; why says the reason
	l.mu.Lock()
	l.err = why
	pending := l.pending
	l.pending = nil
	l.settled.Broadcast()
	l.mu.Unlock()
	for _, m := range pending {
		l.relay.out.lost(m, why)
	}
}

// drained returns when nothing is under way, or when the link is lost.
func (l *mcpLink) drained() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.pending)+l.settling > 0 && l.err == nil {
		l.settled.Wait()
	}
}

// idKey makes ids comparable that mean the same: a client may write a string's
// escapes in its own way.
func idKey(id []byte) string {
	var s string
	if len(id) == 0 || id[0] != '"' || json.Unmarshal(id, &s) != nil {
		return string(id)
	}
	b, err := json.Marshal(s)
	if err != nil { // a string always can be
		return string(id)
	}
	return string(b)
}
