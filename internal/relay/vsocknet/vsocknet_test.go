//go:build linux

package vsocknet

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestAMissingDeviceIsWaitedForAndARefusalIsNot(t *testing.T) {
	for err, want := range map[error]bool{
		unix.ENODEV:       true,
		unix.EAFNOSUPPORT: true,
		unix.ECONNRESET:   false,
		unix.ETIMEDOUT:    false,
		nil:               false,
	} {
		if err != nil {
			err = fmt.Errorf("dialling: %w", err)
		}
		if got := absent(err); got != want {
			t.Errorf("%v: %t", err, got)
		}
	}
}

func TestWaitingForADeviceEndsWithItsContextOrItsLimit(t *testing.T) {
	events, err := listenUevents()
	if err != nil {
		t.Skipf("this machine does not let us hear of devices: %v", err)
	}
	defer events.Close()
	for _, u := range []*uevents{events, nil} {
		if err := u.next(t.Context(), time.Millisecond); err != nil {
			t.Errorf("at the limit: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := u.next(ctx, time.Hour); !errors.Is(err, context.Canceled) {
			t.Errorf("at the end of the context: %v", err)
		}
	}
}
