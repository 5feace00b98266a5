package vmtest

import (
	"encoding/json"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/image/cpio"
)

// EnvImage names the variable that says where an image is: a folder with
// vmlinux, manifest.json and modules/, as `capsem image build` makes it.
const EnvImage = "CAPSEM_TEST_IMAGE"

// guestProgram is the file, below the root of the module, of the program that is
// the guest's /init.
const guestProgram = "internal/vm/vmtest/guest/main.go"

// ModuleFolder is where the guest finds its kernel modules, and ModuleList the
// file that lists them in the order in which they can be loaded, one a line.
const (
	ModuleFolder = "modules"
	ModuleList   = "modules/list"
)

// Kernel opens the kernel of the image that the environment names. Without one
// the test is skipped, or fails if CAPSEM_TEST_REQUIRE lists "vm".
func Kernel(t testing.TB) *os.File {
	t.Helper()
	return openFile(t, filepath.Join(folder(t), "vmlinux"))
}

// Image opens a kernel and an initramfs that runs Guest. Words of arguments on
// the kernel command line that follow "--" reach it.
func Image(t testing.TB) (kernel, initrd *os.File) {
	t.Helper()
	kernel = Kernel(t)
	entries := []cpio.Entry{
		{Name: ".", Mode: cpio.Dir | 0o755},
		{Name: "dev", Mode: cpio.Dir | 0o755},
		{Name: "dev/console", Mode: cpio.Char | 0o600, Major: 5, Minor: 1},
		{Name: "init", Mode: cpio.File | 0o755, Body: buildGuest(t)},
		{Name: ModuleFolder, Mode: cpio.Dir | 0o755},
	}
	entries = append(entries, modules(t)...)
	initrd, err := os.Create(filepath.Join(t.TempDir(), "initrd"))
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, initrd)
	if err := cpio.Write(initrd, entries); err != nil {
		t.Fatal(err)
	}
	return kernel, initrd
}

func folder(t testing.TB) string {
	t.Helper()
	env := config.OSEnv()
	dir := env.Get(EnvImage)
	if dir != "" {
		return dir
	}
	const hint = "this test boots a kernel: build one with `./justw image tiny` and name its folder, $CAPSEM_HOME/images/tiny/<digest>, in " + EnvImage
	if config.TestRequires(env, "vm") {
		t.Fatal(hint)
	}
	t.Skip(hint + "; " + config.EnvTestRequire + "=vm makes this a failure")
	return ""
}

func openFile(t testing.TB, name string) *os.File {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, f)
	return f
}

// modules are the image's modules that the guest loads at boot, and their list.
func modules(t testing.TB) []cpio.Entry {
	t.Helper()
	dir := folder(t)
	b, err := os.ReadFile(filepath.Join(dir, "manifest.json"))
	if err != nil {
		t.Fatal(err)
	}
	var manifest struct {
		Modules []string `json:"modules"`
	}
	if err := json.Unmarshal(b, &manifest); err != nil {
		t.Fatal(err)
	}
	var entries []cpio.Entry
	var list strings.Builder
	for _, name := range manifest.Modules {
		body, err := os.ReadFile(filepath.Join(dir, filepath.FromSlash(name)))
		if err != nil {
			t.Fatal(err)
		}
		name = path.Join(ModuleFolder, path.Base(name))
		entries = append(entries, cpio.Entry{Name: name, Mode: cpio.File | 0o644, Body: body})
		list.WriteString(name + "\n")
	}
	return append(entries, cpio.Entry{Name: ModuleList, Mode: cpio.File | 0o644, Body: []byte(list.String())})
}

// buildGuest compiles the guest's program.
func buildGuest(t testing.TB) []byte {
	t.Helper()
	file := filepath.Join(moduleRoot(t), filepath.FromSlash(guestProgram))
	// A cached result of the test must not outlive a change of the program: go
	// test looks at the files that a test has looked at.
	if _, err := os.Stat(file); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "init")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, ".")
	cmd.Dir = filepath.Dir(file)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOFLAGS=")
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building the guest: %v\n%s", err, output)
	}
	program, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return program
}

// moduleRoot is the folder above the test's that has go.mod.
func moduleRoot(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		if dir == filepath.Dir(dir) {
			t.Fatal("the test does not run below a folder with go.mod")
		}
		dir = filepath.Dir(dir)
	}
}
