//go:build linux

package pid1

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// CgroupRoot is where the guest's cgroup v2 hierarchy is mounted, and Commands
// the group below it in which every command has a group of its own.
const (
	CgroupRoot = "/sys/fs/cgroup"
	Commands   = CgroupRoot + "/capsem"
)

// Commands together get less than the machine has, so that a command that takes
// all it can get is stopped by the kernel before the agent is.
const (
	// The memory kept back is a reserveShare-th of it, within the bounds.
	reserveShare = 16
	reserveLeast = 16 << 20
	reserveMost  = 128 << 20
)

// prepareCgroups makes the group of all commands and bounds it.
func prepareCgroups() error {
	if err := enableControllers(CgroupRoot); err != nil {
		return err
	}
	if err := os.Mkdir(Commands, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("making the commands' cgroup: %w", err)
	}
	if err := enableControllers(Commands); err != nil {
		return err
	}
	return errors.Join(boundMemory(), boundProcesses())
}

// enableControllers hands the memory and pids controllers down, as far as the
// kernel has them.
func enableControllers(group string) error {
	have, err := os.ReadFile(filepath.Join(group, "cgroup.controllers"))
	if err != nil {
		return fmt.Errorf("reading a cgroup's controllers: %w", err)
	}
	var wanted []string
	for c := range strings.FieldsSeq(string(have)) {
		if c == "memory" || c == "pids" {
			wanted = append(wanted, "+"+c)
		}
	}
	if len(wanted) == 0 {
		return nil
	}
	// In one write: each is a change of the whole hierarchy.
	return set(group, "cgroup.subtree_control", strings.Join(wanted, " "))
}

func boundMemory() error {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return fmt.Errorf("asking for the size of memory: %w", err)
	}
	total := info.Totalram * uint64(info.Unit)
	reserve := min(max(total/reserveShare, reserveLeast), reserveMost)
	if total <= 2*reserve {
		return nil // too little to divide
	}
	return set(Commands, "memory.max", strconv.FormatUint(total-reserve, 10))
}

// boundProcesses leaves a quarter of the threads that the kernel allows to the
// agent: a fork bomb must not keep it from starting the command that ends it.
func boundProcesses() error {
	f, err := os.Open("/proc/sys/kernel/threads-max")
	if err != nil {
		return fmt.Errorf("reading the limit of threads: %w", err)
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	s.Scan()
	n, err := strconv.Atoi(strings.TrimSpace(s.Text()))
	if err = errors.Join(err, s.Err()); err != nil {
		return fmt.Errorf("reading the limit of threads: %w", err)
	}
	return set(Commands, "pids.max", strconv.Itoa(n-n/4))
}

// set writes one control file. A file that is not there belongs to a controller
// that the kernel does not have.
func set(group, file, value string) error {
	name := filepath.Join(group, file)
	f, err := os.OpenFile(name, os.O_WRONLY, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("setting %s: %w", name, err)
	}
	_, err = f.WriteString(value)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("setting %s to %s: %w", name, value, err)
	}
	return nil
}
