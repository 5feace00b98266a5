//go:build linux

package sysmon

import (
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// slackOf is a thread's timer slack in nanoseconds.
func slackOf(t *testing.T, tid int) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/" + strconv.Itoa(tid) + "/timerslack_ns")
	if err != nil {
		t.Skipf("this kernel does not tell: %v", err)
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestRestGivesOneThreadBesideTheMainOneSlack(t *testing.T) {
	slackOf(t, os.Getpid())
	if err := Rest(); err != nil {
		t.Fatal(err)
	}
	tid, err := monitor()
	if err != nil {
		t.Fatal(err)
	}
	if got := slackOf(t, tid); got != int64(Slack) {
		t.Errorf("the monitor has a slack of %d ns, want %d", got, int64(Slack))
	}
	if got := slackOf(t, os.Getpid()); got != int64(usualSlack) {
		t.Errorf("the main thread has a slack of %d ns, want %d", got, int64(usualSlack))
	}
}

func TestWhatIsForkedAfterRestoreHasTheUsualSlack(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	slackOf(t, os.Getpid())
	if err := os.WriteFile("/proc/"+strconv.Itoa(unix.Gettid())+"/timerslack_ns", []byte("7000000"), 0); err != nil {
		t.Fatal(err)
	}
	if err := Restore(); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "cat", "/proc/self/timerslack_ns").Output()
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(string(out)); got != strconv.FormatInt(int64(usualSlack), 10) {
		t.Errorf("a forked program has a slack of %s ns, want %d", got, int64(usualSlack))
	}
}
