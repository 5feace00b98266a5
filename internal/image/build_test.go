package image_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/images"
	"github.com/capsem/capsem/internal/image"
)

// require skips a test that this machine cannot run, or fails it where
// CAPSEM_TEST_REQUIRE, a comma-separated list, has "image".
func require(t *testing.T, err error, remedy string) {
	t.Helper()
	if err == nil {
		return
	}
	if slices.Contains(strings.Split(os.Getenv("CAPSEM_TEST_REQUIRE"), ","), "image") {
		t.Fatalf("%v: %s", err, remedy)
	}
	t.Skipf("%v: %s; CAPSEM_TEST_REQUIRE=image makes this a failure", err, remedy)
}

// relay builds a static program to stand for the guest's.
func relay(t *testing.T, text string) string {
	t.Helper()
	dir := t.TempDir()
	source := filepath.Join(dir, "main.go")
	if err := os.WriteFile(source, []byte("package main\n\nfunc main() { println(\""+text+"\") }\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "guest-relay")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", out, source)
	cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0")
	if msg, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building a guest program: %v\n%s", err, msg)
	}
	return out
}

func TestTinyIsBuiltFromTheDistributionsPackages(t *testing.T) {
	_, err := exec.LookPath("apt-get")
	require(t, err, "run it on Debian")
	home := t.TempDir()
	var steps []string
	options := image.Options{
		Name: "tiny", Recipes: images.FS,
		Images: filepath.Join(home, "images"), Cache: filepath.Join(home, "cache"),
		Relay:    relay(t, "one"),
		Progress: func(step string) { steps = append(steps, step) },
	}
	first, err := image.Build(t.Context(), options)
	require(t, err, "it needs Debian's archive, by network")
	t.Logf("built %s in steps %q", first.KernelRelease, steps)

	again, err := image.Build(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(first, again); d != "" {
		t.Errorf("the same inputs gave another image (-first +second):\n%s", d)
	}

	t.Setenv("http_proxy", "http://127.0.0.1:1") // a second network access would fail
	options.Relay, steps = relay(t, "two"), nil
	second, err := image.Build(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"looking up packages", "writing the image"}; !slices.Equal(steps, want) {
		t.Errorf("a rebuild with another guest program took the steps %q, want %q", steps, want)
	}
	if first.RelaySHA256 == second.RelaySHA256 {
		t.Error("the guest program is not part of the image")
	}
	opened, err := image.Open(options.Images, image.Ref{Name: "tiny"})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(second, opened.Manifest); d != "" {
		t.Errorf("opened (-want +got):\n%s", d)
	}
	if err := opened.Close(); err != nil {
		t.Error(err)
	}
	for _, want := range []string{"vsock", "vmw_vsock_virtio_transport"} {
		if !slices.Contains(second.Modules, "modules/"+want+".ko") {
			t.Errorf("the modules loaded at boot are %v, without %s", second.Modules, want)
		}
	}
}

func TestBuildThatCannotBeginSaysWhy(t *testing.T) {
	home := t.TempDir()
	options := image.Options{Name: "tiny", Recipes: images.FS, Images: filepath.Join(home, "images"), Cache: filepath.Join(home, "cache"), Relay: filepath.Join(home, "missing")}
	if _, err := image.Build(t.Context(), options); err == nil || !strings.Contains(err.Error(), "guest's program") {
		t.Errorf("without a guest program: error is %v", err)
	}
	options.Name = "huge"
	if _, err := image.Build(t.Context(), options); err == nil || !strings.Contains(err.Error(), "no recipe for an image") {
		t.Errorf("without a recipe: error is %v", err)
	}
	options.Name, options.Relay = "tiny", relay(t, "one")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := image.Build(ctx, options); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: error is %v", err)
	}
	t.Setenv("PATH", t.TempDir())
	if _, err := image.Build(t.Context(), options); !errors.Is(err, exec.ErrNotFound) || !strings.Contains(err.Error(), "on Debian 12 or later") {
		t.Errorf("without apt: error is %v", err)
	}
	if list, err := image.List(options.Images); err != nil || len(list) > 0 {
		t.Errorf("failed builds left %v, %v", list, err)
	}
}

// BenchmarkOpen measures what every boot pays for verification, on the image in
// the folder that CAPSEM_BENCH_IMAGES names.
func BenchmarkOpen(b *testing.B) {
	dir := os.Getenv("CAPSEM_BENCH_IMAGES")
	if dir == "" {
		b.Skip("set CAPSEM_BENCH_IMAGES to a folder of images with tiny")
	}
	for b.Loop() {
		i, err := image.Open(dir, image.Ref{Name: "tiny"})
		if err != nil {
			b.Fatal(err)
		}
		b.SetBytes(i.Manifest.Size())
		if err := i.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
