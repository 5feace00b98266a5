//go:build linux

package command

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// groups makes cgroups for one test, or says that this machine has none to give.
func groups(t *testing.T) *Cgroups {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if f[2] != "cgroup2" {
			continue
		}
		dir, err := os.MkdirTemp(f[1], "command-test-")
		if err != nil {
			break
		}
		if err := os.Remove(dir); err != nil {
			t.Fatal(err)
		}
		c, err := OpenCgroups(dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { closeGroups(t, c) })
		return c
	}
	t.Skip("no cgroup v2 that this user may write to")
	return nil
}

// closeGroups kills what is left and waits until the kernel has let go of it.
func closeGroups(t *testing.T, c *Cgroups) {
	if err := c.Kill(); err != nil {
		t.Error(err)
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(5 * time.Second)
	for c.Close() != nil {
		select {
		case <-tick.C:
		case <-deadline:
			t.Errorf("something still lives in %s", c.path)
			return
		}
	}
}

// each runs a test with a cgroup and without.
func each(t *testing.T, f func(t *testing.T, group func() *Group)) {
	t.Run("cgroup", func(t *testing.T) {
		c := groups(t)
		f(t, func() *Group {
			g, err := c.New()
			if err != nil {
				t.Fatal(err)
			}
			return g
		})
	})
	t.Run("process table", func(t *testing.T) { f(t, func() *Group { return nil }) })
}

func spec(argv ...string) Spec {
	return Spec{Argv: argv, Env: User{}.Environ(), Dir: "/"}
}

// run starts a command, reads it to the end and returns all it gave.
func run(t *testing.T, s Spec) (stdout, stderr string, st Status) {
	t.Helper()
	c, err := Start(s)
	if err != nil {
		t.Fatal(err)
	}
	defer closeCommand(t, c)
	errs := make(chan string)
	go func() {
		b, err := io.ReadAll(c.Stderr)
		if err != nil {
			b = append(b, err.Error()...)
		}
		errs <- string(b)
	}()
	out, err := io.ReadAll(c.Stdout)
	if err != nil {
		t.Fatal(err)
	}
	stderr = <-errs
	st, err = c.Wait()
	if err != nil {
		t.Fatal(err)
	}
	return string(out), stderr, st
}

func closeCommand(t *testing.T, c *Command) {
	t.Helper()
	for _, f := range []*os.File{c.Stdin, c.Stdout, c.Stderr} {
		if f != nil {
			if err := f.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
				t.Error(err)
			}
		}
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

func TestExitStatusIsTheCommands(t *testing.T) {
	each(t, func(t *testing.T, group func() *Group) {
		for _, tt := range []struct {
			script string
			want   Status
		}{
			{"exit 0", Status{}},
			{"exit 7", Status{Code: 7}},
			{"exit 255", Status{Code: 255}},
			{"kill -TERM $$", Status{Code: 143, Signal: syscall.SIGTERM}},
			{"kill -KILL $$", Status{Code: 137, Signal: syscall.SIGKILL}},
			{"kill -SEGV $$", Status{Code: 139, Signal: syscall.SIGSEGV}},
		} {
			s := spec("sh", "-c", tt.script)
			s.Group = group()
			_, _, got := run(t, s)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tt.script, diff)
			}
		}
	})
}

func TestOutputAndErrorsStayApart(t *testing.T) {
	out, errs, _ := run(t, spec("sh", "-c", "printf out; printf err >&2"))
	if out != "out" || errs != "err" {
		t.Errorf("got %q and %q", out, errs)
	}
}

func TestStdinIsEmptyUnlessAskedFor(t *testing.T) {
	out, _, st := run(t, spec("cat"))
	if out != "" || st.Code != 0 {
		t.Errorf("cat gave %q and ended with %v", out, st)
	}
}

