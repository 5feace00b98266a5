//go:build linux

package guest_test

import (
	"context"
	"log/slog"
	"net"
	"testing"

	"github.com/capsem/capsem/internal/vm"
	"github.com/capsem/capsem/internal/vm/fakevm"
)

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

// machine is a fake machine that is not started.
func machine(t *testing.T, run func(context.Context, *fakevm.Guest) error) vm.Machine {
	t.Helper()
	m, err := fakevm.New(run).Create(t.Context(), vm.Spec{CPUs: 1, MemoryBytes: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return m
}

// pipes is a machine whose connections stay in this process's memory, so that
// time in a test can be the test's own.
type pipes struct {
	toHost, toGuest chan net.Conn
	closed          chan struct{}
}

func newPipes() *pipes {
	return &pipes{toHost: make(chan net.Conn), toGuest: make(chan net.Conn), closed: make(chan struct{})}
}

func (p *pipes) Listen(uint32) (net.Listener, error) { return p, nil }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.toHost:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	close(p.closed)
	return nil
}

func (p *pipes) Addr() net.Addr { return nil }

func (p *pipes) Dial(context.Context, uint32) (net.Conn, error) {
	host, inside := net.Pipe()
	p.toGuest <- inside
	return host, nil
}

// dialHost is the guest's dial.
func (p *pipes) dialHost(uint32) net.Conn {
	host, inside := net.Pipe()
	p.toHost <- host
	return inside
}

// acceptStream is the guest's accept.
func (p *pipes) acceptStream() net.Conn { return <-p.toGuest }
