// Package launch starts the programs of one virtual machine in their own
// process trees, and takes a whole tree down when its machine's process dies.
//
// The per-VM process starts the launcher (`capsemd launch`, Serve) before it
// does anything else, and asks it for every program from then on, through a
// socketpair that only these two hold. The launcher starts each program below an
// init of ours (`capsemd launch-init`, Init), which is process 1 of new
// namespaces: user, mount, pid, ipc, uts, cgroup, and network where the profile
// says so. When it dies, the kernel kills everything in the pid namespace,
// whatever sessions and double forks there are. It dies with the launcher, and
// the launcher with the per-VM process.
//
// The init builds the jail that the program's Profile describes, with package
// confine: a file tree with nothing in it but what the program needs, resource
// limits, no capabilities, no_new_privs, Landlock rules, a system call filter.
// They bind the program and whatever it starts from its first instruction on.
//
// Where namespaces are refused, a program is started only if its Jail accepts
// Weak: there is no file tree then, and the init is a child subreaper: what loses
// its parent becomes the init's child, and the init kills all its descendants
// when its program ends or when its line to the launcher breaks. A program that
// forks faster than it is killed, or that kills the init, can escape, and the
// network is the host's. Client.Isolation says which of the two holds, and why.
//
// Descriptors travel by SCM_RIGHTS. A program has 0, 1, 2 and the files that it
// was given, the environment that it was given, and nothing else.
package launch

import (
	"fmt"
	"syscall"
	"time"
)

// The subcommands of the executable that Start is given.
const (
	// ServeCommand runs Serve.
	ServeCommand = "launch"
	// InitCommand runs Init.
	InitCommand = "launch-init"
)

// SocketFD is the descriptor on which the launcher and its inits find their
// socket.
const SocketFD = 3

// Bounds of the launcher's protocol.
const (
	// MaxMessage is the size of one message in bytes. Program, arguments,
	// environment and working directory must fit, base64-encoded.
	MaxMessage = 160 << 10
	// MaxFiles is the number of descriptors that a program may get, 0, 1 and 2
	// among them. The kernel's own limit is 253 (SCM_MAX_FD).
	MaxFiles = 64
	// MaxProcesses is how many programs one launcher runs at a time.
	MaxProcesses = 64
)

// killWait bounds how long anybody waits for what was killed to be gone.
const killWait = 5 * time.Second

// message is everything that is said between client and launcher, and between
// launcher and init. Exactly one member is set.
type message struct {
	// Hello is the launcher's first message to its client.
	Hello *hello `json:"hello,omitempty"`
	// Start comes with the descriptors of the program: 0, 1, 2, 3, ...
	Start *startRequest `json:"start,omitempty"`
	// Started answers Start, unless with an error: from an init with the
	// listener of the program's proxy if it has one, from the launcher with a
	// pidfd ahead of that.
	Started *started `json:"started,omitempty"`
	// Kill ends a program and everything below it.
	Kill *kill `json:"kill,omitempty"`
	// Exited says that a program and everything below it is gone.
	Exited *exited `json:"exited,omitempty"`
}

type hello struct {
	Isolation string `json:"isolation"`
}

// startRequest has byte strings where the kernel takes any bytes.
type startRequest struct {
	ID      uint64   `json:"id"`
	Profile Profile  `json:"profile"`
	Weak    bool     `json:"weak,omitempty"`
	KVM     bool     `json:"kvm,omitempty"`
	Read    [][]byte `json:"read,omitempty"`
	Write   [][]byte `json:"write,omitempty"`
	Path    []byte   `json:"path"`
	Args    [][]byte `json:"args"`
	Env     [][]byte `json:"env"`
	Dir     []byte   `json:"dir"`
	// Namespace tells the init that it is process 1 of namespaces of its own;
	// the client leaves it unset.
	Namespace bool `json:"namespace,omitempty"`
}

type started struct {
	ID    uint64 `json:"id"`
	PID   int    `json:"pid"`
	Error string `json:"error,omitempty"`
	// Errno classifies Error, 0 where it is not the kernel's.
	Errno syscall.Errno `json:"errno,omitempty"`
	// Note is what the init could not do and went on without.
	Note string `json:"note,omitempty"`
}

type kill struct {
	ID uint64 `json:"id"`
}

type exited struct {
	ID     uint64         `json:"id"`
	Code   int            `json:"code"`
	Signal syscall.Signal `json:"signal"`
	// Lost says that the init went without a report of its program's end.
	Lost string `json:"lost,omitempty"`
}

// StartError is why a program could not be started.
type StartError struct {
	Text  string
	Errno syscall.Errno
}

// Error is the text that the start gave, on whichever side it failed.
func (e *StartError) Error() string { return e.Text }

// Unwrap is the kernel's error, so that errors.Is(err, fs.ErrNotExist) and its
// like hold as they do for package child.
func (e *StartError) Unwrap() error {
	if e.Errno == 0 {
		return nil
	}
	return e.Errno
}

func toStrings(in [][]byte) []string {
	out := make([]string, len(in))
	for i, b := range in {
		out[i] = string(b)
	}
	return out
}

func toBytes(in []string) [][]byte {
	out := make([][]byte, len(in))
	for i, s := range in {
		out[i] = []byte(s)
	}
	return out
}

func (r *startRequest) jail() Jail {
	return Jail{Profile: r.Profile, Weak: r.Weak, KVM: r.KVM, Read: toStrings(r.Read), Write: toStrings(r.Write)}
}

// check refuses a request that no client of ours makes.
func (r *startRequest) check(files int) error {
	if err := r.jail().check(); err != nil {
		return err
	}
	if files < 3 || files > MaxFiles {
		return fmt.Errorf("%d descriptors, want 3 to %d", files, MaxFiles)
	}
	return nil
}
