//go:build linux

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/bench/guest/wire"
)

const (
	portRaw = wire.PortRaw
	portSSH = wire.PortSSH
	hostCID = 2 // VMADDR_CID_HOST
)

// fd is a descriptor that blocks: no poller stands between a system call and
// the goroutine that makes it.
type fd int

func (f fd) Read(b []byte) (int, error) {
	n, err := retry(func() (int, error) { return unix.Read(int(f), b) })
	if n == 0 && err == nil && len(b) > 0 {
		return 0, io.EOF
	}
	return max(n, 0), err
}

func (f fd) Write(b []byte) (int, error) {
	done := 0
	for done < len(b) {
		n, err := retry(func() (int, error) { return unix.Write(int(f), b[done:]) })
		if err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}

func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// listen listens on a port.
func listen(port uint32) (fd, error) {
	l, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(l, &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: port})
	}
	if err == nil {
		err = unix.Listen(l, unix.SOMAXCONN)
	}
	if err != nil {
		return 0, fmt.Errorf("listening on port %d: %w", port, err)
	}
	return fd(l), nil
}

// accept serves every connection in a goroutine of its own.
func accept(l fd, serve func(fd) error) error {
	for {
		conn, err := retry(func() (int, error) {
			c, _, err := unix.Accept4(int(l), unix.SOCK_CLOEXEC)
			return c, err
		})
		if err != nil {
			return fmt.Errorf("accepting a connection: %w", err)
		}
		go func() {
			if err := serve(fd(conn)); err != nil {
				fmt.Fprintln(os.Stderr, "raw:", err)
			}
			_ = unix.Close(conn) // the host sees what is missing
		}()
	}
}

// callHost tells the host that everything listens.
func callHost() error {
	conn, err := dial(wire.PortFirst)
	if err != nil {
		return fmt.Errorf("calling the host: %w", err)
	}
	return unix.Close(int(conn))
}

func dial(port uint32) (fd, error) {
	conn, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	return fd(conn), unix.Connect(conn, &unix.SockaddrVM{CID: hostCID, Port: port})
}

// serveSerial answers the requests of the one virtio-serial port, if there is
// one.
func serveSerial() error {
	ports, err := filepath.Glob("/dev/vport*")
	if err != nil || len(ports) == 0 {
		select {} // a machine without the device
	}
	port, err := unix.Open(ports[0], unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("opening %s: %w", ports[0], err)
	}
	return fmt.Errorf("serving %s: %w", ports[0], serveRequests(fd(port)))
}

// serveSSH runs a server on the connection, as inetd would.
func serveSSH(conn fd) error {
	f := os.NewFile(uintptr(conn), "connection")
	cmd := exec.Command("/usr/sbin/sshd", "-i", "-f", "/etc/ssh/sshd_config") //nolint:noctx // it ends with its connection
	cmd.Stdin, cmd.Stdout, cmd.Stderr = f, f, os.Stderr
	return cmd.Run()
}

func serveRequests(conn fd) error {
	buf := make([]byte, wire.Block)
	for {
		req, err := wire.Read(conn)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = serve(conn, req, buf)
		}
		if err != nil {
			return fmt.Errorf("serving %q: %w", req.Op, err)
		}
	}
}

func serve(conn fd, req wire.Request, buf []byte) error {
	switch req.Op {
	case wire.Echo:
		return echo(conn, buf[:req.Size], req.Count)
	case wire.Discard:
		for left := req.Count; left > 0; {
			n, err := conn.Read(buf[:min(uint64(len(buf)), left)])
			if err != nil {
				return err
			}
			left -= uint64(n)
		}
		_, err := conn.Write(buf[:1])
		return err
	case wire.Zeros:
		clear(buf)
		for left := req.Count; left > 0; {
			n, err := conn.Write(buf[:min(uint64(req.Size), left)])
			if err != nil {
				return err
			}
			left -= uint64(n)
		}
		return nil
	case wire.Spawn:
		times, err := spawn(req.Count)
		if err == nil {
			_, err = conn.Write(wire.AppendTimes(nil, times))
		}
		return err
	case wire.Run:
		return run(conn, req.Size)
	}
	return fmt.Errorf("there is no such request")
}

func echo(conn fd, message []byte, count uint64) error {
	for range count {
		if _, err := io.ReadFull(conn, message); err != nil {
			return err
		}
		if _, err := conn.Write(message); err != nil {
			return err
		}
	}
	return nil
}

// spawn measures fork, exec and wait of a program that does nothing.
func spawn(count uint64) ([]time.Duration, error) {
	times := make([]time.Duration, count)
	for i := range times {
		began := time.Now()
		pid, err := syscall.ForkExec("/bin/true", []string{"true"}, &syscall.ProcAttr{})
		if err == nil {
			_, err = retry(func() (int, error) { return unix.Wait4(pid, nil, 0, nil) })
		}
		if err != nil {
			return nil, err
		}
		times[i] = time.Since(began)
	}
	return times, nil
}

func run(conn fd, size uint32) error {
	words := make([]byte, size)
	if _, err := io.ReadFull(conn, words); err != nil {
		return err
	}
	argv := strings.Split(strings.TrimSuffix(string(words), "\x00"), "\x00")
	cmd := exec.Command(argv[0], argv[1:]...) //nolint:noctx // the host waits for it
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("running %s: %w", argv[0], err)
	}
	_, err = conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(out))), out...))
	return err
}
