package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/vm/qemu"
)

// machine is where something was measured, as far as it matters for the
// figures.
type machine struct {
	CPU         string `json:"cpu"`
	Cores       int    `json:"cores"`
	MemoryMiB   uint64 `json:"memory_mib"`
	Kernel      string `json:"kernel"`
	Go          string `json:"go"`
	QEMU        string `json:"qemu"`
	Accelerator string `json:"accelerator"`
}

func (m machine) String() string {
	return fmt.Sprintf("%s, %d cores, %d MiB, Linux %s, %s, QEMU %s, guests under %s",
		m.CPU, m.Cores, m.MemoryMiB, m.Kernel, m.Go, m.QEMU, m.Accelerator)
}

// describeMachine says what is known; what cannot be found out is "unknown".
func describeMachine(ctx context.Context, l *lab) machine {
	m := machine{CPU: "unknown processor", Cores: runtime.NumCPU(), Kernel: "unknown", Go: runtime.Version(), QEMU: "unknown", Accelerator: l.accelerator}
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for s := bufio.NewScanner(bytes.NewReader(b)); s.Scan(); {
			if key, value, _ := strings.Cut(s.Text(), ":"); strings.TrimSpace(key) == "model name" {
				m.CPU = strings.TrimSpace(value)
				break
			}
		}
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		release, _, _ := strings.Cut(unix.ByteSliceToString(u.Release[:]), "-")
		m.Kernel = release
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		m.MemoryMiB = info.Totalram * uint64(info.Unit) >> 20
	}
	version, err := qemu.Version(ctx, qemu.Config{Path: l.path, Start: startChild})
	if err == nil {
		m.QEMU, _, _ = strings.Cut(version, " ")
	}
	return m
}

// startChild starts QEMU as a child of this process.
func startChild(ctx context.Context, cmd child.Command) (qemu.Process, error) {
	return child.Start(ctx, cmd)
}

// describeLoad is the load average of the last minute.
func describeLoad() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	one, _, _ := strings.Cut(string(b), " ")
	return one
}
