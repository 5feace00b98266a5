//go:build linux

package command

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
)

// Cgroups is a folder of a cgroup v2 hierarchy in which every command gets a
// group of its own (Documentation/admin-guide/cgroup-v2.rst of the kernel).
type Cgroups struct {
	path string
	next atomic.Uint64
}

// OpenCgroups makes the folder path, whose parent is a cgroup v2, and ends what
// an earlier owner of it may have left running there.
func OpenCgroups(path string) (*Cgroups, error) {
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("making cgroup %s: %w", path, err)
	}
	c := &Cgroups{path: path}
	if err := killGroup(path); err != nil {
		return nil, err
	}
	c.Sweep()
	return c, nil
}

// Sweep removes the groups in which nothing lives any more.
func (c *Cgroups) Sweep() {
	entries, err := os.ReadDir(c.path)
	if err != nil {
		return
	}
	for _, e := range entries {
		if e.IsDir() {
			_ = os.Remove(filepath.Join(c.path, e.Name())) // EBUSY: something lives in it
		}
	}
}

// Kill ends everything that runs in any of the groups.
func (c *Cgroups) Kill() error { return killGroup(c.path) }

// Close removes the folder with the groups that are empty.
func (c *Cgroups) Close() error {
	c.Sweep()
	if err := os.Remove(c.path); err != nil {
		return fmt.Errorf("removing cgroup %s: %w", c.path, err)
	}
	return nil
}

// New makes a group for one command.
func (c *Cgroups) New() (*Group, error) {
	for {
		path := filepath.Join(c.path, strconv.FormatUint(c.next.Add(1), 10))
		err := os.Mkdir(path, 0o755)
		if errors.Is(err, fs.ErrExist) {
			continue // an earlier owner's, with something still alive in it
		}
		if err != nil {
			return nil, fmt.Errorf("making cgroup %s: %w", path, err)
		}
		dir, err := os.Open(path)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("opening cgroup %s: %w", path, err), os.Remove(path))
		}
		return &Group{path: path, dir: dir}, nil
	}
}

// Group is one command's cgroup. The methods of a nil Group do nothing.
type Group struct {
	path string
	dir  *os.File
}

func (g *Group) kill() error { return killGroup(g.path) }

// killGroup ends everything below a cgroup, at once and without a race against
// forks (cgroup.kill, since Linux 5.14).
func killGroup(path string) error {
	f, err := os.OpenFile(filepath.Join(path, "cgroup.kill"), os.O_WRONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		if _, serr := os.Stat(path); errors.Is(serr, fs.ErrNotExist) {
			return nil // removed, so nothing lives in it
		}
	}
	if err != nil {
		return fmt.Errorf("killing cgroup %s: %w", path, err)
	}
	_, err = f.WriteString("1")
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("killing cgroup %s: %w", path, err)
	}
	return nil
}

// oomKilled reports whether the kernel's out-of-memory killer took a process of
// the group. Without the memory controller nobody counts, and it is false.
func (g *Group) oomKilled() bool {
	if g == nil {
		return false
	}
	events, err := os.ReadFile(filepath.Join(g.path, "memory.events"))
	if err != nil {
		return false
	}
	for line := range bytes.Lines(events) {
		if n, ok := bytes.CutPrefix(line, []byte("oom_kill ")); ok {
			return !bytes.Equal(bytes.TrimSpace(n), []byte("0"))
		}
	}
	return false
}

func (g *Group) remove() {
	if g == nil {
		return
	}
	_ = g.dir.Close()     // a folder opened for reading has nothing to lose
	_ = os.Remove(g.path) // EBUSY: a background process lives on in it, and Sweep comes later
}
