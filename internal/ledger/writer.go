package ledger

import (
	"context"
	"errors"
	"fmt"

	sqlite3 "modernc.org/sqlite/lib"
)

// errEnded says that the row has its outcome already.
var errEnded = errors.New("the outcome was recorded before")

// statements are the indices of the prepared statements: insert of table t is
// 2t, finish of table t is 2t+1, and then these.
const (
	insertBody = 2*int(tableCount) + iota
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
	synced  bool // a block or an ask: the batch is synced
	kept    int64 // bytes of bodies that were counted against the quota
	twice   int64 // those of them that were there already
	id      int64 // of the first row, set by the writer
	err     error // set by the writer
	done    chan struct{}
}

// row is one statement with its values, values[from:to] of the op.
type row struct {
	stmt     int
	from, to int
}

// maxPooled bounds the scratch that a pooled op keeps.
const maxPooled = 256 << 10

func newOp() *op {
	return &op{values: make([]value, 0, 128), scratch: make([]byte, 0, 8<<10), done: make(chan struct{}, 1)}
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
	done := o.done
	*o = op{rows: o.rows[:0], values: o.values[:0], scratch: o.scratch[:0], done: done}
	l.ops.Put(o)
}

// submit has the writer commit o, gives o back to the pool, and returns the id
// of its first row. Cancelling ctx ends the wait at the door; what the writer
// has taken is waited for, so that a row is never left behind unknown.
func (l *Ledger) submit(ctx context.Context, o *op) (int64, error) {
	defer l.freeOp(o)
	if err := l.enqueue(ctx, o); err != nil {
		l.bodies.Add(-o.kept)
		return 0, err
	}
	<-o.done
	return o.id, o.err
}

func (l *Ledger) enqueue(ctx context.Context, o *op) error {
	l.door.RLock()
	defer l.door.RUnlock()
	if l.closed {
		return fmt.Errorf("recording in ledger %s: %w", l.path, ErrClosed)
	}
	select {
	case l.queue <- o:
		return nil
	default:
	}
	select {
	case l.queue <- o:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting to record in ledger %s: %w", l.path, ctx.Err())
	}
}

// write is the writer goroutine: it commits batches until the queue is closed.
func (l *Ledger) write() {
	defer close(l.done)
	batch := make([]*op, 0, MaxBatch)
	for o := range l.queue {
		batch = l.gather(append(batch[:0], o))
		l.commitBatch(batch)
		clear(batch)
	}
}

// gather adds what is waiting to a batch, up to MaxBatch rows.
func (l *Ledger) gather(batch []*op) []*op {
	for rows := len(batch[0].rows); rows < MaxBatch; {
		select {
		case o, open := <-l.queue:
			if !open {
				return batch
			}
			batch = append(batch, o)
			rows += len(o.rows)
		default:
			return batch
		}
	}
	return batch
}

// commitBatch commits all of batch, and answers every op in it. One that fails
// does not take its neighbours with it: they are tried again, alone.
func (l *Ledger) commitBatch(batch []*op) {
	err := l.commit(batch)
	if err != nil && len(batch) > 1 {
		for _, o := range batch {
			l.answer(o, l.commit([]*op{o}))
		}
		return
	}
	for _, o := range batch {
		l.answer(o, err)
	}
}

// answer tells the caller what came of its op, and takes back from the quota
// what was not stored.
func (l *Ledger) answer(o *op, err error) {
	if err != nil {
		o.err = l.explain(err)
	}
	if o.err != nil {
		o.twice = o.kept
	}
	l.bodies.Add(-o.twice)
	o.done <- struct{}{}
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
	return fmt.Errorf("recording in ledger %s: %w: %s", l.path, err, hint)
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
			o.err = fmt.Errorf("recording in ledger %s: %w", l.path, errEnded)
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
