//go:build linux

package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// maxSize is what the program may add to every image and boot, in bytes.
const maxSize = 6_000_000

func TestTheProgramIsSmallAndStatic(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the program")
	}
	out := filepath.Join(t.TempDir(), "guest-relay")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, b)
	}
	info, err := os.Stat(out)
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() > maxSize {
		t.Errorf("it has %d bytes, over %d: what does it link?", info.Size(), maxSize)
	}
}

// TestTheProgramLinksNothingHeavy looks at the functions in the test's own
// program, which has all of guest-relay's.
func TestTheProgramLinksNothingHeavy(t *testing.T) {
	program, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	// The names are put together here: written out, they would be in the program.
	for _, name := range [][2]string{{"net/http", "(*Client).Do"}, {"crypto/tls", "(*Conn).Handshake"}, {"modernc.org/sqlite", "(*conn).Close"}} {
		if bytes.Contains(program, []byte(strings.Join(name[:], "."))) {
			t.Errorf("it links %s", name[0])
		}
	}
}

func TestAnUnknownNameIsAnError(t *testing.T) {
	var out, errs strings.Builder
	if code := run(t.Context(), []string{"/usr/bin/something"}, nil, &out, &errs); code != 1 || !strings.Contains(errs.String(), `started as "something"`) {
		t.Errorf("status %d, %q", code, errs.String())
	}
}

func TestTheAgentRefusesToRunOutsideAGuest(t *testing.T) {
	var out, errs strings.Builder
	if code := run(t.Context(), []string{"capsem-agent"}, nil, &out, &errs); code != 1 || !strings.Contains(errs.String(), "first process of a guest") {
		t.Errorf("status %d, %q", code, errs.String())
	}
}
