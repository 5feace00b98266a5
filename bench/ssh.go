package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"

	"github.com/capsem/capsem/bench/guest/wire"
)

func sshBenchmark() benchmark {
	return benchmark{
		name: "ssh",
		about: "`POST exec` of /bin/true, and `capsem exec`, against `ssh guest /bin/true` to a `sshd -i` with its default settings, over vsock on the " +
			"same kind of machine: with a connection for each call, and over a ControlMaster that is there already",
		run: benchSSH,
	}
}

func benchSSH(ctx context.Context, l *lab) (rows []row, err error) {
	f, err := l.raw(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := l.exec(ctx, "/bin/true"); err != nil {
		return nil, err
	}
	s, err := l.openSSH(ctx, f)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.startMaster(ctx); err != nil {
		return nil, err
	}
	const calls = 5
	median := func(f func(context.Context) error) side {
		return func(ctx context.Context) (float64, error) { return repeat(calls, func() error { return f(ctx) }) }
	}
	all, err := alternate(ctx, l.rounds(7), l.execRound,
		median(func(ctx context.Context) error { return s.run(ctx, "-o", "ControlPath=none") }),
		median(func(ctx context.Context) error { return s.run(ctx, "-o", "ControlMaster=no") }),
		median(func(ctx context.Context) error {
			return l.capsem(ctx, "exec", "box", "--", "/bin/true")
		}),
	)
	if err != nil {
		return nil, err
	}
	return []row{
		compare("exec against ssh, a connection each, p50", "µs", all[0], all[1], atMost(0.1), ""),
		compare("exec against ssh, ControlMaster, p50", "µs", all[0], all[2], atMost(0.5), ""),
		compare("`capsem exec` against ssh, a connection each, p50", "µs", all[3], all[1], nil, "both start a program"),
		compare("`capsem exec` against ssh, ControlMaster, p50", "µs", all[3], all[2], nil, "both start a program"),
	}, nil
}

// sshClient makes calls to a guest's sshd.
type sshClient struct {
	dir    string
	args   []string
	bridge net.Listener
	conns  sync.WaitGroup
	master *exec.Cmd
}

// openSSH bridges a Unix socket to the guest's SSH port, since ssh cannot dial a
// device that lives in this process.
func (l *lab) openSSH(ctx context.Context, f *floorVM) (*sshClient, error) {
	dir, err := os.MkdirTemp(l.dir, "ssh")
	if err != nil {
		return nil, fmt.Errorf("making a scratch folder: %w", err)
	}
	s := &sshClient{dir: dir}
	socket := filepath.Join(dir, "bridge")
	if s.bridge, err = (&net.ListenConfig{}).Listen(ctx, "unix", socket); err != nil {
		return nil, fmt.Errorf("bridging to the guest's sshd: %w", err)
	}
	s.conns.Go(func() { s.accept(ctx, f) })
	s.args = []string{
		"-F", "none", "-i", f.key, "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes",
		"-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=" + os.DevNull, "-o", "LogLevel=ERROR",
		"-o", fmt.Sprintf("ProxyCommand=%s %s %s", l.self, roleConnect, socket), "-o", "ProxyUseFdpass=yes",
		"-o", "ControlPath=" + filepath.Join(dir, "master"),
	}
	return s, nil
}

func (s *sshClient) accept(ctx context.Context, f *floorVM) {
	for {
		conn, err := s.bridge.Accept()
		if err != nil {
			return // closed
		}
		guest, err := f.machine.Dial(ctx, wire.PortSSH)
		if err != nil {
			_ = conn.Close() // ssh says that nobody answers
			continue
		}
		s.conns.Go(func() { join(conn, guest) })
	}
}

// join copies both ways until one side ends, and then ends both.
func join(a, b net.Conn) {
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{a, b}, {b, a}} {
		both.Go(func() {
			_, err := io.Copy(way[0], way[1])
			if err != nil && !errors.Is(err, net.ErrClosed) {
				_ = way[1].Close() // ends the other direction too
			}
			_ = way[0].Close() // the other side sees the end
		})
	}
	both.Wait()
}

// startMaster starts the connection that calls share, and makes the first call
// over it.
func (s *sshClient) startMaster(ctx context.Context) error {
	s.master = exec.CommandContext(ctx, "ssh", append(s.args, "-o", "ControlMaster=yes", "-N", "-f", "guest")...)
	if out, err := s.master.CombinedOutput(); err != nil {
		return fmt.Errorf("starting the shared connection: %w: %s", err, out)
	}
	return s.run(ctx, "-o", "ControlMaster=no")
}

// run makes one call.
func (s *sshClient) run(ctx context.Context, options ...string) error {
	args := append(append(options, s.args...), "root@guest", "/bin/true")
	if out, err := exec.CommandContext(ctx, "ssh", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("running ssh: %w: %s", err, out)
	}
	return nil
}

func (s *sshClient) close() error {
	var errs []error
	if s.master != nil {
		// The master left this process; it is told by its socket.
		args := append([]string{"-O", "exit"}, append(s.args, "guest")...)
		errs = append(errs, exec.Command("ssh", args...).Run()) //nolint:noctx // it only writes to a socket
	}
	errs = append(errs, s.bridge.Close())
	s.conns.Wait()
	return errors.Join(errs...)
}
