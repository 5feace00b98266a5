//go:build linux

package guest_test

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/guest"
	"github.com/capsem/capsem/internal/guestproto"
)

// socketPair is a client's connection and ours.
func socketPair(t *testing.T) (client, server net.Conn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		if conns[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { conns[0].Close() })
	return conns[0], conns[1]
}

// attached is a client's view of a command.
type attached struct {
	t      *testing.T
	conn   net.Conn
	c      *guestproto.StreamConn
	result event.ExecResult
	err    error
	done   chan struct{}
	// refusal is what the client is told instead of how the command ended.
	refusal error
}

func attach(ctx context.Context, t *testing.T, g *guest.Guest, e guestproto.Exec) *attached {
	return attachRefused(ctx, t, g, e, nil)
}

func attachRefused(ctx context.Context, t *testing.T, g *guest.Guest, e guestproto.Exec, refusal error) *attached {
	client, server := socketPair(t)
	if err := client.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	a := &attached{t: t, conn: client, c: guestproto.NewStreamConn(client), done: make(chan struct{}), refusal: refusal}
	go func() {
		defer close(a.done)
		var end *guest.Attached
		a.result, end, a.err = g.Attach(ctx, server, e)
		if err := end.Finish(a.refusal); err != nil && a.err == nil {
			t.Error(err)
		}
	}()
	return a
}

func (a *attached) write(m *guestproto.Stream) {
	a.t.Helper()
	if err := a.c.Write(m); err != nil {
		a.t.Fatal(err)
	}
}

// read confirms and gathers output up to the last message.
func (a *attached) read() (stdout, stderr string, last *guestproto.Stream) {
	a.t.Helper()
	in := guestproto.NewIntake()
	var out, errs strings.Builder
	for {
		m, err := a.c.Read()
		if err != nil {
			a.t.Fatal(err)
		}
		switch {
		case m.Data != nil:
			if err := in.Receive(m.Data); err != nil {
				a.t.Fatal(err)
			}
			d, _ := in.Next()
			if d.Stream == guestproto.Out {
				out.Write(d.Bytes)
			} else {
				errs.Write(d.Bytes)
			}
			if ack := in.Consume(len(d.Bytes)); ack != nil {
				a.write(&guestproto.Stream{Ack: ack})
			}
		case m.Exit != nil, m.Error != nil:
			if err := a.conn.Close(); err != nil {
				a.t.Fatal(err)
			}
			<-a.done
			return out.String(), errs.String(), m
		}
	}
}

func TestAttachCarriesBothWaysAndCounts(t *testing.T) {
	g := ready(t)
	e := sh("cat; echo oops >&2; exit 5")
	e.Stdin = true
	a := attach(bounded(t), t, g, e)
	a.write(data(guestproto.In, "hello "))
	a.write(data(guestproto.In, "there"))
	a.write(&guestproto.Stream{EOF: &guestproto.EOF{Stream: guestproto.In}})
	out, errs, last := a.read()
	if out != "hello there" || errs != "oops\n" || last.Exit == nil || last.Exit.Code != 5 {
		t.Errorf("the client saw %q, %q, %+v", out, errs, last)
	}
	want := event.ExecResult{ExitCode: 5, StdoutBytes: 11, StderrBytes: 5}
	if diff := cmp.Diff(want, a.result); diff != "" || a.err != nil {
		t.Errorf("the host knows %v, %s", a.err, diff)
	}
}

func TestAttachCarriesMoreThanTheWindow(t *testing.T) {
	g := ready(t)
	const size = 5 * guestproto.Window
	a := attach(bounded(t), t, g, sh("head -c 1310720 /dev/zero"))
	out, _, last := a.read()
	if len(out) != size || last.Exit == nil || a.result.StdoutBytes != size {
		t.Errorf("%d bytes, %+v, %+v", len(out), last, a.result)
	}
}

