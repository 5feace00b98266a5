package ledger

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/capsem/capsem/internal/event"
)

// TestFullDiskRefusesAndRecovers runs on a small file system of its own, in a
// mount namespace of its own.
func TestFullDiskRefusesAndRecovers(t *testing.T) {
	if os.Getenv(childVar) == "full disk" {
		os.Exit(childFullDisk())
	}
	cmd := child(t, "full disk", t.TempDir(), "-test.run=^TestFullDiskRefusesAndRecovers$")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	if os.Getuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	out, err := cmd.Output()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.ExitCode() == exitNoMount, err != nil && !errors.As(err, &exit):
		if strings.Contains(os.Getenv("CAPSEM_TEST_REQUIRE"), "jail") {
			t.Fatalf("a mount namespace is required: %v", err)
		}
		t.Skipf("needs a mount namespace: run as root, or allow user namespaces (%v)", err)
	case err != nil:
		t.Errorf("%v\n%s", err, out)
	}
}

const exitNoMount = 77

func childFullDisk() int {
	dir := os.Getenv(pathVar)
	if err := syscall.Mount("none", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return exitNoMount
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=2m"); err != nil {
		return exitNoMount
	}
	if err := fullDisk(dir); err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

func fullDisk(dir string) error {
	ctx := context.Background()
	path := filepath.Join(dir, "session.db")
	l, err := Open(ctx, path, Options{})
	if err != nil {
		return err
	}
	acknowledged, err := fillUp(ctx, l)
	if err != nil {
		return err
	}
	for _, size := range []string{"size=4m", "size=8m"} {
		if _, err := begin1(ctx, l); err == nil {
			return errors.New("a full disk took a further row")
		} else if !strings.Contains(err.Error(), "full") || !strings.Contains(err.Error(), "refused") {
			return fmt.Errorf("the error does not say what is wrong: %w", err)
		}
		if err := syscall.Mount("", dir, "", syscall.MS_REMOUNT, size); err != nil {
			return err
		}
		more, err := fillUp(ctx, l)
		if err != nil {
			return err
		}
		if more == 0 {
			return errors.New("nothing is taken though there is space again")
		}
		acknowledged += more
	}
	if err := l.Close(); err == nil || !strings.Contains(err.Error(), "full") {
		return fmt.Errorf("closing with pending rows on a full disk: %w", err)
	}
	if err := syscall.Mount("", dir, "", syscall.MS_REMOUNT, "size=16m"); err != nil {
		return err
	}
	if r, err := Recover(ctx, path); err != nil || r.Requests != int64(acknowledged) {
		return fmt.Errorf("recovering: %+v %w", r, err)
	}
	c, err := openConn(path)
	if err != nil {
		return err
	}
	defer c.close()
	if ok, err := c.first("PRAGMA integrity_check"); err != nil || ok != "ok" {
		return fmt.Errorf("integrity_check: %s %w", ok, err)
	}
	n, err := c.number("SELECT count(*) FROM net_events")
	if err == nil && n != int64(acknowledged) {
		err = fmt.Errorf("%d rows, %d were acknowledged", n, acknowledged)
	}
	return err
}

// fillUp writes until the ledger refuses, and counts what it took.
func fillUp(ctx context.Context, l *Ledger) (taken int, err error) {
	for range 100_000 {
		if _, err := begin1(ctx, l); err != nil {
			return taken, nil
		}
		taken++
	}
	return taken, errors.New("the disk never filled up")
}

func begin1(ctx context.Context, l *Ledger) (Receipt, error) {
	ev, err := newEvent(event.HTTP)
	if err != nil {
		return nil, err
	}
	ev.Time = time.Now()
	ev.HTTP = &event.HTTPRequest{Host: "example.org", Path: "/" + strings.Repeat("x", 3000)}
	return l.Begin(ctx, ev, allow())
}
