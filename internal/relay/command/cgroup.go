//go:build linux

package command

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// Cgroups is a folder of a cgroup v2 hierarchy in which every command gets a
// group of its own (Documentation/admin-guide/cgroup-v2.rst of the kernel). Its
// methods may be called from any goroutine.
type Cgroups struct {
	path string

	mu   sync.Mutex // guards what follows
	next uint64
	// left are groups whose command has ended and in which something still
	// lives, as far as is known.
	left []string
	// spare is made ahead for the next command, nil if there is none: making a
	// group takes as long as a good part of a short command.
	spare  *Group
	closed bool
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
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, fmt.Errorf("reading cgroup %s: %w", path, err)
	}
	for _, e := range entries {
		if e.IsDir() {
			c.left = append(c.left, filepath.Join(path, e.Name()))
		}
	}
	c.Sweep()
	return c, nil
}

// Sweep removes the groups of ended commands in which nothing lives any more.
func (c *Cgroups) Sweep() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.left = slices.DeleteFunc(c.left, func(path string) bool { return !busy(os.Remove(path)) })
}

// busy says that a group could not be removed because something lives in it.
func busy(err error) bool { return errors.Is(err, unix.EBUSY) }

// Kill ends everything that runs in any of the groups.
func (c *Cgroups) Kill() error { return killGroup(c.path) }

// Close removes the folder with the groups that are empty.
func (c *Cgroups) Close() error {
	c.mu.Lock()
	spare := c.spare
	c.spare, c.closed = nil, true
	c.mu.Unlock()
	spare.discard()
	c.Sweep()
	if err := os.Remove(c.path); err != nil {
		return fmt.Errorf("removing cgroup %s: %w", c.path, err)
	}
	return nil
}

// New returns a group for one command, which nothing has been in.
func (c *Cgroups) New() (*Group, error) {
	c.mu.Lock()
	spare := c.spare
	c.spare = nil
	c.mu.Unlock()
	if spare != nil {
		return spare, nil
	}
	return c.make()
}

// restock makes the spare group. Whoever needs one that could not be made is told
// by New.
func (c *Cgroups) restock() {
	c.mu.Lock()
	wanted := c.spare == nil && !c.closed
	c.mu.Unlock()
	if !wanted {
		return
	}
	g, err := c.make()
	if err != nil {
		return
	}
	c.mu.Lock()
	if c.spare == nil && !c.closed {
		c.spare, g = g, nil
	}
	c.mu.Unlock()
	g.discard()
}

func (c *Cgroups) make() (*Group, error) {
	for {
		c.mu.Lock()
		c.next++
		path := filepath.Join(c.path, strconv.FormatUint(c.next, 10))
		c.mu.Unlock()
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
		return &Group{path: path, dir: dir, owner: c}, nil
	}
}

// Group is one command's cgroup. The methods of a nil Group do nothing.
type Group struct {
	path  string
	dir   *os.File
	owner *Cgroups
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

// remove gives the group up, and makes another one for the next command.
func (g *Group) remove() {
	if g == nil {
		return
	}
	g.discard()
	g.owner.restock()
}

// discard gives the group up: at once, or when what still lives in it has ended.
func (g *Group) discard() {
	if g == nil {
		return
	}
	_ = g.dir.Close() // a folder opened for reading has nothing to lose
	if busy(os.Remove(g.path)) {
		g.owner.mu.Lock()
		defer g.owner.mu.Unlock()
		g.owner.left = append(g.owner.left, g.path)
	}
}
