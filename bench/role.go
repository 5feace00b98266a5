package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// The roles in which benchmarks start this program again. They are no part of
// its command line.
const (
	rolePrefix = "role:"
	// roleEcho copies stdin to stdout: a process hop.
	roleEcho = rolePrefix + "echo"
	// roleConnect connects to a Unix socket and hands the connection to whoever
	// holds the other end of its stdout, as ssh's ProxyUseFdpass wants it.
	roleConnect = rolePrefix + "connect"
)

func playRole(ctx context.Context, args []string, stdin io.Reader, stdout io.Writer) error {
	switch {
	case len(args) == 1 && args[0] == roleEcho:
		_, err := io.CopyBuffer(struct{ io.Writer }{stdout}, struct{ io.Reader }{stdin}, make([]byte, 1<<20))
		return err
	case len(args) == 2 && args[0] == roleConnect:
		return connect(ctx, args[1])
	}
	return fmt.Errorf("there is no role %q", args)
}

func connect(ctx context.Context, socket string) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return err
	}
	f, err := conn.(*net.UnixConn).File()
	if err != nil {
		return errors.Join(err, conn.Close())
	}
	err = unix.Sendmsg(int(os.Stdout.Fd()), []byte{0}, unix.UnixRights(int(f.Fd())), nil, 0)
	return errors.Join(err, f.Close(), conn.Close())
}
