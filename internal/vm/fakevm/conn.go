package fakevm

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/vm"
)

// pair is one connection, with both of its ends.
type pair struct {
	machine     *Machine
	host, guest *Conn
	stopped     atomic.Bool // the machine ended before the connection did
}

// newPair makes a connection between a listener and a caller, one of which is
// the guest.
func newPair(m *Machine, listener, caller Addr) (*pair, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("making a socketpair: %w", err)
	}
	first, err1 := unixConn(fds[0])
	second, err2 := unixConn(fds[1])
	if err := errors.Join(err1, err2); err != nil {
		for _, c := range []*net.UnixConn{first, second} {
			if c != nil {
				err = errors.Join(err, c.Close())
			}
		}
		return nil, err
	}
	p := &pair{machine: m}
	p.host = &Conn{Conn: first, pair: p, local: listener, remote: caller}
	p.guest = &Conn{Conn: second, pair: p, local: caller, remote: listener}
	if listener.CID == guestCID {
		p.host.local, p.host.remote = caller, listener
		p.guest.local, p.guest.remote = listener, caller
	}
	return p, nil
}

// unixConn makes a connection of fd, which it owns.
func unixConn(fd int) (*net.UnixConn, error) {
	file := os.NewFile(uintptr(fd), "socketpair")
	conn, err := net.FileConn(file)
	if err := errors.Join(err, file.Close()); err != nil {
		return nil, fmt.Errorf("making a connection of a socketpair: %w", err)
	}
	return conn.(*net.UnixConn), nil
}

// stop ends the connection as the end of its machine does: what the guest has
// sent can still be read.
func (p *pair) stop() {
	p.stopped.Store(true)
	_ = p.guest.Conn.Close() // it may have been closed before
}

// Conn is one end of a connection.
type Conn struct {
	net.Conn      // a *net.UnixConn, whose ReadFrom and WriteTo would go round Read
	pair          *pair
	local, remote Addr
	done          atomic.Bool // this end has said that it sends no more
}

// Read reads what is there. After the machine has ended, the host's end fails
// with vm.ErrStopped where the guest had not ended it in order.
func (c *Conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err == nil || !c.pair.stopped.Load() || c.pair.guest.done.Load() {
		return n, err
	}
	if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || c == c.pair.guest {
		err = opError("read", c.remote, vm.ErrStopped)
	}
	return n, err
}

// CloseWrite tells the other end that nothing more comes.
func (c *Conn) CloseWrite() error {
	c.done.Store(true)
	return c.Conn.(*net.UnixConn).CloseWrite()
}

// Close ends the connection.
func (c *Conn) Close() error {
	c.done.Store(true)
	c.pair.machine.mu.Lock()
	if c == c.pair.guest || c.pair.guest.done.Load() {
		delete(c.pair.machine.pairs, c.pair)
	}
	c.pair.machine.mu.Unlock()
	return c.Conn.Close()
}

// LocalAddr is this end.
func (c *Conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr is the other end.
func (c *Conn) RemoteAddr() net.Addr { return c.remote }
