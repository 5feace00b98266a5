package fakevm_test

import (
	"context"
	"errors"
	"testing"

	"go.uber.org/goleak"

	"github.com/capsem/capsem/internal/vm"
	"github.com/capsem/capsem/internal/vm/fakevm"
	"github.com/capsem/capsem/internal/vm/vmtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMachinesPassTheSuite(t *testing.T) {
	vmtest.Run(t, vmtest.Setup{
		Backend: fakevm.New(func(ctx context.Context, g *fakevm.Guest) error { return vmtest.Guest(ctx, g) }),
		Spec:    func(t testing.TB) vm.Spec { return vm.Spec{Name: t.Name()} },
	})
}

func TestAGuestThatFailsSaysWhy(t *testing.T) {
	cause := errors.New("out of luck")
	m, err := fakevm.New(func(context.Context, *fakevm.Guest) error { return cause }).Create(t.Context(), vm.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := m.Wait(); !errors.Is(err, cause) {
		t.Errorf("got %v, want %v", err, cause)
	}
}

func TestStoppingEndsAGuestThatWaits(t *testing.T) {
	m, err := fakevm.New(func(ctx context.Context, _ *fakevm.Guest) error {
		<-ctx.Done()
		return ctx.Err()
	}).Create(t.Context(), vm.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := m.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	if err := m.Wait(); !errors.Is(err, vm.ErrStopped) {
		t.Errorf("got %v, want vm.ErrStopped", err)
	}
}

func BenchmarkMachine(b *testing.B) {
	vmtest.Benchmark(b, vmtest.Setup{
		Backend: fakevm.New(func(ctx context.Context, g *fakevm.Guest) error { return vmtest.Guest(ctx, g) }),
		Spec:    func(testing.TB) vm.Spec { return vm.Spec{Name: "bench"} },
	})
}
