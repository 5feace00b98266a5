package confine

import "golang.org/x/sys/unix"

// dangerousHere are those of Dangerous that only this architecture has: port
// access, segments for 16-bit code, the second kexec.
var dangerousHere = []uint32{
	unix.SYS_IOPL, unix.SYS_IOPERM, unix.SYS_MODIFY_LDT, unix.SYS_KEXEC_FILE_LOAD, unix.SYS_LOOKUP_DCOOKIE,
	unix.SYS_USELIB, unix.SYS_USTAT, unix.SYS_SYSFS, unix.SYS__SYSCTL, unix.SYS_NFSSERVCTL,
}

// goRuntimeHere are older forms of what is in GoRuntime, and thread-local storage.
var goRuntimeHere = []uint32{unix.SYS_ARCH_PRCTL, unix.SYS_EPOLL_WAIT, unix.SYS_DUP2, unix.SYS_POLL, unix.SYS_PIPE}
