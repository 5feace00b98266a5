package vhostvsock

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/nettest"
	"golang.org/x/sync/errgroup"

	"github.com/capsem/capsem/internal/vm"
)

// open connects the guest to a new listener on port and returns both ends.
func open(t testing.TB, d *Device, g *guest, port uint32) (net.Conn, *guestSocket) {
	t.Helper()
	l, err := d.Listen(port)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s, err := g.dial(port)
	if err != nil {
		t.Fatal(err)
	}
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return c, s
}

// TestConnBehavesAsNetConn runs the conformance suite of package net on two
// connections of the host that the guest joins: all that one end writes passes
// through the guest to the other.
func TestConnBehavesAsNetConn(t *testing.T) {
	nettest.TestConn(t, func() (net.Conn, net.Conn, func(), error) {
		d, g := startGuest(t)
		calls := g.listen(1)
		l, err := d.Listen(2)
		if err != nil {
			return nil, nil, nil, err
		}
		c1, err := d.Dial(t.Context(), 1)
		if err != nil {
			return nil, nil, nil, err
		}
		s1 := <-calls
		s2, err := g.dial(2)
		if err != nil {
			return nil, nil, nil, err
		}
		c2, err := l.Accept()
		if err != nil {
			return nil, nil, nil, err
		}
		var join errgroup.Group
		join.Go(func() error { return splice(s1, s2) })
		join.Go(func() error { return splice(s2, s1) })
		stop := func() {
			c1.Close()
			c2.Close()
			if err := join.Wait(); err != nil {
				t.Log(err) // the tests cut connections at any point
			}
		}
		return c1, c2, stop, nil
	})
}

// splice copies one direction, and ends both sockets when it breaks.
func splice(dst, src *guestSocket) error {
	_, err := io.Copy(dst, src)
	if err != nil {
		return errors.Join(err, src.Close(), dst.Close())
	}
	return dst.CloseWrite()
}

func TestAPortWithoutListenerIsRefusedInBothDirections(t *testing.T) {
	d, g := startGuest(t)
	if _, err := g.dial(5003); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("guest to host: got %v, want a reset", err)
	}
	if _, err := d.Dial(t.Context(), 5003); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("host to guest: got %v, want a reset", err)
	}
}

func TestAClosedListenerRefuses(t *testing.T) {
	d, g := startGuest(t)
	l, err := d.Listen(7)
	if err != nil {
		t.Fatal(err)
	}
	waiting, err := g.dial(7) // established, never accepted
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := waiting.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection that waited: got %v, want a reset", err)
	}
	if _, err := g.dial(7); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a new connection: got %v, want a reset", err)
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept: got %v, want net.ErrClosed", err)
	}
	if _, err := d.Listen(7); err != nil {
		t.Errorf("listening again: %v", err)
	}
}

func TestAPortHasOneListener(t *testing.T) {
	d, _ := startDevice(t)
	if _, err := d.Listen(7); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Listen(7); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("got %v, want EADDRINUSE", err)
	}
}

func TestDialBeforeTheGuestRunsIsAnsweredWhenItDoes(t *testing.T) {
	d, socket := startDevice(t)
	drv := newDriver(t, socket)
	drv.realize()
	var dial errgroup.Group
	dial.Go(func() error {
		_, err := d.Dial(t.Context(), 1)
		return err
	})
	for { // until the call is queued
		d.mu.Lock()
		n := d.out.notes.Len()
		d.mu.Unlock()
		if n > 0 {
			break
		}
	}
	drv.start()
	h, _, ok := drv.receive()
	if !ok || h.op != opRequest {
		t.Fatalf("got %+v, %v, want a request", h, ok)
	}
	drv.transmit(header{srcCID: guestCID, dstCID: vm.HostCID, srcPort: 1, dstPort: h.srcPort, typ: typeStream, op: opResponse}, nil)
	if err := dial.Wait(); err != nil {
		t.Error(err)
	}
}

func TestADialThatIsGivenUpLeavesNothing(t *testing.T) {
	d, socket := startDevice(t)
	g := newDriver(t, socket)
	g.realize()
	g.start()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := d.Dial(ctx, 1) // the driver answers nothing
	var timeout net.Error
	if !errors.As(err, &timeout) || !timeout.Timeout() || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want a timeout", err)
	}
	for _, want := range []opcode{opRequest, opReset} {
		if h, _, _ := g.receive(); h.op != want {
			t.Errorf("the guest got packet %d, want %d", h.op, want)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.conns) != 0 {
		t.Errorf("%d connections are left", len(d.conns))
	}
}

