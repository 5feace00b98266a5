package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	_ "modernc.org/sqlite" // the ledger's engine, without the ledger

	"github.com/google/uuid"

	"github.com/capsem/capsem/internal/ledger"
)

// rawLedger writes what the ledger writes for a tool call, and nothing else: the
// rows of the intent, then those of the outcome, with prepared statements into a
// ledger's tables, indexes and triggers. There are no digests, no compression,
// and nobody waits for anything but the commit.
type rawLedger struct {
	db    *sql.DB
	conn  *sql.Conn
	stmts [rawStatements]*sql.Stmt
	calls int64
}

// The statements.
const (
	rawBegin = iota
	rawCommit
	rawInsert
	rawFinish
	rawBody
	rawBlob
	rawStatements
)

// rawCall is what is written of one call.
type rawCall struct {
	id        int64
	event     string
	arguments []byte
	response  []byte
}

// newRaw makes a ledger of a scratch folder's, and opens it as openRaw does.
func newRaw(ctx context.Context, dir string) (*rawLedger, error) {
	path := filepath.Join(dir, "raw-"+uuid.NewString()+".db")
	l, err := ledger.Open(ctx, path, ledger.Options{})
	if err != nil {
		return nil, err
	}
	if err := l.Close(); err != nil {
		return nil, err
	}
	return openRaw(ctx, path)
}

// openRaw opens the file of a ledger that nobody writes.
func openRaw(ctx context.Context, path string) (_ *rawLedger, err error) {
	r := &rawLedger{}
	r.db, err = sql.Open("sqlite", "file:"+path+"?_pragma=journal_mode(WAL)&_pragma=synchronous(NORMAL)&_pragma=cache_size(-8192)&_pragma=wal_autocheckpoint(4096)")
	if err != nil {
		return nil, fmt.Errorf("opening the floor's database: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.db.Close())
		}
	}()
	if r.conn, err = r.db.Conn(ctx); err != nil {
		return nil, fmt.Errorf("opening the floor's database: %w", err)
	}
	// Rows that are there keep their ids.
	if err = r.conn.QueryRowContext(ctx, "SELECT coalesce(max(id), 0) FROM tool_calls").Scan(&r.calls); err != nil {
		return nil, fmt.Errorf("reading the floor's database: %w", err)
	}
	for i, text := range rawSQL() {
		if r.stmts[i], err = r.conn.PrepareContext(ctx, text); err != nil { //nolint:sqlclosecheck // close does
			return nil, fmt.Errorf("preparing %q: %w", text, err)
		}
	}
	return r, nil
}

// rawSQL makes the ledger's statements from its description of its tables.
func rawSQL() [rawStatements]string {
	all := [rawStatements]string{
		rawBegin: "BEGIN IMMEDIATE", rawCommit: "COMMIT",
		rawBody: "INSERT INTO bodies (digest, encoding, body, kept_total) VALUES (?, 'none', ?, 0)",
	}
	for _, t := range ledger.Tables() {
		var names, sets []string
		for _, c := range t.Columns {
			if strings.Contains(c.Type, "GENERATED") {
				continue
			}
			names = append(names, c.Name)
			if c.Stage == ledger.Outcome {
				sets = append(sets, c.Name+" = coalesce(?, "+c.Name+")")
			}
		}
		insert := fmt.Sprintf("INSERT INTO %s (%s) VALUES (%s)", t.Name, strings.Join(names, ", "),
			strings.TrimSuffix(strings.Repeat("?, ", len(names)), ", "))
		switch t.Name {
		case "tool_calls":
			all[rawInsert] = insert
			all[rawFinish] = fmt.Sprintf("UPDATE tool_calls SET %s WHERE id = ? AND status = 'pending'", strings.Join(sets, ", "))
		case "event_body_blobs":
			all[rawBlob] = insert
		}
	}
	return all
}

func (r *rawLedger) begin(ctx context.Context) error  { return r.exec(ctx, rawBegin) }
func (r *rawLedger) commit(ctx context.Context) error { return r.exec(ctx, rawCommit) }

func (r *rawLedger) exec(ctx context.Context, stmt int, args ...any) error {
	if _, err := r.stmts[stmt].ExecContext(ctx, args...); err != nil {
		return fmt.Errorf("writing to the floor's database: %w", err)
	}
	return nil
}

// intent writes the rows with which a call begins. It is called between begin
// and commit.
func (r *rawLedger) intent(ctx context.Context, c *rawCall) error {
	r.calls++
	c.id = r.calls
	id, err := uuid.NewV7()
	if err != nil {
		return fmt.Errorf("making an id: %w", err)
	}
	c.event = id.String()
	err = r.exec(ctx, rawInsert, c.event, rawTime(), c.event, nil, "guest_agent", nil, nil, "bench",
		"builtin", "vsock", "builtin", "tools/call", "builtin__echo", "echo", "1", "read", string(c.arguments), rawDigest, rawDigest,
		"pending", "allow", nil, nil, nil, nil, nil, nil, nil, nil, nil, nil)
	if err != nil {
		return err
	}
	return r.body(ctx, c, "request", c.arguments)
}

// outcome writes the rows with which it ends.
func (r *rawLedger) outcome(ctx context.Context, c *rawCall) error {
	err := r.exec(ctx, rawFinish, "done", nil, nil, nil, 1, 100, nil, nil, 0, string(c.response), len(c.arguments), len(c.response), c.id)
	if err != nil {
		return err
	}
	return r.body(ctx, c, "response", c.response)
}

// rawDigest has the form of a policy's digest.
const rawDigest = "5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9"

// body writes a body under a digest that is as unlike its neighbours as a real
// one: the end of a UUIDv7 is random.
func (r *rawLedger) body(ctx context.Context, c *rawCall, direction string, b []byte) error {
	random := c.event[24:] + c.event[:23] + direction
	digest := (random + rawDigest)[:len(rawDigest)]
	if err := r.exec(ctx, rawBody, digest, b); err != nil {
		return err
	}
	return r.exec(ctx, rawBlob, c.event, rawTime(), "mcp.tool_call", direction, "application/json", len(b), 0, nil, digest)
}

func rawTime() string { return time.Now().UTC().Format("2006-01-02T15:04:05.000000Z") }

func (r *rawLedger) close() error {
	var errs []error
	for _, s := range r.stmts {
		errs = append(errs, s.Close())
	}
	return errors.Join(append(errs, r.conn.Close(), r.db.Close())...)
}
