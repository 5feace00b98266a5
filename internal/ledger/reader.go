package ledger

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/klauspost/compress/zstd"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// The bounds of a reader.
const (
	// maxReaders is how many queries of one Reader run at once.
	maxReaders = 4
	// maxColumns bounds the columns of a result, and with Limits.Bytes, which
	// bounds every value, the memory that one row can take.
	maxColumns = 100
	// maxSQL bounds the text of a query, in bytes.
	maxSQL = 1 << 20
)

// Reader reads one ledger, live or sealed. It cannot write and never delays the
// writer. Its methods are safe for concurrent use.
type Reader struct {
	path string
	db   *sql.DB
}

// OpenReader opens the ledger at path. The error wraps fs.ErrNotExist where
// there is none, and ErrNewer where this version cannot read it.
func OpenReader(path string) (*Reader, error) {
	r, err := openReader(path)
	if err != nil {
		return nil, fmt.Errorf("opening ledger %s for reading: %w", path, err)
	}
	return r, nil
}

func openReader(path string) (*Reader, error) {
	if _, err := os.Stat(path); err != nil {
		return nil, err
	}
	absolute, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	options := url.Values{
		"mode": {"ro"}, "_query_only": {"1"}, "_busy_timeout": {"5000"}, "_defensive": {"1"}, "_dqs": {"0"},
		"_pragma": {"trusted_schema(OFF)"},
	}
	dsn := (&url.URL{Scheme: "file", Path: absolute, RawQuery: options.Encode()}).String()
	r := &Reader{path: path, db: sql.OpenDB(connector{dsn})}
	r.db.SetMaxOpenConns(maxReaders)
	if err := r.check(); err != nil {
		return nil, errors.Join(err, r.db.Close())
	}
	return r, nil
}

// connector opens connections that obey readOnly. A driver of our own carries
// the hook: one on the registered driver would reach every connection.
type connector struct{ dsn string }

func (c connector) Driver() driver.Driver { return &sqlite.Driver{} }

func (c connector) Connect(ctx context.Context) (driver.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	conn, err := c.Driver().Open(c.dsn)
	if err != nil {
		return nil, err
	}
	guarded, ok := conn.(sqlite.AuthorizerRegisterer)
	if !ok {
		return nil, errors.Join(errors.New("the SQLite driver has no authorizer"), conn.Close())
	}
	if err := guarded.RegisterAuthorizer(readOnly); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// readOnly lets a statement read, and nothing else: no ATTACH, no write, no
// transaction, no setting, no extension.
func readOnly(action sqlite.AuthorizerActionCode, arg1, arg2, _, _ string) sqlite.AuthorizerReturnCode {
	switch action {
	case sqlite.AuthSelect, sqlite.AuthRead, sqlite.AuthRecursive:
		return sqlite.AuthorizerOK
	case sqlite.AuthFunction:
		if arg2 != "load_extension" {
			return sqlite.AuthorizerOK
		}
	case sqlite.AuthPragma:
		if describes(arg1, arg2) {
			return sqlite.AuthorizerOK
		}
	}
	return sqlite.AuthorizerDeny
}

// describes reports whether a pragma only says how the database is made.
func describes(pragma, argument string) bool {
	switch pragma {
	case "table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo":
		return true
	case "user_version", "application_id":
		return argument == ""
	}
	return false
}

func (r *Reader) check() error {
	ctx, cancel := context.WithTimeout(context.Background(), DefaultQueryTime)
	defer cancel()
	var id, version int64
	if err := r.db.QueryRowContext(ctx, "PRAGMA application_id").Scan(&id); err != nil {
		return err
	}
	if id != applicationID {
		return errors.New("the file is not a ledger")
	}
	if err := r.db.QueryRowContext(ctx, "PRAGMA user_version").Scan(&version); err != nil {
		return err
	}
	if version > schemaVersion {
		return fmt.Errorf("%w (schema %d, this one knows %d): upgrade Capsem to read it", ErrNewer, version, schemaVersion)
	}
	return nil
}

// Close ends the reader.
func (r *Reader) Close() error { return r.db.Close() }

// Body gives the bytes of a body by its digest: at most MaxBody. The error
// wraps sql.ErrNoRows where only the digest was kept.
func (r *Reader) Body(ctx context.Context, digest string) ([]byte, error) {
	var encoding string
	var data []byte
	err := r.db.QueryRowContext(ctx, "SELECT encoding, body FROM bodies WHERE digest = ?", digest).Scan(&encoding, &data)
	if err == nil && encoding == "zstd" {
		data, err = unpack(data)
	}
	if err != nil {
		return nil, fmt.Errorf("reading body %s of ledger %s: %w", digest, r.path, err)
	}
	return data, nil
}

func unpack(data []byte) ([]byte, error) {
	d, err := zstd.NewReader(nil, zstd.WithDecoderMaxMemory(MaxBody), zstd.WithDecoderConcurrency(1))
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.DecodeAll(data, nil)
}

// The limits of a query where its caller names none.
const (
	DefaultQueryRows  = 10_000
	DefaultQueryTime  = 10 * time.Second
	DefaultQueryBytes = 32 << 20
)

// Limits bound a query; a zero field is its default.
type Limits struct {
	// Rows and Bytes bound the result, Bytes also every value in it.
	Rows  int
	Bytes int
	Time  time.Duration
}

func (l Limits) complete() Limits {
	if l.Rows <= 0 {
		l.Rows = DefaultQueryRows
	}
	if l.Bytes <= 0 {
		l.Bytes = DefaultQueryBytes
	}
	if l.Time <= 0 {
		l.Time = DefaultQueryTime
	}
	return l
}

// Result is what a query gave. A value is nil, int64, float64, string or
// []byte. Truncated says which limit ("rows" or "bytes") cut it, "" for none.
type Result struct {
	Columns   []string `json:"columns"`
	Rows      [][]any  `json:"rows"`
	Truncated string   `json:"truncated,omitempty"`
}

// Query runs one statement that only reads. What goes over the limit of rows or
// bytes is cut, and Result says so; what goes over the time is an error.
func (r *Reader) Query(ctx context.Context, query string, limits Limits) (*Result, error) {
	limits = limits.complete()
	result, err := r.query(ctx, query, limits)
	if err != nil {
		return nil, fmt.Errorf("querying ledger %s: %w", r.path, explainQuery(ctx, err, limits))
	}
	return result, nil
}

func (r *Reader) query(ctx context.Context, query string, limits Limits) (*Result, error) {
	statement, err := oneStatement(query)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, limits.Time)
	defer cancel()
	conn, err := r.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	result, err := collect(ctx, conn, statement, limits)
	return result, errors.Join(err, conn.Close())
}

