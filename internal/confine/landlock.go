package confine

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Landlock's access rights to files, by the ABI that brought them (landlock(7)).
const (
	landlockReadFile = unix.LANDLOCK_ACCESS_FS_READ_FILE
	landlockRead     = unix.LANDLOCK_ACCESS_FS_EXECUTE | landlockReadFile | unix.LANDLOCK_ACCESS_FS_READ_DIR
	landlockABI1     = unix.LANDLOCK_ACCESS_FS_MAKE_SYM<<1 - 1
	landlockABI2     = unix.LANDLOCK_ACCESS_FS_REFER
	landlockABI3     = unix.LANDLOCK_ACCESS_FS_TRUNCATE
	landlockABI5     = unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	// What can be allowed of something that is no folder.
	landlockOfFile = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | landlockReadFile |
		landlockABI3 | landlockABI5
)

// Rules are what Landlock leaves a program.
type Rules struct {
	Shown []Shown
	// Held are files that the program has as descriptors: it may open regular
	// ones among them again, for reading, by way of /proc/self/fd.
	Held []*os.File
	// TCP leaves it the right to connect and to listen, in the network that it
	// has.
	TCP bool
}

// LandlockABI is the version of Landlock that the kernel has, 0 for none: it is
// not built in, or not in the list of `lsm=` on the kernel's command line.
func LandlockABI() int {
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return 0
	}
	return int(abi)
}

// LandlockLoss says what a kernel with this ABI leaves open that a newer one
// would close, "" for nothing.
func LandlockLoss(abi int) string {
	switch {
	case abi < 1:
		return "no Landlock: add landlock to lsm= on the kernel's command line"
	case abi < 3:
		return fmt.Sprintf("Landlock ABI %d: truncating files, TCP, device ioctls, signals and abstract sockets are outside its rules (Linux 6.12 has them all)", abi)
	case abi < 4:
		return "Landlock ABI 3: TCP, device ioctls, signals and abstract sockets are outside its rules (Linux 6.12 has them all)"
	case abi < 5:
		return "Landlock ABI 4: device ioctls, signals and abstract sockets are outside its rules (Linux 6.12 has them all)"
	case abi < 6:
		return "Landlock ABI 5: signals and abstract sockets are outside its rules (Linux 6.12 has them)"
	}
	return ""
}

// Landlock puts rules in force for the calling thread, as far as the kernel's ABI
// reaches: files outside of them, abstract sockets and processes outside of the
// domain are out of reach. What is shown and missing is left out. With no
// Landlock at all it is an error.
func Landlock(r Rules) error {
	abi := LandlockABI()
	if abi < 1 {
		return errors.New(LandlockLoss(0))
	}
	files := landlockFiles(abi)
	attr := unix.LandlockRulesetAttr{Handled_access_fs: files}
	if abi >= 4 && !r.TCP {
		attr.Handled_access_net = unix.LANDLOCK_ACCESS_NET_BIND_TCP | unix.LANDLOCK_ACCESS_NET_CONNECT_TCP
	}
	if abi >= 6 {
		attr.Scoped = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
	}
	set, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr), 0)
	if errno != 0 {
		return fmt.Errorf("making Landlock rules: %w", errno)
	}
	defer unix.Close(int(set)) //nolint:errcheck // the rules are in force or not, with or without it
	for _, s := range r.Shown {
		if err := landlockAllow(int(set), s, files); err != nil {
			return err
		}
	}
	for _, f := range r.Held {
		if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
			continue
		}
		err := landlockRule(int(set), int(f.Fd()), landlockReadFile)
		if err != nil && !errors.Is(err, unix.EBADFD) { // a memfd has no place in a file system
			return fmt.Errorf("allowing %s: %w", f.Name(), err)
		}
	}
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, set, 0, 0); errno != 0 {
		return fmt.Errorf("putting Landlock rules in force: %w", errno)
	}
	return nil
}

func landlockFiles(abi int) uint64 {
	rights := uint64(landlockABI1)
	if abi >= 2 {
		rights |= landlockABI2
	}
	if abi >= 3 {
		rights |= landlockABI3
	}
	if abi >= 5 {
		rights |= landlockABI5
	}
	return rights
}

func landlockAllow(set int, s Shown, handled uint64) error {
	fd, err := unix.Open(s.Path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("allowing %s: %w", s.Path, err)
	}
	defer unix.Close(fd) //nolint:errcheck // only a name for the rule
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("allowing %s: %w", s.Path, err)
	}
	rights := uint64(landlockRead)
	if s.Access != Read {
		rights = handled &^ (unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK | unix.LANDLOCK_ACCESS_FS_MAKE_CHAR)
	}
	if s.Access == Device {
		rights = landlockReadFile | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | landlockABI5
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		rights &= landlockOfFile
	}
	if err := landlockRule(set, fd, rights&handled); err != nil {
		return fmt.Errorf("allowing %s: %w", s.Path, err)
	}
	return nil
}

func landlockRule(set, fd int, rights uint64) error {
	rule := unix.LandlockPathBeneathAttr{Allowed_access: rights, Parent_fd: int32(fd)}
	_, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(set), unix.LANDLOCK_RULE_PATH_BENEATH,
		uintptr(unsafe.Pointer(&rule)), 0, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}
