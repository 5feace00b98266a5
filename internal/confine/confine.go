// Package confine takes privileges away: from the calling thread, and from
// everything that it starts from then on. Nothing that is taken can be had back.
//
// Each primitive is a function of its own, and says what it could not do, with
// the setting of the host that stands in the way. None of them weakens itself in
// silence; what to do without one is the caller's decision. The order that works
// is that of package launch: file tree, limits, capabilities, no_new_privs,
// Landlock, system call filter. Each needs something that the next one takes.
//
// Landlock rules, capabilities and filters belong to a thread. The caller has
// locked its goroutine to one and forks from there; the other threads of the
// process keep what they had.
//
// Sources are the manual pages and headers of Linux: landlock(7), seccomp(2),
// capabilities(7), mount_setattr(2), pivot_root(2). The system calls are made
// directly: together they are shorter than what a library would have to be told.
package confine

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// NoNewPrivs keeps set-uid programs and file capabilities from adding to what
// the calling thread and its children have. Landlock and Filter need it.
func NoNewPrivs() error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("setting no_new_privs: %w", err)
	}
	return nil
}

// NotDumpable keeps the process's memory, environment and descriptors from
// others of the same user (ptrace(2), /proc/PID), and out of core files. It ends
// when the process executes another program.
func NotDumpable() error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("making the process undumpable: %w", err)
	}
	return nil
}

// Limits sets resource limits, soft and hard alike, by RLIMIT_ number. They hold
// for the whole process. One that is lower already stays as it is.
func Limits(limits map[int]uint64) error {
	for resource, value := range limits {
		var now unix.Rlimit
		if err := unix.Getrlimit(resource, &now); err != nil {
			return fmt.Errorf("reading resource limit %d: %w", resource, err)
		}
		value = min(value, now.Max)
		if err := unix.Setrlimit(resource, &unix.Rlimit{Cur: value, Max: value}); err != nil {
			return fmt.Errorf("setting resource limit %d to %d: %w", resource, value, err)
		}
	}
	return nil
}

// DropCapabilities leaves the calling thread, and what it executes, without any
// capability: in no set, and not in the bounding set, so that no file gives one
// back. Without CAP_SETPCAP, the bounding set cannot be emptied; then there must
// be no_new_privs, which has the same effect.
func DropCapabilities() error {
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("clearing ambient capabilities: %w", err)
	}
	for c := range uintptr(64) {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		switch {
		case errors.Is(err, unix.EINVAL): // past the kernel's last capability
		case errors.Is(err, unix.EPERM): // no_new_privs stands for it
		case err != nil:
			return fmt.Errorf("dropping capability %d from the bounding set: %w", c, err)
		}
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	if err := unix.Capset(&header, &none[0]); err != nil {
		return fmt.Errorf("giving up capabilities: %w", err)
	}
	return nil
}

// PreferForOOM makes the kernel choose this process and its children first when
// memory runs out, before anything that was not told so.
func PreferForOOM() error {
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("800"), 0); err != nil {
		return fmt.Errorf("offering the process to the out-of-memory killer: %w", err)
	}
	return nil
}

// WhyNoNamespaces says which setting of the host keeps a process from making
// namespaces, as far as that can be told; "" where none is known.
func WhyNoNamespaces() string {
	for _, setting := range []struct{ file, bad, change string }{
		{"/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1 allows them"},
		{
			"/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1",
			"AppArmor restricts them (kernel.apparmor_restrict_unprivileged_userns=1): give the program a profile with `userns,`, or set it to 0",
		},
		{"/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=10000 allows them"},
		{"/proc/sys/user/max_pid_namespaces", "0", "sysctl user.max_pid_namespaces=10000 allows them"},
		{"/proc/sys/user/max_mnt_namespaces", "0", "sysctl user.max_mnt_namespaces=10000 allows them"},
		{"/proc/sys/user/max_net_namespaces", "0", "sysctl user.max_net_namespaces=10000 allows them"},
	} {
		value, err := os.ReadFile(setting.file)
		if err == nil && strings.TrimSpace(string(value)) == setting.bad {
			return setting.change
		}
	}
	return ""
}