func TestHalfCloseLetsTheOtherDirectionFinish(t *testing.T) {
	d, g := startGuest(t)
	t.Run("by the host", func(t *testing.T) {
		c, s := open(t, d, g, 1)
		if _, err := io.WriteString(c, "question"); err != nil {
			t.Fatal(err)
		}
		if err := c.(*Conn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(s); string(got) != "question" || err != nil {
			t.Errorf("the guest read %q, %v", got, err)
		}
		if _, err := c.Write([]byte("more")); !errors.Is(err, syscall.EPIPE) {
			t.Errorf("writing after CloseWrite: got %v, want EPIPE", err)
		}
		if _, err := io.WriteString(s, "answer"); err != nil {
			t.Fatal(err)
		}
		s.Close()
		if got, err := io.ReadAll(c); string(got) != "answer" || err != nil {
			t.Errorf("the host read %q, %v", got, err)
		}
	})
	t.Run("by the guest", func(t *testing.T) {
		c, s := open(t, d, g, 2)
		if _, err := io.WriteString(s, "question"); err != nil {
			t.Fatal(err)
		}
		if err := s.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(c); string(got) != "question" || err != nil {
			t.Errorf("the host read %q, %v", got, err)
		}
		if _, err := io.WriteString(c, "answer"); err != nil {
			t.Fatal(err)
		}
		c.Close()
		if got, err := io.ReadAll(s); string(got) != "answer" || err != nil {
			t.Errorf("the guest read %q, %v", got, err)
		}
	})
}

func TestAGuestThatStopsReadingBreaksTheHostsWrites(t *testing.T) {
	d, g := startGuest(t)
	c, s := open(t, d, g, 1)
	s.shutdown(shutdownReceive)
	_, err := io.Copy(c, endless{})
	if !errors.Is(err, syscall.EPIPE) {
		t.Errorf("got %v, want EPIPE", err)
	}
	if _, err := io.WriteString(s, "still here"); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(io.LimitReader(c, 10)); string(got) != "still here" || err != nil {
		t.Errorf("the host read %q, %v", got, err)
	}
}

// endless is a reader without end.
type endless struct{}

func (endless) Read(b []byte) (int, error) { return len(b), nil }

func TestWhatTheGuestSentBeforeItsEndCanBeRead(t *testing.T) {
	d, g := startGuest(t)
	for name, test := range map[string]struct {
		end  func(*guestSocket)
		want error
	}{
		"closed": {end: func(s *guestSocket) { s.Close() }},
		"reset":  {end: (*guestSocket).reset, want: syscall.ECONNRESET},
	} {
		t.Run(name, func(t *testing.T) {
			c, s := open(t, d, g, 1)
			if _, err := io.WriteString(s, "last words"); err != nil {
				t.Fatal(err)
			}
			test.end(s)
			if got, err := io.ReadAll(c); string(got) != "last words" || !errors.Is(err, test.want) {
				t.Errorf("got %q, %v; want the words and %v", got, err, test.want)
			}
			if _, err := c.Write([]byte("x")); err == nil {
				t.Error("writing to it works")
			}
		})
	}
}

func TestAResetInTheMiddleEndsReadersAndWriters(t *testing.T) {
	d, g := startGuest(t)
	c, s := open(t, d, g, 1)
	var both errgroup.Group
	both.Go(func() error {
		if _, err := io.Copy(io.Discard, c); !errors.Is(err, syscall.ECONNRESET) {
			return fmt.Errorf("reading: got %w, want a reset", err)
		}
		return nil
	})
	both.Go(func() error {
		if _, err := io.Copy(c, endless{}); !errors.Is(err, syscall.ECONNRESET) {
			return fmt.Errorf("writing: got %w, want a reset", err)
		}
		return nil
	})
	if _, err := io.CopyN(io.Discard, s, 1<<20); err != nil {
		t.Fatal(err)
	}
	s.reset()
	if err := both.Wait(); err != nil {
		t.Error(err)
	}
}

func TestClosingWithUnreadDataResetsTheGuestsWriter(t *testing.T) {
	d, g := startGuest(t)
	c, s := open(t, d, g, 1)
	var write errgroup.Group
	write.Go(func() error {
		_, err := io.Copy(s, endless{})
		return err
	})
	if _, err := io.ReadFull(c, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	c.Close()
	if err := write.Wait(); !errors.Is(err, syscall.EPIPE) {
		t.Errorf("the guest's writer: got %v, want EPIPE", err)
	}
}

func TestADeadlineUnblocksAWriterWhoseGuestNeverReads(t *testing.T) {
	d, g := startGuest(t)
	c, _ := open(t, d, g, 1)
	if err := c.SetWriteDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	n, err := io.Copy(c, endless{})
	if !errors.Is(err, os.ErrDeadlineExceeded) || n != guestBuffer {
		t.Errorf("wrote %d bytes, %v; want the guest's %d and a timeout", n, err, guestBuffer)
	}
	// Nobody else is held up.
	c2, s2 := open(t, d, g, 2)
	exchange(t, c2, s2)
}

// exchange sends a message each way.
func exchange(t *testing.T, a, b io.ReadWriter) {
	t.Helper()
	for _, way := range [][2]io.ReadWriter{{a, b}, {b, a}} {
		if _, err := io.WriteString(way[0], "hello"); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 5)
		if _, err := io.ReadFull(way[1], got); err != nil || string(got) != "hello" {
			t.Fatalf("got %q, %v", got, err)
		}
	}
}

func TestBulkDataArrivesUnchangedInBothDirectionsAtOnce(t *testing.T) {
	size := int64(256 << 20)
	if testing.Short() {
		size = 16 << 20
	}
	d, g := startGuest(t)
	c, s := open(t, d, g, 1)
	transfer(t, c, s, size)
}

func TestEveryKindOfRingCarriesData(t *testing.T) {
	for name, test := range map[string]struct {
		features uint64
		indirect bool
	}{
		"with indirect tables":  {features, true},
		"without event indexes": {features &^ featureEventIdx, false},
		"with neither":          {featureVersion1, false},
	} {
		t.Run(name, func(t *testing.T) {
			d, g := startGuestWith(t, test.features)
			g.indirect = test.indirect
			c, s := open(t, d, g, 1)
			exchange(t, c, s)
			transfer(t, c, s, 4<<20)
		})
	}
}

// transfer sends size pseudo-random bytes each way at the same time, in pieces
// of odd sizes, and compares the digests.
func transfer(t *testing.T, a, b io.ReadWriter, size int64) {
	t.Helper()
	var all errgroup.Group
	for i, way := range [][2]io.ReadWriter{{a, b}, {b, a}} {
		sent, got := sha256.New(), sha256.New()
		var one errgroup.Group
		one.Go(func() error {
			source := io.LimitReader(rand.NewChaCha8([32]byte{byte(i)}), size)
			_, err := io.CopyBuffer(struct{ io.Writer }{io.MultiWriter(way[0], sent)}, source, make([]byte, 100_003))
			return err
		})
		one.Go(func() error {
			_, err := io.CopyBuffer(struct{ io.Writer }{got}, io.LimitReader(way[1], size), make([]byte, 70_001))
			return err
		})
		all.Go(func() error {
			if err := one.Wait(); err != nil {
				return err
			}
			if !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
				return fmt.Errorf("direction %d: the digests differ", i)
			}
			return nil
		})
	}
	if err := all.Wait(); err != nil {
		t.Error(err)
	}
}

