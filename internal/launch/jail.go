package launch

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/confine"
)

// ProxyAddress is where a program without a network of the host finds its way
// out, if its profile has one.
const ProxyAddress = "127.0.0.1:3128"

// built is a jail from the inside, before its program runs.
type built struct {
	confinement
	// passed has the listener at ProxyAddress, if the profile has one.
	passed []*os.File
	// note says what is missing and not required.
	note string
}

// build makes this process, which is an init, the inside of the request's jail:
// all that holds for the whole process, and not only for the program.
func build(req *startRequest) (*built, error) {
	conf, err := req.jail().confine(string(req.Path), toStrings(req.Env))
	if err != nil {
		return nil, err
	}
	b := &built{confinement: conf}
	if conf.oomFirst {
		// A process that is not dumpable may not write to its own /proc.
		if dumpErr := dumpable(func() { err = confine.PreferForOOM() }); dumpErr != nil {
			return nil, dumpErr
		}
		if err != nil {
			b.note = err.Error()
		}
	}
	// The program is of the same user, and must not read what is in here.
	if err := confine.NotDumpable(); err != nil {
		return nil, err
	}
	if !req.Namespace {
		return b, becomeSubreaper()
	}
	if limit, ok := conf.limits[unix.RLIMIT_NPROC]; ok {
		if err := confine.LimitPIDs(limit); err != nil {
			return nil, err
		}
	}
	if conf.proxy {
		listener, err := listen()
		if err != nil {
			return nil, err
		}
		b.passed = []*os.File{listener}
	}
	return b, confine.EnterTree(conf.view)
}

// listen opens the listener of the program's proxy, in the network namespace
// that this process is in, whose only interface it brings up.
func listen() (*os.File, error) {
	if err := loopbackUp(); err != nil {
		return nil, fmt.Errorf("bringing up the loopback interface: %w", err)
	}
	listener, err := net.Listen("tcp4", ProxyAddress) //nolint:noctx // it neither resolves nor waits
	if err != nil {
		return nil, fmt.Errorf("opening the way out at %s: %w", ProxyAddress, err)
	}
	// The copy stays open; the original is of no more use.
	file, err := listener.(*net.TCPListener).File()
	return file, errors.Join(err, listener.Close())
}

// loopbackUp is `ip link set lo up` (netdevice(7)).
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd) //nolint:errcheck // a handle for the ioctl
	request := struct {
		name  [unix.IFNAMSIZ]byte
		flags uint16
		_     [22]byte // the rest of struct ifreq
	}{flags: unix.IFF_UP | unix.IFF_RUNNING}
	copy(request.name[:], "lo")
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCSIFFLAGS, uintptr(unsafe.Pointer(&request)))
	if errno != 0 {
		return errno
	}
	return nil
}

// start confines a thread and starts the program from it. The thread does
// nothing else in its life, which is that of this process: the program's
// parent-death signal follows it, and what binds the program binds it too.
func (b *built) start(req *startRequest, files []*os.File) (*os.Process, error) {
	type result struct {
		proc *os.Process
		err  error
	}
	started := make(chan result)
	go func() {
		runtime.LockOSThread()
		proc, err := b.startHere(req, files)
		started <- result{proc, err}
		select {} // until the process ends
	}()
	r := <-started
	return r.proc, r.err
}

func (b *built) startHere(req *startRequest, files []*os.File) (*os.Process, error) {
	if err := errors.Join(confine.Limits(b.limits), confine.DropCapabilities(), confine.NoNewPrivs()); err != nil {
		return nil, err
	}
	if err := b.landlock(req.Namespace, files); err != nil {
		if !req.Namespace && !req.Weak || confine.LandlockABI() > 0 {
			return nil, err
		}
		b.note = err.Error()
	}
	installed, err := b.filter.Install()
	if err != nil {
		return nil, err
	}
	proc, err := child.Fork(child.Command{
		Path: string(req.Path), Args: toStrings(req.Args), Env: toStrings(req.Env), Dir: string(req.Dir),
		Stdin: files[0], Stdout: files[1], Stderr: files[2], Files: files[3:],
	})
	return proc, errors.Join(err, installed.Close())
}

// landlock repeats the view as rules. Where the view is all that there is, they
// are a second wall; where it could not be made, the only one.
func (b *built) landlock(tree bool, held []*os.File) error {
	shown := b.view.Shown
	if tree {
		shown = append(shown, confine.Shown{Path: "/", Access: confine.Read})
		if b.view.Temp > 0 {
			shown = append(shown, confine.Shown{Path: "/tmp", Access: confine.Write})
		}
	} else {
		shown = append(shown, weakly(b.confinement)...)
	}
	return confine.Landlock(confine.Rules{Shown: shown, Held: held, TCP: b.proxy})
}

// weakly is what a program sees besides where there is no tree: the host's /proc
// in the place of its own, and what resolves names in the host's network.
func weakly(c confinement) []confine.Shown {
	var shown []confine.Shown
	if c.view.Proc {
		shown = optional("/proc")
	}
	if c.proxy {
		shown = append(shown, optional("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/host.conf")...)
	}
	return shown
}
