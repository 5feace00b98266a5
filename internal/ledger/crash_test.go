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
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/event"
)

// childVar names what the test binary is to do when it is run by a test.
const (
	childVar = "LEDGER_TEST_CHILD"
	pathVar  = "LEDGER_TEST_PATH"
)

func TestMain(m *testing.M) {
	if os.Getenv(childVar) == "writer" {
		os.Exit(childWriter())
	}
	os.Exit(m.Run())
}

func child(t *testing.T, what, path string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, args...)
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

// die leaves the file as a killed process does.
func (l *Ledger) die(t *testing.T) {
	t.Helper()
	l.shut()
	if err := l.release(nil); err != nil {
		t.Fatal(err)
	}
}

func TestClosingInterruptsWhatIsPending(t *testing.T) {
	l := openTest(t, Options{})
	if _, err := l.Begin(t.Context(), toolCallEvent(t, `{}`), allow()); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if got := rows(t, l.path, "SELECT status FROM tool_calls"); !cmp.Equal(got, [][]any{{"interrupted"}}) {
		t.Errorf("got %v", got)
	}
}

func TestPendingRowsOfEveryTableAreInterruptedAtTheNextOpen(t *testing.T) {
	l := openTest(t, Options{})
	for _, ev := range []*event.Event{
		toolCallEvent(t, `{}`), execEvent(t, "true"), httpEvent(t, "x"), messageEvent(t, event.MCPResourceRead, "resources/read"),
		{ID: newID(t), Type: event.FileImport, File: &event.File{Op: "import"}},
		{ID: newID(t), Type: event.Boot},
	} {
		if _, err := l.Begin(t.Context(), ev, allow()); err != nil {
			t.Fatal(err)
		}
	}
	l.die(t)
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
