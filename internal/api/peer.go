package api

import (
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// SameUser returns a listener on Unix sockets that drops connections of other
// users than this process's and root. The sockets are 0600; this holds also
// where somebody loosened that.
func SameUser(l net.Listener) net.Listener { return sameUser{l} }

type sameUser struct{ net.Listener }

func (s sameUser) Accept() (net.Conn, error) {
	for {
		conn, err := s.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if uid, err := peerUID(conn); err == nil && (uid == os.Geteuid() || uid == 0) {
			return conn, nil
		}
		if err := conn.Close(); err != nil {
			return nil, fmt.Errorf("refusing another user's connection: %w", err)
		}
	}
}

// peerUID is who connected, from the kernel (SO_PEERCRED, unix(7)).
func peerUID(conn net.Conn) (int, error) {
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return 0, errors.New("not a Unix socket")
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var failure error
	if err := raw.Control(func(fd uintptr) {
		cred, failure = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}
	if failure != nil {
		return 0, failure
	}
	return int(cred.Uid), nil
}
