//go:build linux

package command

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// The exit codes of a command that could not be started (POSIX, "Exit Status
// for Commands").
const (
	codeCannot  = 126
	codeMissing = 127
)

// Limits of execve(2) that are checked before the kernel would say only "argument
// list too long".
const (
	// maxString is MAX_ARG_STRLEN of linux/binfmts.h (32 pages), without the
	// terminating NUL.
	maxString = 32*4096 - 1
	// maxTotal is a quarter of the usual 8 MiB stack limit, which bounds argv
	// and environment together.
	maxTotal = 2 << 20
)

// StartError says why a command could not be started, in the words for whoever
// asked for it.
type StartError struct {
	// Code is the exit status a shell would give: 127 for a program that is not
	// there, 126 for all else.
	Code    int
	Message string
}

// Error returns the message.
func (e *StartError) Error() string { return e.Message }

// validate checks what execve would refuse with less to say.
func validate(spec Spec) error {
	if len(spec.Argv) == 0 {
		return &StartError{Code: codeCannot, Message: "the command is empty"}
	}
	if err := validateStrings(spec); err != nil {
		return err
	}
	info, err := os.Stat(spec.Dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return &StartError{Code: codeCannot, Message: fmt.Sprintf("the working directory %q does not exist", spec.Dir)}
	case err != nil:
		return &StartError{Code: codeCannot, Message: fmt.Sprintf("the working directory: %v", err)}
	case !info.IsDir():
		return &StartError{Code: codeCannot, Message: fmt.Sprintf("the working directory %q is not a directory", spec.Dir)}
	}
	return nil
}

func validateStrings(spec Spec) error {
	total := 0
	check := func(kind string, i int, s string) error {
		name := fmt.Sprintf("%s %d", kind, i)
		if kind == "variable" {
			n, _, _ := strings.Cut(s, "=")
			name = fmt.Sprintf("%s %.64q", kind, n)
		}
		if strings.IndexByte(s, 0) >= 0 {
			return &StartError{Code: codeCannot, Message: name + " contains a NUL byte, which no program can be given"}
		}
		if len(s) > maxString {
			return &StartError{Code: codeCannot, Message: fmt.Sprintf(
				"%s has %d bytes, over Linux's limit of %d for one string: send it on standard input or in a file", name, len(s), maxString)}
		}
		total += len(s) + 1 + 8 // the string, its NUL, its pointer
		return nil
	}
	for i, s := range spec.Argv {
		if err := check("argument", i, s); err != nil {
			return err
		}
	}
	for i, s := range spec.Env {
		if err := check("variable", i, s); err != nil {
			return err
		}
	}
	if total > maxTotal {
		return tooLong(total)
	}
	return nil
}

func tooLong(total int) error {
	return &StartError{Code: codeCannot, Message: fmt.Sprintf(
		"arguments and environment have %d bytes together, over Linux's limit of about %d: send them on standard input or in a file", total, maxTotal)}
}

// lookPath finds a program as execvp(3) does, but in the command's own PATH and
// directory.
func lookPath(name, dir string, env []string) (string, error) {
	if name == "" {
		return "", &StartError{Code: codeMissing, Message: "the program's name is empty"}
	}
	if strings.Contains(name, "/") {
		return name, nil // relative to the working directory, as execve resolves it
	}
	path := ""
	for _, e := range env {
		if p, ok := strings.CutPrefix(e, "PATH="); ok {
			path = p
		}
	}
	denied := ""
	for folder := range strings.SplitSeq(path, ":") {
		if folder == "" {
			folder = "."
		}
		if !filepath.IsAbs(folder) {
			folder = filepath.Join(dir, folder)
		}
		candidate := filepath.Join(folder, name)
		info, err := os.Stat(candidate)
		if err != nil || info.IsDir() {
			continue
		}
		if info.Mode()&0o111 == 0 {
			denied = candidate
			continue
		}
		return candidate, nil
	}
	if denied != "" {
		return "", &StartError{Code: codeCannot, Message: fmt.Sprintf("%s: not executable", denied)}
	}
	return "", &StartError{Code: codeMissing, Message: fmt.Sprintf("%s: not found in PATH (%s)", name, path)}
}

// startError words what execve answered.
func startError(path string, spec Spec, err error) error {
	at := path
	if !filepath.IsAbs(at) {
		at = filepath.Join(spec.Dir, path)
	}
	switch {
	case errors.Is(err, unix.ENOENT):
		if _, serr := os.Stat(at); serr == nil {
			return &StartError{Code: codeCannot, Message: path + ": its interpreter or loader does not exist"}
		}
		return &StartError{Code: codeMissing, Message: path + ": not found"}
	case errors.Is(err, unix.ENOTDIR):
		return &StartError{Code: codeMissing, Message: path + ": not found (a part of the path is not a directory)"}
	case errors.Is(err, unix.EACCES):
		if info, serr := os.Stat(at); serr == nil && info.IsDir() {
			return &StartError{Code: codeCannot, Message: path + ": is a directory"}
		}
		return &StartError{Code: codeCannot, Message: fmt.Sprintf("%s: not executable for user %s, or its working directory %s is closed to them", path, spec.User.Name, spec.Dir)}
	case errors.Is(err, unix.ENOEXEC):
		return &StartError{Code: codeCannot, Message: path + ": neither a program of this machine nor a script with a #! line"}
	case errors.Is(err, unix.EAGAIN):
		return &StartError{Code: codeCannot, Message: path + ": the guest's limit of processes is reached: end some, or restart the machine"}
	case errors.Is(err, unix.E2BIG):
		total := 0
		for _, s := range spec.Argv {
			total += len(s) + 9
		}
		for _, s := range spec.Env {
			total += len(s) + 9
		}
		return tooLong(total)
	}
	return &StartError{Code: codeCannot, Message: fmt.Sprintf("%s: %v", path, err)}
}