func TestAttachCarriesSignals(t *testing.T) {
	g := ready(t)
	a := attach(bounded(t), t, g, argv("sleep", "1000"))
	a.write(&guestproto.Stream{Signal: &guestproto.Signal{Name: "INT"}})
	_, _, last := a.read()
	if last.Exit == nil || last.Exit.Signal != "INT" || a.result.Signal != "INT" || a.result.ExitCode != 130 {
		t.Errorf("%+v, %+v", last, a.result)
	}
}

func TestAClientThatLeavesEndsItsCommand(t *testing.T) {
	g := ready(t)
	a := attach(bounded(t), t, g, sh(runaway))
	var out strings.Builder
	for len(strings.Fields(out.String())) < 3 {
		m, err := a.c.Read()
		if err != nil {
			t.Fatal(err)
		}
		if m.Data != nil {
			out.Write(m.Data.Bytes)
		}
	}
	if err := a.conn.Close(); err != nil {
		t.Fatal(err)
	}
	<-a.done
	if a.err == nil {
		t.Error("a command without its client's end is a success")
	}
	wantGone(t, pids(t, out.String()))
}

func TestAClientThatBreaksTheProtocolIsToldAndCutOff(t *testing.T) {
	g := ready(t)
	for name, m := range map[string]*guestproto.Stream{
		"input that was not announced": data(guestproto.In, "x"),
		"output":                       data(guestproto.Out, "x"),
		"an ack of nothing":            ack(1),
		"an exit":                      exit(0),
		"a signal that is none":        {Signal: &guestproto.Signal{Name: "WINCH"}},
	} {
		a := attach(bounded(t), t, g, argv("sleep", "1000"))
		a.write(m)
		_, _, last := a.read()
		if _, ok := errors.AsType[*guest.ClientError](a.err); !ok || last.Error == nil {
			t.Errorf("%s: the host knows %v, the client was told %+v", name, a.err, last)
		}
	}
}

func TestAClientOfALyingGuestIsTold(t *testing.T) {
	g, _ := start(t, liar(t, func(conn net.Conn, _ *guestproto.StreamConn, _ *guestproto.Stream) {
		send(t, conn, started(), exit(999))
	}), guest.Options{})
	awaitReady(t, g)
	a := attach(bounded(t), t, g, argv("true"))
	_, _, last := a.read()
	if last.Error == nil || !isProtocolError(a.err) {
		t.Errorf("the host knows %v, the client was told %+v", a.err, last)
	}
}

func TestAttachEndsWithItsContextAndSaysWhy(t *testing.T) {
	g := ready(t)
	ctx, cancel := context.WithCancelCause(bounded(t))
	a := attach(ctx, t, g, argv("sleep", "1000"))
	why := errors.New("the machine is being stopped")
	cancel(why)
	_, _, last := a.read()
	if !errors.Is(a.err, why) || last.Error == nil || !strings.Contains(last.Error.Message, why.Error()) {
		t.Errorf("the host knows %v, the client was told %+v", a.err, last)
	}
}

func TestAttachHoldsTheTimeout(t *testing.T) {
	g := ready(t)
	e := argv("sleep", "1000")
	e.TimeoutMS = 20
	a := attach(bounded(t), t, g, e)
	_, _, last := a.read()
	if last.Exit == nil || !last.Exit.TimedOut || !a.result.TimedOut {
		t.Errorf("%+v, %+v, %v", last, a.result, a.err)
	}
}

func TestAttachTellsARefusalInsteadOfHowTheCommandEnded(t *testing.T) {
	g := ready(t)
	a := attachRefused(bounded(t), t, g, sh("exit 7"), errors.New("blocked by rule r"))
	_, _, last := a.read()
	if last.Exit != nil || last.Error == nil || last.Error.Code != "blocked" || last.Error.Message != "blocked by rule r" {
		t.Errorf("the client saw %+v", last)
	}
	if a.result.ExitCode != 7 {
		t.Errorf("the host knows %+v", a.result)
	}
}
