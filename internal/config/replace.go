package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// replaceFile puts data into the file at path with mode 0600: whoever reads it,
// also after a crash, finds the old content or the new, whole.
func replaceFile(path string, data []byte) error {
	dir := filepath.Dir(path)
	temp, err := writeTemp(dir, data)
	if err != nil {
		return err
	}
	if err := os.Rename(temp, path); err != nil {
		return errors.Join(err, os.Remove(temp))
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// writeTemp writes data durably to a new file in dir and returns its path. The
// dot before the name keeps it out of every list of names.
func writeTemp(dir string, data []byte) (string, error) {
	f, err := os.CreateTemp(dir, ".new-*") // mode 0600
	if err != nil {
		return "", err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return "", errors.Join(fmt.Errorf("writing %s: %w", f.Name(), err), os.Remove(f.Name()))
	}
	return f.Name(), nil
}
