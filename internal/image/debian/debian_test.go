package debian

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// programs puts shell scripts in front of the system's programs.
func programs(t *testing.T, scripts map[string]string) {
	t.Helper()
	dir := t.TempDir()
	for name, script := range scripts {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":/usr/bin:/bin")
}

func open(t *testing.T) *Archive {
	t.Helper()
	a, err := Open(filepath.Join(t.TempDir(), "packages"))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func packageOf(content string) Package {
	sum := sha256.Sum256([]byte(content))
	return Package{Name: "tool", Version: "1:2.0-1", Architecture: "amd64", SHA256: hex.EncodeToString(sum[:]), Size: int64(len(content))}
}

const stanza = `Package: tool
Version: 1:2.0-1
Architecture: amd64
Depends: libc6 (>= 2.36), other
Description: a tool
 SHA256: not a field
Size: 928188
SHA256: 3d3fdbe91d4660c873e14b092c213fe81c1da6362daa236eb25d0171eb108744

Package: tool
Version: 1.0-1
`

func TestLookupReadsTheFirstStanza(t *testing.T) {
	programs(t, map[string]string{"apt-cache": "cat <<'END'\n" + stanza + "END\n"})
	got, err := open(t).Lookup(t.Context(), "tool")
	if err != nil {
		t.Fatal(err)
	}
	want := Package{
		Name: "tool", Version: "1:2.0-1", Architecture: "amd64", Size: 928188, Depends: "libc6 (>= 2.36), other",
		SHA256: "3d3fdbe91d4660c873e14b092c213fe81c1da6362daa236eb25d0171eb108744",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("package (-want +got):\n%s", d)
	}
}

func TestIndexEntriesThatCannotBeUsedAreRefused(t *testing.T) {
	tests := map[string]struct{ old, new, want string }{
		"no digest":        {"SHA256: 3d3f", "SHA1: 3d3f", "no archive that apt knows"},
		"short digest":     {"3d3fdbe9", "", "malformed"},
		"size zero":        {"Size: 928188", "Size: 0", "states a size"},
		"size too large":   {"Size: 928188", "Size: 99999999999", "states a size"},
		"version's option": {"Version: 1:2.0-1", "Version: -o", "malformed"},
		"name's path":      {"Package: tool", "Package: ../tool", "malformed"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := parseStanza([]byte(strings.Replace(stanza, test.old, test.new, 1)))
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error is %v, want one with %q", err, test.want)
			}
		})
	}
}

func TestUnknownPackageIsItsOwnError(t *testing.T) {
	programs(t, map[string]string{"apt-cache": "echo 'E: No packages found' >&2; exit 100\n"})
	_, err := open(t).Lookup(t.Context(), "tool")
	if !errors.Is(err, ErrUnknown) || !strings.Contains(err.Error(), "No packages found") {
		t.Errorf("error is %v, want ErrUnknown with apt's words", err)
	}
}

func TestMachineWithoutAptIsToldWhatIsNeeded(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := open(t).Lookup(t.Context(), "tool")
	if !errors.Is(err, exec.ErrNotFound) || !strings.Contains(err.Error(), "apt-cache is not on this machine") {
		t.Errorf("error is %v", err)
	}
}

func TestNamesThatAptWouldTakeForOptionsAreRefused(t *testing.T) {
	for _, name := range []string{"", "-o", "--help", "a b", "../x", "tool=1"} {
		if _, err := open(t).Lookup(t.Context(), name); err == nil || !strings.Contains(err.Error(), "not a package's name") {
			t.Errorf("name %q: error is %v", name, err)
		}
	}
}

