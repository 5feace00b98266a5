package ledger

import (
	"fmt"
	"unsafe"

	"modernc.org/libc"
	"modernc.org/libc/sys/types"

	// The driver package readies the library (its init applies a patch).
	_ "modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// conn is the writer's connection to SQLite, for one goroutine at a time.
//
// It calls the translated library itself instead of going through
// database/sql: that way costs some thirty allocations a row, and a quarter of
// the throughput (BenchmarkToolCall). Readers go through database/sql.
//
// Memory that SQLite sees is never Go memory: run copies text and blobs into
// arena, which the library's allocator owns.
type conn struct {
	tls   *libc.TLS
	db    uintptr
	out   uintptr // room for one pointer that a call gives back
	arena uintptr
	size  int // of arena
	full  bool
	stmts []stmt
}

// stmt is a prepared statement with the number of its parameters.
type stmt struct {
	handle uintptr
	params int
}

// maxArena bounds what is kept between rows; a larger body gives it back.
const maxArena = 1 << 20

// busyTimeout is how long a write waits for another program's lock.
const busyTimeout = 5000 // ms

// kind is the type of a value to bind.
type kind uint8

const (
	null kind = iota
	integer
	str
	bytesText
	blob
)

// value is one parameter of a statement.
type value struct {
	kind kind
	n    int64
	s    string
	b    []byte
}

func (v *value) len() int { return len(v.s) + len(v.b) }

// sqliteError is SQLite's extended result code with its text.
type sqliteError struct {
	code int
	text string
}

func (e *sqliteError) Error() string { return fmt.Sprintf("%s (%d)", e.text, e.code) }

// Is makes errors about a damaged file known as ErrDamaged.
func (e *sqliteError) Is(target error) bool {
	primary := e.code & 0xff
	return target == ErrDamaged && (primary == sqlite3.SQLITE_CORRUPT || primary == sqlite3.SQLITE_NOTADB)
}

// openConn opens or creates the database file at path for writing.
func openConn(path string) (*conn, error) {
	c := &conn{tls: libc.NewTLS()}
	c.out = libc.Xmalloc(c.tls, types.Size_t(unsafe.Sizeof(uintptr(0))))
	name, err := libc.CString(path)
	if err != nil {
		c.close()
		return nil, err
	}
	defer libc.Xfree(c.tls, name)
	rc := sqlite3.Xsqlite3_open_v2(c.tls, name, c.out, sqlite3.SQLITE_OPEN_READWRITE|sqlite3.SQLITE_OPEN_CREATE|sqlite3.SQLITE_OPEN_NOMUTEX, 0)
	c.db = c.pointer()
	if rc != sqlite3.SQLITE_OK {
		err := c.error(rc)
		c.close()
		return nil, err
	}
	sqlite3.Xsqlite3_extended_result_codes(c.tls, c.db, 1)
	sqlite3.Xsqlite3_busy_timeout(c.tls, c.db, busyTimeout)
	return c, nil
}

// close gives everything back. The connection cannot be used afterwards.
func (c *conn) close() {
	for _, s := range c.stmts {
		sqlite3.Xsqlite3_finalize(c.tls, s.handle)
	}
	c.stmts = nil
	if c.db != 0 {
		sqlite3.Xsqlite3_close_v2(c.tls, c.db)
		c.db = 0
	}
	libc.Xfree(c.tls, c.arena)
	libc.Xfree(c.tls, c.out)
	c.arena, c.out, c.size = 0, 0, 0
	c.tls.Close()
}

// memory is n bytes of the library's memory at p, as a slice. The indirection
// tells vet what it cannot know: p is no Go pointer, so nothing can move it.
func memory(p uintptr, n int) []byte {
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&p))), n)
}

func (c *conn) pointer() uintptr {
	b := memory(c.out, int(unsafe.Sizeof(uintptr(0))))
	return *(*uintptr)(unsafe.Pointer(&b[0]))
}

func (c *conn) error(rc int32) error {
	if c.db == 0 {
		return &sqliteError{code: int(rc), text: libc.GoString(sqlite3.Xsqlite3_errstr(c.tls, rc))}
	}
	return &sqliteError{code: int(rc), text: libc.GoString(sqlite3.Xsqlite3_errmsg(c.tls, c.db))}
}

// prepare compiles one statement that lives as long as the connection, and
// gives its index for run.
func (c *conn) prepare(sql string) (int, error) {
	handle, _, err := c.compile(sql)
	if err != nil {
		return 0, err
	}
	c.stmts = append(c.stmts, stmt{handle, int(sqlite3.Xsqlite3_bind_parameter_count(c.tls, handle))})
	return len(c.stmts) - 1, nil
}

// compile gives the first statement in sql (0 where there is only white space)
// with the text behind it.
func (c *conn) compile(sql string) (handle uintptr, rest string, err error) {
	text, err := libc.CString(sql)
	if err != nil {
		return 0, "", err
	}
	defer libc.Xfree(c.tls, text)
	tail := libc.Xmalloc(c.tls, types.Size_t(unsafe.Sizeof(uintptr(0))))
	defer libc.Xfree(c.tls, tail)
	if rc := sqlite3.Xsqlite3_prepare_v2(c.tls, c.db, text, -1, c.out, tail); rc != sqlite3.SQLITE_OK {
		return 0, "", c.error(rc)
	}
	b := memory(tail, int(unsafe.Sizeof(uintptr(0))))
	used := int(*(*uintptr)(unsafe.Pointer(&b[0])) - text)
	return c.pointer(), sql[used:], nil
}

