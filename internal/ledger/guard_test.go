package ledger

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/event"
)

// filled is the path of a closed ledger that has a row in every table.
func filled(t *testing.T) string {
	t.Helper()
	l := openTest(t, Options{})
	verdict := allow()
	verdict.Matches = []event.Match{{Rule: "profile.seen", Action: "allow"}}
	for _, ev := range []*event.Event{
		toolCallEvent(t, `{"a":1}`), execEvent(t, "true"), httpEvent(t, "x"), messageEvent(t, event.MCPPromptGet, "prompts/get"),
		{ID: newID(t), Type: event.FileExport, File: &event.File{Op: "export", Path: "/a"}},
		{ID: newID(t), Type: event.Boot},
	} {
		r, err := l.Begin(t.Context(), ev, verdict)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.End(t.Context(), r, event.Outcome{Status: event.Done}, allow()); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return l.path
}

func raw(t *testing.T, path string) *conn {
	t.Helper()
	c, err := openConn(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.close)
	return c
}

func TestNoTableLetsARowBeDeletedChangedOrReplaced(t *testing.T) {
	c := raw(t, filled(t))
	if err := c.script("INSERT INTO ledger_chain VALUES (1, 1, x'00', x'00')"); err != nil {
		t.Fatal(err)
	}
	keys := map[string]string{"bodies": "digest", "ledger_chain": "seq"}
	names := []string{"bodies", "ledger_chain"}
	for _, table := range Tables() {
		names = append(names, table.Name)
		keys[table.Name] = "id"
	}
	for _, name := range names {
		before, err := c.first(fmt.Sprintf("SELECT group_concat(%s) FROM %s", keys[name], name))
		if err != nil || before == "" {
			t.Fatalf("%s has no rows (%v)", name, err)
		}
		columns, err := c.first(fmt.Sprintf("SELECT group_concat(name) FROM pragma_table_info('%s')", name))
		if err != nil {
			t.Fatal(err)
		}
		attempts := []string{
			"DELETE FROM " + name,
			fmt.Sprintf("UPDATE %s SET %s = 99", name, keys[name]),
			fmt.Sprintf("UPDATE OR REPLACE %[1]s SET %[2]s = %[2]s", name, keys[name]),
		}
		for _, column := range strings.Split(columns, ",") {
			attempts = append(attempts, fmt.Sprintf("UPDATE %[1]s SET %[2]s = %[2]s", name, column))
		}
		if name != "bodies" {
			attempts = append(attempts, fmt.Sprintf("INSERT OR REPLACE INTO %[1]s (%[2]s) SELECT %[2]s FROM %[1]s", name, columns))
		}
		for _, sql := range attempts {
			err := c.script(sql)
			if err == nil || !strings.Contains(err.Error(), "append-only") {
				t.Errorf("%s: %v", sql, err)
			}
		}
		if err := c.script("INSERT OR REPLACE INTO bodies SELECT digest, encoding, x'00', kept_total FROM bodies"); err != nil {
			t.Errorf("a body that is there must be ignored: %v", err)
		}
		if n, err := c.number("SELECT count(*) FROM bodies WHERE body = x'00'"); err != nil || n != 0 {
			t.Errorf("%d bodies were replaced (%v)", n, err)
		}
		if after, err := c.first(fmt.Sprintf("SELECT group_concat(%s) FROM %s", keys[name], name)); err != nil || after != before {
			t.Errorf("%s: rows were %s, are %s (%v)", name, before, after, err)
		}
	}
}

func TestPendingRowTakesItsOutcomeOnceAndKeepsItsIntent(t *testing.T) {
	l := openTest(t, Options{})
	for _, ev := range []*event.Event{toolCallEvent(t, `{}`), execEvent(t, "true"), httpEvent(t, "x")} {
		if _, err := l.Begin(t.Context(), ev, allow()); err != nil {
			t.Fatal(err)
		}
	}
	l.die(t)
	c := raw(t, l.path)
	for _, id := range []tableID{toolCalls, execEvents, netEvents} {
		table := Tables()[id]
		for _, column := range append(table.written(Intent), "id", "begin_digest") {
			if err := c.script(fmt.Sprintf("UPDATE %[1]s SET %[2]s = %[2]s, %[3]s = 'done'", table.Name, column, table.State)); err == nil {
				t.Errorf("%s.%s was changed while pending", table.Name, column)
			}
		}
		if err := c.script(fmt.Sprintf("UPDATE %s SET reason = 'x'", table.Name)); err == nil {
			t.Errorf("%s: an outcome column was changed without ending the row", table.Name)
		}
		if err := c.script(fmt.Sprintf("UPDATE %s SET %s = 'done', digest = x'01'", table.Name, table.State)); err != nil {
			t.Errorf("%s: the outcome is refused: %v", table.Name, err)
		}
		if err := c.script(fmt.Sprintf("UPDATE %s SET %s = 'failed'", table.Name, table.State)); err == nil {
			t.Errorf("%s: the outcome was written twice", table.Name)
		}
	}
}

func TestSecondEventWithTheSameIDIsRefused(t *testing.T) {
	l := openTest(t, Options{})
	ev := toolCallEvent(t, `{}`)
	call(t, l, ev, response(`{}`))
	if _, err := l.Begin(t.Context(), ev, allow()); err == nil {
		t.Error("no error")
	}
}

func TestSecondWriterIsRefusedAndToldWhoWrites(t *testing.T) {
	l := openTest(t, Options{})
	for _, open := range []func() error{
		func() error { _, err := Open(t.Context(), l.path, Options{}); return err },
		func() error { _, err := Recover(t.Context(), l.path); return err },
	} {
		err := open()
		if !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), fmt.Sprintf("process %d", os.Getpid())) {
			t.Errorf("got %v, want %v", err, ErrLocked)
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	openAt(t, l.path, Options{})
}

func TestRecoverOfNothingSaysSo(t *testing.T) {
	if _, err := Recover(t.Context(), filepath.Join(t.TempDir(), "session.db")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

func TestNewerSchemaIsRefused(t *testing.T) {
	path := filled(t)
	if err := raw(t, path).script("PRAGMA user_version = 99"); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), path, Options{}); !errors.Is(err, ErrNewer) {
		t.Errorf("writer: got %v", err)
	}
	if _, err := OpenReader(path); !errors.Is(err, ErrNewer) {
		t.Errorf("reader: got %v", err)
	}
}

func TestDatabaseOfAnotherProgramIsRefusedAndUntouched(t *testing.T) {
	path := filepath.Join(t.TempDir(), "other.db")
	c := raw(t, path)
	if err := c.script("CREATE TABLE mine (a); PRAGMA user_version = 1"); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), path, Options{}); err == nil || !strings.Contains(err.Error(), "another program") {
		t.Errorf("writer: %v", err)
	}
	if _, err := OpenReader(path); err == nil {
		t.Error("reader: no error")
	}
	if n, err := c.number("SELECT count(*) FROM sqlite_master"); err != nil || n != 1 {
		t.Errorf("%d objects (%v), want 1", n, err)
	}
	garbage := filepath.Join(t.TempDir(), "garbage.db")
	if err := os.WriteFile(garbage, []byte(strings.Repeat("garbage", 1000)), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), garbage, Options{}); err == nil {
		t.Error("garbage: no error")
	}
}

