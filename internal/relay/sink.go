//go:build linux

package relay

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/guestproto"
)

// defaultMode is the mode of a new file where the host names none.
const defaultMode = 0o644

// sink is a file that is being written. Either commit or abandon ends it; abandon
// may follow a commit that failed.
type sink interface {
	io.Writer
	commit() error
	// abandon leaves the path as it was before.
	abandon() error
}

// replacement is a new file that takes the path's place at the end.
type replacement struct {
	*os.File
	path string
	mode uint32
	done bool
}

func newReplacement(path string, w *guestproto.WriteFile) (sink, error) {
	old, err := os.Stat(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err == nil && !old.Mode().IsRegular() {
		return nil, fmt.Errorf("%w: %s is there and not a regular file", errInvalid, path)
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".capsem-write-*")
	if err != nil {
		return nil, err
	}
	r := &replacement{File: f, path: path, mode: w.Mode}
	if r.mode == 0 {
		r.mode = defaultMode
	}
	if old == nil {
		return r, nil
	}
	if st, ok := old.Sys().(*syscall.Stat_t); ok {
		if w.Mode == 0 {
			r.mode = st.Mode & 0o7777
		}
		if err := f.Chown(int(st.Uid), int(st.Gid)); err != nil {
			return nil, errors.Join(fmt.Errorf("keeping the owner of %s: %w", path, err), r.abandon())
		}
	}
	return r, nil
}

// commit puts the file in place. After it the content is on disk, also when the
// power goes.
func (r *replacement) commit() error {
	// Through the descriptor: the path of a temporary file could have been
	// swapped for a link.
	if err := unix.Fchmod(int(r.Fd()), r.mode); err != nil {
		return fmt.Errorf("setting the mode of %s: %w", r.path, err)
	}
	if err := r.Sync(); err != nil {
		return err
	}
	if err := r.Close(); err != nil {
		return err
	}
	if err := os.Rename(r.Name(), r.path); err != nil {
		return err
	}
	r.done = true
	dir, err := os.Open(filepath.Dir(r.path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

func (r *replacement) abandon() error {
	if r.done {
		return nil
	}
	_ = r.Close() // nothing of it is wanted
	return os.Remove(r.Name())
}

// appendage is a file that is added to.
type appendage struct {
	*os.File
	size int64 // before
	mode uint32
}

func newAppendage(path string, w *guestproto.WriteFile) (sink, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_NONBLOCK, defaultMode)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%w: %s is there and not a regular file", errInvalid, path)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &appendage{File: f, size: info.Size(), mode: w.Mode}, nil
}

func (a *appendage) commit() error {
	if a.mode != 0 {
		if err := unix.Fchmod(int(a.Fd()), a.mode); err != nil {
			return fmt.Errorf("setting the mode of %s: %w", a.Name(), err)
		}
	}
	if err := a.Sync(); err != nil {
		return err
	}
	return a.Close()
}

func (a *appendage) abandon() error {
	return errors.Join(a.Truncate(a.size), a.Close())
}
