//go:build linux

package guest_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/guest"
	"github.com/capsem/capsem/internal/guestproto"
	"github.com/capsem/capsem/internal/relay"
	"github.com/capsem/capsem/internal/relay/command"
	"github.com/capsem/capsem/internal/vm"
	"github.com/capsem/capsem/internal/vm/fakevm"
)

// patience bounds every wait of a test.
const patience = 30 * time.Second

// real is a guest function that runs the real relay.
func real(t testing.TB, o relay.Options) func(context.Context, *fakevm.Guest) error {
	o.Log = slog.New(slog.NewTextHandler(testLog{t}, nil))
	if o.Cgroups == nil {
		o.Cgroups = cgroups(t)
	}
	o.Version, o.BootID = "test", "boot"
	return func(ctx context.Context, g *fakevm.Guest) error { return relay.Run(ctx, g, o) }
}

// testLog writes a log to a test.
type testLog struct{ t testing.TB }

func (l testLog) Write(p []byte) (int, error) {
	l.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

// cgroups makes cgroups for one test where this machine has some to give, else
// none: commands are then ended by way of the process table.
func cgroups(t testing.TB) *command.Cgroups {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if f[2] != "cgroup2" {
			continue
		}
		dir, err := os.MkdirTemp(f[1], "guest-test-")
		if err != nil {
			return nil
		}
		c, err := command.OpenCgroups(dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { // after the machine has stopped
			if err := c.Kill(); err != nil {
				t.Error(err)
			}
			eventually(t, "the cgroups are empty", func() bool { return c.Close() == nil })
		})
		return c
	}
	return nil
}

// eventually waits for a state of the machine that nothing announces.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("in %v it was never so that %s", patience, what)
		}
	}
}

// start runs a machine whose guest is run, and serves it.
func start(t testing.TB, run func(context.Context, *fakevm.Guest) error, o guest.Options) (*guest.Guest, vm.Machine) {
	t.Helper()
	m, err := fakevm.New(run).Create(t.Context(), vm.Spec{CPUs: 1, MemoryBytes: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	o.Log = slog.New(slog.NewTextHandler(testLog{t}, nil))
	g, err := guest.New(m, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := m.Stop(ctx); err != nil {
			t.Error(err)
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := m.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return g, m
}

// ready is a guest that has announced itself.
func ready(t testing.TB) *guest.Guest {
	t.Helper()
	g, _ := start(t, real(t, relay.Options{}), guest.Options{})
	awaitReady(t, g)
	return g
}

func awaitReady(t testing.TB, g *guest.Guest) {
	t.Helper()
	if err := g.Ready(bounded(t)); err != nil {
		t.Fatal(err)
	}
}

func bounded(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// argv is a command.
func argv(args ...string) guestproto.Exec {
	e := guestproto.Exec{Cwd: []byte("/")}
	for _, a := range args {
		e.Argv = append(e.Argv, []byte(a))
	}
	return e
}

// sh is a shell script.
func sh(script string) guestproto.Exec { return argv("sh", "-c", script) }

// capture runs a command to its end.
func capture(t testing.TB, g *guest.Guest, e guestproto.Exec, stdin io.Reader) (stdout, stderr string, r event.ExecResult) {
	t.Helper()
	var out, errs bytes.Buffer
	r, err := g.Exec(bounded(t), e, guest.IO{Stdin: stdin, Stdout: &out, Stderr: &errs})
	if err != nil {
		t.Fatalf("%s: %v", e.Argv, err)
	}
	return out.String(), errs.String(), r
}

// liar is a guest that shakes hands properly and then does what a test says on
// each stream.
func liar(t testing.TB, stream func(conn net.Conn, c *guestproto.StreamConn, first *guestproto.Stream)) func(context.Context, *fakevm.Guest) error {
	return func(ctx context.Context, g *fakevm.Guest) error {
		l, err := g.Listen(guestproto.PortStreams)
		if err != nil {
			return err
		}
		control, err := announce(ctx, g, 1)
		if err != nil {
			return err
		}
		defer control.Close()
		stop := context.AfterFunc(ctx, func() { l.Close() })
		defer stop()
		for {
			conn, err := l.Accept()
			if err != nil {
				return nil
			}
			c := guestproto.NewStreamConn(conn)
			first, err := c.Read()
			if err != nil {
				t.Error(err)
			}
			stream(conn, c, first)
			conn.Close()
		}
	}
}

// announce shakes hands as an agent of this epoch.
func announce(ctx context.Context, g *fakevm.Guest, epoch uint64) (net.Conn, error) {
	conn, err := g.Dial(ctx, guestproto.PortControl)
	if err != nil {
		return nil, err
	}
	c := guestproto.NewControlConn(conn)
	hello := &guestproto.Hello{Protocol: guestproto.ProtocolVersion, AgentVersion: "liar", BootID: "x", Epoch: epoch}
	if err := c.Write(&guestproto.Control{Hello: hello}); err != nil {
		return nil, err
	}
	if _, err := c.Read(); err != nil {
		return nil, err
	}
	return conn, c.Write(&guestproto.Control{Ready: &guestproto.Ready{}})
}

// send writes messages to a host, all in one piece.
func send(t testing.TB, conn net.Conn, messages ...*guestproto.Stream) {
	var b bytes.Buffer
	c := guestproto.NewStreamConn(&b)
	for _, m := range messages {
		if err := c.Write(m); err != nil {
			t.Error(err)
		}
	}
	if _, err := conn.Write(b.Bytes()); err != nil && !errors.Is(err, net.ErrClosed) {
		t.Log(err) // the host may have had enough
	}
}

// options are those of a guest without anything special.
func options() relay.Options { return relay.Options{} }
