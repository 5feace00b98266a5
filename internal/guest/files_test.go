//go:build linux

package guest_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"

	"github.com/capsem/capsem/internal/guest"
	"github.com/capsem/capsem/internal/guestproto"
)

// pattern is n bytes, every value among them, that do not repeat at a power of 2.
func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i/251)
	}
	return b
}

func write(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := os.WriteFile(path, content, 0o640); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestReadFileGivesTheRangeThatWasAsked(t *testing.T) {
	g := ready(t)
	path := filepath.Join(t.TempDir(), "file")
	content := pattern(3*guestproto.Window + 17)
	write(t, path, content)
	for _, tt := range []struct{ offset, limit int64 }{
		{0, 0}, {0, 1}, {0, 65536}, {1, 65537}, {guestproto.Window, 0}, {int64(len(content)) - 1, 10}, {int64(len(content)), 0}, {int64(len(content)) + 5, 5},
	} {
		var got bytes.Buffer
		info, err := g.ReadFile(bounded(t), path, tt.offset, tt.limit, &got)
		if err != nil {
			t.Fatalf("%+v: %v", tt, err)
		}
		want := content[min(tt.offset, int64(len(content))):]
		if tt.limit > 0 {
			want = want[:min(tt.limit, int64(len(want)))]
		}
		sum := sha256.Sum256(want)
		if !bytes.Equal(got.Bytes(), want) || !bytes.Equal(info.SHA256, sum[:]) || info.Size != int64(len(content)) || info.Mode&0o777 != 0o640 {
			t.Errorf("%+v: %d bytes of %d, info %+v", tt, got.Len(), len(want), info)
		}
	}
}

func TestReadFileTakesFilesWithoutASize(t *testing.T) {
	g := ready(t)
	var got bytes.Buffer
	if _, err := g.ReadFile(bounded(t), "/proc/version", 0, 0, &got); err != nil || !strings.HasPrefix(got.String(), "Linux") {
		t.Errorf("got %q, %v", got.String(), err)
	}
}

func TestFilesThatCannotBeReadSayWhy(t *testing.T) {
	g := ready(t)
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, code := range map[string]string{
		dir:                          "invalid",
		fifo:                         "invalid",
		"/dev/zero":                  "invalid",
		filepath.Join(dir, "absent"): "not_found",
		fifo + "/below":              "invalid",
		"relative":                   "invalid",
	} {
		_, err := g.ReadFile(bounded(t), path, 0, 0, io.Discard)
		if e, ok := errors.AsType[*guest.Error](err); !ok || e.Code != code {
			t.Errorf("%s: got %v, want code %s", path, err, code)
		}
	}
}

func TestWriteFilePutsEveryByteInPlace(t *testing.T) {
	g := ready(t)
	dir := t.TempDir()
	for _, size := range []int{0, 1, guestproto.MaxData, guestproto.MaxData + 1, 3*guestproto.Window + 5} {
		path := filepath.Join(dir, "new", "folder", "file")
		content := pattern(size)
		for _, announced := range []int64{-1, int64(size)} {
			info, err := g.WriteFile(bounded(t), guestproto.WriteFile{Path: []byte(path), Mode: 0o751, Size: announced, Parents: true}, bytes.NewReader(content))
			if err != nil {
				t.Fatalf("%d bytes, %d announced: %v", size, announced, err)
			}
			if got := read(t, path); !bytes.Equal(got, content) || info.Size != int64(size) || info.Mode&0o7777 != 0o751 {
				t.Errorf("%d bytes became %d, info %+v", size, len(got), info)
			}
		}
	}
}

func TestWriteFileKeepsModeAndOwnerAndFollowsALink(t *testing.T) {
	g := ready(t)
	dir := t.TempDir()
	path, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	write(t, path, []byte("old"))
	if os.Getuid() == 0 {
		if err := os.Chown(path, 4242, 4243); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("file", link); err != nil {
		t.Fatal(err)
	}
	info, err := g.WriteFile(bounded(t), guestproto.WriteFile{Path: []byte(link), Size: -1}, strings.NewReader("new"))
	if err != nil {
		t.Fatal(err)
	}
	if string(read(t, path)) != "new" || info.Mode&0o7777 != 0o640 || (os.Getuid() == 0 && info.UID != 4242) {
		t.Errorf("content %q, info %+v", read(t, path), info)
	}
	if target, err := os.Readlink(link); err != nil || target != "file" {
		t.Errorf("the link became %q, %v", target, err)
	}
}

func TestWriteFileAppends(t *testing.T) {
	g := ready(t)
	path := filepath.Join(t.TempDir(), "log")
	for _, s := range []string{"one\n", "two\n"} {
		if _, err := g.WriteFile(bounded(t), guestproto.WriteFile{Path: []byte(path), Size: 4, Append: true}, strings.NewReader(s)); err != nil {
			t.Fatal(err)
		}
	}
	if got := string(read(t, path)); got != "one\ntwo\n" {
		t.Errorf("got %q", got)
	}
}

// TestAWriteThatFailsLeavesTheOldFile covers a source that breaks, a size that is
// not true, and a disk that is full.
func TestAWriteThatFailsLeavesTheOldFile(t *testing.T) {
	g := ready(t)
	broken := errors.New("the source broke")
	long := bytes.NewReader(pattern(3 * guestproto.Window))
	for _, tt := range []struct {
		name string
		f    guestproto.WriteFile
		r    io.Reader
		want string
	}{
		{"source", guestproto.WriteFile{Size: -1}, io.MultiReader(long, iotest.ErrReader(broken)), broken.Error()},
		{"too few", guestproto.WriteFile{Size: 10}, strings.NewReader("five!"), "10 bytes were announced and 5 came"},
		{"too many", guestproto.WriteFile{Size: 3}, strings.NewReader("five!"), "more came"},
		{"append, too few", guestproto.WriteFile{Size: 10, Append: true}, strings.NewReader("five!"), "10 bytes were announced and 5 came"},
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "file")
		write(t, path, []byte("old"))
		tt.f.Path = []byte(path)
		_, err := g.WriteFile(bounded(t), tt.f, tt.r)
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %q", tt.name, err, tt.want)
		}
		eventually(t, tt.name+" leaves the old file alone", func() bool {
			left, err := os.ReadDir(dir)
			return err == nil && len(left) == 1 && string(read(t, path)) == "old"
		})
	}
}

