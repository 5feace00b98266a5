//go:build linux

package guest_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/capsem/capsem/internal/guest"
	"github.com/capsem/capsem/internal/guestproto"
	"github.com/capsem/capsem/internal/relay"
	"github.com/capsem/capsem/internal/vm/fakevm"
)

func TestAGuestOfAnotherProtocolIsNamed(t *testing.T) {
	told := make(chan *guestproto.Error, 1)
	g, _ := start(t, func(ctx context.Context, g *fakevm.Guest) error {
		conn, err := g.Dial(ctx, guestproto.PortControl)
		if err != nil {
			return err
		}
		defer conn.Close()
		c := guestproto.NewControlConn(conn)
		if err := c.Write(&guestproto.Control{Hello: &guestproto.Hello{Protocol: 99, AgentVersion: "future", Epoch: 1}}); err != nil {
			return err
		}
		m, err := c.Read()
		if err != nil {
			return err
		}
		told <- m.Error
		<-ctx.Done()
		return nil
	}, guest.Options{})
	err := g.Ready(bounded(t))
	v, ok := errors.AsType[*guest.VersionError](err)
	if !ok || v.Guest != 99 || !strings.Contains(err.Error(), "future") {
		t.Errorf("the host says %v", err)
	}
	if e := <-told; e == nil || e.Code != "version" {
		t.Errorf("the guest is told %+v", e)
	}
}

func TestAnAgentThatIsNotUnderstoodSaysSo(t *testing.T) {
	refused := make(chan error, 1)
	run := func(ctx context.Context, g *fakevm.Guest) error {
		err := relay.Run(ctx, g, relay.Options{Log: discard()})
		refused <- err
		return err
	}
	m := machine(t, run)
	l, err := m.Listen(guestproto.PortControl)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	c := guestproto.NewControlConn(conn)
	if _, err := c.Read(); err != nil {
		t.Fatal(err)
	}
	if err := c.Write(&guestproto.Control{Error: &guestproto.Error{Code: "version", Message: "we speak 7"}}); err != nil {
		t.Fatal(err)
	}
	if err := <-refused; !errors.Is(err, relay.ErrVersion) || !strings.Contains(err.Error(), "we speak 7") {
		t.Errorf("the agent ended with %v", err)
	}
}

func TestAnotherEpochTakesTheControlConnectionOver(t *testing.T) {
	served, lost := make(chan struct{}), make(chan struct{})
	g, _ := start(t, func(ctx context.Context, g *fakevm.Guest) error {
		first, err := announce(ctx, g, 3)
		if err != nil {
			return err
		}
		defer first.Close()
		<-served
		// An epoch that is not above it is sent away.
		stale, err := g.Dial(ctx, guestproto.PortControl)
		if err != nil {
			return err
		}
		defer stale.Close()
		c := guestproto.NewControlConn(stale)
		if err := c.Write(&guestproto.Control{Hello: &guestproto.Hello{Protocol: guestproto.ProtocolVersion, Epoch: 3}}); err != nil {
			return err
		}
		if m, err := c.Read(); err != nil || m.Error == nil {
			t.Errorf("a stale epoch was answered %+v, %v", m, err)
		}
		second, err := announce(ctx, g, 4)
		if err != nil {
			return err
		}
		defer second.Close()
		if _, err := first.Read(make([]byte, 1<<16)); err == nil {
			t.Error("the first connection is still open")
		}
		close(lost)
		<-ctx.Done()
		return nil
	}, guest.Options{})
	awaitReady(t, g)
	close(served)
	select {
	case <-lost:
	case <-bounded(t).Done():
		t.Fatal("the second epoch did not take over")
	}
	if e := g.Announced().Epoch; e != 4 {
		t.Errorf("epoch %d", e)
	}
}

// TestTheAgentComesBackWithAHigherEpoch: the host drops its control connection, a
// command that runs does not notice.
func TestTheAgentComesBackWithAHigherEpoch(t *testing.T) {
	g, _ := start(t, real(t, relay.Options{}), guest.Options{})
	awaitReady(t, g)
	if e := g.Announced().Epoch; e != 1 {
		t.Fatalf("epoch %d", e)
	}
	guest.DropControl(g)
	eventually(t, "the agent is back", func() bool { return g.Announced().Epoch == 2 })
	awaitReady(t, g)
	if out, _, _ := capture(t, g, argv("echo", "still here"), nil); out != "still here\n" {
		t.Errorf("got %q", out)
	}
}

