package ledger

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/event"
)

// recorder is what the gate asks of a ledger.
type recorder interface {
	Begin(ctx context.Context, ev *event.Event, v event.Verdict) (any, error)
	End(ctx context.Context, r any, out event.Outcome, v event.Verdict) error
}

var _ recorder = (*Ledger)(nil)

func TestManyCallersAtOnceGetOneRowEachWithTheirOwnOutcome(t *testing.T) {
	l := openTest(t, Options{})
	r := reader(t, l.path)
	const callers, calls = 20, 25
	var wait sync.WaitGroup
	for c := range callers {
		wait.Go(func() {
			for i := range calls {
				name := fmt.Sprintf("%d-%d", c, i)
				ev := toolCallEvent(t, `"`+name+`"`)
				if i%5 == 4 {
					if _, err := l.Begin(t.Context(), ev, block("profile.no")); err != nil {
						t.Error(err)
					}
					continue
				}
				receipt, err := l.Begin(t.Context(), ev, allow())
				if err == nil {
					err = l.End(t.Context(), receipt, response(`"`+name+`"`), allow())
				}
				if err == nil {
					err = l.Protocol(t.Context(), malformed(fmt.Sprint(c)))
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
		wait.Go(func() {
			if _, err := r.Timeline(t.Context(), TimelineOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for query, want := range map[string]int64{
		"SELECT count(*) FROM tool_calls":                                                callers * calls,
		"SELECT count(*) FROM tool_calls WHERE status = 'done' AND arguments = response": callers * calls * 4 / 5,
		"SELECT count(*) FROM tool_calls WHERE status = 'blocked'":                       callers * calls / 5,
		"SELECT sum(count) FROM protocol_events":                                         callers * calls * 4 / 5,
		"SELECT count(*) FROM bodies":                                                    2 * callers * calls * 4 / 5,
	} {
		if got := rows(t, l.path, query); !cmp.Equal(got, [][]any{{want}}) {
			t.Errorf("%s: %v, want %d", query, got, want)
		}
	}
	if l.keptTotal != l.bodies.Load() {
		t.Errorf("%d bytes are stored, %d counted", l.keptTotal, l.bodies.Load())
	}
}

func TestCloseDuringCallsLeavesNoneUnanswered(t *testing.T) {
	l := openTest(t, Options{})
	var acknowledged, refused sync.Map
	var wait sync.WaitGroup
	started := make(chan struct{}, 8)
	for range 8 {
		wait.Go(func() {
			for i := 0; ; i++ {
				ev := toolCallEvent(t, `{}`)
				_, err := l.Begin(t.Context(), ev, allow())
				if i == 0 {
					started <- struct{}{}
				}
				if err != nil {
					refused.Store(ev.ID, err)
					return
				}
				acknowledged.Store(ev.ID, true)
			}
		})
	}
	for range 8 {
		<-started
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	wait.Wait()
	there := map[string]bool{}
	for _, row := range rows(t, l.path, "SELECT event_id FROM tool_calls") {
		there[row[0].(string)] = true
	}
	acknowledged.Range(func(id, _ any) bool {
		if !there[id.(string)] {
			t.Errorf("%s was acknowledged and is not there", id)
		}
		return true
	})
	refused.Range(func(id, err any) bool {
		if there[id.(string)] || !errors.Is(err.(error), ErrClosed) {
			t.Errorf("%s was refused (%v), there: %v", id, err, there[id.(string)])
		}
		return true
	})
}

func TestCancelledBeginAtTheDoorRecordsNothing(t *testing.T) {
	l := openTest(t, Options{})
	for range MaxQueue { // nobody leaves
		l.writer.places <- struct{}{}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.Begin(ctx, toolCallEvent(t, `{"body":"kept?"}`), allow()); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	for range MaxQueue {
		<-l.writer.places
	}
	if n := l.bodies.Load(); n != 0 {
		t.Errorf("%d bytes are still counted", n)
	}
	if got := rows(t, l.path, "SELECT count(*) FROM tool_calls"); !cmp.Equal(got, [][]any{{int64(0)}}) {
		t.Errorf("rows: %v", got)
	}
}

func TestBatchTakesCallsUntilItsBound(t *testing.T) {
	w := &writer{}
	for range 300 {
		w.waiting = append(w.waiting, &op{rows: make([]row, 2)})
	}
	if n := len(w.take()); n != MaxBatch/2 {
		t.Errorf("%d calls of 2 rows, want %d", n, MaxBatch/2)
	}
	w.waiting = []*op{{rows: make([]row, 1000)}, {}}
	if n := len(w.take()); n != 1 {
		t.Errorf("%d calls after one of 1000 rows, want 1", n)
	}
}

func TestBatchWithABlockIsSynced(t *testing.T) {
	for _, tc := range []struct {
		name       string
		durability Durability
		verdict    event.Verdict
		want       string
	}{
		{"allow", Process, allow(), "1"},
		{"block", Process, block("profile.no"), "2"},
		{"ask", Process, event.Verdict{Decision: event.Ask}, "2"},
		{"power", Power, allow(), "2"},
	} {
		l := openTest(t, Options{Durability: tc.durability})
		if _, err := l.Begin(t.Context(), toolCallEvent(t, `{}`), tc.verdict); err != nil {
			t.Fatal(err)
		}
		if got, err := l.conn.first("PRAGMA synchronous"); err != nil || got != tc.want {
			t.Errorf("%s: synchronous is %s (%v), want %s", tc.name, got, err, tc.want)
		}
	}
	if _, err := Open(t.Context(), t.TempDir()+"/session.db", Options{Durability: "never"}); err == nil {
		t.Error("an unknown durability: no error")
	}
}

func TestRedactorPrintsNoSecret(t *testing.T) {
	r, err := NewRedactor("hunter2hunter2")
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(Options{Redactor: r})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{fmt.Sprint(r), fmt.Sprintf("%+v", Options{Redactor: r}), fmt.Sprintf("%#v", r), string(b), r.LogValue().String()} {
		if strings.Contains(s, "hunter2") {
			t.Errorf("printed %s", s)
		}
	}
	if err := r.Set([]string{"abc"}); err == nil {
		t.Error("a secret of three bytes: no error")
	}
	if got := r.text("a hunter2hunter2"); got != "a [redacted]" {
		t.Errorf("after a refused Set: %q", got)
	}
}

// FuzzRedactor disguises a secret and wants it found, whatever stands around it.
func FuzzRedactor(f *testing.F) {
	f.Add(`s3cr\et/"key%`, []byte("\x00\x01\x02\x03\x00"), "before", "after")
	f.Add("\u00e9t\u00e9\U0001F511", []byte{1, 2, 2, 1, 3}, `\`, `%`)
	f.Add(`\\\\`, []byte{0}, "x", "x")
	f.Add("aaaaab", []byte{0}, "aaaa", "b")
	f.Fuzz(func(t *testing.T, secret string, ways []byte, before, after string) {
		r, err := NewRedactor(secret)
		if err != nil || !utf8.ValidString(secret) || strings.Contains(redacted, secret) || len(ways) == 0 {
			return
		}
		got := r.text(before + disguise(secret, ways) + after)
		if plain := unescapeAll(got); !strings.Contains(got, redacted) && strings.Contains(plain, secret) {
			t.Fatalf("%q is still in %q", secret, got)
		}
		if strings.Contains(got, secret) {
			t.Fatalf("%q is still in %q", secret, got)
		}
		if plain := "nothing " + strings.Repeat("-", 3); r.text(plain) != plain && !strings.Contains(plain, secret) {
			t.Fatalf("%q was changed", plain)
		}
	})
}

func disguise(secret string, ways []byte) string {
	var b strings.Builder
	for i, r := range secret {
		switch ways[i%len(ways)] % 4 {
		case 0:
			b.WriteRune(r)
		case 1:
			if r > 0xFFFF {
				r -= 0x10000
				fmt.Fprintf(&b, `\u%04x\u%04X`, 0xD800+r>>10, 0xDC00+r&0x3FF)
			} else {
				fmt.Fprintf(&b, `\u%04x`, r)
			}
		case 2:
			for _, c := range []byte(string(r)) {
				fmt.Fprintf(&b, "%%%02X", c)
			}
		case 3:
			quoted, err := json.Marshal(string(r))
			if err != nil {
				return ""
			}
			b.Write(bytes.Trim(quoted, `"`))
		}
	}
	return b.String()
}

func unescapeAll(s string) string {
	var out []byte
	for i := 0; i < len(s); {
		if plain, n := unescape([]byte(s[i:]), nil); n > 0 {
			out, i = append(out, plain...), i+n
			continue
		}
		out, i = append(out, s[i]), i+1
	}
	return string(out)
}

func FuzzAppendCompact(f *testing.F) {
	f.Add([]byte(`{ "a" : [ 1, "x \" y" ] }`))
	f.Add([]byte(`"` + strings.Repeat("é", 3000) + `"`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		got := appendCompact([]byte("x"), raw)[1:]
		if len(got) > MaxText || !utf8.Valid(got) {
			t.Fatalf("%d bytes, valid %v", len(got), utf8.Valid(got))
		}
		var want bytes.Buffer
		if err := json.Compact(&want, raw); err != nil || !utf8.Valid(raw) || want.Len() > MaxText {
			return
		}
		if !bytes.Equal(got, want.Bytes()) {
			t.Fatalf("got %q, want %q", got, want.Bytes())
		}
	})
}
