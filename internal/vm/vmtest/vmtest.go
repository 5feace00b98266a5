// Package vmtest is the suite that every backend passes.
//
// It has two halves that talk to each other: Run drives a machine as the
// supervisor does, and Guest is what runs inside of it. For a backend with a
// real guest, Image builds an initramfs whose /init is Guest.
package vmtest

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/capsem/capsem/internal/vm"
)

// bootLimit is how long a guest may take until it calls.
const bootLimit = 60 * time.Second

// Setup is a backend and how to make its guest run Guest.
type Setup struct {
	// Backend is what is tested.
	Backend vm.Backend
	// Spec describes a machine whose guest runs Guest.
	Spec func(t testing.TB) vm.Spec
	// Bulk is how many bytes are sent each way, 0 for 16 MiB.
	Bulk int64
}

// Run checks that s's machines do what vm.Machine promises.
func Run(t *testing.T, s Setup) {
	if s.Bulk == 0 {
		s.Bulk = 16 << 20
	}
	t.Run("Connections", s.testConnections)
	t.Run("PowerOff", s.testPowerOff)
	t.Run("Stop", s.testStop)
	t.Run("StopBeforeStart", s.testStopBeforeStart)
}

// running is a machine whose guest has called.
type running struct {
	machine vm.Machine
	control net.Conn
	answers *bufio.Reader
}

// start boots a machine and waits for its guest.
func (s Setup) start(t testing.TB) *running {
	t.Helper()
	m, err := s.Backend.Create(t.Context(), s.Spec(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stop(t, m) })
	l := listen(t, m, portControl)
	if err := m.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(bootLimit, func() { stop(t, m) }) // ends Accept
	defer timer.Stop()
	c, err := l.Accept()
	if err != nil {
		t.Fatalf("the guest did not call: %v; the machine: %v", err, m.Wait())
	}
	return &running{machine: m, control: c, answers: bufio.NewReader(c)}
}

func stop(t testing.TB, m vm.Machine) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 10*time.Second)
	defer cancel()
	if err := m.Stop(ctx); err != nil {
		t.Errorf("stopping the machine: %v", err)
	}
}

func closeAtEnd(t testing.TB, c io.Closer) {
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
}

func listen(t testing.TB, m vm.Machine, port uint32) net.Listener {
	t.Helper()
	l, err := m.Listen(port)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func (r *running) dial(t testing.TB, port uint32) conn {
	t.Helper()
	c, err := r.machine.Dial(t.Context(), port)
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, c)
	return c.(conn)
}

// tell has the guest do something and returns its answer.
func (r *running) tell(format string, args ...any) error {
	if _, err := fmt.Fprintf(r.control, format+"\n", args...); err != nil {
		return err
	}
	answer, err := r.answers.ReadString('\n')
	if err != nil {
		return err
	}
	if answer = strings.TrimSpace(answer); answer != "ok" {
		return errors.New(answer)
	}
	return nil
}

func (s Setup) testConnections(t *testing.T) {
	r := s.start(t)
	t.Run("a port without listener refuses the guest", func(t *testing.T) {
		if err := r.tell("refused %d", portNobody); err != nil {
			t.Error(err)
		}
	})
	t.Run("a port without listener refuses the host", func(t *testing.T) {
		if _, err := r.machine.Dial(t.Context(), portNobody); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("got %v, want a reset", err)
		}
	})
	t.Run("a closed listener refuses", func(t *testing.T) {
		if err := listen(t, r.machine, portCalls).Close(); err != nil {
			t.Fatal(err)
		}
		if err := r.tell("refused %d", portCalls); err != nil {
			t.Error(err)
		}
	})
	t.Run("half-close by the host", func(t *testing.T) {
		c := r.dial(t, portEcho)
		roundTrip(t, c, 1000)
	})
	t.Run("half-close by the guest", func(t *testing.T) {
		l := listen(t, r.machine, portCalls)
		defer l.Close()
		var guest errgroup.Group
		guest.Go(func() error { return r.tell("call %d 1", portCalls) })
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		roundTrip(t, c.(conn), 1000)
		if err := guest.Wait(); err != nil {
			t.Error(err)
		}
	})
	t.Run("a deadline ends a read", func(t *testing.T) {
		c := r.dial(t, portEcho)
		if err := c.SetReadDeadline(time.Now().Add(time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		var timeout net.Error
		if _, err := c.Read(make([]byte, 1)); !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Errorf("got %v, want a timeout", err)
		}
		if err := c.SetReadDeadline(time.Time{}); err != nil {
			t.Fatal(err)
		}
		roundTrip(t, c, 10)
	})
	t.Run("64 connections at once by the host", func(t *testing.T) { r.testManyDialled(t) })
	t.Run("64 connections at once by the guest", func(t *testing.T) { r.testManyAccepted(t) })
	t.Run("bulk to the guest", func(t *testing.T) { r.testBulkTo(t, s.Bulk) })
	t.Run("bulk from the guest", func(t *testing.T) { r.testBulkFrom(t, s.Bulk) })
}

// roundTrip sends n bytes to an echo, half-closes, and expects them back.
func roundTrip(t *testing.T, c conn, n int64) {
	t.Helper()
	if err := echoed(c, n); err != nil {
		t.Error(err)
	}
}

