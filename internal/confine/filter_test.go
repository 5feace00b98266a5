package confine

import (
	"encoding/binary"
	"slices"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// verdict runs a filter on one call, in an interpreter of the same machine. That
// one reads big-endian words, as from a packet.
func verdict(t *testing.T, f Filter, arch, number uint32, args ...uint64) uint32 {
	t.Helper()
	var raw []bpf.Instruction
	for _, i := range f.program() {
		raw = append(raw, bpf.RawInstruction{Op: i.Code, Jt: i.Jt, Jf: i.Jf, K: i.K}.Disassemble())
	}
	vm, err := bpf.NewVM(raw)
	if err != nil {
		t.Fatal(err)
	}
	data := make([]byte, 64)
	binary.BigEndian.PutUint32(data[offsetNumber:], number)
	binary.BigEndian.PutUint32(data[offsetArch:], arch)
	for i, a := range args {
		binary.BigEndian.PutUint32(data[offsetArgs+8*i:], uint32(a)) // the lower half comes first
		binary.BigEndian.PutUint32(data[offsetArgs+8*i+4:], uint32(a>>32))
	}
	action, err := vm.Run(data)
	if err != nil {
		t.Fatal(err)
	}
	return uint32(action)
}

const (
	denied  = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	noCall  = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
	noSuch  = unix.SECCOMP_RET_ERRNO | uint32(unix.EAFNOSUPPORT)
	allowed = unix.SECCOMP_RET_ALLOW
	killed  = unix.SECCOMP_RET_KILL_PROCESS
	asked   = unix.SECCOMP_RET_USER_NOTIF
)

func TestFiltersDecideAsTheySay(t *testing.T) {
	open := Filter{Deny: Dangerous(), Families: []uint32{unix.AF_INET, unix.AF_INET6}}
	once := Filter{Deny: Dangerous(), Once: true}
	closed := Filter{Allow: GoRuntime(), Once: true}
	for _, test := range []struct {
		name   string
		filter Filter
		number uint32
		args   []uint64
		want   uint32
	}{
		{"what is not listed, where all is allowed", open, unix.SYS_OPENAT, nil, allowed},
		{"what is not listed, where all is refused", closed, unix.SYS_OPENAT, nil, denied},
		{"read", closed, unix.SYS_READ, nil, allowed},
		{"read", once, unix.SYS_READ, nil, allowed},
		{"a TCP socket", open, unix.SYS_SOCKET, []uint64{unix.AF_INET, unix.SOCK_STREAM}, allowed},
		{"a TCP socket with bits above the number", open, unix.SYS_SOCKET, []uint64{1<<32 | unix.AF_INET}, allowed},
		{"a Unix socket", open, unix.SYS_SOCKET, []uint64{unix.AF_UNIX}, noSuch},
		{"a vsock socket", open, unix.SYS_SOCKET, []uint64{unix.AF_VSOCK}, noSuch},
		{"any socket", once, unix.SYS_SOCKET, []uint64{unix.AF_INET}, noSuch},
		{"a pair of Unix sockets", open, unix.SYS_SOCKETPAIR, []uint64{unix.AF_UNIX}, allowed},
		{"a pair of others", open, unix.SYS_SOCKETPAIR, []uint64{unix.AF_TIPC}, noSuch},
		{"a fork", open, unix.SYS_CLONE, []uint64{uint64(unix.SIGCHLD)}, allowed},
		{"a fork", once, unix.SYS_CLONE, []uint64{uint64(unix.SIGCHLD)}, asked},
		{"a thread", once, unix.SYS_CLONE, []uint64{unix.CLONE_VM | unix.CLONE_THREAD | unix.CLONE_SIGHAND}, allowed},
		{"a thread in a namespace", once, unix.SYS_CLONE, []uint64{unix.CLONE_THREAD | unix.CLONE_NEWUSER}, denied},
		{"a user namespace", open, unix.SYS_CLONE, []uint64{unix.CLONE_NEWUSER}, denied},
		{"a network namespace", open, unix.SYS_CLONE, []uint64{unix.CLONE_NEWNET}, denied},
		{"clone3", open, unix.SYS_CLONE3, nil, noCall},
		{"clone3", closed, unix.SYS_CLONE3, nil, noCall},
		{"an exec", open, unix.SYS_EXECVE, nil, allowed},
		{"an exec", once, unix.SYS_EXECVE, nil, asked},
		{"an exec of a descriptor", once, unix.SYS_EXECVEAT, nil, denied},
		{"an exec of a descriptor", closed, unix.SYS_EXECVEAT, nil, denied},
		{"typing into a terminal", open, unix.SYS_IOCTL, []uint64{0, unix.TIOCSTI}, denied},
		{"typing into a terminal, with bits above the number", open, unix.SYS_IOCTL, []uint64{0, 1<<32 | unix.TIOCSTI}, denied},
		{"another ioctl", open, unix.SYS_IOCTL, []uint64{0, unix.TCGETS}, allowed},
	} {
		if got := verdict(t, test.filter, auditArch, test.number, test.args...); got != test.want {
			t.Errorf("%s (call %d): got %#x, want %#x", test.name, test.number, got, test.want)
		}
	}
	for _, number := range Dangerous() {
		for _, f := range []Filter{open, once, closed} {
			if got := verdict(t, f, auditArch, number); got != denied {
				t.Errorf("call %d: got %#x, want %#x", number, got, denied)
			}
		}
	}
}

func TestAnotherArchitecturesCallsKill(t *testing.T) {
	for _, f := range []Filter{{}, {Allow: GoRuntime(), Once: true}, {Deny: Dangerous()}} {
		for _, arch := range []uint32{unix.AUDIT_ARCH_I386, unix.AUDIT_ARCH_ARM, 0} {
			if got := verdict(t, f, arch, unix.SYS_READ); got != killed {
				t.Errorf("architecture %#x: got %#x", arch, got)
			}
		}
		if auditArch != unix.AUDIT_ARCH_X86_64 {
			continue
		}
		for _, number := range []uint32{x32Bit, x32Bit | unix.SYS_READ, x32Bit | 520, 1<<31 | unix.SYS_READ} {
			if got := verdict(t, f, auditArch, number); got != killed {
				t.Errorf("call %#x: got %#x", number, got)
			}
		}
	}
}

func TestNothingDangerousIsAllowedToPrograms(t *testing.T) {
	for _, number := range GoRuntime() {
		if slices.Contains(Dangerous(), number) {
			t.Errorf("call %d is in both lists", number)
		}
	}
	for _, list := range [][]uint32{GoRuntime(), Dangerous()} {
		sorted := slices.Sorted(slices.Values(list))
		if len(slices.Compact(sorted)) != len(list) {
			t.Error("a list has a call twice")
		}
	}
}
