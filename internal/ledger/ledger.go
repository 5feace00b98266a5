// Package ledger is the record of what a sandbox tried, what was decided, and
// what came of it: one SQLite database per virtual machine.
//
// A Ledger is the one writer of such a file. Begin writes the intent and
// returns when it is committed, so that nothing happens without a row; End adds
// the outcome, once. Triggers refuse to delete a row or to change what was
// begun. A second writer is refused by a lock on a file beside the database.
// What is pending when the ledger is closed becomes "interrupted"; where the
// process died first, Recover or the next Open sees to it.
//
// Commits are grouped without a timer: who finds nobody writing commits at once,
// and what arrives during a commit is the next batch. Hashing and compressing
// happen before that, side by side. When the disk is full or fails, Begin says
// so, nothing that was acknowledged is lost, and writing works again as soon as
// there is space.
//
// Bodies are kept whole, compressed and addressed by their BLAKE3 digest; the
// columns beside them hold display forms. A blocked request is kept as digest
// and size unless Options.RecordBlocked says otherwise, a blocked response
// always. Values that the Redactor knows are in no column and no body.
//
// A Reader is anybody's: it opens the file read-only, live or sealed, never
// delays the writer, and bounds what a query may cost.
package ledger

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"

	"github.com/klauspost/compress/zstd"

	"github.com/capsem/capsem/internal/event"
)

// Durability says what a commit survives.
type Durability string

// The two durabilities. In both, a batch that holds a block or an ask is synced.
const (
	// Process survives the death of every process (synchronous=NORMAL).
	Process Durability = "process"
	// Power survives a power cut as well (synchronous=FULL).
	Power Durability = "power"
)

// The bounds of a ledger.
const (
	// MaxBody is how many bytes of one body are kept.
	MaxBody = 16 << 20
	// MaxText is how many bytes a text column holds; longer text is cut at a rune.
	MaxText = 4096
	// MaxBatch is how many rows one commit takes before it stops adding calls.
	MaxBatch = 256
	// MaxQueue is how many calls wait for a commit with their rows made; more
	// wait at the door, where they can be cancelled.
	MaxQueue = 1024
	// DefaultBodyQuota is how many bytes of bodies, as stored, a ledger keeps.
	DefaultBodyQuota = 1 << 30
)

// Errors that callers tell apart.
var (
	// ErrClosed is the answer of a ledger that was closed or sealed.
	ErrClosed = errors.New("the ledger is closed")
	// ErrLocked says that another process writes this ledger.
	ErrLocked = errors.New("another process is writing this ledger")
	// ErrSealed says that the ledger was sealed: it is evidence, and read only.
	ErrSealed = errors.New("the ledger is sealed")
	// ErrNewer says that the ledger was written by a newer version of Capsem.
	ErrNewer = errors.New("the ledger was written by a newer version of Capsem")
	// ErrDamaged says that the file is no whole database any more.
	ErrDamaged = errors.New("the ledger is damaged")
)

// Options shape a ledger. The zero value is usable.
type Options struct {
	// Durability is Process when empty.
	Durability Durability
	// RecordBlocked is "full" to keep the bodies of blocked requests; anything
	// else keeps their digest and size.
	RecordBlocked string
	// BodyQuota bounds the bytes of all bodies as stored; 0 is DefaultBodyQuota.
	BodyQuota int64
	// Redactor removes secrets from everything that is written; nil removes none.
	Redactor *Redactor
	// Log hears of rows that could not be written with nobody to tell; nil is
	// slog.DiscardHandler.
	Log *slog.Logger
}

// Ledger is the writer of one ledger file. Its methods are safe for concurrent
// use.
type Ledger struct {
	path    string
	options Options
	lock    *lockFile
	zstd    *zstd.Encoder
	repeats *repeats

	writer writer
	conn   *conn // used by whoever has the writer's turn
	ops    sync.Pool

	bodies    atomic.Int64 // bytes of bodies kept, with those on their way
	keptTotal int64        // the same as committed; guarded as conn is
	overQuota atomic.Bool  // a row has said so
	recovered Recovered
}

// Recovered counts the rows that a dead writer left pending, by table.
type Recovered struct {
	ToolCalls, Execs, Requests, Files, Protocol, VM int64
}

// Total is the number of rows of all tables.
func (r Recovered) Total() int64 {
	return r.ToolCalls + r.Execs + r.Requests + r.Files + r.Protocol + r.VM
}

// String says it in words.
func (r Recovered) String() string {
	return fmt.Sprintf("%d tool calls, %d commands, %d requests, %d files, %d messages, %d machine events",
		r.ToolCalls, r.Execs, r.Requests, r.Files, r.Protocol, r.VM)
}

// Open opens the ledger at path for writing, creating or migrating it, and
// turns rows that a dead writer left pending into interrupted ones. The caller
// must Close or Seal it. Errors are ErrLocked, ErrSealed, ErrNewer or ErrDamaged
// where that is the reason.
func Open(ctx context.Context, path string, options Options) (*Ledger, error) {
	l, err := open(ctx, path, options)
	if err != nil {
		return nil, fmt.Errorf("opening ledger %s: %w", path, err)
	}
	return l, nil
}

// OpenService opens the ledger of what concerns no machine. It has the same
// schema; Begin takes Admin and Boot events, and tool calls of the host.
func OpenService(ctx context.Context, path string, options Options) (*Ledger, error) {
	return Open(ctx, path, options)
}