func collect(ctx context.Context, conn *sql.Conn, statement string, limits Limits) (result *Result, err error) {
	for id, n := range map[int]int{
		sqlite3.SQLITE_LIMIT_LENGTH: max(limits.Bytes, maxSQL), sqlite3.SQLITE_LIMIT_COLUMN: maxColumns,
		sqlite3.SQLITE_LIMIT_SQL_LENGTH: maxSQL, sqlite3.SQLITE_LIMIT_ATTACHED: 0,
	} {
		if _, err := sqlite.Limit(conn, id, n); err != nil {
			return nil, err
		}
	}
	rows, err := conn.QueryContext(ctx, statement)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	return scan(rows, limits)
}

func scan(rows *sql.Rows, limits Limits) (*Result, error) {
	columns, err := rows.Columns()
	if err != nil {
		return nil, err
	}
	result := &Result{Columns: columns, Rows: [][]any{}}
	for size := 0; rows.Next(); {
		if len(result.Rows) == limits.Rows {
			result.Truncated = "rows"
			return result, nil
		}
		values := make([]any, len(columns))
		targets := make([]any, len(columns))
		for i := range values {
			targets[i] = &values[i]
		}
		if err := rows.Scan(targets...); err != nil {
			return nil, err
		}
		for _, v := range values {
			size += sizeOf(v)
		}
		if size > limits.Bytes {
			result.Truncated = "bytes"
			return result, nil
		}
		result.Rows = append(result.Rows, values)
	}
	return result, rows.Err()
}

// sizeOf is about what a value takes in memory.
func sizeOf(v any) int {
	const word = 16
	switch v := v.(type) {
	case string:
		return word + len(v)
	case []byte:
		return word + len(v)
	}
	return word
}

// explainQuery turns SQLite's words into what the person who asked can use.
func explainQuery(ctx context.Context, err error, limits Limits) error {
	var se *sqlite.Error
	switch {
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
		return fmt.Errorf("it took longer than %s: %w", limits.Time, err)
	case errors.As(err, &se) && se.Code()&0xff == sqlite3.SQLITE_AUTH:
		return fmt.Errorf("only SELECT is allowed, on this ledger alone: %w", err)
	case errors.As(err, &se) && se.Code()&0xff == sqlite3.SQLITE_TOOBIG:
		return fmt.Errorf("a value is larger than %d bytes: %w", limits.Bytes, err)
	}
	return err
}
