package ledger

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"

	sqlite3 "modernc.org/sqlite/lib"
)

// errEnded says that the row has its outcome already.
var errEnded = errors.New("the outcome was recorded before")

// statements are the indices of the prepared statements: insert of table t is
// 2t, finish of table t is 2t+1, and then these.
const (
	insertBody = 2*tableCount + iota
	begin
	commit
	rollback
)

func insertRow(t tableID) int { return 2 * int(t) }
func finishRow(t tableID) int { return 2*int(t) + 1 }

// prepareAll compiles every statement that the writer uses, in that order.
func (c *conn) prepareAll() error {
	var all []string
	for _, t := range Tables() {
		finish := "SELECT 1" // never run: these rows have no outcome
		if t.State != "" {
			finish = t.finishSQL()
		}
		all = append(all, t.insertSQL(), finish)
	}
	all = append(all, insertBodySQL, "BEGIN IMMEDIATE", "COMMIT", "ROLLBACK")
	for _, sql := range all {
		if _, err := c.prepare(sql); err != nil {
			return fmt.Errorf("preparing %q: %w", sql, err)
		}
	}
	return nil
}

// op is what one caller wants written: rows that are committed together or not
// at all. Ops are pooled; their values and scratch keep their capacity.
type op struct {
	rows    []row
	values  []value
	scratch []byte
	redact  *Redactor
	synced  bool  // a block or an ask: the batch is synced
	kept    int64 // bytes of bodies that were counted against the quota
	twice   int64 // those of them that were there already
	id      int64 // of the first row, set by the writer
	err     error // set by the writer
	turn    chan turn
}

// row is one statement with its values, values[from:to] of the op.
type row struct {
	stmt     int
	from, to int
}

// maxPooled bounds the scratch that a pooled op keeps.
const maxPooled = 256 << 10

func newOp() *op {
	return &op{values: make([]value, 0, 128), scratch: make([]byte, 0, 8<<10), turn: make(chan turn, 1)}
}

func (l *Ledger) newOp() *op {
	o, _ := l.ops.Get().(*op) // New makes no other type
	o.redact = l.options.Redactor
	return o
}

func (l *Ledger) freeOp(o *op) {
	if cap(o.scratch) > maxPooled {
		return
	}
	clear(o.values)
	turn := o.turn
	*o = op{rows: o.rows[:0], values: o.values[:0], scratch: o.scratch[:0], turn: turn}
	l.ops.Put(o)
}

// turn is what a caller that waits for its op is told.
type turn bool

const (
	committed turn = false // the op is answered
	lead      turn = true  // nobody commits: it is your turn
)

// writer is the right to write. There is no goroutine for it: a caller that
// finds nobody committing commits at once itself, with no switch to another
// goroutine and back; whoever comes meanwhile is the next batch, committed by
// the first of them.
type writer struct {
	places chan struct{} // one for each op that waits or is being committed

	mu      sync.Mutex
	waiting []*op
	busy    bool
	closed  bool
	commits int            // batches so far; guarded as conn is
	inside  sync.WaitGroup // callers of submit, added to while mu is held
}

// submit has o committed, gives it back to the pool, and returns the id of its
// first row. Cancelling ctx ends the wait for a place; what has one is
// committed, so that no row is left behind unknown.
func (l *Ledger) submit(ctx context.Context, o *op) (int64, error) {
	defer l.freeOp(o)
	leads, err := l.enter(ctx, o)
	if err != nil {
		l.bodies.Add(-o.kept)
		return 0, fmt.Errorf("recording in the ledger: %w", err)
	}
	defer l.writer.inside.Done()
	if leads || <-o.turn == lead {
		l.lead()
		<-o.turn
	}
	<-l.writer.places
	return o.id, o.err
}

// enter queues o, and says whether its caller is to commit.
func (l *Ledger) enter(ctx context.Context, o *op) (leads bool, err error) {
	w := &l.writer
	select {
	case w.places <- struct{}{}:
	case <-ctx.Done():
		return false, fmt.Errorf("waiting for the writer: %w", ctx.Err())
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		<-w.places
		return false, ErrClosed
	}
	w.inside.Add(1)
	w.waiting = append(w.waiting, o)
	leads = !w.busy
	w.busy = true
	return leads, nil
}

// lead commits one batch, which holds the caller's own op, and passes the turn on.
func (l *Ledger) lead() {
	w := &l.writer
	runtime.Gosched() // callers that are ready to run are in this batch, not the next
	w.mu.Lock()
	batch := w.take()
	w.mu.Unlock()
	l.commitBatch(batch)
	w.commits++
	w.mu.Lock()
	if len(w.waiting) > 0 {
		w.waiting[0].turn <- lead
	} else {
		w.busy = false
	}
	w.mu.Unlock()
	for _, o := range batch {
		o.turn <- committed
	}
}

