package child_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/child"
)

// TestMain lets the test binary play the child when it is started as one.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "play" {
		os.Exit(play(os.Args[2]))
	}
	os.Exit(m.Run())
}

func play(role string) int {
	switch role {
	case "env":
		for _, kv := range os.Environ() {
			fmt.Println(kv)
		}
	case "fds":
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			return 1
		}
		for _, e := range entries {
			// The runtime itself opens an epoll instance, its cgroup's limits,
			// and, for ReadDir, the folder.
			target, err := os.Readlink("/proc/self/fd/" + e.Name())
			if err == nil && !strings.HasPrefix(target, "anon_inode:") && !strings.HasPrefix(target, "/proc/") && !strings.HasPrefix(target, "/sys/fs/cgroup/") {
				fmt.Println(e.Name())
			}
		}
	case "stubborn":
		signal.Ignore(syscall.SIGTERM, syscall.SIGHUP)
		fmt.Println("ready")
		forever()
	case "parent":
		p, err := child.Start(context.Background(), child.Command{Path: "/proc/self/exe", Args: []string{"play", "stubborn"}})
		if err != nil {
			return 1
		}
		fmt.Println(p.PID())
		forever()
	case "family":
		// A grandchild in the same group that holds stdout.
		if err := startSleeper(); err != nil {
			return 1
		}
		fmt.Println("ready")
	}
	return 0
}

// forever blocks in a way that the runtime does not take for a deadlock.
func forever() {
	never := make(chan os.Signal, 1)
	signal.Notify(never, syscall.SIGUSR2)
	<-never
}

func startSleeper() error {
	p, err := os.StartProcess("/proc/self/exe", []string{"x", "play", "stubborn"}, &os.ProcAttr{Files: []*os.File{nil, os.Stdout}})
	if err != nil {
		return err
	}
	return p.Release()
}

func pipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = r.Close() // may be closed by the test already
		_ = w.Close()
	})
	return r, w
}

// start runs the test binary in a role, and returns its stdout.
func start(t *testing.T, role string, cmd child.Command) (*child.Process, *bufio.Reader) {
	t.Helper()
	r, w := pipe(t)
	cmd.Path, cmd.Args, cmd.Stdout, cmd.Stderr = "/proc/self/exe", []string{"play", role}, w, os.Stderr
	p, err := child.Start(t.Context(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Kill(); err != nil {
			t.Error(err)
		}
		<-p.Done()
	})
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return p, bufio.NewReader(r)
}

func shell(t *testing.T, script string) *child.Process {
	t.Helper()
	p, err := child.Start(t.Context(), child.Command{Path: "/bin/sh", Args: []string{"-c", script}})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestWaitSaysHowTheProcessEnded(t *testing.T) {
	for _, test := range []struct {
		script string
		want   error
	}{
		{"exit 0", nil},
		{"exit 7", &child.ExitError{Program: "/bin/sh", Code: 7}},
		{"kill -9 $$", &child.ExitError{Program: "/bin/sh", Code: -1, Signal: syscall.SIGKILL}},
	} {
		p := shell(t, test.script)
		for range 2 {
			if diff := cmp.Diff(test.want, p.Wait()); diff != "" {
				t.Errorf("%q (-want +got):\n%s", test.script, diff)
			}
		}
		if err := p.Signal(syscall.SIGTERM); !errors.Is(err, os.ErrProcessDone) {
			t.Errorf("signalling after the end: %v", err)
		}
		if err := p.Kill(); err != nil {
			t.Errorf("killing after the end: %v", err)
		}
	}
}

func TestAProgramThatCannotStartIsNamedWithTheReason(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string, mode os.FileMode) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
		return file
	}
	plain := write("plain", "#!/bin/sh\n", 0o600)
	orphan := write("orphan", "#!/nowhere/interpreter\n", 0o700)
	garbage := write("garbage", "\x00\x01\x02", 0o700)
	for _, test := range []struct {
		path  string
		env   []string
		want  string
		match error
	}{
		{"no-such-thing", []string{"PATH=/usr/bin:" + dir}, `starting no-such-thing: no such program in PATH "/usr/bin:` + dir + `"`, fs.ErrNotExist},
		{"sh", nil, "starting sh: no such program: its environment has no PATH", fs.ErrNotExist},
		{"/no/such/thing", nil, "starting /no/such/thing: no such program", fs.ErrNotExist},
		{"plain", []string{"PATH=" + dir}, plain + " is not executable", fs.ErrPermission},
		{plain, nil, plain + " is not executable", fs.ErrPermission},
		{orphan, nil, "its interpreter", fs.ErrNotExist},
		{garbage, nil, garbage + " is no program for this machine", syscall.ENOEXEC},
		{"", nil, "no program named", nil},
	} {
		_, err := child.Start(t.Context(), child.Command{Path: test.path, Env: test.env})
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q in it", test.path, err, test.want)
		}
		if test.match != nil && !errors.Is(err, test.match) {
			t.Errorf("%s: %v does not match %v", test.path, err, test.match)
		}
	}
}

