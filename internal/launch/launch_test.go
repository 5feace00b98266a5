package launch_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/launch"
)

// wantIsolation is the variable by which a re-run of this suite is told what it
// must find.
const wantIsolation = "CAPSEM_TEST_ISOLATION"

// TestMain lets the test binary be the launcher, an init, or a program.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case launch.ServeCommand:
			log := slog.New(slog.NewTextHandler(os.Stderr, nil))
			if err := launch.Serve(context.Background(), os.NewFile(launch.SocketFD, "socket"), log); err != nil {
				log.Error("launcher failed", "error", err)
				os.Exit(1)
			}
			os.Exit(0)
		case launch.InitCommand:
			os.Exit(launch.Init(os.Stderr))
		case "play":
			os.Exit(play(os.Args[2]))
		}
	}
	code := m.Run()
	if hostileFolder != "" {
		if err := os.RemoveAll(hostileFolder); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
	os.Exit(code)
}

func play(role string) int {
	var err error
	switch role {
	case "owner": // the per-VM process
		err = playOwner()
	case "tree": // npx → sh → node, with everything that escapes a group
		err = playTree()
	case "sleeper":
		signal.Ignore(syscall.SIGTERM, syscall.SIGHUP)
		fmt.Println("sleeper")
		forever()
	case "polite":
		term := make(chan os.Signal, 1)
		signal.Notify(term, syscall.SIGTERM)
		fmt.Println("polite")
		<-term
		return 5
	case "fds":
		err = playFDs()
	case "env":
		fmt.Print(strings.Join(os.Environ(), "\n"))
	case "refused":
		err = playRefused()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func playOwner() error {
	client, err := launch.Start(context.Background(), "/proc/self/exe")
	if err != nil {
		return err
	}
	for range 2 {
		if _, err := client.Start(context.Background(), jail(), program("tree", os.Stdout)); err != nil {
			return err
		}
	}
	forever()
	return nil
}

// playTree starts a daemon: a grandchild in a session of its own whose parent is
// gone.
func playTree() error {
	daemon := exec.Command("/bin/sh", "-c", `setsid "$0" play sleeper & exit 0`, self())
	daemon.Stdout = os.Stdout
	if err := daemon.Start(); err != nil {
		return err
	}
	fmt.Println("tree")
	forever()
	return nil
}

func playFDs() error {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, e := range entries {
		target, err := os.Readlink("/proc/self/fd/" + e.Name())
		// The runtime opens an epoll instance and its cgroup's limits.
		if err == nil && !strings.HasPrefix(target, "anon_inode:") && !strings.HasPrefix(target, "/proc/") && !strings.HasPrefix(target, "/sys/fs/cgroup/") {
			fmt.Println(e.Name())
		}
	}
	return nil
}

// playRefused runs the suite in a user namespace that allows no more namespaces.
func playRefused() error {
	for _, kind := range []string{"user", "pid", "mnt"} {
		if err := os.WriteFile("/proc/sys/user/max_"+kind+"_namespaces", []byte("0"), 0); err != nil {
			return err
		}
	}
	return unix.Exec(self(), rerunArgs(), os.Environ())
}

// self is this program's path, which jails show.
func self() string {
	path, err := os.Executable()
	if err != nil {
		panic(err) // /proc is not there
	}
	return path
}

// jail is one for programs of all kinds, also where the host has no namespaces.
func jail() launch.Jail { return launch.Jail{Profile: launch.Aggregator, Weak: true} }

// forever blocks in a way that the runtime does not take for a deadlock.
func forever() {
	never := make(chan os.Signal, 1)
	signal.Notify(never, syscall.SIGUSR2)
	<-never
}

func program(role string, stdout *os.File) child.Command {
	return child.Command{Path: self(), Args: []string{"play", role}, Stdout: stdout, Stderr: os.Stderr, Env: []string{"PATH=/usr/bin:/bin"}}
}

func newClient(t *testing.T) *launch.Client {
	t.Helper()
	client, err := launch.Start(t.Context(), "/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	})
	return client
}

// run starts a role through client and returns its stdout.
func run(t *testing.T, client *launch.Client, role string, files ...*os.File) (*launch.Process, *bufio.Reader) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() }) // read side
	cmd := program(role, w)
	cmd.Files = files
	p, err := client.Start(t.Context(), jail(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return p, bufio.NewReader(r)
}

// await reads lines until each of words was seen n times.
func await(t *testing.T, out *bufio.Reader, n int, words ...string) {
	t.Helper()
	seen := make(map[string]int)
	for {
		missing := false
		for _, w := range words {
			missing = missing || seen[w] < n
		}
		if !missing {
			return
		}
		line, err := out.ReadString('\n')
		if err != nil {
			t.Fatalf("after %v: %v", seen, err)
		}
		seen[strings.TrimSpace(line)]++
	}
}

// gone checks that every process that holds the other end of out ends within a
// second.
func gone(t *testing.T, out io.Reader) {
	t.Helper()
	begin := time.Now()
	if _, err := io.ReadAll(out); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took > time.Second {
		t.Errorf("the last process was gone after %s", took)
	}
}

func TestEverythingDiesWithTheOwner(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }() // read side
	owner, err := child.Start(t.Context(), program("owner", w))
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	out := bufio.NewReader(r)
	await(t, out, 2, "tree", "sleeper")
	if err := owner.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	gone(t, out)
}

func TestKillTakesTheWholeTree(t *testing.T) {
	client := newClient(t)
	p, out := run(t, client, "tree")
	await(t, out, 1, "tree", "sleeper")
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	gone(t, out)
	want := &child.ExitError{Program: self(), Code: -1, Signal: syscall.SIGKILL}
	if diff := cmp.Diff(error(want), p.Wait()); diff != "" {
		t.Error(diff)
	}
	if err := p.Kill(); err != nil {
		t.Errorf("killing it again: %v", err)
	}
	if err := p.Signal(syscall.SIGTERM); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("signalling it afterwards: %v", err)
	}
}