func TestAFullDiskLeavesTheOldFile(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to mount a small file system")
	}
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("this machine does not let us mount: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	g := ready(t)
	path := filepath.Join(dir, "file")
	write(t, path, []byte("old"))
	_, err := g.WriteFile(bounded(t), guestproto.WriteFile{Path: []byte(path), Size: -1}, bytes.NewReader(pattern(2<<20)))
	e, ok := errors.AsType[*guest.Error](err)
	if !ok || e.Code != "io" || !strings.Contains(e.Message, "no space left on device") {
		t.Errorf("got %v", err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 || string(read(t, path)) != "old" {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestFilesThatCannotBeWrittenSayWhy(t *testing.T) {
	g := ready(t)
	dir := t.TempDir()
	plain := filepath.Join(dir, "plain")
	write(t, plain, nil)
	for path, code := range map[string]string{
		dir:                               "invalid",
		"/dev/null":                       "invalid",
		filepath.Join(dir, "absent", "x"): "not_found",
		plain + "/below":                  "invalid",
		"relative":                        "invalid",
	} {
		for _, appending := range []bool{false, true} {
			_, err := g.WriteFile(bounded(t), guestproto.WriteFile{Path: []byte(path), Size: -1, Append: appending}, bytes.NewReader(pattern(2*guestproto.Window)))
			if e, ok := errors.AsType[*guest.Error](err); !ok || e.Code != code {
				t.Errorf("%s (append %t): got %v, want code %s", path, appending, err, code)
			}
		}
	}
}

func TestStatSaysWhatThePathItselfIs(t *testing.T) {
	g := ready(t)
	dir := t.TempDir()
	path, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	write(t, path, []byte("12345"))
	if err := os.Symlink("file", link); err != nil {
		t.Fatal(err)
	}
	info, err := g.Stat(bounded(t), path)
	if err != nil || info.Size != 5 || info.Mode&syscall.S_IFMT != syscall.S_IFREG || string(info.Path) != path {
		t.Errorf("file: %+v, %v", info, err)
	}
	info, err = g.Stat(bounded(t), link)
	if err != nil || info.Mode&syscall.S_IFMT != syscall.S_IFLNK || string(info.Target) != "file" {
		t.Errorf("link: %+v, %v", info, err)
	}
	info, err = g.Stat(bounded(t), dir)
	if err != nil || info.Mode&syscall.S_IFMT != syscall.S_IFDIR {
		t.Errorf("folder: %+v, %v", info, err)
	}
	_, err = g.Stat(bounded(t), filepath.Join(dir, "absent"))
	if e, ok := errors.AsType[*guest.Error](err); !ok || e.Code != "not_found" {
		t.Errorf("absent: %v", err)
	}
}
