package launch_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/launch"
)

// hostileProgram is the variable that names a hostile program that is built
// already, for a re-run of this suite as a user who cannot build it.
const hostileProgram = "CAPSEM_TEST_HOSTILE"

// hostileFolder is what TestMain removes; buildHostile sets it.
var hostileFolder string

// buildHostile builds the program of testdata/hostile once.
var buildHostile = sync.OnceValues(func() (string, error) {
	if path := os.Getenv(hostileProgram); path != "" {
		return path, nil
	}
	dir, err := os.MkdirTemp("", "hostile-")
	if err != nil {
		return "", err
	}
	hostileFolder = dir
	cmd := exec.Command("go", "build", "-o", filepath.Join(dir, "hostile"), "./testdata/hostile")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the hostile program: %w\n%s", err, out)
	}
	return filepath.Join(dir, "hostile"), os.Chmod(dir, 0o755)
})

// targets are what is attacked.
type targets struct {
	hostile, dir, secret, socket, abstract, tcp, udp string
	victim                                           int
}

// newTargets puts up what the attacks are after. Outside of a jail, all of it is
// within reach of the program.
func newTargets(t *testing.T) targets {
	t.Helper()
	hostile, err := buildHostile()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	x := targets{
		hostile: hostile, dir: dir, secret: filepath.Join(dir, "session.db"), socket: filepath.Join(dir, "service.sock"),
		abstract: "hostile-" + strconv.Itoa(os.Getpid()),
	}
	if err := os.WriteFile(x.secret, []byte("evidence"), 0o600); err != nil {
		t.Fatal(err)
	}
	listen := func(network, address string) string {
		l, err := net.Listen(network, address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() }) // nobody is connected
		return l.Addr().String()
	}
	listen("unix", x.socket)
	listen("unix", "@"+x.abstract)
	x.tcp = listen("tcp", "127.0.0.1:0")
	packets, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	answering := make(chan struct{})
	go func() {
		defer close(answering)
		buf := make([]byte, 16)
		for {
			n, from, err := packets.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = packets.WriteTo(buf[:n], from) // or they have gone
		}
	}()
	t.Cleanup(func() {
		_ = packets.Close() // nobody is connected
		<-answering
	})
	x.udp = packets.LocalAddr().String()
	x.victim = startVictim(t, hostile)
	return x
}

func startVictim(t *testing.T, hostile string) int {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }() // read side
	p, err := child.Start(t.Context(), child.Command{Path: hostile, Args: []string{"victim"}, Stdout: w, Env: []string{"KEY=secret"}})
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Kill(); err != nil {
			t.Error(err)
		}
		<-p.Done()
	})
	if _, err := bufio.NewReader(r).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	return p.PID()
}

// hostileAttack is one way out.
type hostileAttack struct {
	name string
	args []string
	// open are the profiles in which it is no attack, but what they are for.
	open []launch.Profile
}

func (x targets) attacks() []hostileAttack {
	victim := strconv.Itoa(x.victim)
	server := []launch.Profile{launch.Aggregator}
	return []hostileAttack{
		{name: "read", args: []string{x.secret}},
		{name: "read", args: []string{"/etc/shadow"}},
		{name: "list", args: []string{filepath.Dir(x.dir)}},
		{name: "list", args: []string{"/home"}},
		{name: "list", args: []string{"/root"}},
		{name: "write", args: []string{x.secret}},
		{name: "write", args: []string{"/usr/hostile"}},
		{name: "write", args: []string{"/etc/hostile"}},
		{name: "sysctl"},
		{name: "disk", args: []string{x.dir}},
		{name: "pids"},
		{name: "fds"},
		{name: "exec", open: server},
		{name: "fork", open: server},
		{name: "environ", args: []string{victim}},
		{name: "mem", args: []string{victim}},
		{name: "ptrace", args: []string{victim}},
		{name: "vmread", args: []string{victim}},
		{name: "signal", args: []string{victim}},
		{name: "pidfd", args: []string{victim}},
		// Its own init is process 1 of what it sees, and of the same user.
		{name: "environ", args: []string{"1"}},
		{name: "mem", args: []string{"1"}},
		{name: "ptrace", args: []string{"1"}},
		{name: "unix", args: []string{x.socket}},
		{name: "unix", args: []string{"/var/run/docker.sock"}},
		{name: "abstract", args: []string{x.abstract}},
		{name: "tcp", args: []string{x.tcp}},
		{name: "udp", args: []string{x.udp}},
		{name: "vsock"},
		{name: "netlink"},
		{name: "packet"},
		{name: "userns"},
		{name: "mountns"},
		{name: "mount", args: []string{x.dir}},
		{name: "opentree"},
		{name: "chroot"},
		{name: "mknod", args: []string{filepath.Join(x.dir, "loop")}},
		{name: "setuid"},
		{name: "bpf"},
		{name: "iouring"},
		{name: "keyctl"},
		{name: "perf"},
		{name: "uffd"},
		{name: "personality"},
		{name: "int80"},
		{name: "x32"},
	}
}

// missingHere are targets that need not be there for a control.
var missingHere = []string{"/var/run/docker.sock"}

