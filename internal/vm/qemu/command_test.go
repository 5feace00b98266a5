package qemu

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/vm"
)

// files are three different files to hand over.
func files(t *testing.T, n int) []*os.File {
	t.Helper()
	var list []*os.File
	for range n {
		f, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		list = append(list, f)
	}
	return list
}

func TestQEMUGetsDescriptorsAndNoPaths(t *testing.T) {
	f := files(t, 5)
	spec := vm.Spec{Name: "a,b", CPUs: 2, MemoryBytes: 512 << 20, Kernel: f[0], Initrd: f[1]}
	args, handed := arguments(spec, TCG, "quiet", ends{monitor: f[2], console: f[3], vsock: f[4]})
	if diff := cmp.Diff(f, handed, cmp.Comparer(func(a, b *os.File) bool { return a == b })); diff != "" {
		t.Errorf("descriptors (-want +got):\n%s", diff)
	}
	value := func(flag string) string {
		i := slices.Index(args, flag)
		if i < 0 {
			t.Fatalf("no %s in %q", flag, args)
		}
		return args[i+1]
	}
	for flag, want := range map[string]string{
		"-kernel": "/proc/self/fd/3", "-initrd": "/proc/self/fd/4", "-m": "512M", "-smp": "2", "-name": "guest=a,,b",
	} {
		if got := value(flag); got != want {
			t.Errorf("%s is %q, want %q", flag, got, want)
		}
	}
	line := strings.Join(args, " ")
	for _, want := range []string{
		"socket,id=monitor,fd=5", "socket,id=console,fd=6", "socket,id=vsock,fd=7", "spawn=deny", "-no-reboot",
		"share=on,seal=on,size=512M", "-nodefaults", "-no-user-config",
	} {
		if !strings.Contains(line, want) {
			t.Errorf("no %q in %q", want, line)
		}
	}
	if strings.Contains(strings.ReplaceAll(line, "/proc/self/fd/", ""), "/") {
		t.Errorf("there is a path in %q", line)
	}
}

func TestTheClocksFrequencyIsGivenOnlyWhereItIsKnown(t *testing.T) {
	for name, test := range map[string]struct {
		accelerator string
		khz         int
		want        bool
	}{
		"translated":                            {TCG, 2445430, true},
		"translated, on a host that hides it":   {TCG, 0, false},
		"KVM, which tells the guest by its own": {KVM, 2445430, false},
	} {
		t.Run(name, func(t *testing.T) {
			got := kernelCmdline(test.accelerator, test.khz, "extra=1")
			if strings.Contains(got, "tsc_early_khz=2445430") != test.want || !strings.HasSuffix(got, " extra=1") {
				t.Errorf("got %q", got)
			}
		})
	}
}

func TestTheProcessorsFrequencyIsRead(t *testing.T) {
	for in, want := range map[string]int{
		"processor\t: 0\ncpu MHz\t\t: 2445.430\nflags\t\t: fpu\ncpu MHz\t\t: 1000.0\n": 2445430,
		"processor\t: 0\n":      0,
		"cpu MHz\t\t: fast\n":   0,
		"cpu MHz\t\t: -1\n":     0,
		"cpu MHz\t\t: 1e300\n":  0,
		"cpu MHz\t\t: 3000.0\n": 3000000,
	} {
		if got := parseKHz([]byte(in)); got != want {
			t.Errorf("%q: got %d, want %d", in, got, want)
		}
	}
}

func TestSpecsThatCannotRunAreRefused(t *testing.T) {
	good := vm.Spec{Name: "x", CPUs: 1, MemoryBytes: 64 << 20, Kernel: files(t, 1)[0]}
	if err := check(good); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*vm.Spec){
		"no processor":        func(s *vm.Spec) { s.CPUs = 0 },
		"too many processors": func(s *vm.Spec) { s.CPUs = maxCPUs + 1 },
		"too little memory":   func(s *vm.Spec) { s.MemoryBytes = 63 << 20 },
		"half a MiB":          func(s *vm.Spec) { s.MemoryBytes += 1 << 19 },
		"no kernel":           func(s *vm.Spec) { s.Kernel = nil },
	} {
		spec := good
		change(&spec)
		if err := check(spec); err == nil {
			t.Errorf("%s: it was accepted", name)
		}
	}
}

func TestTheTailOfTheOutputIsKeptInWholeLines(t *testing.T) {
	out := new(tail)
	line := strings.Repeat("x", 99) + "\n"
	for range 100 {
		if _, err := out.Write([]byte(line)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := out.Write([]byte("the \xff end\n")); err != nil {
		t.Fatal(err)
	}
	got := strings.Split(out.String(), "\n")
	if got[0]+"\n" != line || got[len(got)-1] != "the � end" || len(out.kept) > tailSize {
		t.Errorf("got %q", got)
	}
}