func TestTheProgramIsLookedUpInThePathOfTheChild(t *testing.T) {
	p, err := child.Start(t.Context(), child.Command{Path: "sh", Args: []string{"-c", "exit 3"}, Env: []string{"PATH=relative:/usr/bin:/bin"}})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(error(&child.ExitError{Program: "sh", Code: 3}), p.Wait()); diff != "" {
		t.Error(diff)
	}
}

func TestTheEnvironmentIsOnlyWhatTheCommandSays(t *testing.T) {
	t.Setenv("CAPSEM_CHILD_SECRET", "leak")
	for _, env := range [][]string{nil, {}, {"A=1", "B="}} {
		p, out := start(t, "env", child.Command{Env: env})
		got, err := io.ReadAll(out)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		want := ""
		for _, kv := range env {
			want += kv + "\n"
		}
		if diff := cmp.Diff(want, string(got)); diff != "" {
			t.Error(diff)
		}
	}
}

func TestTheChildHasItsDescriptorsAndNoOthers(t *testing.T) {
	// A descriptor that would be inherited: not close-on-exec.
	fd, err := unix.Open("/etc/passwd", unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }() // read only
	r, w := pipe(t)
	p, out := start(t, "fds", child.Command{Files: []*os.File{r, w}})
	got, err := io.ReadAll(out)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff("0\n1\n2\n3\n4\n", string(got)); diff != "" {
		t.Error(diff)
	}
}

func TestTheChildLeadsItsOwnSession(t *testing.T) {
	p, out := start(t, "stubborn", child.Command{})
	if _, err := out.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	sid, err := unix.Getsid(p.PID())
	if err != nil || sid != p.PID() {
		t.Errorf("session %d, %v; want %d", sid, err, p.PID())
	}
}

func TestStopKillsAChildThatIgnoresTerm(t *testing.T) {
	p, out := start(t, "stubborn", child.Command{})
	if _, err := out.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	if err := p.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took < child.Grace || took > child.Grace+2*time.Second {
		t.Errorf("took %s", took)
	}
	want := &child.ExitError{Program: "/proc/self/exe", Code: -1, Signal: syscall.SIGKILL}
	if diff := cmp.Diff(error(want), p.Wait()); diff != "" {
		t.Error(diff)
	}
}

func TestStopKillsAtOnceWhenItsContextEnds(t *testing.T) {
	p, out := start(t, "stubborn", child.Command{})
	if _, err := out.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	begin := time.Now()
	if err := p.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took >= child.Grace {
		t.Errorf("took %s", took)
	}
}

func TestWhatIsLeftOfTheGroupDiesWithItsLeader(t *testing.T) {
	_, out := start(t, "family", child.Command{})
	// The sleeper holds the pipe's other end: the end of file says that it is
	// gone as well.
	if _, err := io.ReadAll(out); err != nil {
		t.Fatal(err)
	}
}

func TestTheChildOutlivesTheContextOfItsStart(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	r, w := pipe(t)
	p, err := child.Start(ctx, child.Command{Path: "/bin/cat", Stdin: r})
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := p.Signal(0); err != nil {
		t.Error(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(); err != nil {
		t.Errorf("it did not end by itself: %v", err)
	}
}

func TestTheChildDiesWithItsParent(t *testing.T) {
	p, out := start(t, "parent", child.Command{})
	line, err := out.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	grandchild, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(grandchild) }() // a pidfd holds no data
	if err := p.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(grandchild), Events: unix.POLLIN}}, 1000); n != 1 {
		t.Errorf("the grandchild is there after a second: %v", err)
	}
}

func TestAThousandCyclesLeaveNoZombieAndNoDescriptor(t *testing.T) {
	before := openDescriptors(t)
	for i := range 1000 {
		p, err := child.Start(t.Context(), child.Command{Path: "/bin/true"})
		if err != nil {
			t.Fatalf("cycle %d: %v", i, err)
		}
		if i%2 == 0 {
			err = p.Wait()
		} else {
			err = p.Stop(t.Context())
		}
		if err != nil {
			t.Fatalf("cycle %d: %v", i, err)
		}
	}
	if after := openDescriptors(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
	if err := unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil); err != unix.ECHILD {
		t.Errorf("there are children left: %v", err)
	}
}

func openDescriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
