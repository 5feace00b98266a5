package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

func memoryBenchmark() benchmark {
	return benchmark{
		name: "memory",
		about: "resident memory (RSS) of everything that runs for one idle machine but QEMU: `capsemd vm`, the launcher, the inits of what it started, " +
			"and the built-in tools. Pages that they share count for each; the sum without that (PSS) stands beside it",
		run: benchMemory,
	}
}

func benchMemory(ctx context.Context, l *lab) ([]row, error) {
	m, err := l.machine(ctx)
	if err != nil {
		return nil, err
	}
	pids, err := descendants(m.PID)
	if err != nil {
		return nil, err
	}
	const mib = 1 << 10 // of kB
	var rss, pss float64
	var parts []string
	for _, pid := range append([]int{m.PID}, pids...) {
		u, err := memoryOf(pid)
		if err != nil {
			return nil, err
		}
		if strings.HasPrefix(u.name, "qemu") {
			continue
		}
		rss, pss = rss+u.rss, pss+u.pss
		parts = append(parts, fmt.Sprintf("%s %.0f", u.name, u.rss/mib))
	}
	note := fmt.Sprintf("%s; PSS %.1f MiB", strings.Join(parts, ", "), pss/mib)
	return []row{absolute("memory of one idle machine, without QEMU", "MiB", series{rss / mib}, atMost(60), note)}, nil
}

// usage is what a process holds, in kB.
type usage struct {
	name     string
	rss, pss float64
}

func memoryOf(pid int) (u usage, err error) {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	args, err := os.ReadFile(filepath.Join(dir, "cmdline"))
	if err != nil {
		return u, fmt.Errorf("looking at a process: %w", err)
	}
	words := strings.Split(string(args), "\x00")
	u.name = filepath.Base(words[0])
	if u.name == "capsemd" && len(words) > 1 {
		u.name += " " + words[1]
	}
	b, err := os.ReadFile(filepath.Join(dir, "smaps_rollup"))
	if err != nil {
		return u, fmt.Errorf("looking at a process: %w", err)
	}
	for s := bufio.NewScanner(bytes.NewReader(b)); s.Scan(); {
		fields := strings.Fields(s.Text())
		if len(fields) < 2 {
			continue
		}
		kb, _ := strconv.ParseFloat(fields[1], 64) // the header's line has none
		switch fields[0] {
		case "Rss:":
			u.rss = kb
		case "Pss:":
			u.pss = kb
		}
	}
	return u, nil
}

// descendants are all processes below one.
func descendants(pid int) ([]int, error) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		return nil, err
	}
	var all []int
	for _, file := range tasks {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // the thread has ended
		}
		for _, word := range strings.Fields(string(b)) {
			child, err := strconv.Atoi(word)
			if err != nil {
				return nil, fmt.Errorf("reading %s: %w", file, err)
			}
			below, err := descendants(child)
			if err != nil {
				return nil, err
			}
			all = append(append(all, child), below...)
		}
	}
	return all, nil
}