// take removes a batch from those who wait: ops until MaxBatch rows.
func (w *writer) take() []*op {
	rows, n := 0, 0
	for n < len(w.waiting) && rows < MaxBatch {
		rows += len(w.waiting[n].rows)
		n++
	}
	batch := w.waiting[:n:n]
	w.waiting = w.waiting[n:]
	if len(w.waiting) == 0 {
		w.waiting = nil
	}
	return batch
}

// close refuses further ops and waits for those inside. It is false when that
// was done before.
func (w *writer) close() bool {
	w.mu.Lock()
	was := w.closed
	w.closed = true
	w.mu.Unlock()
	w.inside.Wait()
	return !was
}

// commitBatch commits all of batch, and answers every op in it. One that is
// wrong does not take its neighbours with it: they are tried again, alone.
func (l *Ledger) commitBatch(batch []*op) {
	err := l.commit(batch)
	if err != nil && len(batch) > 1 && !wholesale(err) {
		for _, o := range batch {
			l.answer(o, l.commit([]*op{o}))
		}
		return
	}
	for _, o := range batch {
		l.answer(o, err)
	}
}

// wholesale reports whether an error is the database's and not one row's, so
// that every row would get it. To try each would take up to busyTimeout each.
func wholesale(err error) bool {
	var se *sqliteError
	if !errors.As(err, &se) {
		return false
	}
	switch se.code & 0xff {
	case sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG:
		return false
	}
	return true
}

// answer sets what came of an op, and takes back from the quota what was not
// stored.
func (l *Ledger) answer(o *op, err error) {
	if err != nil {
		o.err = l.explain(err)
	}
	if o.err != nil {
		o.twice = o.kept
	}
	l.bodies.Add(-o.twice)
}

// explain says what a failed write means for whoever reads the message.
func (l *Ledger) explain(err error) error {
	hint := "new actions are refused until it can write again"
	var se *sqliteError
	if errors.As(err, &se) {
		switch se.code & 0xff {
		case sqlite3.SQLITE_FULL:
			hint = "the disk is full; " + hint + ": free some space (capsem purge)"
		case sqlite3.SQLITE_IOERR:
			hint = "the disk may be full or failing; " + hint
		case sqlite3.SQLITE_BUSY:
			hint = "another program holds the ledger's write lock; " + hint
		case sqlite3.SQLITE_CONSTRAINT:
			hint = "the row contradicts one that is there"
		}
	}
	return fmt.Errorf("recording in the ledger: %w: %s", err, hint)
}

func (l *Ledger) commit(batch []*op) (err error) {
	if err := l.conn.setSync(l.options.Durability == Power || anySynced(batch)); err != nil {
		return err
	}
	if _, err := l.conn.run(begin, nil); err != nil {
		return err
	}
	kept := l.keptTotal
	defer func() {
		if err == nil {
			return
		}
		l.keptTotal = kept
		if l.conn.inTransaction() {
			_, rerr := l.conn.run(rollback, nil)
			err = errors.Join(err, rerr)
		}
	}()
	for _, o := range batch {
		o.err, o.twice = nil, 0
		if err := l.insert(o); err != nil {
			return err
		}
	}
	if _, err := l.conn.run(commit, nil); err != nil {
		return err
	}
	return nil
}

func anySynced(batch []*op) bool {
	for _, o := range batch {
		if o.synced {
			return true
		}
	}
	return false
}

// setSync must be called outside a transaction: SQLite ignores it inside one.
func (c *conn) setSync(full bool) error {
	if full == c.full {
		return nil
	}
	mode := "NORMAL"
	if full {
		mode = "FULL"
	}
	if err := c.script("PRAGMA synchronous=" + mode); err != nil {
		return err
	}
	c.full = full
	return nil
}

// insert writes the rows of one op. An outcome that finds no pending row leaves
// the whole op unwritten, which is an error of that op alone.
func (l *Ledger) insert(o *op) error {
	for i, r := range o.rows {
		values := o.values[r.from:r.to]
		if r.stmt == insertBody {
			if err := l.storeBody(o, values); err != nil {
				return err
			}
			continue
		}
		changed, err := l.conn.run(r.stmt, values)
		if err != nil {
			return err
		}
		if i > 0 {
			continue
		}
		if changed == 0 {
			o.err = fmt.Errorf("recording in the ledger: %w", errEnded)
			return nil
		}
		o.id = l.conn.lastID()
	}
	return nil
}

// storeBody stores a body unless it is there. The last value is the running
// total, which only the writer knows.
func (l *Ledger) storeBody(o *op, values []value) error {
	size := int64(len(values[bodyColumn].b))
	values[bodyColumn+1].n = l.keptTotal + size
	changed, err := l.conn.run(insertBody, values)
	if err != nil {
		return err
	}
	if changed == 0 {
		o.twice += size
		return nil
	}
	l.keptTotal += size
	return nil
}

// bodyColumn is the place of the bytes in insertBodySQL's values.
const bodyColumn = 2
