package launch

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// socket carries messages with descriptors over a SOCK_SEQPACKET socket: one
// packet, one message. One goroutine may receive, any number may send.
type socket struct {
	conn *net.UnixConn

	mu sync.Mutex // serialises sends
}

// socketpair returns one end as a socket and the other as a file for a child,
// which the caller closes.
func socketpair() (*socket, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("making a socketpair: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "launcher socket")
	ours, err := newSocket(os.NewFile(uintptr(fds[0]), "launcher socket"))
	if err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	return ours, theirs, nil
}

// newSocket takes over f and closes it.
func newSocket(f *os.File) (*socket, error) {
	conn, err := net.FileConn(f)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("using the launcher's socket: %w", err)
	}
	uc, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("the launcher's socket is a %T", conn), conn.Close())
	}
	return &socket{conn: uc}, nil
}

// send sends m with files, which stay the caller's.
func (s *socket) send(m message, files ...*os.File) error {
	data, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("encoding a launcher message: %w", err)
	}
	if len(data) > MaxMessage {
		return fmt.Errorf("a launcher message of %d bytes, limit %d: arguments and environment are too large", len(data), MaxMessage)
	}
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, _, err := s.conn.WriteMsgUnix(data, rights, nil); err != nil {
		return fmt.Errorf("sending to the launcher's socket: %w", err)
	}
	return nil
}

// receive returns the next message and its descriptors, which are the caller's
// to close. io.EOF means that the other side closed its end.
func (s *socket) receive() (m message, files []*os.File, err error) {
	data := make([]byte, MaxMessage)
	oob := make([]byte, unix.CmsgSpace(MaxFiles*4))
	n, oobn, flags, _, err := s.conn.ReadMsgUnix(data, oob)
	if err != nil {
		return message{}, nil, err
	}
	files, err = rights(oob[:oobn])
	if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = errors.New("a launcher message over the limit")
	}
	if err == nil {
		err = json.Unmarshal(data[:n], &m)
	}
	if err != nil {
		closeAll(files)
		return message{}, nil, fmt.Errorf("decoding a launcher message: %w", err)
	}
	return m, files, nil
}

func rights(oob []byte) (files []*os.File, err error) {
	if len(oob) == 0 {
		return nil, nil
	}
	cmsgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for i := range cmsgs {
		fds, err := unix.ParseUnixRights(&cmsgs[i])
		if err != nil {
			return files, err
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "passed"))
		}
	}
	return files, nil
}

func (s *socket) close() error { return s.conn.Close() }

// closeAll closes copies of descriptors that were passed; what they refer to is
// held by somebody else, so nothing can be lost here.
func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // a copy
	}
}