func TestTheTreeGoesWhenItsInitIsKilled(t *testing.T) {
	client := newClient(t)
	p, out := run(t, client, "tree")
	await(t, out, 1, "tree", "sleeper")
	if err := unix.Kill(p.PID(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	gone(t, out)
	if err := p.Wait(); err == nil {
		t.Error("its end looks like an orderly one")
	}
}

func TestTheTreeGoesWhenItsProgramEnds(t *testing.T) {
	client := newClient(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }() // read side
	p, err := client.Start(t.Context(), jail(), child.Command{
		Path: "/bin/sh", Args: []string{"-c", "setsid sleep 1000 & exit 3"}, Stdout: w, Env: []string{"PATH=/usr/bin:/bin"},
	})
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	gone(t, r)
	if diff := cmp.Diff(error(&child.ExitError{Program: "/bin/sh", Code: 3}), p.Wait()); diff != "" {
		t.Error(diff)
	}
}

func TestCloseTakesEverything(t *testing.T) {
	client := newClient(t)
	p, out := run(t, client, "tree")
	await(t, out, 1, "tree", "sleeper")
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	gone(t, out)
	if err := p.Wait(); err == nil {
		t.Error("its end looks like an orderly one")
	}
	if _, err := client.Start(t.Context(), jail(), program("env", nil)); err == nil {
		t.Error("something was started after Close")
	}
}

func TestStopAsksFirst(t *testing.T) {
	client := newClient(t)
	p, out := run(t, client, "polite")
	await(t, out, 1, "polite")
	if err := p.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(error(&child.ExitError{Program: self(), Code: 5}), p.Wait()); diff != "" {
		t.Error(diff)
	}
}

func TestStopKillsWhatIgnoresIt(t *testing.T) {
	client := newClient(t)
	p, out := run(t, client, "sleeper")
	await(t, out, 1, "sleeper")
	begin := time.Now()
	if err := p.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took < child.Grace || took > child.Grace+2*time.Second {
		t.Errorf("took %s", took)
	}
}

func TestWaitGivesTheProgramsStatus(t *testing.T) {
	client := newClient(t)
	for _, test := range []struct {
		script string
		want   error
	}{
		{"exit 0", nil},
		{"exit 7", &child.ExitError{Program: "/bin/sh", Code: 7}},
		{"kill -11 $$", &child.ExitError{Program: "/bin/sh", Code: -1, Signal: syscall.SIGSEGV}},
	} {
		p, err := client.Start(t.Context(), launch.Jail{Profile: launch.VMM, Weak: true}, child.Command{Path: "/bin/sh", Args: []string{"-c", test.script}})
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if diff := cmp.Diff(test.want, p.Wait()); diff != "" {
				t.Errorf("%q (-want +got):\n%s", test.script, diff)
			}
		}
	}
}

func TestTheProgramHasItsDescriptorsAndVariablesAndNoOthers(t *testing.T) {
	client := newClient(t)
	fd, err := unix.Open("/etc/passwd", unix.O_RDONLY, 0) // not close-on-exec
	if err != nil {
		t.Fatal(err)
	}
	extra := os.NewFile(uintptr(fd), "extra")
	defer func() { _ = extra.Close() }() // read only
	for role, want := range map[string]string{"fds": "0\n1\n2\n3\n4\n", "env": "PATH=/usr/bin:/bin"} {
		p, out := run(t, client, role, extra, extra)
		got, err := io.ReadAll(out)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, string(got)); diff != "" {
			t.Errorf("%s: %s", role, diff)
		}
	}
}

