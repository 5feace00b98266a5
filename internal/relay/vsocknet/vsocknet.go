//go:build linux

// Package vsocknet is a guest's real vsock, as package relay wants its network.
package vsocknet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"
)

// hostCID is the host's context id (VMADDR_CID_HOST of linux/vm_sockets.h).
const hostCID = 2

// recheck is how often a dial that waits for the device looks again, should the
// kernel's word of it be missed.
const recheck = time.Second

// Network is the guest's end of virtio-vsock.
type Network struct{}

// Listen accepts connections from the host, and from nobody else: a process of
// the guest that could connect as well would be served as the host is.
func (Network) Listen(port uint32) (net.Listener, error) {
	l, err := vsock.ListenContextID(unix.VMADDR_CID_ANY, port, nil)
	if err != nil {
		return nil, fmt.Errorf("listening on vsock port %d: %w", port, err)
	}
	return hostOnly{l}, nil
}

// hostOnly is a listener for the host's connections.
type hostOnly struct{ *vsock.Listener }

// Accept returns the host's next connection.
func (l hostOnly) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if a, ok := conn.RemoteAddr().(*vsock.Addr); ok && a.ContextID == hostCID {
			return conn, nil
		}
		_ = conn.Close() // a stranger; nothing was said
	}
}

// Dial connects to the host's port. While there is no vsock device (at boot, or
// between suspend and resume) it waits for one, as long as ctx lives.
func (n Network) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	conn, err := n.DialNow(ctx, port)
	if !absent(err) {
		return conn, err
	}
	// Listening begins before the second look: a device that comes in between
	// is heard of.
	events, eventsErr := listenUevents()
	if eventsErr == nil {
		defer events.Close()
	}
	for {
		conn, err = n.DialNow(ctx, port)
		if !absent(err) || ctx.Err() != nil {
			return conn, err
		}
		if err := events.next(ctx, recheck); err != nil {
			return nil, fmt.Errorf("waiting for the vsock device: %w", errors.Join(err, eventsErr))
		}
	}
}

// DialNow connects to the host's port, or fails at once.
func (Network) DialNow(ctx context.Context, port uint32) (net.Conn, error) {
	conn, err := vsock.DialContext(ctx, hostCID, port, nil)
	if err != nil {
		return nil, fmt.Errorf("dialling host port %d: %w", port, err)
	}
	return conn, nil
}

// absent says that a dial failed for want of a device or of its driver.
func absent(err error) bool {
	return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EADDRNOTAVAIL)
}
