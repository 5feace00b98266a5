package confine

import "golang.org/x/sys/unix"

// dangerousHere are those of Dangerous that only this architecture has.
var dangerousHere = []uint32{unix.SYS_KEXEC_FILE_LOAD, unix.SYS_LOOKUP_DCOOKIE, unix.SYS_NFSSERVCTL}

// goRuntimeHere are those of GoRuntime that only this architecture has: none.
var goRuntimeHere []uint32
