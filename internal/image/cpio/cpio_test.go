package cpio_test

import (
	"bytes"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/capsem/capsem/internal/image/cpio"
)

func sample() []cpio.Entry {
	return []cpio.Entry{
		{Name: ".", Mode: cpio.Dir | 0o755},
		{Name: "bin", Mode: cpio.Dir | 0o755},
		{Name: "bin/sh", Mode: cpio.Symlink | 0o777, Body: []byte("busybox")},
		{Name: "dev", Mode: cpio.Dir | 0o755},
		{Name: "dev/console", Mode: cpio.Char | 0o600, Major: 5, Minor: 1},
		{Name: "empty", Mode: cpio.File | 0o644},
		{Name: "init", Mode: cpio.File | 0o755, UID: 1000, GID: 100, Body: []byte("hello")},
	}
}

func encode(t *testing.T, entries []cpio.Entry) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := cpio.Write(&b, entries); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestArchiveReadsBackAsWritten(t *testing.T) {
	got, err := cpio.Read(encode(t, sample()))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(sample(), got, cmpopts.EquateEmpty()); d != "" {
		t.Errorf("read back (-want +got):\n%s", d)
	}
}

func TestSameEntriesGiveSameBytes(t *testing.T) {
	if !bytes.Equal(encode(t, sample()), encode(t, sample())) {
		t.Error("two archives of the same entries differ")
	}
}

// GNU cpio is an implementation that shares nothing with ours.
func TestGNUCpioListsTheArchive(t *testing.T) {
	program, err := exec.LookPath("cpio")
	if err != nil {
		t.Skip("GNU cpio is not installed (apt-get install cpio)")
	}
	cmd := exec.CommandContext(t.Context(), program, "--list", "--verbose", "--numeric-uid-gid", "--quiet")
	cmd.Stdin = bytes.NewReader(encode(t, sample()))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("cpio: %v\n%s", err, out)
	}
	for _, want := range []string{"bin/sh -> busybox", "dev/console", "5,   1", "1000", "init"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("cpio's list has no %q:\n%s", want, out)
		}
	}
}

func TestEntriesThatTheFormatCannotHoldAreRefused(t *testing.T) {
	tests := map[string]cpio.Entry{
		"absolute name":       {Name: "/etc", Mode: cpio.Dir},
		"climbing name":       {Name: "../etc", Mode: cpio.Dir},
		"trailer's name":      {Name: "TRAILER!!!", Mode: cpio.File},
		"zero byte":           {Name: "a\x00b", Mode: cpio.File},
		"name too long":       {Name: strings.Repeat("a", 4096), Mode: cpio.File},
		"no type":             {Name: "a", Mode: 0o644},
		"link without target": {Name: "a", Mode: cpio.Symlink},
		"directory's content": {Name: "a", Mode: cpio.Dir, Body: []byte("x")},
		"file's device":       {Name: "a", Mode: cpio.File, Major: 1},
	}
	for name, e := range tests {
		t.Run(name, func(t *testing.T) {
			var b bytes.Buffer
			if err := cpio.Write(&b, []cpio.Entry{e}); err == nil {
				t.Error("written without an error")
			}
			if b.Len() > 0 {
				t.Errorf("%d bytes were written before the refusal", b.Len())
			}
		})
	}
}

func TestEveryTruncationIsAnError(t *testing.T) {
	whole := encode(t, sample())
	for n := range len(whole) {
		if _, err := cpio.Read(whole[:n]); err == nil {
			t.Fatalf("the first %d of %d bytes were accepted", n, len(whole))
		}
	}
}

func FuzzReadThenWriteGivesTheInputBack(f *testing.F) {
	var b bytes.Buffer
	if err := cpio.Write(&b, sample()); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, in []byte) {
		entries, err := cpio.Read(in)
		if err != nil {
			return
		}
		var out bytes.Buffer
		if err := cpio.Write(&out, entries); err != nil {
			t.Fatalf("what was read cannot be written: %v", err)
		}
		if !bytes.Equal(in, out.Bytes()) {
			t.Errorf("read and written again, the archive differs")
		}
	})
}