func TestAHostileProgramGetsNothing(t *testing.T) {
	client := newClient(t)
	if !strings.HasPrefix(client.Isolation(), launch.Strict) {
		t.Skip("needs user namespaces: this host has none")
	}
	// A descriptor that anything could inherit which does not take care.
	fd, err := unix.Open("/etc/passwd", unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }() // read only
	x := newTargets(t)
	for _, a := range x.attacks() {
		name := strings.Join(append([]string{a.name}, a.args...), " ")
		t.Run(strings.ReplaceAll(name, "/", "|"), func(t *testing.T) {
			x.control(t, a)
			for _, profile := range []launch.Profile{launch.Aggregator, launch.Builtin, launch.VMM} {
				out, err := x.jailed(t, client, profile, a)
				if open := slices.Contains(a.open, profile); open != (err == nil) {
					t.Errorf("%s: got %v (%s), want success %t", profile, err, out, open)
				}
			}
		})
	}
}

// control checks that the attack works without a jail, for what is tested is the
// jail. Some attacks need root, or a kernel that has what they attack.
func (x targets) control(t *testing.T, a hostileAttack) {
	t.Helper()
	if len(a.args) > 0 && slices.Contains(missingHere, a.args[0]) || a.name == "environ" && a.args[0] == "1" ||
		len(a.args) > 0 && a.args[0] == "1" {
		return
	}
	cmd := exec.CommandContext(t.Context(), x.hostile, append([]string{a.name}, a.args...)...)
	if a.name == "fds" {
		f, err := os.Open("/etc/passwd")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }() // read only
		cmd.ExtraFiles = []*os.File{f}
	}
	out, err := cmd.Output()
	_ = os.Remove(filepath.Join(x.dir, "loop")) // where it was made
	_ = os.Remove("/usr/hostile")               // likewise
	_ = os.Remove("/etc/hostile")               // likewise
	switch {
	case err == nil:
	case os.Geteuid() != 0 || cmd.ProcessState.ExitCode() == 4:
		t.Logf("control: it does not work here without a jail either: %v: %s", err, out)
	default:
		t.Errorf("control: %v: %s", err, out)
	}
}

// jailed runs an attack in a jail and returns what it said, and how it ended.
func (x targets) jailed(t *testing.T, client *launch.Client, profile launch.Profile, a hostileAttack) (string, error) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }() // read side
	p, err := client.Start(t.Context(), launch.Jail{Profile: profile}, child.Command{
		Path: x.hostile, Args: append([]string{a.name}, a.args...), Dir: "/", Stdout: w, Stderr: os.Stderr,
	})
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out)), p.Wait()
}

func TestAProgramInAnyJailRuns(t *testing.T) {
	client := newClient(t)
	x := targets{}
	var err error
	if x.hostile, err = buildHostile(); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(client.Isolation(), launch.Strict) {
		t.Skip("needs user namespaces: this host has none")
	}
	for _, profile := range []launch.Profile{launch.Aggregator, launch.Builtin, launch.VMM} {
		if out, err := x.jailed(t, client, profile, hostileAttack{name: "nothing"}); err != nil {
			t.Errorf("%s: %v: %s", profile, err, out)
		}
	}
}

// BenchmarkStart is the time from the request to the running program: with a
// jail, with the init and its namespaces in it.
func BenchmarkStart(b *testing.B) {
	hostile, err := buildHostile()
	if err != nil {
		b.Fatal(err)
	}
	b.Run("plain", func(b *testing.B) {
		for b.Loop() {
			p, err := child.Start(b.Context(), child.Command{Path: hostile, Args: []string{"nothing"}})
			if err != nil {
				b.Fatal(err)
			}
			b.StopTimer()
			<-p.Done()
			b.StartTimer()
		}
	})
	client, err := launch.Start(b.Context(), self())
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := client.Close(); err != nil {
			b.Error(err)
		}
	}()
	for _, profile := range []launch.Profile{launch.Builtin, launch.VMM, launch.Aggregator} {
		b.Run(string(profile), func(b *testing.B) {
			for b.Loop() {
				p, err := client.Start(b.Context(), launch.Jail{Profile: profile}, child.Command{Path: hostile, Args: []string{"nothing"}})
				if err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				<-p.Done()
				b.StartTimer()
			}
		})
	}
}

func TestTheOnlyWayOutIsTheProxy(t *testing.T) {
	client := newClient(t)
	if !strings.HasPrefix(client.Isolation(), launch.Strict) {
		t.Skip("needs user namespaces: this host has none")
	}
	hostile, err := buildHostile()
	if err != nil {
		t.Fatal(err)
	}
	p, err := client.Start(t.Context(), launch.Jail{Profile: launch.Aggregator}, child.Command{
		Path: hostile, Args: []string{"tcp", launch.ProxyAddress}, Dir: "/",
	})
	if err != nil {
		t.Fatal(err)
	}
	conn, err := p.Proxy().Accept()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(conn.Close(), p.Wait()); err != nil {
		t.Error(err)
	}
	if _, err := p.Proxy().Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("after the program's end: %v", err)
	}
}