func TestStdinReachesTheCommand(t *testing.T) {
	s := spec("cat")
	s.Stdin = true
	c, err := Start(s)
	if err != nil {
		t.Fatal(err)
	}
	defer closeCommand(t, c)
	if _, err := c.Stdin.WriteString("a\x00b\xff"); err != nil {
		t.Fatal(err)
	}
	if err := c.Stdin.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(c.Stdout)
	if err != nil || string(got) != "a\x00b\xff" {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := c.Wait(); err != nil {
		t.Error(err)
	}
}

func TestWhatCannotBeStartedSaysWhy(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	plain := write("plain", "#!/bin/sh\n", 0o644)
	noLoader := write("noloader", "#!/no/such/interpreter\n", 0o755)
	noFormat := write("noformat", "hello", 0o755)
	long := strings.Repeat("x", maxString+1)
	for _, tt := range []struct {
		name string
		spec Spec
		code int
		text string
	}{
		{"missing", spec("no-such-program"), 127, "not found in PATH"},
		{"missing path", spec("/no/such/program"), 127, "not found"},
		{"path through a file", spec(plain + "/x"), 127, "not a directory"},
		{"empty name", spec(""), 127, "empty"},
		{"no argv", spec(), 126, "empty"},
		{"not executable", spec(plain), 126, "not executable"},
		{"not executable in PATH", Spec{Argv: []string{"plain"}, Env: []string{"PATH=" + dir}, Dir: "/"}, 126, "not executable"},
		{"directory", spec(dir), 126, "directory"},
		{"interpreter missing", spec(noLoader), 126, "interpreter"},
		{"no known format", spec(noFormat), 126, "neither a program"},
		{"missing cwd", Spec{Argv: []string{"true"}, Dir: "/no/such/dir"}, 126, `"/no/such/dir" does not exist`},
		{"cwd is a file", Spec{Argv: []string{"true"}, Dir: plain}, 126, "not a directory"},
		{"NUL in argv", spec("echo", "a\x00b"), 126, "argument 1 contains a NUL"},
		{"long argument", spec("echo", long), 126, "argument 1 has 131072 bytes, over Linux's limit of 131071"},
		{"long variable", Spec{Argv: []string{"true"}, Env: []string{"BIG=" + long}, Dir: "/"}, 126, `variable "BIG" has 131076 bytes`},
		{"long in all", spec(append([]string{"true"}, strings.Split(strings.Repeat(long[:100_000]+" ", 30), " ")...)...), 126, "together, over Linux's limit"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := Start(tt.spec)
			if err == nil {
				closeCommand(t, c)
				t.Fatal("it started")
			}
			se, ok := errors.AsType[*StartError](err)
			if !ok {
				t.Fatalf("got %T: %v", err, err)
			}
			if se.Code != tt.code || !strings.Contains(se.Message, tt.text) {
				t.Errorf("got %d %q, want %d and %q in it", se.Code, se.Message, tt.code, tt.text)
			}
		})
	}
}

// daemon is a script whose grandchild leaves the session, prints its pid and
// stays; the script itself ends when its standard input does.
const daemon = `setsid sh -c 'echo $$; exec sleep 1000' & read x; exit 3`

func TestKillReachesWhatLeftTheSession(t *testing.T) {
	each(t, func(t *testing.T, group func() *Group) {
		s := spec("sh", "-c", daemon)
		s.Stdin, s.Group = true, group()
		c, err := Start(s)
		if err != nil {
			t.Fatal(err)
		}
		defer closeCommand(t, c)
		var pid int
		if _, err := fmt.Fscanln(c.Stdout, &pid); err != nil {
			t.Fatal(err)
		}
		if err := c.Kill(); err != nil {
			t.Fatal(err)
		}
		if st, err := c.Wait(); err != nil || st.Signal != syscall.SIGKILL {
			t.Errorf("ended with %v, %v", st, err)
		}
		wantEOF(t, c.Stdout)
	})
}