// Recover takes the writer's lock of a ledger whose writer has died, turns what
// it left pending into interrupted, and says how many rows that were. It fails
// with ErrLocked while a writer lives, and with an error that wraps
// fs.ErrNotExist when there is no ledger.
func Recover(ctx context.Context, path string) (Recovered, error) {
	if _, err := os.Stat(path); err != nil {
		return Recovered{}, fmt.Errorf("recovering ledger: %w", err)
	}
	l, err := Open(ctx, path, Options{})
	if err != nil {
		return Recovered{}, fmt.Errorf("recovering: %w", err)
	}
	return l.recovered, l.Close()
}

// Recovered says what Open found pending.
func (l *Ledger) Recovered() Recovered { return l.recovered }

func open(ctx context.Context, path string, options Options) (*Ledger, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	options, err := options.complete()
	if err != nil {
		return nil, err
	}
	if err := refuseSealed(path); err != nil {
		return nil, err
	}
	lock, err := takeLock(path + ".lock")
	if err != nil {
		return nil, err
	}
	l := &Ledger{
		path: path, options: options, lock: lock,
		writer: writer{places: make(chan struct{}, MaxQueue)},
	}
	l.ops.New = func() any { return newOp() }
	l.repeats = newRepeats(l.writeRepeat)
	if err := l.start(); err != nil {
		return nil, errors.Join(err, lock.release())
	}
	if l.recovered.Total() > 0 {
		if err := l.VMEvent(ctx, "recovered", "interrupted: "+l.recovered.String()); err != nil {
			return nil, errors.Join(err, l.Close())
		}
	}
	return l, nil
}

func (o Options) complete() (Options, error) {
	switch o.Durability {
	case "":
		o.Durability = Process
	case Process, Power:
	default:
		return o, fmt.Errorf("durability is %q or %q, not %q", Process, Power, o.Durability)
	}
	if o.BodyQuota == 0 {
		o.BodyQuota = DefaultBodyQuota
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o, nil
}

// refuseSealed looks at the mode bits, because the superuser may write anyway.
func refuseSealed(path string) error {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case !info.Mode().IsRegular():
		return errors.New("it is not a regular file")
	case info.Mode().Perm()&0o200 == 0:
		return ErrSealed
	}
	return nil
}

// start readies everything that writing uses.
func (l *Ledger) start() (err error) {
	if err := createPrivate(l.path); err != nil {
		return err
	}
	if l.conn, err = openConn(l.path); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			l.conn.close()
		}
	}()
	if err := l.conn.configure(); err != nil {
		return err
	}
	if err := l.conn.migrate(l.path, migrations()); err != nil {
		return err
	}
	if err := l.conn.prepareAll(); err != nil {
		return err
	}
	if l.recovered, err = l.conn.interrupt(); err != nil {
		return err
	}
	if l.keptTotal, err = l.conn.number("SELECT kept_total FROM bodies ORDER BY rowid DESC LIMIT 1"); err != nil {
		return err
	}
	l.bodies.Store(l.keptTotal)
	l.zstd, err = newEncoder()
	return err
}

// createPrivate makes a new file that only its owner can read. An existing one
// must not be opened here: closing it would drop SQLite's locks (POSIX locks
// belong to the process).
func createPrivate(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return f.Close()
}

// VMEvent records something that happened to the machine or its ledger: kind is
// one word, detail may be empty. It returns when the row is committed.
func (l *Ledger) VMEvent(ctx context.Context, kind, detail string) error {
	ev, err := newEvent(event.Admin)
	if err != nil {
		return err
	}
	o := l.newOp()
	o.vmEvent(ev, kind, detail, event.Done, event.Verdict{Decision: event.Allow})
	_, err = l.submit(ctx, o)
	return err
}

// Close writes what is counted but not yet written, waits for calls that are
// under way, turns rows whose outcome will not come into interrupted ones, and
// gives the lock back. It can be called again.
func (l *Ledger) Close() error {
	if !l.shut() {
		return nil
	}
	_, err := l.conn.interrupt()
	if err != nil {
		err = fmt.Errorf("closing ledger %s: %w", l.path, err)
	}
	return l.release(err)
}

// release gives everything back and joins what fails to err.
func (l *Ledger) release(err error) error {
	l.conn.close()
	return errors.Join(err, l.zstd.Close(), l.lock.release())
}

// shut ends writing; it is false when that was done before.
func (l *Ledger) shut() bool {
	l.repeats.close()
	return l.writer.close()
}

// Seal closes the ledger for good: everything is in one file, which nobody may
// write. It fails, and the ledger is closed but not sealed, while a reader
// still has the file open; then Open and Seal it again.
func (l *Ledger) Seal(ctx context.Context) error {
	if err := l.seal(ctx); err != nil {
		return fmt.Errorf("sealing ledger %s: %w", l.path, err)
	}
	return nil
}

func (l *Ledger) seal(ctx context.Context) error {
	if err := l.VMEvent(ctx, "sealed", ""); err != nil {
		return errors.Join(err, l.Close())
	}
	if !l.shut() {
		return ErrClosed
	}
	_, err := l.conn.interrupt()
	if err == nil {
		err = l.conn.singleFile()
	}
	if err == nil {
		err = os.Chmod(l.path, 0o400)
	}
	if err == nil {
		err = os.Remove(l.path + ".lock")
	}
	return l.release(err)
}
