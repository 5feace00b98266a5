package qemu

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/vm"
	"github.com/capsem/capsem/internal/vm/vmtest"
)

// realConfig runs the QEMU of this machine; without one the test is skipped.
func realConfig(t testing.TB) Config {
	t.Helper()
	if _, err := exec.LookPath(Program); err != nil {
		if config.TestRequires(config.OSEnv(), "vm") {
			t.Fatal(err)
		}
		t.Skipf("%v: `apt-get install qemu-system-x86` enables this test", err)
	}
	return Config{
		Accelerator: TCG,
		Path:        os.Getenv("PATH"),
		Start: func(ctx context.Context, cmd child.Command) (Process, error) {
			p, err := child.Start(ctx, cmd)
			if err != nil {
				return nil, err
			}
			return p, nil
		},
	}
}

// console shows a test what the guest printed, if the test fails.
func console(t testing.TB) *lockedBuffer {
	b := new(lockedBuffer)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the guest's console:\n%s", b)
		}
	})
	return b
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func realBackend(t testing.TB) *Backend {
	t.Helper()
	b, err := New(realConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestMachinesPassTheSuite(t *testing.T) {
	backend := realBackend(t)
	kernel, initrd := vmtest.Image(t)
	vmtest.Run(t, vmtest.Setup{
		Backend: backend,
		Spec: func(t testing.TB) vm.Spec {
			return vm.Spec{Name: "suite,1", CPUs: 1, MemoryBytes: 256 << 20, Kernel: kernel, Initrd: initrd, Console: console(t)}
		},
	})
}

func TestAKernelThatPanicsIsNoOrderlyEnd(t *testing.T) {
	backend := realBackend(t)
	printed := console(t)
	m, err := backend.Create(t.Context(), vm.Spec{Name: "panic", CPUs: 1, MemoryBytes: 128 << 20, Kernel: vmtest.Kernel(t), Console: printed})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := m.Wait(); err == nil || !strings.Contains(err.Error(), "reset itself") {
		t.Errorf("got %v, want that the guest reset itself", err)
	}
	if !strings.Contains(printed.String(), booted) {
		t.Errorf("the console lacks the panic:\n%s", printed)
	}
	if err := m.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

// start boots a kernel without an initramfs and returns when QEMU runs.
func start(t *testing.T, backend *Backend, kernel *os.File) *Machine {
	t.Helper()
	m, err := backend.Create(t.Context(), vm.Spec{Name: t.Name(), CPUs: 1, MemoryBytes: 128 << 20, Kernel: kernel})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if err := m.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return m.(*Machine)
}

func TestQEMUIsKilledWhenItsSocketDeviceEnds(t *testing.T) {
	m := start(t, realBackend(t), vmtest.Kernel(t))
	if err := m.device.Close(); err != nil {
		t.Fatal(err)
	}
	if err := m.Wait(); err == nil || errors.Is(err, vm.ErrStopped) {
		t.Errorf("got %v, want that QEMU ended by itself", err)
	}
}

func TestAQEMUThatIsKilledByOthersIsNoOrderlyEnd(t *testing.T) {
	m := start(t, realBackend(t), vmtest.Kernel(t))
	if err := syscall.Kill(m.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := m.Wait(); err == nil || !strings.Contains(err.Error(), "signal 9") {
		t.Errorf("got %v, want the signal", err)
	}
}

func TestAStartThatIsCancelledLeavesNothing(t *testing.T) {
	backend := realBackend(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	m, err := backend.Create(t.Context(), vm.Spec{Name: "x", CPUs: 1, MemoryBytes: 128 << 20, Kernel: vmtest.Kernel(t)})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Start(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	if err := m.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestMachinesLeaveNoDescriptorsBehind(t *testing.T) {
	backend, kernel := realBackend(t), vmtest.Kernel(t)
	var before int
	for i := range 3 { // the first opens descriptors of the runtime's
		m := start(t, backend, kernel)
		if err := m.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		names, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		if i > 0 && len(names) > before {
			t.Errorf("round %d: %d descriptors, %d before", i, len(names), before)
		}
		before = len(names)
	}
}

func TestMissingQEMUSaysWhatToInstall(t *testing.T) {
	c := realConfig(t)
	c.Path = t.TempDir()
	b, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	m, err := b.Create(t.Context(), vm.Spec{Name: "x", CPUs: 1, MemoryBytes: 128 << 20, Kernel: null})
	if err != nil {
		t.Fatal(err)
	}
	err = m.Start(t.Context())
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v, want fs.ErrNotExist", err)
	}
	for _, want := range []string{Program, c.Path, "apt-get install qemu-system-x86"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not mention %q: %v", want, err)
		}
	}
	if err := m.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestQEMUThatRefusesItsKernelIsQuoted(t *testing.T) {
	b := realBackend(t)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	m, err := b.Create(t.Context(), vm.Spec{Name: "x", CPUs: 1, MemoryBytes: 128 << 20, Kernel: null})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Start(t.Context()); err == nil {
		err = m.Wait()
		if err == nil || !strings.Contains(err.Error(), "kernel") {
			t.Errorf("got %v, want QEMU's words", err)
		}
	} else if !strings.Contains(err.Error(), "kernel") {
		t.Errorf("got %v, want QEMU's words", err)
	}
	if err := m.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestProbeAnswersWithinItsLimit(t *testing.T) {
	began := time.Now()
	found, err := Probe(t.Context(), realConfig(t), vmtest.Kernel(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v after %s", found, time.Since(began))
	if found.Accelerator != KVM && found.Accelerator != TCG || found.Reason == "" || found.BootID == "" || found.QEMUVersion == "" {
		t.Errorf("the answer is incomplete: %+v", found)
	}
	if took := time.Since(began); took > 10*ProbeLimit {
		t.Errorf("it took %s", took)
	}
}

func TestProbeRecognisesAnAcceleratorThatWorks(t *testing.T) {
	c := realConfig(t) // TCG always works
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := tryBoot(ctx, c, vmtest.Kernel(t)); err != nil {
		t.Error(err)
	}
}

func TestProbeGivesUpOnAGuestThatDoesNotBoot(t *testing.T) {
	c := realConfig(t)
	kernel := vmtest.Kernel(t)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond) // too short for any guest
	defer cancel()
	if err := tryBoot(ctx, c, kernel); err == nil || !strings.Contains(err.Error(), "within") {
		t.Errorf("got %v, want that it took too long", err)
	}
}

func BenchmarkMachine(b *testing.B) {
	backend := realBackend(b)
	kernel, initrd := vmtest.Image(b)
	vmtest.Benchmark(b, vmtest.Setup{
		Backend: backend,
		Spec: func(b testing.TB) vm.Spec {
			return vm.Spec{Name: "bench", CPUs: 1, MemoryBytes: 256 << 20, Kernel: kernel, Initrd: initrd, Console: console(b)}
		},
	})
}
