//go:build linux

package guest_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/guest"
	"github.com/capsem/capsem/internal/guestproto"
)

// TestA1ExecReturnsWhenTheCommandHasEndedWhateverStdinDoes: the caller's input is
// a pipe that nobody closes.
func TestA1ExecReturnsWhenTheCommandHasEndedWhateverStdinDoes(t *testing.T) {
	g := ready(t)
	open, w := io.Pipe()
	defer w.Close()
	out, _, r := capture(t, g, argv("echo", "hi"), open)
	if out != "hi\n" || r.ExitCode != 0 {
		t.Errorf("got %q, %+v", out, r)
	}
	e := argv("sleep", "1000")
	e.TimeoutMS = 50
	_, _, r = capture(t, g, e, open)
	if !r.TimedOut || r.Signal != "TERM" || r.ExitCode != 143 {
		t.Errorf("sleep over its time: %+v", r)
	}
}

func TestA2StdinIsEmptyUnlessThereIsOne(t *testing.T) {
	g := ready(t)
	if out, _, r := capture(t, g, argv("cat"), nil); out != "" || r.ExitCode != 0 {
		t.Errorf("cat without input: %q, %+v", out, r)
	}
	if out, _, _ := capture(t, g, argv("cat"), strings.NewReader("x\n")); out != "x\n" {
		t.Errorf("cat gave %q", out)
	}
}

// slowWriter takes a little at a time, each piece when the test lets it.
type slowWriter struct {
	sum   io.Writer
	total int64
	gate  <-chan struct{}
}

func (w *slowWriter) Write(p []byte) (int, error) {
	<-w.gate
	w.total += int64(len(p))
	return w.sum.Write(p)
}

// TestA4ASlowConsumerLosesNothing: output is far more than all buffers between
// together, and its reader stops for a while in the middle.
func TestA4ASlowConsumerLosesNothing(t *testing.T) {
	g := ready(t)
	const size = 24 << 20
	gate := make(chan struct{})
	w := &slowWriter{sum: sha256.New(), gate: gate}
	var opened sync.Once
	progress := filepath.Join(t.TempDir(), "progress")
	script := fmt.Sprintf(`yes 0123456789abcde | head -c %d; echo done > %s`, size, progress)
	done := make(chan error, 1)
	var r event.ExecResult
	go func() {
		var err error
		r, err = g.Exec(bounded(t), sh(script), guest.IO{Stdout: w})
		done <- err
	}()
	for range 3 {
		gate <- struct{}{}
	}
	// The writer stands still: so must the command.
	if _, err := os.Stat(progress); err == nil {
		t.Error("the command has ended although nobody took its output")
	}
	opened.Do(func() { close(gate) })
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	want := sha256.New()
	line := []byte("0123456789abcde\n")
	for range size / len(line) {
		want.Write(line)
	}
	if got := w.sum.(interface{ Sum([]byte) []byte }).Sum(nil); w.total != size || !bytes.Equal(got, want.Sum(nil)) {
		t.Errorf("%d of %d bytes came, or not the right ones", w.total, size)
	}
	if r.StdoutBytes != size {
		t.Errorf("counted %d bytes", r.StdoutBytes)
	}
}

// TestA7TheLastBytesComeBeforeTheEnd runs it often: the race is between the pipe
// and the exit status.
func TestA7TheLastBytesComeBeforeTheEnd(t *testing.T) {
	g := ready(t)
	n := 1000
	if testing.Short() {
		n = 100
	}
	work := make(chan int)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range work {
				out, _, _ := capture(t, g, argv("printf", "late"), nil)
				if out != "late" {
					t.Errorf("run %d gave %q", i, out)
				}
			}
		})
	}
	for i := range n {
		work <- i
	}
	close(work)
	wg.Wait()
}