func TestKillAfterTheCommandObeyedTermReachesWhatItLeft(t *testing.T) {
	each(t, func(t *testing.T, group func() *Group) {
		s := spec("sh", "-c", daemon)
		s.Stdin, s.Group = true, group()
		c, err := Start(s)
		if err != nil {
			t.Fatal(err)
		}
		defer closeCommand(t, c)
		var pid int
		if _, err := fmt.Fscanln(c.Stdout, &pid); err != nil {
			t.Fatal(err)
		}
		if err := c.Terminate(); err != nil {
			t.Fatal(err)
		}
		if st, err := c.Wait(); err != nil || st.Signal != syscall.SIGTERM {
			t.Errorf("ended with %v, %v", st, err)
		}
		if err := syscall.Kill(pid, 0); err != nil {
			t.Fatalf("the process that left the session did not outlive TERM: %v", err)
		}
		if err := c.Kill(); err != nil {
			t.Fatal(err)
		}
		wantEOF(t, c.Stdout)
	})
}

// wantEOF says that nobody holds the pipe any more.
func wantEOF(t *testing.T, f *os.File) {
	t.Helper()
	if err := f.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, f); err != nil {
		t.Errorf("something of the tree is alive: %v", err)
	}
}

func TestSignalAfterTheEndMeetsNobody(t *testing.T) {
	c, err := Start(spec("true"))
	if err != nil {
		t.Fatal(err)
	}
	defer closeCommand(t, c)
	if _, err := c.Wait(); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.Signal(syscall.SIGTERM), c.Kill()); err != nil {
		t.Error(err)
	}
}

func TestCgroupStaysWhileABackgroundProcessLives(t *testing.T) {
	cg := groups(t)
	g, err := cg.New()
	if err != nil {
		t.Fatal(err)
	}
	s := spec("sh", "-c", "sleep 1000 >/dev/null 2>&1 & exit 0")
	s.Group = g
	run(t, s)
	cg.Sweep()
	if _, err := os.Stat(g.path); err != nil {
		t.Errorf("the background process was taken along: %v", err)
	}
}

func TestOpenCgroupsEndsWhatACrashedOwnerLeft(t *testing.T) {
	cg := groups(t)
	g, err := cg.New()
	if err != nil {
		t.Fatal(err)
	}
	s := spec("sleep", "1000")
	s.Group = g
	c, err := Start(s)
	if err != nil {
		t.Fatal(err)
	}
	defer closeCommand(t, c)
	if _, err := OpenCgroups(cg.path); err != nil {
		t.Fatal(err)
	}
	if st, err := c.Wait(); err != nil || st.Signal != syscall.SIGKILL {
		t.Errorf("ended with %v, %v", st, err)
	}
}

func TestParseStatTakesAnyCommandName(t *testing.T) {
	for _, name := range []string{"sh", "a) R 1 1 (b", "x\ny", ""} {
		line := "42 (" + name + ") S 7 42 41 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 987 1 2"
		p, ok := parseStat([]byte(line))
		if want := (process{parent: 7, session: 41, start: 987}); !ok || p != want {
			t.Errorf("%q: got %+v, %t", name, p, ok)
		}
	}
}