func TestOlderSchemaIsBackedUpAndMigratedInOneTransaction(t *testing.T) {
	path := filled(t)
	steps := append(migrations(), "ALTER TABLE vm_events ADD COLUMN further TEXT;")
	c := raw(t, path)
	broken := append(migrations(), "ALTER TABLE vm_events ADD COLUMN further TEXT; SELECT no_such_function();")
	if err := c.migrate(path, broken); err == nil {
		t.Fatal("a broken migration: no error")
	}
	if n, err := c.number("SELECT count(*) FROM pragma_table_info('vm_events') WHERE name = 'further'"); err != nil || n != 0 {
		t.Errorf("a broken migration left its traces (%d, %v)", n, err)
	}
	if err := c.migrate(path, steps); err != nil {
		t.Fatal(err)
	}
	if n, err := c.number("PRAGMA user_version"); err != nil || n != 2 {
		t.Errorf("version %d, %v", n, err)
	}
	if got := rows(t, path+".v1.bak", "SELECT count(*) FROM tool_calls"); !cmp.Equal(got, [][]any{{int64(1)}}) {
		t.Errorf("the backup has %v tool calls", got)
	}
}

func TestSealedLedgerIsOneFileThatNobodyWrites(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "session.db")
	l := openAt(t, path, Options{})
	call(t, l, toolCallEvent(t, `{"a":1}`), response(`{}`))
	if _, err := l.Begin(t.Context(), toolCallEvent(t, `{"b":1}`), allow()); err != nil {
		t.Fatal(err)
	}
	if err := l.Seal(t.Context()); err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(files) != 1 {
		t.Errorf("%d files are left, want 1: %v", len(files), files)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o400 {
		t.Errorf("mode is %v (%v)", info.Mode(), err)
	}
	if _, err := Open(t.Context(), path, Options{}); !errors.Is(err, ErrSealed) {
		t.Errorf("opening a sealed ledger: %v", err)
	}
	if _, err := l.Begin(t.Context(), toolCallEvent(t, `{}`), allow()); !errors.Is(err, ErrClosed) {
		t.Errorf("writing to a sealed ledger: %v", err)
	}
	if err := l.Seal(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("sealing again: %v", err)
	}
	moved := filepath.Join(t.TempDir(), "moved ?#%.db")
	if err := os.Rename(path, moved); err != nil {
		t.Fatal(err)
	}
	got := rows(t, moved, "SELECT status, count(*) FROM tool_calls GROUP BY 1 ORDER BY 1")
	if diff := cmp.Diff([][]any{{"done", int64(1)}, {"interrupted", int64(1)}}, got); diff != "" {
		t.Error(diff)
	}
	if got := rows(t, moved, "SELECT kind FROM vm_events ORDER BY id DESC LIMIT 1"); !cmp.Equal(got, [][]any{{"sealed"}}) {
		t.Errorf("the last row is %v", got)
	}
}

