package tests

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// process is one process of this machine, as /proc shows it.
type process struct {
	pid, ppid int
	// began tells two processes of one pid apart.
	began string
	comm  string
	argv  []string
}

func (p process) String() string {
	return fmt.Sprintf("%d (child of %d) %s %q", p.pid, p.ppid, p.comm, p.argv)
}

// role is what a process of Capsem does.
func (p process) role() string {
	base := ""
	if len(p.argv) > 0 {
		base = filepath.Base(p.argv[0])
	}
	switch {
	case base == "capsemd" && len(p.argv) > 1:
		return map[string]string{"serve": "service", "vm": "vm", "launch": "launcher"}[p.argv[1]]
	case strings.HasPrefix(base, "qemu-system"):
		return "qemu"
	case base == "capsem-aggregator":
		return "aggregator"
	case base == "capsem-builtin":
		return "builtin"
	}
	return base
}

// readProcess reads one process. One that has ended, a zombie too, is an error.
func readProcess(pid int) (p process, err error) {
	dir := fmt.Sprintf("/proc/%d/", pid)
	stat, err := os.ReadFile(dir + "stat")
	if err != nil {
		return p, err
	}
	open, shut := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
	if open < 0 || shut < open {
		return p, fmt.Errorf("%sstat is %q", dir, stat)
	}
	fields := strings.Fields(string(stat[shut+1:]))
	if len(fields) < 20 || fields[0] == "Z" || fields[0] == "X" {
		return p, os.ErrNotExist
	}
	p = process{pid: pid, comm: string(stat[open+1 : shut]), began: fields[19]}
	if p.ppid, err = strconv.Atoi(fields[1]); err != nil {
		return p, err
	}
	cmdline, err := os.ReadFile(dir + "cmdline")
	if err != nil {
		return p, err
	}
	if len(cmdline) > 0 {
		p.argv = strings.Split(strings.TrimSuffix(string(cmdline), "\x00"), "\x00")
	}
	return p, nil
}

// processes lists those that run now.
func processes() ([]process, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	var all []process
	for _, dir := range dirs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			return nil, err
		}
		if p, err := readProcess(pid); err == nil {
			all = append(all, p)
		}
	}
	return all, nil
}

// mentions reports whether a process was started by a path below root, or has
// root in its environment, as all that is started there has in its PATH.
func (p process) mentions(root string) bool {
	if len(p.argv) > 0 && strings.HasPrefix(p.argv[0], root+"/") {
		return true
	}
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.pid))
	return err == nil && bytes.Contains(env, []byte(root+"/"))
}

// below returns p and all that descends from it.
func below(all []process, p process) []process {
	tree := []process{p}
	for i := 0; i < len(tree); i++ {
		for _, other := range all {
			if other.ppid == tree[i].pid {
				tree = append(tree, other)
			}
		}
	}
	return tree
}

// watched is a process that is known by more than its number.
type watched struct {
	process
	fd int
}

// watch takes hold of processes, to see their end. Those that are gone already
// are left out.
func watch(list []process) ([]watched, error) {
	var out []watched
	for _, p := range list {
		fd, err := unix.PidfdOpen(p.pid, 0)
		if errors.Is(err, unix.ESRCH) {
			continue
		}
		if err != nil {
			return out, fmt.Errorf("watching %s: %w", p, err)
		}
		if now, err := readProcess(p.pid); err != nil || now.began != p.began {
			if err := unix.Close(fd); err != nil {
				return out, err
			}
			continue
		}
		out = append(out, watched{p, fd})
	}
	return out, nil
}

// awaitEnd waits until all have ended, within limit, lets go of them, and returns
// those that have not.
func awaitEnd(list []watched, limit time.Duration) (alive []process, err error) {
	deadline := time.Now().Add(limit)
	for _, w := range list {
		for {
			left := max(0, time.Until(deadline).Milliseconds())
			n, pollErr := unix.Poll([]unix.PollFd{{Fd: int32(w.fd), Events: unix.POLLIN}}, int(left))
			if errors.Is(pollErr, unix.EINTR) {
				continue
			}
			if pollErr != nil {
				err = errors.Join(err, pollErr)
			}
			if n == 0 {
				alive = append(alive, w.process)
			}
			break
		}
		err = errors.Join(err, unix.Close(w.fd))
	}
	return alive, err
}
