package confine

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// minPIDMax is the least that the kernel takes for pid_max: its reserved pids and
// one more.
const minPIDMax = 301

// LimitPIDs bounds the processes and threads of the pid namespace that this
// process is in, to n and at least to 301, with kernel.pid_max, which belongs to
// the namespace from Linux 6.14 on. On an older kernel it would be the host's: it
// is left alone, and RLIMIT_NPROC has to do, which does not bind root.
func LimitPIDs(n uint64) error {
	if os.Getpid() != 1 {
		return errors.New("limiting processes: not process 1 of a namespace")
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return fmt.Errorf("asking for the kernel's version: %w", err)
	}
	var major, minor int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &major, &minor); err != nil {
		return fmt.Errorf("reading the kernel's version: %w", err)
	}
	if major < 6 || major == 6 && minor < 14 {
		return nil
	}
	err := os.WriteFile("/proc/sys/kernel/pid_max", []byte(strconv.FormatUint(max(n, minPIDMax), 10)), 0)
	if err != nil && !errors.Is(err, os.ErrPermission) {
		return fmt.Errorf("limiting processes: %w", err)
	}
	return nil
}
