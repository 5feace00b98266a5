//go:build linux

package vsocknet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// kernelEvents is the multicast group of the kernel's own uevents
// (netlink(7), NETLINK_KOBJECT_UEVENT).
const kernelEvents = 1

// uevents hears of devices that come and go. A nil uevents hears nothing.
type uevents struct{ *os.File }

func listenUevents() (*uevents, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return nil, fmt.Errorf("listening for devices: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: kernelEvents}); err != nil {
		return nil, errors.Join(fmt.Errorf("listening for devices: %w", err), unix.Close(fd))
	}
	return &uevents{os.NewFile(uintptr(fd), "uevents")}, nil
}

// next waits for an event, whatever it says, but no longer than limit. The error
// is that of ctx.
func (u *uevents) next(ctx context.Context, limit time.Duration) error {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	heard := make(chan struct{})
	if u != nil {
		go func() {
			defer close(heard)
			// What it says does not matter, nor why it fails (an overrun is
			// an event too): the caller looks for itself.
			_, _ = u.Read(make([]byte, 8192))
		}()
		defer func() {
			_ = u.SetReadDeadline(time.Now()) // ends the read
			<-heard
			_ = u.SetReadDeadline(time.Time{}) // a socket has deadlines
		}()
	}
	select {
	case <-heard:
	case <-timer.C:
	case <-ctx.Done():
	}
	return ctx.Err()
}
