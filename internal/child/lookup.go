package child

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Lookup finds the program that name means, as execvp does, but in the PATH
// that a child with env will have. Errors match fs.ErrNotExist and
// fs.ErrPermission.
func Lookup(name string, env []string) (string, error) {
	if name == "" {
		return "", errors.New("no program named")
	}
	if strings.ContainsRune(name, '/') {
		return name, nil
	}
	path, set := pathOf(env)
	if !set {
		return "", fmt.Errorf("no such program: its environment has no PATH: %w", fs.ErrNotExist)
	}
	var denied error
	for _, dir := range filepath.SplitList(path) {
		if !filepath.IsAbs(dir) {
			continue // a program must not depend on the working directory
		}
		file := filepath.Join(dir, name)
		err := executable(file)
		if err == nil {
			return file, nil
		}
		if denied == nil && errors.Is(err, fs.ErrPermission) {
			denied = err
		}
	}
	if denied != nil {
		return "", denied
	}
	return "", fmt.Errorf("no such program in PATH %q: %w", path, fs.ErrNotExist)
}

func pathOf(env []string) (path string, set bool) {
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			path, set = v, true // the last one is what the child sees
		}
	}
	return path, set
}

func executable(file string) error {
	info, err := os.Stat(file)
	if err != nil {
		return err
	}
	if info.IsDir() {
		return fs.ErrNotExist
	}
	if err := unix.Access(file, unix.X_OK); err != nil {
		return fmt.Errorf("%s is not executable: %w", file, err)
	}
	return nil
}

// explain says in words what a failed start means; execve's own error leaves
// open whether the program or its interpreter is missing.
func explain(err error, path string) error {
	var pathErr *fs.PathError
	if errors.As(err, &pathErr) {
		err = pathErr.Err
	}
	switch {
	case errors.Is(err, syscall.ENOENT):
		if _, statErr := os.Stat(path); statErr == nil {
			return fmt.Errorf("%s, its interpreter, its loader or its working directory is missing: %w", path, err)
		}
		return fmt.Errorf("no such program: %w", err)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("%s is not executable: %w", path, err)
	case errors.Is(err, syscall.ENOEXEC):
		return fmt.Errorf("%s is no program for this machine: %w", path, err)
	}
	return err
}
