package ledger

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/event"
)

func reader(t *testing.T, path string) *Reader {
	t.Helper()
	r, err := OpenReader(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func TestQueryRefusesEverythingButOneReadingStatement(t *testing.T) {
	path := filled(t)
	r := reader(t, path)
	for _, tc := range []struct{ query, want string }{
		{"", "empty"},
		{" ; -- nothing\n", "empty"},
		{"SELECT 1; SELECT 2", "one at a time"},
		{"SELECT 1;;DELETE FROM tool_calls", "one at a time"},
		{"SELECT 1 /* ; */; DROP TABLE tool_calls", "one at a time"},
		{"SELECT 1\x00; DELETE FROM tool_calls", "NUL"},
		{"DELETE FROM tool_calls", "only SELECT"},
		{"UPDATE tool_calls SET status = 'done'", "only SELECT"},
		{"INSERT INTO bodies VALUES ('a', 'none', x'00', 1)", "only SELECT"},
		{"WITH x AS (SELECT 1) DELETE FROM tool_calls", "only SELECT"},
		{"INSERT INTO tool_calls SELECT * FROM tool_calls RETURNING id", "only SELECT"},
		{"DROP TABLE tool_calls", "only SELECT"},
		{"CREATE TEMP TABLE x (a)", "only SELECT"},
		{"CREATE TEMP VIEW x AS SELECT 1", "only SELECT"},
		{"CREATE VIRTUAL TABLE x USING fts5(a)", "only SELECT"},
		{"ATTACH ':memory:' AS x", "only SELECT"},
		{"ATTACH '" + filepath.Join(t.TempDir(), "new.db") + "' AS x", "only SELECT"},
		{"DETACH main", "only SELECT"},
		{"VACUUM", "only SELECT"},
		{"VACUUM INTO '" + filepath.Join(t.TempDir(), "copy.db") + "'", "only SELECT"},
		{"BEGIN", "only SELECT"},
		{"SAVEPOINT x", "only SELECT"},
		{"ANALYZE", "only SELECT"},
		{"REINDEX", "only SELECT"},
		{"PRAGMA query_only = 0", "only SELECT"},
		{"PRAGMA journal_mode = DELETE", "only SELECT"},
		{"PRAGMA user_version = 9", "only SELECT"},
		{"PRAGMA writable_schema = 1", "only SELECT"},
		{"PRAGMA wal_checkpoint(TRUNCATE)", "only SELECT"},
		{"PRAGMA hard_heap_limit = 1", "only SELECT"},
		{"PRAGMA temp_store_directory = '/'", "only SELECT"},
		{"SELECT load_extension('x')", ""},
		{"SELECT * FROM nosuch", "no such table"},
		{"SELECT \"not_a_column\" FROM tool_calls", "no such column"},
		{"SELEC 1", "syntax error"},
		{"SELECT " + strings.Repeat("1,", 150) + "1", "too many"},
		{"SELECT '" + strings.Repeat("x", maxSQL) + "'", "too"},
	} {
		result, err := r.Query(t.Context(), tc.query, Limits{})
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%.60q: got %v, %v, want an error with %q", tc.query, result, err, tc.want)
		}
	}
	if got := rows(t, path, "SELECT count(*) FROM tool_calls"); !cmp.Equal(got, [][]any{{int64(1)}}) {
		t.Errorf("tool calls: %v", got)
	}
}

func TestQueryAllowsWhatReads(t *testing.T) {
	r := reader(t, filled(t))
	for _, query := range []string{
		"SELECT 1;", "SELECT 1 ; -- the end\n", "-- first\nSELECT ';', \";\" FROM (SELECT 1 AS \";\")", "SELECT 'it''s; fine'", "SELECT 1 AS [a;b]",
		"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10) SELECT i FROM n", "VALUES (1), (2)",
		"EXPLAIN QUERY PLAN SELECT * FROM tool_calls", "PRAGMA table_info(tool_calls)", "SELECT name FROM pragma_table_info('tool_calls')",
		"SELECT name FROM sqlite_master", "SELECT json_extract(arguments, '$.a') FROM tool_calls",
		"SELECT count(*) OVER (), group_concat(status) FROM tool_calls", "PRAGMA user_version",
	} {
		if result, err := r.Query(t.Context(), query, Limits{}); err != nil || len(result.Rows) == 0 {
			t.Errorf("%s: %v, %v", query, result, err)
		}
	}
}

func TestQueryGivesTypedValues(t *testing.T) {
	r := reader(t, filled(t))
	got, err := r.Query(t.Context(), "SELECT 1 AS a, 1.5 AS b, 'x' AS c, x'00ff' AS d, NULL AS e, timestamp IS NOT NULL AS f FROM tool_calls", Limits{})
	if err != nil {
		t.Fatal(err)
	}
	want := &Result{Columns: []string{"a", "b", "c", "d", "e", "f"}, Rows: [][]any{{int64(1), 1.5, "x", []byte{0, 255}, nil, int64(1)}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

const endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "

func TestQueryIsBounded(t *testing.T) {
	r := reader(t, filled(t))
	for _, tc := range []struct {
		name, query string
		limits      Limits
		rows        int
		truncated   string
		err         string
	}{
		{"rows", endless + "SELECT i FROM n", Limits{Rows: 10}, 10, "rows", ""},
		{"exactly the rows", "VALUES (1), (2)", Limits{Rows: 2}, 2, "", ""},
		{"default rows", endless + "SELECT i FROM n", Limits{}, DefaultQueryRows, "rows", ""},
		{"bytes", endless + "SELECT hex(zeroblob(500000)) FROM n", Limits{Bytes: 3 << 20}, 3, "bytes", ""},
		{"time", endless + "SELECT count(*) FROM n", Limits{Time: 50 * time.Millisecond}, 0, "", "longer than 50ms"},
		{"time while sorting", endless + "SELECT i FROM n ORDER BY -i", Limits{Time: 50 * time.Millisecond}, 0, "", "longer than 50ms"},
		{"one value", "SELECT zeroblob(2000000000)", Limits{}, 0, "", "larger than"},
		{"one value that grows", "SELECT replace(hex(zeroblob(1000000)), '0', 'xxxxxxxx')", Limits{Bytes: 4 << 20}, 0, "", "larger than"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := r.Query(t.Context(), tc.query, tc.limits)
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Errorf("got %v, want %q", err, tc.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if len(got.Rows) != tc.rows || got.Truncated != tc.truncated {
				t.Errorf("%d rows, truncated %q; want %d, %q", len(got.Rows), got.Truncated, tc.rows, tc.truncated)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.Query(ctx, "SELECT 1", Limits{}); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled query: %v", err)
	}
	if got, err := r.Query(t.Context(), "SELECT 1", Limits{}); err != nil || len(got.Rows) != 1 {
		t.Errorf("the reader does not work after all that: %v, %v", got, err)
	}
}

func TestReaderDoesNotDelayTheWriter(t *testing.T) {
	l := openTest(t, Options{})
	call(t, l, toolCallEvent(t, `{"a":1}`), response(`{}`))
	r := reader(t, l.path)
	open, err := r.db.QueryContext(t.Context(), "SELECT id FROM tool_calls UNION ALL SELECT id FROM tool_calls")
	if err != nil {
		t.Fatal(err)
	}
	if !open.Next() {
		t.Fatal("no row")
	}
	start := time.Now()
	for range 50 {
		call(t, l, toolCallEvent(t, `{"a":1}`), response(`{}`))
	}
	if took := time.Since(start); took > busyTimeout*time.Millisecond {
		t.Errorf("50 calls beside an open query took %v", took)
	}
	if err := errors.Join(open.Close(), open.Err()); err != nil {
		t.Fatal(err)
	}
}

func TestReaderOfNothingSaysSoAndCreatesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "session.db")
	if _, err := OpenReader(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file is there: %v", err)
	}
}

// mixed fills a ledger with events of all layers and gives their ids in order.
func mixed(t *testing.T, l *Ledger, n int) (ids []string) {
	t.Helper()
	for i := range n {
		ev := []*event.Event{
			toolCallEvent(t, `{}`), execEvent(t, "ls", fmt.Sprint(i)), httpEvent(t, "x"), messageEvent(t, event.MCPPromptGet, "prompts/get"),
			{ID: newID(t), Type: event.FileImport, Time: time.Now(), File: &event.File{Op: "import", Path: "/a"}},
			{ID: newID(t), Type: event.Admin, Time: time.Now(), Detail: "stop"},
		}[i%6]
		ev.ID = newID(t)
		v := allow()
		if i%4 == 0 {
			v.Matches = []event.Match{{Rule: "profile.a", Action: "allow", Reason: "seen"}, {Rule: "profile.b", Action: "allow"}}
			ids = append(ids, ev.ID, ev.ID)
		}
		r, err := l.Begin(t.Context(), ev, v)
		if err == nil {
			err = l.End(t.Context(), r, event.Outcome{Status: event.Done}, allow())
		}
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, ev.ID)
	}
	return ids
}

func TestTimelinePagesThroughEverythingOnceNewestFirst(t *testing.T) {
	l := openTest(t, Options{})
	want := mixed(t, l, 60)
	slices.Reverse(want)
	r := reader(t, l.path)
	for _, limit := range []int{1, 2, 7, 1000} {
		var got []string
		seen := map[string]bool{}
		for before, more := "", true; more; {
			page, err := r.Timeline(t.Context(), TimelineOptions{Limit: limit, Before: before})
			if err != nil {
				t.Fatal(err)
			}
			if len(page.Entries) > limit {
				t.Fatalf("%d entries on a page of %d", len(page.Entries), limit)
			}
			for _, e := range page.Entries {
				key := fmt.Sprint(e.Layer, e.ID)
				if seen[key] {
					t.Errorf("%s is there twice", key)
				}
				seen[key] = true
				got = append(got, e.EventID)
			}
			before, more = page.Next, page.Next != ""
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("pages of %d: %s", limit, diff)
		}
	}
}

func TestTimelineShowsWhatHappened(t *testing.T) {
	l := openTest(t, Options{})
	if _, err := l.Begin(t.Context(), toolCallEvent(t, `{}`), block("profile.no")); err != nil {
		t.Fatal(err)
	}
	call(t, l, execEvent(t, "false"), event.Outcome{Status: event.Failed, Duration: time.Millisecond, Exec: &event.ExecResult{ExitCode: 1}})
	page, err := reader(t, l.path).Timeline(t.Context(), TimelineOptions{Layers: []string{"tool", "exec", "security"}})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range page.Entries {
		got = append(got, strings.Join([]string{e.Layer, e.Subject, e.Status, e.Decision, e.Rule, e.Detail, fmt.Sprint(e.DurationUS), e.TraceID, e.InitiatorKind}, "|"))
	}
	want := []string{
		`exec|["false"]|failed|allow||exit 1|1000||person`,
		"security|profile.no|request|block|profile.no|no|0|trace-1|guest_agent",
		"tool|github__create_issue|blocked|block|profile.no|no|0|trace-1|guest_agent",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestTimelineSelects(t *testing.T) {
	l := openTest(t, Options{})
	mixed(t, l, 12)
	<-time.After(2 * time.Millisecond) // ids and Since have milliseconds
	since := time.Now()
	late := execEvent(t, "late")
	late.TraceID = "trace-2"
	call(t, l, late, event.Outcome{Status: event.Done})
	r := reader(t, l.path)
	for _, tc := range []struct {
		name    string
		options TimelineOptions
		want    int
	}{
		{"layer", TimelineOptions{Layers: []string{"exec"}}, 3},
		{"layers", TimelineOptions{Layers: []string{"exec", "net"}}, 5},
		{"since", TimelineOptions{Since: since}, 1},
		{"trace", TimelineOptions{Trace: "trace-2"}, 1},
		{"trace of others", TimelineOptions{Trace: "trace-1", Layers: []string{"tool"}}, 2},
		{"no such trace", TimelineOptions{Trace: "x"}, 0},
	} {
		page, err := r.Timeline(t.Context(), tc.options)
		if err != nil || len(page.Entries) != tc.want {
			t.Errorf("%s: %d entries (%v), want %d", tc.name, len(page.Entries), err, tc.want)
		}
	}
	for _, options := range []TimelineOptions{{Layers: []string{"tools"}}, {Before: "x"}, {Before: "a/b/c"}, {Before: "a/tool/x"}} {
		if _, err := r.Timeline(t.Context(), options); err == nil {
			t.Errorf("%+v: no error", options)
		}
	}
}

func TestNoTimelineQueryReadsAWholeTable(t *testing.T) {
	r := reader(t, filled(t))
	for _, l := range layers() {
		for _, traced := range []bool{false, true} {
			args := []any{"\U0010FFFF", "\U0010FFFF", int64(math.MaxInt64), ""}
			if traced {
				args = append(args, "trace")
			}
			rows, err := r.db.QueryContext(t.Context(), "EXPLAIN QUERY PLAN "+l.sql(traced), append(args, 100)...)
			if err != nil {
				t.Fatal(err)
			}
			steps := 0
			for rows.Next() {
				var id, parent, unused int
				var detail string
				if err := rows.Scan(&id, &parent, &unused, &detail); err != nil {
					t.Fatal(err)
				}
				steps++
				index := "_by_event"
				if traced {
					index = "_by_trace"
				}
				if !strings.HasPrefix(detail, "SEARCH "+l.table+" USING INDEX "+l.table+index) {
					t.Errorf("layer %s, traced %v: %s", l.name, traced, detail)
				}
			}
			if err := errors.Join(rows.Err(), rows.Close()); err != nil || steps != 1 {
				t.Errorf("layer %s: %d steps, %v", l.name, steps, err)
			}
		}
	}
}

func TestWriterFindsPendingRowsAndTotalsWithoutReadingATable(t *testing.T) {
	c := raw(t, filled(t))
	for _, table := range Tables() {
		if table.State == "" {
			continue
		}
		plan, err := c.plan(table.interruptSQL())
		if err != nil || !strings.Contains(plan, "USING INDEX "+table.Name+"_pending") && !strings.Contains(plan, "USING COVERING INDEX "+table.Name+"_pending") {
			t.Errorf("%s: %s (%v)", table.Name, plan, err)
		}
	}
}

// plan is the first step of a statement's query plan.
func (c *conn) plan(sql string) (string, error) {
	handle, _, err := c.compile("EXPLAIN QUERY PLAN " + sql)
	if err != nil {
		return "", err
	}
	return c.column(handle, 3)
}

func FuzzOneStatement(f *testing.F) {
	for _, s := range []string{"SELECT 1;", "SELECT ';' -- x;\n;", "/* ; */ SELECT [;] ;;", "SELECT 'a''b;'", `"`, "--", "/*", ";", "SELECT `;`", "\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		statement, err := oneStatement(s)
		if err != nil {
			return
		}
		if !strings.HasPrefix(s, statement) {
			t.Fatalf("%q is not the beginning of %q", statement, s)
		}
		again, err := oneStatement(statement)
		if err != nil || again != statement {
			t.Fatalf("%q became %q, %v", statement, again, err)
		}
		if rest := s[len(statement):]; strings.Trim(rest, "; \t\n\f\r") != "" && !strings.ContainsAny(rest, "-/") {
			t.Fatalf("%q was dropped from %q", rest, s)
		}
	})
}
