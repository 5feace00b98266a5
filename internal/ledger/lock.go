package ledger

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// lockFile is an exclusive lock that the kernel gives back when the process
// dies. It is not the database itself: closing that would drop SQLite's locks.
type lockFile struct{ file *os.File }

// takeLock creates and locks the file at path. It does not wait: an error that
// wraps ErrLocked names the holder.
func takeLock(path string) (*lockFile, error) {
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, err
		}
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			return nil, errors.Join(lockError(path, err), f.Close())
		}
		same, err := isFile(f, path)
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		if !same { // it was sealed, and its lock file removed, in between
			if err := f.Close(); err != nil {
				return nil, err
			}
			continue
		}
		if err := writePID(f); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		return &lockFile{f}, nil
	}
}

func lockError(path string, err error) error {
	if !errors.Is(err, syscall.EWOULDBLOCK) {
		return fmt.Errorf("locking %s: %w", path, err)
	}
	// The pid is for people; without it the message is still true.
	if b, err := os.ReadFile(path); err == nil && len(b) > 0 {
		return fmt.Errorf("%w (process %s)", ErrLocked, strings.TrimSpace(string(b)))
	}
	return ErrLocked
}

func isFile(f *os.File, path string) (bool, error) {
	mine, err := f.Stat()
	if err != nil {
		return false, err
	}
	there, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return os.SameFile(mine, there), nil
}

// writePID tells people who holds the lock. On a full disk the lock holds
// without it.
func writePID(f *os.File) error {
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err := f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return nil
	}
	return err
}

func (l *lockFile) release() error { return l.file.Close() }
