package service

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestAFullDiskHasRoomForWhatEmptiesIt runs on a small file system of its own.
func TestAFullDiskHasRoomForWhatEmptiesIt(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("reserve-test", dir, "tmpfs", 0, "size=12m"); err != nil {
		t.Skipf("needs to mount a tmpfs: run as root (%v)", err)
	}
	defer func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	r := &allowance{path: filepath.Join(dir, "reserve"), log: slog.New(slog.DiscardHandler)}
	r.hold()
	r.hold() // again, by the next service
	size := func() int64 {
		t.Helper()
		info, err := os.Stat(r.path)
		if err != nil {
			t.Fatal(err)
		}
		return info.Size()
	}
	if err := r.with(func() error { return nil }); err != nil || size() != reserveSize {
		t.Errorf("with room on the disk: %v, %d bytes are set aside", err, size())
	}
	fill, err := os.Create(filepath.Join(dir, "fill"))
	if err != nil {
		t.Fatal(err)
	}
	defer fill.Close()
	for err == nil {
		_, err = fill.Write(make([]byte, 64<<10))
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	row := filepath.Join(dir, "row")
	if err := os.WriteFile(row, make([]byte, 64<<10), 0o600); err == nil {
		t.Fatal("the disk is not full")
	}
	err = r.with(func() error {
		return errors.Join(os.WriteFile(row, make([]byte, 64<<10), 0o600), os.Remove(fill.Name()), fill.Close())
	})
	if err != nil || size() != reserveSize {
		t.Errorf("on a full disk: %v; afterwards %d bytes are set aside", err, size())
	}
}
