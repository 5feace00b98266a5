// Package config finds, reads and validates everything that Capsem keeps in
// files, and is the only reader of the environment.
//
// What it holds, by file: the home folder and every path in it (home.go), the
// machine's settings (settings.go), profiles and the organisation's rules
// (profile.go, corp.go), the records of one VM (record.go) and the secret store
// (secret.go).
//
// Files are written by people, so a mistake in one is answered with file, line,
// column and the nearest valid name, and all mistakes of a file are told at
// once. A file is taken whole or not at all: a key that this version does not
// enforce is refused by name, since a rule that is silently ignored is worse than
// none. Rules are not compiled here; their text is carried with its position, so
// that package policy can point into the same file.
//
// Records are written by one program and read by others. They are replaced
// atomically and decoded strictly.
package config

import (
	"fmt"
	"os"
	"strings"
)

// Env looks up one environment variable. Programs pass OSEnv; tests pass a
// function over a map.
type Env func(name string) (value string, set bool)

// OSEnv is the environment of this process.
func OSEnv() Env { return os.LookupEnv }

// Get returns the variable's value, "" when it is unset.
func (e Env) Get(name string) string {
	v, _ := e(name)
	return v
}

// The variables that Capsem reads.
const (
	// EnvHome is the home folder, default ~/.capsem.
	EnvHome = "CAPSEM_HOME"
	// EnvAccelerator overrides `accelerator` of config.toml.
	EnvAccelerator = "CAPSEM_ACCELERATOR"
	// EnvTestRequire lists what the machine must offer to tests (`vm,jail`): a
	// test that would skip for the lack of one fails instead.
	EnvTestRequire = "CAPSEM_TEST_REQUIRE"

	envUserHome   = "HOME"
	envRuntimeDir = "XDG_RUNTIME_DIR"
)

// TestRequires reports whether tests must fail rather than skip when the machine
// lacks feature.
func TestRequires(env Env, feature string) bool {
	for f := range strings.SplitSeq(env.Get(EnvTestRequire), ",") {
		if strings.TrimSpace(f) == feature {
			return true
		}
	}
	return false
}

// Position is a place in a file. Line and Column count from 1; Column counts
// bytes. A zero Line means the file as a whole.
type Position struct {
	File   string `json:"file"`
	Line   int    `json:"line,omitempty"`
	Column int    `json:"column,omitempty"`
}

// String returns file:line:column, the form that editors jump to.
func (p Position) String() string {
	if p.Line == 0 {
		return p.File
	}
	return fmt.Sprintf("%s:%d:%d", p.File, p.Line, p.Column)
}

// Error is one mistake in one file.
type Error struct {
	Position
	Message string `json:"message"`
}

// Error returns the position, then the message.
func (e *Error) Error() string { return e.Position.String() + ": " + e.Message }

// Errors are all mistakes of a file, in the order of their positions. It is
// never empty when it is returned as an error.
type Errors []*Error

// Error returns one mistake a line.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, err := range e {
		lines[i] = err.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap gives errors.As access to each mistake.
func (e Errors) Unwrap() []error {
	errs := make([]error, len(e))
	for i, err := range e {
		errs[i] = err
	}
	return errs
}

// daemonVariables are what the background processes keep of the environment:
// where programs, the home and the sockets are, and how to trust and name
// things. Everything else, secrets of the person's shell among it, stays out.
var daemonVariables = []string{
	EnvHome, EnvAccelerator, "HOME", "LANG", "LOGNAME", "PATH", "SHELL", "SSL_CERT_DIR", "SSL_CERT_FILE", "TMPDIR", "USER", "XDG_RUNTIME_DIR",
}

// Daemon is the environment with which the background processes run.
func (e Env) Daemon() []string {
	var kept []string
	for _, name := range daemonVariables {
		if value, set := e(name); set {
			kept = append(kept, name+"="+value)
		}
	}
	return kept
}