func TestPackageIsDownloadedOnceAndVerifiedEachTime(t *testing.T) {
	counter := filepath.Join(t.TempDir(), "downloads")
	programs(t, map[string]string{"apt-get": `echo x >> ` + counter + `; printf content > "tool_1%3a2.0-1_amd64.deb"` + "\n"})
	a, p := open(t), packageOf("content")
	if a.Cached(p) {
		t.Error("a package is cached before it was downloaded")
	}
	for range 2 {
		f, err := a.File(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		body := make([]byte, 100)
		n, _ := f.Read(body)
		if string(body[:n]) != "content" {
			t.Errorf("the package has %q", body[:n])
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if !a.Cached(p) {
		t.Error("the package is not cached")
	}
	if err := os.WriteFile(a.path(p), []byte("cOntent"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := a.File(t.Context(), p)
	if err != nil {
		t.Fatalf("an altered package in the cache was not replaced: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(counter); err != nil || string(b) != "x\nx\n" {
		t.Errorf("downloads: %q, %v; want one, and one for the altered file", b, err)
	}
}

func TestPackageThatDoesNotVerifyIsNotKept(t *testing.T) {
	for name, content := range map[string]string{"altered": "cOntent", "cut short": "cont", "longer": "content and more"} {
		t.Run(name, func(t *testing.T) {
			programs(t, map[string]string{"apt-get": `printf '` + content + `' > x.deb` + "\n"})
			a, p := open(t), packageOf("content")
			_, err := a.File(t.Context(), p)
			if !errors.Is(err, ErrDownload) || !strings.Contains(err.Error(), "index states") {
				t.Errorf("error is %v", err)
			}
			if left, _ := os.ReadDir(a.dir); len(left) > 0 {
				t.Errorf("the cache has %v", left)
			}
		})
	}
}

func TestFailedDownloadHasAptsLastWords(t *testing.T) {
	programs(t, map[string]string{"apt-get": "echo 'E: Failed to fetch: Temporary failure resolving' >&2; exit 100\n"})
	_, err := open(t).File(t.Context(), packageOf("content"))
	if !errors.Is(err, ErrDownload) || !strings.Contains(err.Error(), "Temporary failure resolving") {
		t.Errorf("error is %v", err)
	}
}

func TestCancelEndsAptAndItsChildren(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	ready := filepath.Join(t.TempDir(), "ready")
	programs(t, map[string]string{"apt-get": "mkfifo hang; echo > " + ready + "; cat hang & wait\n"})
	if err := exec.CommandContext(t.Context(), "mkfifo", ready).Run(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	a := open(t)
	go func() {
		_, err := a.File(ctx, packageOf("content"))
		done <- err
	}()
	if _, err := os.ReadFile(ready); err != nil { // blocks until apt-get runs
		t.Fatal(err)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v, want that the context was cancelled", err)
	}
}

func TestMessagesOfAProgramAreBounded(t *testing.T) {
	m := tail{limit: 10}
	for i := range 1000 {
		if _, err := fmt.Fprintf(&m, "line %d\n", i); err != nil {
			t.Fatal(err)
		}
	}
	if got := m.String(); got != "line 999" {
		t.Errorf("kept %q", got)
	}
	programs(t, map[string]string{"apt-cache": "head -c 2000000 /dev/zero\n"})
	if _, err := open(t).Lookup(t.Context(), "tool"); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("error is %v, want one about the size of the answer", err)
	}
}

type member struct {
	header tar.Header
	body   string
}

func archive(t *testing.T, members ...member) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, m := range members {
		m.header.Size = int64(len(m.body))
		if err := w.WriteHeader(&m.header); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(m.body)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func file(name, body string) member {
	return member{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o4755}, body}
}

func link(name, target string, kind byte) member {
	return member{tar.Header{Name: name, Typeflag: kind, Linkname: target}, ""}
}

func wantsEverything(string) bool { return true }

func TestOnlyWantedFilesOfATarAreTaken(t *testing.T) {
	got := make(map[string]string)
	b := archive(t, file("./bin/tool", "program"), file("./bin/other", "x"), file("../bin/tool", "escape"), file("/bin/tool", "absolute"),
		link("./lib", "/etc", tar.TypeSymlink), file("./lib/tool", "through the link"))
	wants := func(name string) bool { return name == "bin/tool" || name == "lib/tool" }
	err := takeFiles(bytes.NewReader(b), wants, func(name string, body []byte) error { got[name] = string(body); return nil })
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(map[string]string{"bin/tool": "program", "lib/tool": "through the link"}, got); d != "" {
		t.Errorf("files (-want +got):\n%s", d)
	}
}

func TestHostileTarsAreRefused(t *testing.T) {
	whole := archive(t, file("./a", strings.Repeat("x", 2000)))
	huge := archive(t, file("./a", ""))
	copy(huge[124:136], "77777777777\x00") // 8 GiB, and its checksum below
	total := 0
	copy(huge[148:156], "        ")
	for _, c := range huge[:512] {
		total += int(c)
	}
	copy(huge[148:156], fmt.Sprintf("%06o\x00 ", total))
	tests := map[string]struct {
		tar  []byte
		want string
	}{
		"symbolic link": {archive(t, link("./a", "/etc/passwd", tar.TypeSymlink)), "not a regular file"},
		"hard link":     {archive(t, file("./b", ""), link("./a", "b", tar.TypeLink)), "not a regular file"},
		"device":        {archive(t, link("./a", "", tar.TypeChar)), "not a regular file"},
		"twice":         {archive(t, file("./a", "1"), file("a", "2")), "twice"},
		"huge":          {huge, "more than is accepted"},
		"cut short":     {whole[:1000], "unexpected EOF"},
		"no tar":        {bytes.Repeat([]byte("junk"), 500), "invalid tar header"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			err := takeFiles(bytes.NewReader(test.tar), wantsEverything, func(string, []byte) error { return nil })
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error is %v, want one with %q", err, test.want)
			}
		})
	}
}

// deb makes a package with dpkg-deb.
func deb(t *testing.T, files map[string]string) *os.File {
	t.Helper()
	program, err := exec.LookPath("dpkg-deb")
	if err != nil {
		t.Skip("dpkg-deb is not installed: this needs Debian or Ubuntu")
	}
	dir := t.TempDir()
	files["DEBIAN/control"] = "Package: tool\nVersion: 1\nArchitecture: amd64\nMaintainer: x <x@example.com>\nDescription: x\n"
	for name, body := range files {
		path := filepath.Join(dir, "root", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(body), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	name := filepath.Join(dir, "tool.deb")
	if out, err := exec.CommandContext(t.Context(), program, "--root-owner-group", "--build", filepath.Join(dir, "root"), name).CombinedOutput(); err != nil {
		t.Fatalf("dpkg-deb: %v\n%s", err, out)
	}
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

func TestFilesOfAPackageAreRead(t *testing.T) {
	f := deb(t, map[string]string{"bin/tool": "program", "etc/conf": "x"})
	got := make(map[string]string)
	wants := func(name string) bool { return strings.HasPrefix(name, "bin/") && name != "bin/" }
	if err := Files(t.Context(), f, wants, func(name string, body []byte) error { got[name] = string(body); return nil }); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(map[string]string{"bin/tool": "program"}, got); d != "" {
		t.Errorf("files (-want +got):\n%s", d)
	}
}

func TestFailureOfWhoTakesTheFilesEndsTheUnpacking(t *testing.T) {
	f := deb(t, map[string]string{"bin/tool": "program", "bin/zero": strings.Repeat("\x00", 20<<20)})
	stop := errors.New("enough")
	wants := func(name string) bool { return name == "bin/tool" }
	if err := Files(t.Context(), f, wants, func(string, []byte) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("error is %v, want the taker's", err)
	}
}

func TestFileThatIsNoPackageHasDpkgsLastWords(t *testing.T) {
	deb(t, map[string]string{}) // skips where there is no dpkg-deb
	name := filepath.Join(t.TempDir(), "x.deb")
	if err := os.WriteFile(name, []byte("no package"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	err = Files(t.Context(), f, wantsEverything, func(string, []byte) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "dpkg-deb ended with status 2") {
		t.Errorf("error is %v", err)
	}
}
