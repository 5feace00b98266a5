package confine

import "golang.org/x/sys/unix"

const auditArch = unix.AUDIT_ARCH_X86_64

// forks are the system calls besides clone that make processes.
var forks = []uint32{unix.SYS_FORK, unix.SYS_VFORK}