// TestA8ExitStatusAndReason is the table of ways in which a program ends or does
// not begin.
func TestA8ExitStatusAndReason(t *testing.T) {
	g := ready(t)
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, []byte("no program"), 0o644); err != nil {
		t.Fatal(err)
	}
	elsewhere := argv("true")
	elsewhere.Cwd = []byte("/no/such/folder")
	stranger := argv("true")
	stranger.User = "nobody-of-that-name"
	for _, tt := range []struct {
		name   string
		exec   guestproto.Exec
		code   int
		signal string
		stderr string
	}{
		{"true", argv("true"), 0, "", ""},
		{"false", argv("false"), 1, "", ""},
		{"status 7", sh("exit 7"), 7, "", ""},
		{"status 255", sh("exit 255"), 255, "", ""},
		{"own words", sh("echo why >&2; exit 3"), 3, "", "why\n"},
		{"segmentation fault", sh("kill -SEGV $$"), 139, "SEGV", ""},
		{"killed", sh("kill -KILL $$"), 137, "KILL", ""},
		{"not there", argv("no-such-program"), 127, "", "capsem: no-such-program: not found in PATH"},
		{"not a program", argv(plain), 126, "", "not executable"},
		{"a folder", argv("/tmp"), 126, "", "directory"},
		{"no such cwd", elsewhere, 126, "", `"/no/such/folder" does not exist`},
		{"no such user", stranger, 126, "", "nobody-of-that-name"},
		{"a NUL", argv("echo", "a\x00b"), 126, "", "NUL"},
		{"E2BIG", argv("echo", strings.Repeat("x", 200_000)), 126, "", "argument 1 has 200000 bytes, over Linux's limit of 131071 for one string: send it on standard input or in a file"},
	} {
		_, stderr, r := capture(t, g, tt.exec, nil)
		if r.ExitCode != tt.code || r.Signal != tt.signal || !strings.Contains(stderr, tt.stderr) || (tt.stderr == "") != (stderr == "") {
			t.Errorf("%s: status %d, signal %q, stderr %q; want %d, %q, %q", tt.name, r.ExitCode, r.Signal, stderr, tt.code, tt.signal, tt.stderr)
		}
		if r.StderrBytes != int64(len(stderr)) {
			t.Errorf("%s: counted %d bytes of %d", tt.name, r.StderrBytes, len(stderr))
		}
	}
}

func TestExecRefusesWhatDoesNotFitInAMessage(t *testing.T) {
	g := ready(t)
	e := argv("true")
	e.Env = [][]byte{bytes.Repeat([]byte("x"), guestproto.MaxMessage)}
	_, err := g.Exec(bounded(t), e, guest.IO{})
	if err == nil || !strings.Contains(err.Error(), "over the limit of") {
		t.Errorf("got %v", err)
	}
	if _, err := g.Exec(bounded(t), guestproto.Exec{}, guest.IO{}); err == nil {
		t.Error("a command without argv ran")
	}
}

// TestA13ArgvAndEnvironmentAreBytes is the whole way, host to process; the fuzz
// target of package command has the odd values.
func TestA13ArgvAndEnvironmentAreBytes(t *testing.T) {
	g := ready(t)
	e := argv("cat", "/proc/self/cmdline", "/proc/self/environ", "--", "a b", "", "'\"$HOME`id`", "\xff\xfe", "new\nline")
	e.Env = [][]byte{[]byte("HOME=/h o m e"), []byte("PATH=/usr/bin:/bin"), []byte("X=\xff = \n"), []byte("EMPTY=")}
	out, _, _ := capture(t, g, e, nil)
	want := "cat\x00/proc/self/cmdline\x00/proc/self/environ\x00--\x00a b\x00\x00'\"$HOME`id`\x00\xff\xfe\x00new\nline\x00"
	if !strings.HasPrefix(out, want) {
		t.Errorf("argv is %q, want %q", out, want)
	}
	env := strings.Split(strings.TrimPrefix(out, want), "\x00")
	for _, w := range []string{"HOME=/h o m e", "X=\xff = \n", "EMPTY="} {
		found := false
		for _, e := range env {
			found = found || e == w
		}
		if !found {
			t.Errorf("%q is not in the environment %q", w, env)
		}
	}
}

func TestBaseEnvironmentComesFromTheHostAndACommandOverridesIt(t *testing.T) {
	g, _ := start(t, real(t, options()), guest.Options{Env: [][]byte{[]byte("LANG=C.UTF-8"), []byte("A=base")}})
	awaitReady(t, g)
	e := sh("echo $LANG $A")
	e.Env = [][]byte{[]byte("A=own")}
	if out, _, _ := capture(t, g, e, nil); out != "C.UTF-8 own\n" {
		t.Errorf("got %q", out)
	}
}

// TestA16EveryByteComesThroughBothWays sends the 256-byte table, and runes split
// at the edges of messages.
func TestA16EveryByteComesThroughBothWays(t *testing.T) {
	g := ready(t)
	table := make([]byte, 256)
	for i := range table {
		table[i] = byte(i)
	}
	inputs := [][]byte{table}
	for _, at := range []int{4096, 8192, 65536} {
		text := bytes.Repeat([]byte("x"), at-1)
		inputs = append(inputs, append(text, "é€😀"...))
	}
	for _, in := range inputs {
		out, _, r := capture(t, g, argv("cat"), bytes.NewReader(in))
		if out != string(in) || r.StdoutBytes != int64(len(in)) {
			t.Errorf("%d bytes became %d, counted %d", len(in), len(out), r.StdoutBytes)
		}
	}
}