func TestManyConnectionsAtOnce(t *testing.T) {
	const conns = 64
	d, g := startGuest(t)
	l, err := d.Listen(5)
	if err != nil {
		t.Fatal(err)
	}
	var all errgroup.Group
	for i := range conns {
		all.Go(func() error { // echo
			c, err := l.Accept()
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = io.Copy(c, c)
			return err
		})
		all.Go(func() error {
			s, err := g.dial(5)
			if err != nil {
				return err
			}
			defer s.Close()
			want := make([]byte, 300_000)
			if _, err := rand.NewChaCha8([32]byte{byte(i)}).Read(want); err != nil {
				return err
			}
			var write errgroup.Group
			write.Go(func() error {
				_, err := s.Write(want)
				return err
			})
			got := make([]byte, len(want))
			_, err = io.ReadFull(s, got)
			if !bytes.Equal(got, want) {
				err = errors.Join(err, fmt.Errorf("connection %d: the echo differs", i))
			}
			return errors.Join(err, write.Wait())
		})
	}
	if err := all.Wait(); err != nil {
		t.Error(err)
	}
}

func TestAWriteLargerThanWhatIsMovedAtATimeArrives(t *testing.T) {
	d, g := startGuest(t)
	c, s := open(t, d, g, 1)
	h := s.header(opCreditUpdate)
	h.bufAlloc = 1 << 30 // room for all of it at once
	g.transmit(h, nil)
	d.await(t, func() bool { return c.(*Conn).credit() == 1<<30 })
	g.mu.Lock()
	s.alloc = 1 << 30
	g.mu.Unlock()
	const size = 16 << 20
	var read errgroup.Group
	read.Go(func() error {
		_, err := io.CopyN(io.Discard, s, size)
		return err
	})
	if n, err := c.Write(make([]byte, size)); n != size || err != nil {
		t.Errorf("wrote %d, %v", n, err)
	}
	if err := read.Wait(); err != nil {
		t.Error(err)
	}
}

func TestWritersTakeTurns(t *testing.T) {
	d, g := startGuest(t)
	bulk, sink := open(t, d, g, 1)
	small, echo := open(t, d, g, 2)
	var background errgroup.Group
	background.Go(func() error {
		if _, err := io.Copy(bulk, endless{}); !errors.Is(err, net.ErrClosed) {
			return err
		}
		return nil
	})
	background.Go(func() error {
		_, err := io.Copy(io.Discard, sink)
		return err
	})
	for range 100 {
		exchange(t, small, echo)
	}
	bulk.Close()
	if err := background.Wait(); err != nil {
		t.Error(err)
	}
}
