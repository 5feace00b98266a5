//go:build linux

package pid1

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// loadModules loads what the list names, in its order. A module that fails does
// not keep the others from being tried: the errors of all are returned.
func loadModules(list string, log *bootLog) error {
	f, err := os.Open(list)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // a kernel with everything built in
	}
	if err != nil {
		return fmt.Errorf("opening the list of modules: %w", err)
	}
	defer f.Close()
	var failed error
	s := bufio.NewScanner(f)
	for s.Scan() {
		name := strings.TrimSpace(s.Text())
		if name == "" {
			continue
		}
		err := loadModule(name)
		log.step("module "+path.Base(name), err)
		failed = errors.Join(failed, err)
	}
	return errors.Join(failed, s.Err())
}

func loadModule(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return fmt.Errorf("opening a module: %w", err)
	}
	defer f.Close()
	err = unix.FinitModule(int(f.Fd()), "", 0)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("loading %s: %w", name, err)
	}
	return nil
}