func TestA17SignalsArriveByName(t *testing.T) {
	g := ready(t)
	for _, name := range []string{"INT", "TERM", "HUP", "QUIT", "USR1", "USR2"} {
		r, pw := io.Pipe()
		signals := make(chan string, 1)
		go func() {
			b := make([]byte, 16)
			if _, err := r.Read(b); err == nil { // the trap is set
				signals <- name
			}
			_, _ = io.Copy(io.Discard, r)
		}()
		script := fmt.Sprintf(`trap 'echo got %s; exit 9' %s; echo set; while :; do sleep 0.01; done`, name, name)
		var out bytes.Buffer
		res, err := g.Exec(bounded(t), sh(script), guest.IO{Stdout: io.MultiWriter(&out, pw), Signals: signals})
		if err != nil {
			t.Fatal(err)
		}
		pw.Close()
		if res.ExitCode != 9 || !strings.Contains(out.String(), "got "+name) {
			t.Errorf("%s: %+v, %q", name, res, out.String())
		}
	}
}

func TestASignalDoesNotWaitBehindInputThatNobodyReads(t *testing.T) {
	g := ready(t)
	signals := make(chan string, 1)
	var once sync.Once
	out := writerFunc(func([]byte) { once.Do(func() { signals <- "KILL" }) })
	// The command never reads; far more than the window is there for it.
	res, err := g.Exec(bounded(t), sh("echo up; exec sleep 1000"), guest.IO{Stdin: endless{}, Stdout: out, Signals: signals})
	if err != nil || res.Signal != "KILL" {
		t.Errorf("got %+v, %v", res, err)
	}
}

// endless is input without an end.
type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// writerFunc is a writer that calls.
type writerFunc func([]byte)

func (f writerFunc) Write(p []byte) (int, error) {
	f(p)
	return len(p), nil
}

func TestACommandThatClosesItsInputDoesNotHoldUpItsSender(t *testing.T) {
	g := ready(t)
	in := io.LimitReader(endless{}, 4<<20)
	if out, _, r := capture(t, g, sh("exec <&-; echo closed; sleep 0.05"), in); out != "closed\n" || r.ExitCode != 0 {
		t.Errorf("got %q, %+v", out, r)
	}
}

// runaway prints the pids of a tree that tries to stay: it ignores TERM, has a
// child in another session, and one more below that.
const runaway = `trap '' TERM; setsid sh -c 'trap "" TERM; sleep 1000 & echo $! $$; wait' & echo $$; wait`

// pids reads the three that runaway prints.
func pids(t *testing.T, out string) []int {
	t.Helper()
	var p []int
	for _, f := range strings.Fields(out) {
		n, err := strconv.Atoi(f)
		if err != nil {
			t.Fatal(err)
		}
		p = append(p, n)
	}
	if len(p) != 3 {
		t.Fatalf("the tree did not come up: %q", out)
	}
	return p
}

func wantGone(t *testing.T, pids []int) {
	t.Helper()
	for _, pid := range pids {
		eventually(t, fmt.Sprintf("process %d is gone", pid), func() bool {
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			return err != nil || bytes.Contains(stat, []byte(") Z "))
		})
	}
}

func TestATimeoutEndsTheWholeTree(t *testing.T) {
	g := ready(t)
	e := sh(runaway)
	e.TimeoutMS = 300
	out, _, r := capture(t, g, e, nil)
	if !r.TimedOut || r.Signal != "KILL" {
		t.Errorf("got %+v", r)
	}
	wantGone(t, pids(t, out))
}

func TestALostConnectionEndsTheWholeTree(t *testing.T) {
	g := ready(t)
	ctx, cancel := context.WithCancelCause(bounded(t))
	cause := errors.New("the client has left")
	var out bytes.Buffer
	w := writerFunc(func(p []byte) {
		out.Write(p)
		if len(strings.Fields(out.String())) == 3 {
			cancel(cause)
		}
	})
	_, err := g.Exec(ctx, sh(runaway), guest.IO{Stdout: w})
	if !errors.Is(err, cause) {
		t.Errorf("got %v", err)
	}
	wantGone(t, pids(t, out.String()))
}

