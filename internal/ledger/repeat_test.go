package ledger

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/event"
)

func malformed(detail string) ProtocolEvent {
	return ProtocolEvent{
		Direction: ToServer, Initiator: event.Initiator{Kind: event.GuestAgent, ID: "x"}, Process: "node", Method: "tools/call",
		RequestID: json.RawMessage(`5`), Server: "files", ErrorCode: -32600, Detail: detail,
	}
}

// held is how many kinds are counted, and whether a timer runs.
func (r *repeats) held() (kinds int, timer bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.kinds), r.timer != nil
}

const countsSQL = "SELECT detail, count FROM protocol_events ORDER BY id"

func TestRepeatedMalformedInputIsCountedForASecond(t *testing.T) {
	path := filepath.Join(t.TempDir(), "session.db")
	synctest.Test(t, func(t *testing.T) {
		l, err := Open(t.Context(), path, Options{})
		if err != nil {
			t.Fatal(err)
		}
		send := func(detail string, times int) {
			t.Helper()
			for range times {
				if err := l.Protocol(t.Context(), malformed(detail)); err != nil {
					t.Fatal(err)
				}
			}
		}
		send("bad magic", 1)
		if got := l.counts(t); !cmp.Equal(got, "bad magic 1") {
			t.Errorf("the first is not written at once: %s", got)
		}
		send("bad magic", 500)
		<-time.After(repeatWindow / 2)
		send("bad version", 2)
		if got := l.counts(t); !cmp.Equal(got, "bad magic 1, bad version 1") {
			t.Errorf("within the window: %s", got)
		}
		<-time.After(repeatWindow / 2)
		synctest.Wait()
		if got := l.counts(t); !cmp.Equal(got, "bad magic 1, bad version 1, bad magic 500") {
			t.Errorf("when the first window ends: %s", got)
		}
		send("bad magic", 1) // a new first
		<-time.After(repeatWindow / 2)
		synctest.Wait()
		if got := l.counts(t); !cmp.Equal(got, "bad magic 1, bad version 1, bad magic 500, bad magic 1, bad version 1") {
			t.Errorf("when the second window ends: %s", got)
		}
		send("bad magic", 3)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	})
	got := oneRow(t, path, "SELECT * FROM protocol_events ORDER BY id DESC LIMIT 1")
	delete(got, "event_id")
	delete(got, "timestamp")
	want := map[string]string{
		"id": "6", "initiator_kind": "guest_agent", "initiator_id": "x", "process_name": "node", "event_type": "mcp.malformed",
		"direction": "to_server", "method": "tools/call", "server_name": "files", "detail": "bad magic", "count": "3",
		"status": "failed", "decision": "block", "error_code": "-32600",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("closing writes what was counted: %s", diff)
	}
}

// counts reads through the writer's connection: a pool of readers would keep
// goroutines in the bubble.
func (l *Ledger) counts(t *testing.T) string {
	t.Helper()
	l.writer.mu.Lock()
	defer l.writer.mu.Unlock()
	s, err := l.conn.first("SELECT group_concat(detail || ' ' || count, ', ') FROM (" + countsSQL + ")")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestManyKindsOfMalformedInputAreBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "session.db")
	synctest.Test(t, func(t *testing.T) {
		l, err := Open(t.Context(), path, Options{})
		if err != nil {
			t.Fatal(err)
		}
		for i := range 1000 {
			p := malformed("bad name")
			p.Method = fmt.Sprint(i) + strings.Repeat("x", 2*MaxText)
			if err := l.Protocol(t.Context(), p); err != nil {
				t.Fatal(err)
			}
		}
		if n, _ := l.repeats.held(); n != maxRepeats+1 {
			t.Errorf("%d kinds are held, the bound is %d", n, maxRepeats+1)
		}
		<-time.After(repeatWindow)
		synctest.Wait()
		if n, timer := l.repeats.held(); n != 0 || timer {
			t.Errorf("%d kinds are held and there is a timer (%v) when the window is over", n, timer)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	})
	got := rows(t, path, "SELECT count(*), sum(count), max(count), max(length(method)) FROM protocol_events")
	if diff := cmp.Diff([][]any{{int64(maxRepeats + 1), int64(1000), int64(1000 - maxRepeats), int64(4094)}}, got); diff != "" {
		t.Error(diff)
	}
}

// TestEqualMessagesThatAreNoActAreCounted: also those that fail, or a guest fills
// the disk by asking for what does not exist.
func TestEqualMessagesThatAreNoActAreCounted(t *testing.T) {
	l := openTest(t, Options{})
	failed := func(code int) event.Outcome {
		return event.Outcome{Status: event.Failed, Error: &event.Error{Code: code, Message: "no"}}
	}
	for range 50 {
		call(t, l, messageEvent(t, event.MCPPing, "ping"), event.Outcome{Status: event.Done})
		call(t, l, messageEvent(t, event.MCPOther, "nonsense"), failed(-32601))
		call(t, l, messageEvent(t, event.MCPOther, "nonsense"), failed(-32000))
		call(t, l, messageEvent(t, event.MCPOther, "nonsense"), event.Outcome{Status: event.Cancelled, Error: &event.Error{Code: -32000}})
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	got := rows(t, l.path, "SELECT status, error_code, sum(count), count(*) <= 5 FROM protocol_events GROUP BY 1, 2 ORDER BY 1, 2")
	want := [][]any{
		{"cancelled", int64(-32000), int64(50), int64(1)},
		{"done", nil, int64(50), int64(1)},
		{"failed", int64(-32601), int64(50), int64(1)},
		{"failed", int64(-32000), int64(50), int64(1)},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestCountsSurviveADiskThatIsFullForAWhile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "session.db")
	synctest.Test(t, func(t *testing.T) {
		l, err := Open(t.Context(), path, Options{})
		if err != nil {
			t.Fatal(err)
		}
		for range 10 {
			if err := l.Protocol(t.Context(), malformed("bad magic")); err != nil {
				t.Fatal(err)
			}
		}
		pragma := func(text string) {
			l.writer.mu.Lock()
			defer l.writer.mu.Unlock()
			if err := l.conn.script(text); err != nil {
				t.Fatal(err)
			}
		}
		pragma("CREATE TEMP TRIGGER full BEFORE INSERT ON main.protocol_events BEGIN SELECT RAISE(ABORT, 'no space'); END")
		<-time.After(3 * repeatWindow)
		synctest.Wait()
		if got := l.counts(t); got != "bad magic 1" {
			t.Errorf("written though it cannot be: %s", got)
		}
		pragma("DROP TRIGGER temp.full")
		<-time.After(2 * repeatWindow)
		synctest.Wait()
		if got := l.counts(t); got != "bad magic 1, bad magic 9" {
			t.Errorf("got %s", got)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	})
}
