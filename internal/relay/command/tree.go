//go:build linux

package command

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// killPasses bounds how often the process table is walked to end a tree without
// a cgroup: a tree that forks faster than it is killed survives, and Kill says
// so.
const killPasses = 32

// tree is everything that descends from one command.
type tree struct {
	root  int
	group *Group // nil: walk the process table instead

	mu sync.Mutex // guards what follows
	// known are the processes seen so far, by pid and start time.
	known map[int]uint64
	// reaped says that the root's number may be another process's by now.
	reaped bool
}

// kill ends every process of the tree.
func (t *tree) kill() error {
	if t.group != nil {
		return t.group.kill()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for range killPasses {
		alive, err := t.walk()
		if err != nil || len(alive) == 0 {
			return err
		}
		for _, pid := range alive {
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("killing process %d: %w", pid, err)
			}
		}
	}
	return fmt.Errorf("killing the tree of process %d: it forks faster than it can be killed", t.root)
}

// note remembers who belongs to the tree now, for the time when the processes
// in between are gone. last says that the root is about to be reaped.
func (t *tree) note(last bool) {
	if t.group != nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	_, _ = t.walk() // a walk that fails leaves what was known before; kill walks again and reports
	t.reaped = t.reaped || last
}

// walk lists the living processes of the tree: descendants of the root, members
// of its session, and descendants of what was known before. It is called with
// mu held.
func (t *tree) walk() ([]int, error) {
	procs, err := processes()
	if err != nil {
		return nil, err
	}
	if t.known == nil {
		t.known = make(map[int]uint64)
	}
	for pid, start := range t.known {
		if p, ok := procs[pid]; !ok || p.start != start {
			delete(t.known, pid) // gone, or the number is another process's now
		}
	}
	for grown := true; grown; {
		grown = false
		for pid, p := range procs {
			if _, ok := t.known[pid]; ok {
				continue
			}
			_, parent := t.known[p.parent]
			if parent || (!t.reaped && (pid == t.root || p.session == t.root)) {
				t.known[pid] = p.start
				grown = true
			}
		}
	}
	var alive []int
	for pid := range t.known {
		if !procs[pid].zombie {
			alive = append(alive, pid)
		}
	}
	return alive, nil
}

// process is one row of the process table.
type process struct {
	parent, session int
	// start is the start time in clock ticks, which with the pid identifies a
	// process (proc(5), field 22).
	start  uint64
	zombie bool
}

// processes reads the process table.
func processes() (map[int]process, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, fmt.Errorf("reading the process table: %w", err)
	}
	names, err := dir.Readdirnames(-1)
	if err = errors.Join(err, dir.Close()); err != nil {
		return nil, fmt.Errorf("reading the process table: %w", err)
	}
	procs := make(map[int]process)
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + name + "/stat")
		if err != nil {
			continue // it ended while we looked
		}
		if p, ok := parseStat(stat); ok {
			procs[pid] = p
		}
	}
	return procs, nil
}

// parseStat reads /proc/PID/stat. The command's name stands in parentheses and
// may hold anything, parentheses and newlines too: fields are counted from the
// last one.
func parseStat(stat []byte) (process, bool) {
	end := bytes.LastIndexByte(stat, ')')
	if end < 0 {
		return process{}, false
	}
	// Fields 3 (state), 4 (ppid), 6 (session) and 22 (starttime) of proc(5).
	f := bytes.Fields(stat[end+1:])
	if len(f) < 20 {
		return process{}, false
	}
	parent, err1 := strconv.Atoi(string(f[1]))
	session, err2 := strconv.Atoi(string(f[3]))
	start, err3 := strconv.ParseUint(string(f[19]), 10, 64)
	if errors.Join(err1, err2, err3) != nil {
		return process{}, false
	}
	return process{parent: parent, session: session, start: start, zombie: f[0][0] == 'Z'}, true
}