func TestWhatCannotBeStartedIsExplained(t *testing.T) {
	client := newClient(t)
	long := strings.Repeat("x", launch.MaxMessage)
	for _, test := range []struct {
		name    string
		profile launch.Profile
		cmd     child.Command
		want    string
		match   error
	}{
		{"missing", launch.VMM, child.Command{Path: "no-such-thing", Env: []string{"PATH=/bin"}}, `starting no-such-thing: no such program in PATH "/bin"`, fs.ErrNotExist},
		{"not executable", launch.VMM, child.Command{Path: "/etc/passwd"}, "/etc/passwd is not executable", fs.ErrPermission},
		{"profile", "root", child.Command{Path: "/bin/true"}, `unknown profile "root"`, nil},
		{"too large", launch.VMM, child.Command{Path: "/bin/true", Args: []string{long}}, "arguments and environment are too large", nil},
		{"too many files", launch.VMM, child.Command{Path: "/bin/true", Files: make([]*os.File, launch.MaxFiles-2)}, "65 descriptors, want 3 to 64", nil},
		{"attributes", launch.VMM, child.Command{Path: "/bin/true", Attr: &syscall.SysProcAttr{}}, "process attributes are the profile's", nil},
	} {
		_, err := client.Start(t.Context(), launch.Jail{Profile: test.profile, Weak: true}, test.cmd)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q in it", test.name, err, test.want)
		}
		if test.match != nil && !errors.Is(err, test.match) {
			t.Errorf("%s: %v does not match %v", test.name, err, test.match)
		}
	}
	p, err := client.Start(t.Context(), launch.Jail{Profile: launch.VMM, Weak: true}, child.Command{Path: "/bin/true"})
	if err != nil {
		t.Fatalf("after all that: %v", err)
	}
	if err := p.Wait(); err != nil {
		t.Error(err)
	}
}

func TestNothingIsLeakedByManyStarts(t *testing.T) {
	client := newClient(t)
	cycle := func() {
		p, err := client.Start(t.Context(), jail(), child.Command{Path: "/bin/true"})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	cycle()
	before := descriptors(t, "self")
	for range 20 { // under the race detector every exit takes a second
		cycle()
	}
	if after := descriptors(t, "self"); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func descriptors(t *testing.T, pid string) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/" + pid + "/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestTheLauncherDoesNotTakeWhatIsNoRequest(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	defer func() { _ = ours.Close() }() // nothing is buffered
	p, err := child.Start(t.Context(), child.Command{Path: "/proc/self/exe", Args: []string{launch.ServeCommand}, Files: []*os.File{theirs}})
	if err := errors.Join(err, theirs.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := ours.WriteString(`{"hello":{"isolation":"none"}}`); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(error(&child.ExitError{Program: "/proc/self/exe", Code: 1}), p.Wait()); diff != "" {
		t.Error(diff)
	}
}

func TestIsolationIsWhatItSays(t *testing.T) {
	client := newClient(t)
	if want := os.Getenv(wantIsolation); want != "" && !strings.HasPrefix(client.Isolation(), want) {
		t.Errorf("isolation %q, want %q", client.Isolation(), want)
	}
	t.Logf("isolation: %s", client.Isolation())
	if !strings.HasPrefix(client.Isolation(), launch.Strict) {
		return
	}
	p, err := client.Start(t.Context(), jail(), child.Command{
		Path: "/bin/sh", Args: []string{"-c", "set -- /proc/[0-9]*; exec test $# -eq 2"},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(); err != nil {
		t.Errorf("the program sees more than its init and itself: %v", err)
	}
}

func TestWithoutAJailNothingStartsUnlessWeakIsAccepted(t *testing.T) {
	client := newClient(t)
	p, err := client.Start(t.Context(), launch.Jail{Profile: launch.VMM}, child.Command{Path: "/bin/true"})
	if strings.HasPrefix(client.Isolation(), launch.Strict) {
		if err := errors.Join(err, p.Wait()); err != nil {
			t.Error(err)
		}
		return
	}
	for _, want := range []string{"user namespaces: no space left on device", "sysctl user.max_user_namespaces=", `isolation = "weak"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
}

func TestAJailShowsWhatItNames(t *testing.T) {
	client := newClient(t)
	dir := t.TempDir()
	shown, hidden := filepath.Join(dir, "shown"), filepath.Join(dir, "hidden")
	for _, name := range []string{shown, hidden} {
		if err := os.Mkdir(name, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(name, "file"), []byte("text"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range []struct {
		name, script string
		write        bool
		want         bool
	}{
		{"reads what is shown", "cat $0/file", false, true},
		{"does not write to what is shown", "echo > $0/new", false, false},
		{"does not change what is shown", "echo > $0/file", false, false},
		{"writes to what it may write to", "echo > $0/new", true, true},
		{"does not see what is beside it", "cat $0/../hidden/file", true, false},
	} {
		j := jail()
		if test.write {
			j.Write = []string{shown}
		} else {
			j.Read = []string{shown}
		}
		p, err := client.Start(t.Context(), j, child.Command{Path: "/bin/sh", Args: []string{"-c", test.script, shown}, Env: []string{"PATH=/usr/bin:/bin"}})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(); (err == nil) != test.want {
			t.Errorf("%s: got %v", test.name, err)
		}
	}
}
