package launch_test

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/launch"
)

func rerunArgs() []string {
	return []string{"rerun", "-test.run=^Test", "-test.skip=^TestTheSuite|^TestNothingIsLeaked", "-test.timeout=2m"}
}

// copyOfSelf is this program where every user can reach it.
func copyOfSelf(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "launch-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	data, err := os.ReadFile(self())
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "launch.test")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(path, data, 0o755)); err != nil {
		t.Fatal(err)
	}
	return path
}

// rerun runs this suite in a process with other rights.
func rerun(t *testing.T, attr *syscall.SysProcAttr, isolation string, args []string) {
	t.Helper()
	if os.Geteuid() != 0 || os.Getenv(wantIsolation) != "" {
		t.Skip("needs root")
	}
	hostile, err := buildHostile()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "out")
	out, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	p, err := child.Start(t.Context(), child.Command{
		Path: copyOfSelf(t), Args: args, Dir: "/", Stdout: out, Stderr: out, Attr: attr,
		Env: []string{"PATH=/usr/bin:/bin", wantIsolation + "=" + isolation, hostileProgram + "=" + hostile},
	})
	if err := errors.Join(err, out.Close()); err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(); err != nil {
		text, readErr := os.ReadFile(file)
		t.Errorf("%v %v\n%s", err, readErr, text)
	}
}

func TestTheSuitePassesAsAnOrdinaryUser(t *testing.T) {
	attr := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	rerun(t, attr, launch.Strict, rerunArgs()[1:])
}

func TestTheSuitePassesWhereNamespacesAreRefused(t *testing.T) {
	attr := &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{Size: 1}},
	}
	rerun(t, attr, launch.Weak+": user namespaces: no space left on device", []string{"play", "refused"})
}
