package ledger

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/event"
)

// childVar names what the test binary is to do when it is run by a test.
const (
	childVar = "LEDGER_TEST_CHILD"
	pathVar  = "LEDGER_TEST_PATH"
)

func TestMain(m *testing.M) {
	switch os.Getenv(childVar) {
	case "":
		os.Exit(m.Run())
	case "writer":
		os.Exit(childWriter())
	case "full disk":
		os.Exit(childFullDisk())
	}
	os.Exit(2)
}

func child(t *testing.T, what, path string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), childVar+"="+what, pathVar+"="+path)
	cmd.Stderr = os.Stderr
	return cmd
}

// childWriter writes calls from four goroutines until it is killed, and says on
// stdout what was acknowledged.
func childWriter() int {
	l, err := Open(context.Background(), os.Getenv(pathVar), Options{})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	var out sync.Mutex
	say := func(word, id string) {
		out.Lock()
		defer out.Unlock()
		fmt.Fprintln(os.Stdout, word, id)
	}
	var wait sync.WaitGroup
	for range 4 {
		wait.Go(func() {
			for {
				ev, err := newEvent(event.MCPToolCall)
				if err != nil {
					return
				}
				ev.MCP = &event.MCP{Tool: &event.Tool{Name: "a__b"}, Arguments: []byte(`{"id":"` + ev.ID + `"}`)}
				r, err := l.Begin(context.Background(), ev, allow())
				if err != nil {
					return
				}
				say("begun", ev.ID)
				if err := l.End(context.Background(), r, response(`{}`), allow()); err != nil {
					return
				}
				say("ended", ev.ID)
			}
		})
	}
	wait.Wait()
	return 1
}

func TestKilledWriterLosesNothingThatWasAcknowledged(t *testing.T) {
	for round := range 3 {
		path := filepath.Join(t.TempDir(), "session.db")
		cmd := child(t, "writer", path)
		pipe, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		said := map[string]string{}
		lines := bufio.NewScanner(pipe)
		for killed := false; lines.Scan(); {
			word, id, found := strings.Cut(lines.Text(), " ")
			if !found || len(id) != 36 {
				continue // cut off by the kill
			}
			said[id] = word
			if !killed && len(said) >= 200+100*round {
				killed = true
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
		}
		var exit *exec.ExitError
		if err := cmd.Wait(); !errors.As(err, &exit) {
			t.Fatal(err)
		}
		checkAfterKill(t, path, said)
	}
}

func checkAfterKill(t *testing.T, path string, said map[string]string) {
	t.Helper()
	pending := rows(t, path, "SELECT count(*) FROM tool_calls WHERE status = 'pending'")[0][0].(int64)
	got, err := Recover(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if got != (Recovered{ToolCalls: pending}) {
		t.Errorf("recovered %+v, %d rows were pending", got, pending)
	}
	status := map[string]string{}
	for _, row := range rows(t, path, "SELECT event_id, status FROM tool_calls LIMIT 10000") {
		status[row[0].(string)] = row[1].(string)
	}
	for id, word := range said {
		if s := status[id]; s != "done" && (word == "ended" || s != "interrupted") {
			t.Errorf("%s was acknowledged as %s and is %q", id, word, s)
		}
	}
	want := [][]any{{int64(0)}}
	if got := rows(t, path, "SELECT count(*) FROM tool_calls WHERE status = 'pending'"); !cmp.Equal(got, want) {
		t.Errorf("still pending: %v", got)
	}
	const orphans = `SELECT count(*) FROM tool_calls c WHERE 1 <> (SELECT count(*) FROM event_body_blobs b JOIN bodies USING (digest)
		WHERE b.event_id = c.event_id AND b.direction = 'request')`
	if got := rows(t, path, strings.ReplaceAll(orphans, "USING (digest)", "ON bodies.digest = b.body_digest")); !cmp.Equal(got, want) {
		t.Errorf("calls without their body: %v", got)
	}
	checkIntegrity(t, openAt(t, path, Options{}))
}

func TestPendingRowsOfEveryTableAreInterruptedAtTheNextOpen(t *testing.T) {
	l := openTest(t, Options{})
	for _, ev := range []*event.Event{
		toolCallEvent(t, `{}`), execEvent(t, "true"), httpEvent(t, "x"), messageEvent(t, event.MCPResourceRead, "resources/read"),
		{ID: newID(t), Type: event.FileImport, File: &event.File{Op: "import"}}, {ID: newID(t), Type: event.Boot},
	} {
		if _, err := l.Begin(t.Context(), ev, allow()); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := Recover(t.Context(), l.path)
	if err != nil {
		t.Fatal(err)
	}
	if want := (Recovered{1, 1, 1, 1, 1, 1}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if again, err := Recover(t.Context(), l.path); err != nil || again.Total() != 0 {
		t.Errorf("a second time: %+v, %v", again, err)
	}
	if got := rows(t, l.path, "SELECT count(*) FROM vm_events WHERE kind = 'recovered'"); !cmp.Equal(got, [][]any{{int64(1)}}) {
		t.Errorf("rows that say so: %v", got)
	}
}

// TestFullDiskRefusesAndRecovers runs on a small file system of its own, in a
// mount namespace of its own.
func TestFullDiskRefusesAndRecovers(t *testing.T) {
	cmd := child(t, "full disk", t.TempDir())
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
		t.Skipf("needs a mount namespace (root, or user namespaces): %v", err)
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
	if err := l.Close(); err != nil {
		return err
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