func TestLookupUser(t *testing.T) {
	root := t.TempDir()
	if err := os.Mkdir(root+"/etc", 0o755); err != nil {
		t.Fatal(err)
	}
	passwd := "root:x:0:0:root:/root:/bin/bash\nbroken line\nann:x:1000:1000::/home/ann:/bin/sh\n1000:x:77:77::/odd:/bin/sh\n"
	group := "ann:x:1000:\nwheel:x:10:bob,ann\nvideo:x:44:annabel\n"
	for name, content := range map[string]string{"passwd": passwd, "group": group} {
		if err := os.WriteFile(root+"/etc/"+name, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name string
		want User
	}{
		{"root", User{Name: "root", Groups: []uint32{0}, Home: "/root", Shell: "/bin/bash"}},
		{"0", User{Name: "root", Groups: []uint32{0}, Home: "/root", Shell: "/bin/bash"}},
		{"ann", User{Name: "ann", UID: 1000, GID: 1000, Groups: []uint32{1000, 10}, Home: "/home/ann", Shell: "/bin/sh"}},
		{"1000", User{Name: "1000", UID: 77, GID: 77, Groups: []uint32{77}, Home: "/odd", Shell: "/bin/sh"}},
		{"4242", User{Name: "4242", UID: 4242, GID: 4242, Groups: []uint32{4242}, Home: "/", Shell: "/bin/sh"}},
	} {
		got, err := LookupUser(root, tt.name)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
	if _, err := LookupUser(root, "nobody-here"); err == nil {
		t.Error("a user that does not exist was found")
	}
	if u, err := LookupUser(t.TempDir(), "root"); err != nil || u.Home != "/root" {
		t.Errorf("root of an image without /etc/passwd: %+v, %v", u, err)
	}
}

func TestEnvironKeepsTheLastOfEachName(t *testing.T) {
	u := User{Name: "ann", Home: "/home/ann", Shell: "/bin/sh"}
	got := u.Environ([]string{"HOME=/other", "A=1"}, []string{"A=2 with = and\nnewline", "bare", "\xff=\xfe"})
	want := []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=/other", "USER=ann", "LOGNAME=ann", "SHELL=/bin/sh",
		"A=2 with = and\nnewline", "bare", "\xff=\xfe",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestCommandsOfAnotherUserOwnTheirPipes(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to change identity")
	}
	s := spec("sh", "-c", "id -u; id -G; echo there > /dev/stdout")
	s.User = User{Name: "someone", UID: 4242, GID: 4243, Groups: []uint32{4243, 10}}
	out, errs, _ := run(t, s)
	if want := "4242\n4243 10\nthere\n"; out != want {
		t.Errorf("got %q and %q, want %q", out, errs, want)
	}
}

// FuzzArgvAndEnvironmentArriveAsTheyAre is A13: what a program is given equals
// what was asked for, byte for byte.
func FuzzArgvAndEnvironmentArriveAsTheyAre(f *testing.F) {
	f.Add("a b", "V=c d")
	f.Add("", "=")
	f.Add("'\"$HOME`id`\n\t\\", "X=\xff\xfe é")
	f.Add("--", "NOEQUALS")
	f.Fuzz(func(t *testing.T, arg, env string) {
		if strings.Contains(arg+env, "\x00") || len(arg)+len(env) > 1000 {
			t.Skip("no program can be given a NUL")
		}
		c, err := Start(Spec{
			Argv: []string{"/bin/cat", "/proc/self/cmdline", "/proc/self/environ", "--", arg},
			Env:  []string{"FIRST=1", env},
			Dir:  "/",
		})
		if err != nil {
			t.Fatal(err)
		}
		defer closeCommand(t, c)
		got, err := io.ReadAll(c.Stdout)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Wait(); err != nil {
			t.Fatal(err)
		}
		want := "/bin/cat\x00/proc/self/cmdline\x00/proc/self/environ\x00--\x00" + arg + "\x00FIRST=1\x00" + env + "\x00"
		if !bytes.HasPrefix(got, []byte(want)) {
			t.Errorf("got %q, want %q", got, want)
		}
	})
}

func TestUsersSeesThatTheFilesWereWritten(t *testing.T) {
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(root, "etc", name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	users := Users{Root: root}
	write("passwd", "ada:x:7:7::/home/ada:/bin/sh\n")
	write("group", "")
	for _, home := range []string{"/home/ada", "/home/eve"} {
		write("passwd", "ada:x:7:7::"+home+":/bin/sh\n")
		for range 2 { // read, then remembered
			if u, err := users.Lookup("ada"); err != nil || u.Home != home {
				t.Errorf("got %+v, %v, want the home %s", u, err, home)
			}
		}
	}
	write("group", "crew:x:9:ada\n")
	if u, err := users.Lookup("ada"); err != nil || len(u.Groups) != 2 {
		t.Errorf("got %+v, %v, want two groups", u, err)
	}
	if _, err := users.Lookup("nobody-here"); err == nil {
		t.Error("a user that is not there was found")
	}
}

func TestUsersRemembersFilesThatHaveSettled(t *testing.T) {
	users := Users{}
	first, err := users.Lookup("root")
	if err != nil || !users.files[0].known {
		t.Skipf("this machine's /etc/passwd was written a moment ago, or is not there: %v", err)
	}
	if again, err := users.Lookup("root"); err != nil || !cmp.Equal(again, first) {
		t.Errorf("got %+v, %v, want %+v", again, err, first)
	}
}
