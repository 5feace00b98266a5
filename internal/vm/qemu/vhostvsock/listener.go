package vhostvsock

import (
	"container/list"
	"context"
	"fmt"
	"net"
	"sync"
	"syscall"

	"github.com/capsem/capsem/internal/vm"
)

// firstEphemeral is where the ports begin that Dial calls from.
const firstEphemeral = 1 << 30

// errReset is how a connection ends that the guest resets or refuses.
var errReset error = syscall.ECONNRESET

// Listener accepts the guest's connections to one port.
type Listener struct {
	device *Device
	port   uint32

	// Guarded by device.mu.
	ready   *sync.Cond // signalled when waiting grows or err is set
	waiting list.List  // of *Conn: established and not yet accepted; at most MaxGuestConns
	err     error      // why it is closed
}

// Listen accepts the guest's connections to port. A port has one listener at a
// time. Until Close, the guest's connections are established before they are
// accepted, as the kernel does it; at most MaxGuestConns wait.
func (d *Device) Listen(port uint32) (net.Listener, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stopped {
		return nil, opError("listen", d.hostAddr(port), nil, vm.ErrStopped)
	}
	if d.listeners[port] != nil {
		return nil, opError("listen", d.hostAddr(port), nil, syscall.EADDRINUSE)
	}
	l := &Listener{device: d, port: port, ready: sync.NewCond(&d.mu)}
	d.listeners[port] = l
	return l, nil
}

// Accept returns the next connection, a *Conn.
func (l *Listener) Accept() (net.Conn, error) {
	l.device.mu.Lock()
	defer l.device.mu.Unlock()
	for l.waiting.Len() == 0 && l.err == nil {
		l.ready.Wait()
	}
	if l.err != nil {
		return nil, opError("accept", l.Addr(), nil, l.err)
	}
	return l.waiting.Remove(l.waiting.Front()).(*Conn), nil
}

// Close refuses the port from now on and resets what was not accepted.
func (l *Listener) Close() error {
	l.device.mu.Lock()
	defer l.device.mu.Unlock()
	if l.err != nil {
		return nil
	}
	l.closeLocked(net.ErrClosed)
	l.device.flush()
	return nil
}

// Addr is the host's side of the port.
func (l *Listener) Addr() net.Addr { return l.device.hostAddr(l.port) }

func (l *Listener) closeLocked(err error) {
	l.err = err
	delete(l.device.listeners, l.port)
	for l.waiting.Len() > 0 {
		c := l.waiting.Remove(l.waiting.Front()).(*Conn)
		c.abort(err)
	}
	l.ready.Broadcast()
}

// Dial connects to a port of the guest. It blocks until the guest's driver runs
// and answers. A port on which nobody listens is an error that matches
// syscall.ECONNRESET.
func (d *Device) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	remote := Addr{CID: d.cid, Port: port}
	c, err := d.call(port)
	if err != nil {
		return nil, opError("dial", nil, remote, err)
	}
	wake := context.AfterFunc(ctx, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		c.readable.Broadcast()
	})
	defer wake()
	d.mu.Lock()
	defer d.mu.Unlock()
	for c.state == stateConnecting && ctx.Err() == nil {
		c.readable.Wait()
	}
	switch {
	case c.state == stateConnecting:
		c.abort(ctx.Err())
		d.flush()
		return nil, opError("dial", nil, remote, ctx.Err())
	case c.state == stateGone && c.err != nil:
		return nil, opError("dial", nil, remote, c.err)
	}
	return c, nil
}

// call asks the guest for a connection from a port that is free.
func (d *Device) call(port uint32) (*Conn, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stopped {
		return nil, vm.ErrStopped
	}
	if len(d.conns)-d.guestConns >= MaxHostConns {
		return nil, fmt.Errorf("%d connections are open already: %w", MaxHostConns, syscall.EAGAIN)
	}
	key := connKey{guestPort: port, hostPort: d.nextPort}
	for d.conns[key] != nil { // ends: fewer connections than ports
		key.hostPort = ephemeralAfter(key.hostPort)
	}
	d.nextPort = ephemeralAfter(key.hostPort)
	c := d.newConn(key, stateConnecting)
	c.send(noteRequest)
	d.flush()
	return c, nil
}

// ephemeralAfter is the port that follows p in the range from firstEphemeral to
// the last port but one; the last means "any".
func ephemeralAfter(p uint32) uint32 {
	if p++; p == 1<<32-1 {
		return firstEphemeral
	}
	return p
}

func (d *Device) hostAddr(port uint32) Addr { return Addr{CID: vm.HostCID, Port: port} }

// opError gives an error the shape that those of package net have.
func opError(op string, local, remote net.Addr, err error) error {
	return &net.OpError{Op: op, Net: "vsock", Source: local, Addr: remote, Err: err}
}
