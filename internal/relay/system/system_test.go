//go:build linux

package system

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestFilesAreReplacedWithTheirMode(t *testing.T) {
	s := &System{Root: t.TempDir()}
	for _, content := range []string{"first", "second"} {
		if err := s.write("/etc/deep/file", 0o640, []byte(content)); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(s.Root, "etc/deep/file")
		b, err := os.ReadFile(path)
		if err != nil || string(b) != content {
			t.Errorf("got %q, %v", b, err)
		}
		if info, err := os.Stat(path); err != nil || info.Mode() != 0o640 {
			t.Errorf("mode %v, %v", info.Mode(), err)
		}
	}
	left, err := os.ReadDir(filepath.Join(s.Root, "etc/deep"))
	if err != nil || len(left) != 1 {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestPathsThatAreNotAbsoluteAreRefused(t *testing.T) {
	s := &System{Root: t.TempDir()}
	for _, path := range []string{"", "etc/x", "/a\x00b"} {
		if err := s.write(path, 0, nil); err == nil {
			t.Errorf("%q was written", path)
		}
	}
}

func TestAClockThatIsRightIsLeftAlone(t *testing.T) {
	if err := (&System{}).SyncClock(time.Now()); err != nil {
		t.Error(err)
	}
}

func TestPowerOffTellsTheFirstProcess(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	if err := (&System{Power: w}).PowerOff(1500 * time.Millisecond); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 16)
	if n, err := r.Read(b); err != nil || string(b[:n]) != "1500\n" {
		t.Errorf("got %q, %v", b[:n], err)
	}
}