func echoed(c conn, n int64) error {
	var write errgroup.Group
	write.Go(func() error {
		if _, err := io.Copy(c, noise(n)); err != nil {
			return err
		}
		return c.CloseWrite()
	})
	got, err := io.ReadAll(c)
	if err := errors.Join(err, write.Wait()); err != nil {
		return err
	}
	want, err := io.ReadAll(noise(n))
	if err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("the echo of %d bytes has %d, or differs", n, len(got))
	}
	return nil
}

const many = 64

func (r *running) testManyDialled(t *testing.T) {
	var all errgroup.Group
	for range many {
		all.Go(func() error {
			c, err := r.machine.Dial(t.Context(), portEcho)
			if err != nil {
				return err
			}
			defer c.Close()
			return echoed(c.(conn), 20_000)
		})
	}
	if err := all.Wait(); err != nil {
		t.Error(err)
	}
}

func (r *running) testManyAccepted(t *testing.T) {
	l := listen(t, r.machine, portCalls)
	defer l.Close()
	var all errgroup.Group
	all.Go(func() error { return r.tell("call %d %d", portCalls, many) })
	for range many {
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		all.Go(func() error {
			defer c.Close()
			return echoed(c.(conn), 20_000)
		})
	}
	if err := all.Wait(); err != nil {
		t.Error(err)
	}
}

func (r *running) testBulkTo(t *testing.T, n int64) {
	c := r.dial(t, portDigest)
	want := sha256.New()
	began := time.Now()
	if _, err := io.Copy(c, io.TeeReader(noise(n), want)); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(c)
	if err != nil || string(got) != hex.EncodeToString(want.Sum(nil)) {
		t.Errorf("the guest's digest is %q, %v; want %x", got, err, want.Sum(nil))
	}
	t.Logf("%d bytes in %s", n, time.Since(began))
}

func (r *running) testBulkFrom(t *testing.T, n int64) {
	c := r.dial(t, portSource)
	began := time.Now()
	if _, err := fmt.Fprintln(c, n); err != nil {
		t.Fatal(err)
	}
	got, want := sha256.New(), sha256.New()
	size, err := io.Copy(got, c)
	if _, copyErr := io.Copy(want, noise(n)); err != nil || copyErr != nil || size != n {
		t.Errorf("got %d bytes, %v, %v; want %d", size, err, copyErr, n)
	}
	if !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
		t.Error("the digests differ")
	}
	t.Logf("%d bytes in %s", n, time.Since(began))
}

func (s Setup) testPowerOff(t *testing.T) {
	r := s.start(t)
	waits := make(chan error, 3)
	for range cap(waits) {
		go func() { waits <- r.machine.Wait() }()
	}
	if _, err := fmt.Fprintln(r.control, "power-off"); err != nil {
		t.Fatal(err)
	}
	for range cap(waits) {
		if err := <-waits; err != nil {
			t.Errorf("an orderly power-off: Wait says %v", err)
		}
	}
	if _, err := r.machine.Dial(t.Context(), portEcho); !errors.Is(err, vm.ErrStopped) {
		t.Errorf("dialling after the end: got %v, want vm.ErrStopped", err)
	}
	stop(t, r.machine)
	if err := r.machine.Wait(); err != nil {
		t.Errorf("stopping after the end changed why: %v", err)
	}
}

func (s Setup) testStop(t *testing.T) {
	r := s.start(t)
	l := listen(t, r.machine, portCalls)
	c := r.dial(t, portEcho)
	var readers errgroup.Group
	readers.Go(func() error {
		if _, err := c.Read(make([]byte, 1)); err == nil {
			return errors.New("a read outlived the machine")
		}
		return nil
	})
	readers.Go(func() error {
		if _, err := l.Accept(); err == nil {
			return errors.New("an accept outlived the machine")
		}
		return nil
	})
	readers.Go(func() error {
		if err := r.machine.Wait(); !errors.Is(err, vm.ErrStopped) {
			return fmt.Errorf("waiting for a machine that was stopped: got %w, want vm.ErrStopped", err)
		}
		return nil
	})
	stop(t, r.machine)
	stop(t, r.machine)
	if err := readers.Wait(); err != nil {
		t.Error(err)
	}
	if i, ok := r.machine.(vm.Inspector); ok && i.PID() != 0 {
		if err := syscall.Kill(i.PID(), 0); !errors.Is(err, syscall.ESRCH) {
			t.Errorf("process %d is still there: %v", i.PID(), err)
		}
	}
}

func (s Setup) testStopBeforeStart(t *testing.T) {
	m, err := s.Backend.Create(t.Context(), s.Spec(t))
	if err != nil {
		t.Fatal(err)
	}
	listen(t, m, portControl)
	stop(t, m)
	stop(t, m)
	if err := m.Wait(); !errors.Is(err, vm.ErrStopped) {
		t.Errorf("Wait: got %v, want vm.ErrStopped", err)
	}
	if err := m.Start(t.Context()); !errors.Is(err, vm.ErrStopped) {
		t.Errorf("Start: got %v, want vm.ErrStopped", err)
	}
}