func TestSealingFailsUnderAReaderAndWorksWithoutIt(t *testing.T) {
	l := openTest(t, Options{})
	call(t, l, toolCallEvent(t, `{"a":1}`), response(`{}`))
	r, err := OpenReader(l.path)
	if err != nil {
		t.Fatal(err)
	}
	cursor, err := r.db.QueryContext(t.Context(), "SELECT id FROM tool_calls UNION ALL SELECT id FROM tool_calls")
	if err != nil {
		t.Fatal(err)
	}
	if !cursor.Next() {
		t.Fatal("no row")
	}
	if err := l.Seal(t.Context()); err == nil {
		t.Error("sealed under a reader")
	}
	if err := errors.Join(cursor.Close(), cursor.Err(), r.Close()); err != nil {
		t.Fatal(err)
	}
	again := openAt(t, l.path, Options{})
	if err := again.Seal(t.Context()); err != nil {
		t.Errorf("sealing when the reader is gone: %v", err)
	}
}

func TestFilesAreTheOwnersAlone(t *testing.T) {
	l := openTest(t, Options{})
	for _, suffix := range []string{"", "-wal", "-shm", ".lock"} {
		info, err := os.Stat(l.path + suffix)
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%q: %v, %v", suffix, info, err)
		}
	}
}

func TestTableIDsMatchTables(t *testing.T) {
	want := map[tableID]string{
		toolCalls: "tool_calls", execEvents: "exec_events", netEvents: "net_events", fsEvents: "fs_events", protocolEvents: "protocol_events",
		vmEvents: "vm_events", securityRuleEvents: "security_rule_events", eventBodyBlobs: "event_body_blobs",
	}
	tables := Tables()
	if len(tables) != tableCount {
		t.Fatalf("%d tables, %d ids", len(tables), tableCount)
	}
	for id, name := range want {
		if tables[id].Name != name {
			t.Errorf("table %d is %s, want %s", id, tables[id].Name, name)
		}
		for _, c := range tables[id].Columns {
			if c.Doc == "" {
				t.Errorf("%s.%s says nothing about itself", name, c.Name)
			}
		}
	}
}
