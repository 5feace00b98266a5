package ledger

import (
	"fmt"
	"os"
	"strings"

	sqlite3 "modernc.org/sqlite/lib"
)

// migrations lists the scripts that lead from one schema version to the next:
// the first creates the schema, the one at n leads from version n to n+1.
func migrations() []string {
	return []string{schemaSQL()}
}

// configure sets what belongs to the connection. A checkpoint costs two syncs
// and stalls one commit, so it is done every 16 MiB of log, not every 4; what
// the log once took is given back down to 64 MiB.
func (c *conn) configure() error {
	return c.script(`PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA cache_size=-8192;
		PRAGMA wal_autocheckpoint=4096; PRAGMA journal_size_limit=67108864`)
}

// migrate brings the database to the version that steps lead to. A database
// that has rows is backed up beside itself first.
func (c *conn) migrate(path string, steps []string) error {
	version, err := c.number("PRAGMA user_version")
	if err != nil {
		return err
	}
	if err := c.refuseForeign(version); err != nil {
		return err
	}
	latest := int64(len(steps))
	switch {
	case version == latest:
		return nil
	case version > latest:
		return fmt.Errorf("%w (schema %d, this one knows %d): upgrade Capsem to open it", ErrNewer, version, latest)
	case version > 0:
		if err := c.backup(fmt.Sprintf("%s.v%d.bak", path, version)); err != nil {
			return fmt.Errorf("backing up before migrating: %w", err)
		}
	}
	script := strings.Join(steps[version:], "\n") +
		fmt.Sprintf("\nPRAGMA user_version=%d; PRAGMA application_id=%d;", latest, applicationID)
	if err := c.transaction(func() error { return c.script(script) }); err != nil {
		return fmt.Errorf("migrating from schema %d to %d: %w", version, latest, err)
	}
	return nil
}

// refuseForeign keeps hands off a database that is not a ledger.
func (c *conn) refuseForeign(version int64) error {
	id, err := c.number("PRAGMA application_id")
	if err != nil {
		return err
	}
	if id == applicationID {
		return nil
	}
	objects, err := c.number("SELECT count(*) FROM sqlite_master")
	if err != nil {
		return err
	}
	if version != 0 || objects != 0 {
		return fmt.Errorf("the file is a database of another program (application_id %d)", id)
	}
	return nil
}

// backup writes a copy that a reader could open; an earlier one of that name
// is of an attempt that did not finish, and goes.
func (c *conn) backup(path string) error {
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return err
	}
	return c.script("VACUUM INTO '" + strings.ReplaceAll(path, "'", "''") + "'")
}

// transaction runs f and commits, or rolls everything back.
func (c *conn) transaction(f func() error) error {
	if err := c.script("BEGIN IMMEDIATE"); err != nil {
		return err
	}
	err := f()
	if err == nil {
		err = c.script("COMMIT")
	}
	if err != nil && c.inTransaction() {
		if rerr := c.script("ROLLBACK"); rerr != nil {
			return fmt.Errorf("%w (and rolling back: %w)", err, rerr)
		}
	}
	return err
}

// interrupt closes every pending row: whoever was to write its outcome is gone.
func (c *conn) interrupt() (Recovered, error) {
	var r Recovered
	counts := map[string]*int64{
		"tool_calls": &r.ToolCalls, "exec_events": &r.Execs, "net_events": &r.Requests,
		"fs_events": &r.Files, "protocol_events": &r.Protocol, "vm_events": &r.VM,
	}
	err := c.transaction(func() error {
		for _, t := range Tables() {
			if t.State == "" {
				continue
			}
			if err := c.script(t.interruptSQL()); err != nil {
				return err
			}
			*counts[t.Name] = int64(sqlite3.Xsqlite3_changes(c.tls, c.db))
		}
		return nil
	})
	if err != nil {
		return Recovered{}, fmt.Errorf("closing pending rows: %w", err)
	}
	return r, nil
}

// singleFile leaves nothing beside the database file. It waits a second for
// readers to go.
func (c *conn) singleFile() error {
	if err := c.script("PRAGMA busy_timeout=1000; PRAGMA wal_checkpoint(TRUNCATE)"); err != nil {
		return err
	}
	mode, err := c.first("PRAGMA journal_mode=DELETE")
	if err != nil {
		return err
	}
	if mode != "delete" {
		return fmt.Errorf("leaving WAL mode: the journal mode stays %q; is a reader still there?", mode)
	}
	return nil
}