func TestABackgroundProcessIsNeitherWaitedForNorEnded(t *testing.T) {
	g := ready(t)
	out, _, r := capture(t, g, sh(`sleep 1000 & echo $!`), nil)
	pid, err := strconv.Atoi(strings.TrimSpace(out))
	if err != nil {
		t.Fatalf("%q: %v", out, err)
	}
	if !r.Leaked || r.ExitCode != 0 {
		t.Errorf("got %+v", r)
	}
	if err := syscall.Kill(pid, 0); err != nil {
		t.Errorf("the background process: %v", err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Error(err)
	}
	up := filepath.Join(t.TempDir(), "up")
	script := fmt.Sprintf(`{ exec >/dev/null 2>&1; : > %s; exec sleep 1000; } & pid=$!; until [ -e %s ]; do sleep 0.01; done; echo $pid`, up, up)
	out, _, r = capture(t, g, sh(script), nil)
	if r.Leaked {
		t.Error("a background process that holds no pipe counts as a leak")
	}
	if pid, err = strconv.Atoi(strings.TrimSpace(out)); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Error(err)
	}
}

// TestManyCommandsAtOnce is also where two commands would show that they share
// something.
func TestManyCommandsAtOnce(t *testing.T) {
	g := ready(t)
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			want := strings.Repeat(fmt.Sprintf("line of %d\n", i), 500)
			out, _, r := capture(t, g, argv("cat"), strings.NewReader(want))
			if out != want || r.ExitCode != 0 {
				t.Errorf("command %d: %d bytes, %+v", i, len(out), r)
			}
		})
	}
	wg.Wait()
}

func TestOneCommandOverTheLimitIsRefusedByName(t *testing.T) {
	g := ready(t)
	const limit = 256
	var started, ended sync.WaitGroup
	started.Add(limit)
	ctx, cancel := context.WithCancel(bounded(t))
	for range limit {
		ended.Go(func() {
			var once sync.Once
			_, err := g.Exec(ctx, sh("echo; exec sleep 1000"), guest.IO{Stdout: writerFunc(func([]byte) { once.Do(started.Done) })})
			if !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
	}
	started.Wait()
	_, err := g.Exec(bounded(t), argv("true"), guest.IO{})
	if e, ok := errors.AsType[*guest.Error](err); !ok || e.Code != "busy" {
		t.Errorf("command %d: %v", limit+1, err)
	}
	cancel()
	ended.Wait()
	eventually(t, "there is room again", func() bool {
		_, err := g.Exec(bounded(t), argv("true"), guest.IO{})
		return err == nil
	})
}

func TestAWriterThatFailsEndsTheCommand(t *testing.T) {
	g := ready(t)
	broken := errors.New("broken pipe")
	_, err := g.Exec(bounded(t), sh("yes"), guest.IO{Stdout: failing{broken}})
	if !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

func TestOutputAndErrorsAreApartAndCounted(t *testing.T) {
	g := ready(t)
	out, errs, r := capture(t, g, sh("printf 12345; printf 123 >&2"), nil)
	want := event.ExecResult{StdoutBytes: 5, StderrBytes: 3}
	if diff := cmp.Diff(want, r); diff != "" || out != "12345" || errs != "123" {
		t.Errorf("got %q, %q, %s", out, errs, diff)
	}
}

func TestACommandRunsAsTheUserThatWasNamed(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to change identity")
	}
	g := ready(t)
	e := sh("id -u; echo $HOME")
	e.User = "4242"
	if out, _, _ := capture(t, g, e, nil); out != "4242\n/\n" {
		t.Errorf("got %q", out)
	}
}

// BenchmarkStream moves 1 GiB out of a command; -benchmem shows that it does not
// stay anywhere.
func BenchmarkStream(b *testing.B) {
	g := ready(b)
	const size = 1 << 30
	b.SetBytes(size)
	b.ReportAllocs()
	for b.Loop() {
		r, err := g.Exec(context.Background(), sh(fmt.Sprintf("head -c %d /dev/zero", size)), guest.IO{})
		if err != nil || r.StdoutBytes != size {
			b.Fatal(r, err)
		}
	}
}

// BenchmarkExec is one command from request to result.
func BenchmarkExec(b *testing.B) {
	g := ready(b)
	for b.Loop() {
		if _, err := g.Exec(context.Background(), argv("/bin/true"), guest.IO{}); err != nil {
			b.Fatal(err)
		}
	}
}
