//go:build linux

package pid1

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// mount is a file system that every guest has.
type mount struct {
	source, target, fstype string
	flags                  uintptr
	data                   string
	// vital says that the agent cannot do without it.
	vital bool
}

// mounts are in the order in which they are made. A guest's temporary files are
// bounded, so that they cannot take all memory.
func mounts() []mount {
	const nosuid, noexec, nodev = unix.MS_NOSUID, unix.MS_NOEXEC, unix.MS_NODEV
	return []mount{
		{"proc", "/proc", "proc", nosuid | noexec | nodev, "", true},
		{"sysfs", "/sys", "sysfs", nosuid | noexec | nodev, "", true},
		{"devtmpfs", "/dev", "devtmpfs", nosuid | noexec, "mode=755", true},
		{"devpts", "/dev/pts", "devpts", nosuid | noexec, "mode=620,gid=5,ptmxmode=666", false},
		{"tmpfs", "/dev/shm", "tmpfs", nosuid | nodev, "mode=1777,size=50%", false},
		{"tmpfs", "/tmp", "tmpfs", nosuid | nodev, "mode=1777,size=50%", true},
		{"tmpfs", "/run", "tmpfs", nosuid | nodev, "mode=755,size=25%", true},
		{"cgroup2", CgroupRoot, "cgroup2", nosuid | noexec | nodev, "", false},
	}
}

// mountAll mounts them. The error is that of a vital one.
func mountAll(log *bootLog) error {
	var vital error
	for _, m := range mounts() {
		err := m.make()
		log.step("mount "+m.target, err)
		if err != nil && m.vital {
			vital = errors.Join(vital, err)
		}
	}
	return vital
}

func (m mount) make() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		return fmt.Errorf("making %s: %w", m.target, err)
	}
	err := unix.Mount(m.source, m.target, m.fstype, m.flags, m.data)
	// The kernel may have mounted /dev by itself (CONFIG_DEVTMPFS_MOUNT).
	if err != nil && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("mounting %s on %s: %w", m.fstype, m.target, err)
	}
	return nil
}

// releaseDisks unmounts what lies on block devices, last first, or makes it read
// only where it is in use. It is called when no process is left that writes.
func releaseDisks(log *bootLog) {
	f, err := os.Open("/proc/self/mounts")
	if err != nil {
		log.step("reading the mounts", err)
		return
	}
	defer f.Close()
	var targets []string
	for s := bufio.NewScanner(f); s.Scan(); {
		if fields := strings.Fields(s.Text()); len(fields) > 2 && strings.HasPrefix(fields[0], "/dev/") {
			targets = append(targets, unescape(fields[1]))
		}
	}
	for _, target := range slices.Backward(targets) {
		err := unix.Unmount(target, 0)
		if err != nil {
			err = unix.Mount("", target, "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
		}
		log.step("release "+target, err)
	}
}

// unescape undoes the octal escapes of /proc/self/mounts (proc(5), and fstab(5)
// for the format).
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}
