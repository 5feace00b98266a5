// Package tests runs the built programs as their users do, on real virtual
// machines.
//
// Most of it are the scripts in script/, one for each thing that a user would
// notice, which TestScripts runs with the commands in commands_test.go; what is
// clearer as Go, hostile bytes above all, stands in the other files. Each script
// and test has a home folder of its own, and at its end nothing of that home may
// be left: no process, socket, mount or file but what is meant to stay.
//
// The machines run in software emulation, which every host can do; only the test
// of the acceleration probe looks for hardware. What cannot be tested here is
// skipped, with a word on how to enable it; with CAPSEM_TEST_REQUIRE=vm,npm,root
// such a skip is a failure. The programs are built anew by TestMain and their
// sources looked at, so that a cached result is a true one; -count=1 runs all of
// it in any case.
package tests

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// programs are what is built, by the folders of their sources.
var programs = map[string]string{
	"capsem":            "../cmd/capsem",
	"capsemd":           "../cmd/capsemd",
	"capsem-mcp":        "../cmd/capsem-mcp",
	"capsem-aggregator": "../cmd/aggregator",
	"capsem-builtin":    "../cmd/builtin",
	"guest-relay":       "../cmd/guest-relay",
	"mcpserver":         "./mcpserver",
	"vsockcat":          "./vsockcat",
}

// built is the folder of the built programs, set by TestMain.
var built string

func TestMain(m *testing.M) {
	code, err := runAll(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func runAll(m *testing.M) (code int, err error) {
	if built, err = os.MkdirTemp("", "capsem-built-"); err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(built)) }()
	// A test runs programs as another user.
	if err := os.Chmod(built, 0o755); err != nil {
		return 1, err
	}
	if err := build(context.Background(), built); err != nil {
		return 1, err
	}
	return m.Run(), nil
}

// build builds all programs into dir, and makes their sources known to the test
// cache.
func build(ctx context.Context, dir string) error {
	for _, root := range []string{"../cmd", "../internal", "../images", "../go.mod", "mcpserver", "vsockcat", "npm/package-lock.json"} {
		err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			if err == nil {
				_, err = os.Stat(path)
			}
			if errors.Is(err, fs.ErrNotExist) {
				return nil // somebody edits the tree meanwhile
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("looking at the sources: %w", err)
		}
	}
	for name, source := range programs {
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-o", filepath.Join(dir, name), source)
		cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("building %s: %w\n%s", name, err, out)
		}
	}
	return nil
}