// run executes a prepared statement that gives no rows, and says how many rows
// it changed.
func (c *conn) run(index int, values []value) (changed int, err error) {
	s := c.stmts[index]
	if len(values) != s.params {
		return 0, fmt.Errorf("%d values for %d parameters", len(values), s.params)
	}
	defer sqlite3.Xsqlite3_clear_bindings(c.tls, s.handle)
	if err := c.bind(s.handle, values); err != nil {
		return 0, err
	}
	rc := sqlite3.Xsqlite3_step(c.tls, s.handle)
	if rc != sqlite3.SQLITE_DONE {
		err = c.error(rc)
	}
	changed = int(sqlite3.Xsqlite3_changes(c.tls, c.db))
	sqlite3.Xsqlite3_reset(c.tls, s.handle) // gives step's error once more
	if c.size > maxArena {
		libc.Xfree(c.tls, c.arena)
		c.arena, c.size = 0, 0
	}
	return changed, err
}

// bind sets all parameters. Text and blobs lie in the arena until the next
// bind, so SQLite need not copy them (a destructor of 0 is SQLITE_STATIC).
func (c *conn) bind(handle uintptr, values []value) error {
	need := 1 // so that an empty text has an address
	for i := range values {
		need += values[i].len()
	}
	if err := c.grow(need); err != nil {
		return err
	}
	room, at := memory(c.arena, c.size), 0
	for i := range values {
		v, n := &values[i], int32(i+1)
		p, size := c.arena+uintptr(at), int32(v.len())
		at += copy(room[at:], v.s)
		at += copy(room[at:], v.b)
		var rc int32
		switch v.kind {
		case null: // clear_bindings left it so
		case integer:
			rc = sqlite3.Xsqlite3_bind_int64(c.tls, handle, n, v.n)
		case str, bytesText:
			rc = sqlite3.Xsqlite3_bind_text(c.tls, handle, n, p, size, 0)
		case blob:
			rc = sqlite3.Xsqlite3_bind_blob(c.tls, handle, n, p, size, 0)
		}
		if rc != sqlite3.SQLITE_OK {
			return c.error(rc)
		}
	}
	return nil
}

func (c *conn) grow(need int) error {
	if need <= c.size {
		return nil
	}
	size := max(need, 2*c.size, 16<<10)
	if need > maxArena {
		size = need
	}
	p := libc.Xmalloc(c.tls, types.Size_t(size))
	if p == 0 {
		return fmt.Errorf("allocating %d bytes for a row", size)
	}
	libc.Xfree(c.tls, c.arena)
	c.arena, c.size = p, size
	return nil
}

// script executes all statements in sql, ignoring their rows.
func (c *conn) script(sql string) error {
	for sql != "" {
		handle, rest, err := c.compile(sql)
		if err != nil {
			return err
		}
		sql = rest
		if handle == 0 {
			continue
		}
		rc := sqlite3.Xsqlite3_step(c.tls, handle)
		for rc == sqlite3.SQLITE_ROW {
			rc = sqlite3.Xsqlite3_step(c.tls, handle)
		}
		if rc != sqlite3.SQLITE_DONE {
			err = c.error(rc)
		}
		sqlite3.Xsqlite3_finalize(c.tls, handle) // gives step's error once more
		if err != nil {
			return err
		}
	}
	return nil
}

// first gives the first column of the first row of a query, "" without rows.
func (c *conn) first(sql string) (string, error) {
	handle, _, err := c.compile(sql)
	if err != nil {
		return "", err
	}
	return c.column(handle, 0)
}

// column gives one column of a statement's first row, and ends the statement.
func (c *conn) column(handle uintptr, index int32) (string, error) {
	defer sqlite3.Xsqlite3_finalize(c.tls, handle)
	switch rc := sqlite3.Xsqlite3_step(c.tls, handle); rc {
	case sqlite3.SQLITE_ROW:
		p := sqlite3.Xsqlite3_column_text(c.tls, handle, index)
		n := sqlite3.Xsqlite3_column_bytes(c.tls, handle, index)
		if p == 0 {
			return "", nil
		}
		return string(memory(p, int(n))), nil
	case sqlite3.SQLITE_DONE:
		return "", nil
	default:
		return "", c.error(rc)
	}
}

// number is first for an integer, 0 without rows.
func (c *conn) number(sql string) (int64, error) {
	s, err := c.first(sql)
	if err != nil || s == "" {
		return 0, err
	}
	var n int64
	if _, err := fmt.Sscan(s, &n); err != nil {
		return 0, fmt.Errorf("reading a number from %q: %w", sql, err)
	}
	return n, nil
}

func (c *conn) lastID() int64 { return sqlite3.Xsqlite3_last_insert_rowid(c.tls, c.db) }
func (c *conn) inTransaction() bool {
	return sqlite3.Xsqlite3_get_autocommit(c.tls, c.db) == 0
}