// TestACommandIsNotLostToAnAgentThatComesBack: the first agent is gone, and
// refuses, before the host has heard of it.
func TestACommandIsNotLostToAnAgentThatComesBack(t *testing.T) {
	run := real(t, relay.Options{Epoch: 1})
	again := make(chan struct{})
	g, _ := start(t, func(ctx context.Context, fg *fakevm.Guest) error {
		conn, err := announce(ctx, fg, 1)
		if err != nil {
			return err
		}
		<-again
		if err := conn.Close(); err != nil {
			return err
		}
		return run(ctx, fg)
	}, guest.Options{})
	awaitReady(t, g)
	out := make(chan string)
	go func() {
		s, _, _ := capture(t, g, argv("echo", "done"), nil)
		out <- s
	}()
	close(again)
	if s := <-out; s != "done\n" {
		t.Errorf("got %q", s)
	}
}

func TestWhoWaitsForAnAgentThatIsGivenUpIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newPipes()
		g, err := guest.New(m, guest.Options{Log: discard()})
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		leave := make(chan struct{})
		go func() { // an agent that leaves and does not come back
			conn := m.dialHost(guestproto.PortControl)
			c := guestproto.NewControlConn(conn)
			_ = c.Write(&guestproto.Control{Hello: &guestproto.Hello{Protocol: guestproto.ProtocolVersion, Epoch: 1}})
			_, _ = c.Read()
			_ = c.Write(&guestproto.Control{Ready: &guestproto.Ready{}})
			<-leave
			_ = conn.Close()
		}()
		if err := g.Ready(t.Context()); err != nil {
			t.Fatal(err)
		}
		close(leave)
		synctest.Wait()
		if _, err := g.Exec(t.Context(), argv("true"), guest.IO{}); !errors.Is(err, guest.ErrUnreachable) {
			t.Errorf("got %v", err)
		}
	})
}

func TestShutdownEndsCommandsAndTheGuest(t *testing.T) {
	g, m := start(t, real(t, relay.Options{}), guest.Options{})
	awaitReady(t, g)
	up := make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		r, err := g.Exec(context.Background(), sh(`trap 'echo bye; exit 4' TERM; echo up; while :; do sleep 0.01; done`), guest.IO{Stdout: writerFunc(func(p []byte) {
			if string(p) == "up\n" {
				close(up)
			}
		})})
		if err == nil && r.ExitCode != 4 {
			err = errors.New("it was not allowed to say good-bye")
		}
		ended <- err
	}()
	<-up
	if err := g.Shutdown(bounded(t), 10*time.Second); err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if err := m.Wait(); err != nil {
		t.Errorf("the guest ended with %v", err)
	}
}

func TestCallsEndWhenTheGuestIsClosed(t *testing.T) {
	g := ready(t)
	started := make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		_, err := g.Exec(context.Background(), sh("echo; exec sleep 1000"), guest.IO{Stdout: writerFunc(func([]byte) { close(started) })})
		ended <- err
	}()
	<-started
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ended; !errors.Is(err, guest.ErrClosed) {
		t.Errorf("got %v", err)
	}
	if err := g.Ready(t.Context()); !errors.Is(err, guest.ErrClosed) {
		t.Errorf("Ready after Close: %v", err)
	}
}

// TestA19ASilentGuestEndsWhoWaits runs on a clock of its own: the guest answers
// pings for a while, then freezes as a stopped machine does.
func TestA19ASilentGuestEndsWhoWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newPipes()
		g, err := guest.New(m, guest.Options{Log: discard()})
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		frozen := time.Now().Add(21 * time.Second)
		go func() { // the guest's agent
			conn := m.dialHost(guestproto.PortControl)
			c := guestproto.NewControlConn(conn)
			_ = c.Write(&guestproto.Control{Hello: &guestproto.Hello{Protocol: guestproto.ProtocolVersion, Epoch: 1}})
			_, _ = c.Read()
			_ = c.Write(&guestproto.Control{Ready: &guestproto.Ready{}})
			for {
				m, err := c.Read()
				if err != nil || time.Now().After(frozen) {
					return
				}
				if m.Ping != nil {
					_ = c.Write(&guestproto.Control{Pong: &guestproto.Pong{Seq: m.Ping.Seq}})
				}
			}
		}()
		go func() { // a command that says nothing
			c := guestproto.NewStreamConn(m.acceptStream())
			_, _ = c.Read()
			_ = c.Write(&guestproto.Stream{Started: &guestproto.Started{PID: 1}})
			_, _ = c.Read()
		}()
		if err := g.Ready(t.Context()); err != nil {
			t.Fatal(err)
		}
		_, err = g.Exec(t.Context(), argv("sleep"), guest.IO{})
		if !errors.Is(err, guest.ErrUnreachable) {
			t.Errorf("got %v", err)
		}
		if late := time.Since(frozen); late < 0 || late > guest.LostAfter {
			t.Errorf("%v after the guest fell silent", late)
		}
		if _, err := g.Exec(t.Context(), argv("true"), guest.IO{}); !errors.Is(err, guest.ErrUnreachable) {
			t.Errorf("the next command: %v", err)
		}
	})
}
