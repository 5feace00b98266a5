package service

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// reserveSize is how much disk space is set aside, in bytes: room for the rows,
// the record and the sealing of a deletion.
const reserveSize = 4 << 20

// allowance is disk space that is set aside for what gives disk space back. Nothing
// is done that cannot be recorded, so without it a disk that is full could not be
// emptied by deleting VMs.
type allowance struct {
	path string
	log  *slog.Logger

	mu sync.Mutex // guards the file's size
}

// hold sets the space aside, where there is enough.
func (r *allowance) hold() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.fill(); err != nil {
		r.log.Warn("setting disk space aside", "error", err)
	}
}

func (r *allowance) fill() (err error) {
	f, err := os.OpenFile(r.path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if info, err := f.Stat(); err != nil || info.Size() == reserveSize {
		return err
	}
	if _, err := f.Write(make([]byte, reserveSize)); err != nil {
		return errors.Join(err, f.Truncate(0))
	}
	return nil
}

// relieve gives the space up where the disk has less than that left, and reports
// whether it did.
func (r *allowance) relieve() bool {
	var fs unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(r.path), &fs); err != nil {
		return false // what follows fails with a better reason
	}
	if int64(fs.Bavail)*fs.Bsize >= reserveSize {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := os.Truncate(r.path, 0); err != nil {
		r.log.Warn("giving up disk space that was set aside", "error", err)
		return false
	}
	return true
}

// with runs what gives disk space back, on the reserve where there is nothing
// else.
func (r *allowance) with(do func() error) error {
	if r.relieve() {
		defer r.hold()
	}
	return do()
}
