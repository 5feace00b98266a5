//go:build linux

package relay

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/guestproto"
)

// maxLinks bounds the symlinks followed to the file that a path means, as the
// kernel does (MAXSYMLINKS of linux/namei.h).
const maxLinks = 40

// readFile answers Info, Data, EOF, and Info again with the digest of what was
// sent.
func (s *streams) readFile(conn net.Conn, c *guestproto.StreamConn, r *guestproto.ReadFile) error {
	f, info, err := openRegular(r)
	if refused, ok := errors.AsType[*refusal](err); ok {
		return s.refuse(conn, c, &refused.told)
	}
	defer f.Close()
	if err := c.Write(&guestproto.Stream{Info: info}); err != nil {
		return fmt.Errorf("sending a file's info: %w", err)
	}
	out := guestproto.NewCredit()
	var acks sync.WaitGroup
	acks.Go(func() { takeAcks(c, out) })
	sum := sha256.New()
	err = sendFile(c, out, f, readLimit(r, info.Size), r.Offset, sum)
	if refused, ok := errors.AsType[*refusal](err); ok {
		err = c.Write(&guestproto.Stream{Error: &refused.told})
	} else if err == nil {
		info.SHA256 = sum.Sum(nil)
		err = errors.Join(
			c.Write(&guestproto.Stream{EOF: &guestproto.EOF{Stream: guestproto.Out}}),
			c.Write(&guestproto.Stream{Info: info}))
	}
	// As linger does, with the reader that is already there.
	if err == nil {
		err = errors.Join(closeWrite(conn), conn.SetReadDeadline(time.Now().Add(lingerTime)))
	} else {
		_ = conn.Close() // so that the reader ends; err has the reason
	}
	acks.Wait()
	return err
}

// openRegular opens what is to be read. Every error is a refusal.
func openRegular(r *guestproto.ReadFile) (*os.File, *guestproto.FileInfo, error) {
	if r.Offset < 0 || r.Limit < 0 {
		return nil, nil, refuse("invalid", "offset and limit are not negative")
	}
	path := string(r.Path)
	if err := absolute(path); err != nil {
		return nil, nil, refuseFile(err)
	}
	// Without O_NONBLOCK a named pipe would hold the open until somebody writes.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, refuseFile(err)
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%w: %s is not a regular file", errInvalid, path)
	}
	if err != nil {
		return nil, nil, refuseFile(errors.Join(err, f.Close()))
	}
	return f, fileInfo(path, info), nil
}

// readLimit is how many bytes are sent at most. A file that grows while it is
// read has the size that it had; one without a size (in /proc) is read to its
// end.
func readLimit(r *guestproto.ReadFile, size int64) int64 {
	limit := int64(1<<63 - 1)
	if size > 0 {
		limit = max(0, size-r.Offset)
	}
	if r.Limit > 0 {
		limit = min(limit, r.Limit)
	}
	return limit
}

// takeAcks reads what the host says to a file that it is sent, until it closes.
func takeAcks(c *guestproto.StreamConn, out *guestproto.Credit) {
	defer out.Close()
	for {
		m, err := c.Read()
		if err != nil || m.Ack == nil || out.Confirm(*m.Ack) != nil {
			return
		}
	}
}

func sendFile(c *guestproto.StreamConn, out *guestproto.Credit, f *os.File, limit, offset int64, sum hash.Hash) error {
	src := io.NewSectionReader(f, offset, limit)
	buf := make([]byte, guestproto.MaxData)
	for {
		n, err := src.Read(buf)
		for p := buf[:n]; len(p) > 0; {
			k := out.Take(len(p))
			if k == 0 {
				return errors.New("the host left before the end of a file")
			}
			if err := c.Write(&guestproto.Stream{Data: &guestproto.Data{Stream: guestproto.Out, Bytes: p[:k]}}); err != nil {
				return fmt.Errorf("sending a file: %w", err)
			}
			sum.Write(p[:k]) // a hash does not fail
			p = p[k:]
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return refuseFile(err)
		}
	}
}

// statFile answers Info about a path itself.
func statFile(c *guestproto.StreamConn, s *guestproto.Stat) error {
	path := string(s.Path)
	if err := absolute(path); err != nil {
		return refuseFile(err)
	}
	info, err := os.Lstat(path)
	if err != nil {
		return refuseFile(err)
	}
	answer := fileInfo(path, info)
	if info.Mode()&fs.ModeSymlink != 0 {
		target, err := os.Readlink(path)
		if err != nil {
			return refuseFile(err)
		}
		answer.Target = []byte(target)
	}
	if err := c.Write(&guestproto.Stream{Info: answer}); err != nil {
		return fmt.Errorf("sending a file's info: %w", err)
	}
	return nil
}

func fileInfo(path string, info os.FileInfo) *guestproto.FileInfo {
	out := &guestproto.FileInfo{Path: []byte(path), Size: info.Size(), MtimeNS: info.ModTime().UnixNano()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		out.Mode, out.UID, out.GID = st.Mode, st.Uid, st.Gid
	}
	return out
}

// writeFile takes Data and EOF, and answers Info when the file is in place. Until
// then the path has what it had before; only Append writes into the file itself,
// and takes back what it wrote if it cannot finish.
func writeFile(c *guestproto.StreamConn, w *guestproto.WriteFile) error {
	if w.Mode&^0o7777 != 0 || w.Size < -1 {
		return refuse("invalid", "a mode has permission bits only, and a size is not under -1")
	}
	path, err := target(string(w.Path))
	if err != nil {
		return refuseFile(err)
	}
	if w.Parents {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return refuseFile(err)
		}
	}
	open := newReplacement
	if w.Append {
		open = newAppendage
	}
	sink, err := open(path, w)
	if err != nil {
		return refuseFile(err)
	}
	sum, err := receiveFile(c, sink, w.Size)
	if err == nil {
		err = sink.commit()
	}
	if err != nil {
		return refuseFile(errors.Join(err, sink.abandon()))
	}
	info, err := os.Stat(path)
	if err != nil {
		return refuseFile(err)
	}
	answer := fileInfo(path, info)
	answer.SHA256 = sum
	if err := c.Write(&guestproto.Stream{Info: answer}); err != nil {
		return fmt.Errorf("reporting a written file: %w", err)
	}
	return nil
}

// target follows the symlinks of a path's last part: writing to a link writes to
// what it points at, which need not exist.
func target(path string) (string, error) {
	if err := absolute(path); err != nil {
		return "", err
	}
	for range maxLinks {
		link, err := os.Readlink(path)
		if err != nil {
			return path, nil // no link, or nothing there yet
		}
		if !filepath.IsAbs(link) {
			link = filepath.Join(filepath.Dir(path), link)
		}
		path = link
	}
	return "", &fs.PathError{Op: "open", Path: path, Err: unix.ELOOP}
}

// absolute refuses a path whose meaning would depend on where the agent stands.
func absolute(path string) error {
	if !filepath.IsAbs(path) {
		return fmt.Errorf("%w: %q is not an absolute path", errInvalid, path)
	}
	return nil
}

// receiveFile writes what arrives to sink and returns its digest.
func receiveFile(c *guestproto.StreamConn, sink io.Writer, size int64) ([]byte, error) {
	// Bytes are written and confirmed as they come, so nothing is held; the
	// intake only keeps the sender to its window.
	in := guestproto.NewIntake()
	sum := sha256.New()
	var total int64
	for {
		m, err := c.Read()
		if err != nil {
			return nil, fmt.Errorf("receiving a file: %w", err)
		}
		switch {
		case m.EOF != nil && m.EOF.Stream == guestproto.In:
			if size >= 0 && total != size {
				return nil, fmt.Errorf("%w: %d bytes were announced and %d came", errInvalid, size, total)
			}
			return sum.Sum(nil), nil
		case m.Data != nil && m.Data.Stream == guestproto.In:
			if err := in.Receive(m.Data); err != nil {
				return nil, fmt.Errorf("%w: %w", errInvalid, err)
			}
		default:
			return nil, fmt.Errorf("%w: a message that has no place in a file", errInvalid)
		}
		d, _ := in.Next() // what Receive took
		total += int64(len(d.Bytes))
		if size >= 0 && total > size {
			return nil, fmt.Errorf("%w: %d bytes were announced and more came", errInvalid, size)
		}
		if _, err := sink.Write(d.Bytes); err != nil {
			return nil, fmt.Errorf("after %d bytes: %w", total-int64(len(d.Bytes)), err)
		}
		sum.Write(d.Bytes) // a hash does not fail
		if ack := in.Consume(len(d.Bytes)); ack != nil {
			if err := c.Write(&guestproto.Stream{Ack: ack}); err != nil {
				return nil, fmt.Errorf("confirming a file's bytes: %w", err)
			}
		}
	}
}

// errInvalid marks what the host asked for and should not have.
var errInvalid = errors.New("invalid")

func refuse(code, message string) error {
	return &refusal{guestproto.Error{Code: code, Message: message}}
}

// refuseFile words an error of a file for the host.
func refuseFile(err error) error {
	code := "io"
	switch {
	case errors.Is(err, errInvalid), errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENAMETOOLONG):
		code = "invalid"
	case errors.Is(err, fs.ErrNotExist):
		code = "not_found"
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EROFS):
		code = "permission"
	case errors.Is(err, fs.ErrExist):
		code = "exists"
	case errors.Is(err, unix.EFBIG):
		code = "too_large"
	}
	return refuse(code, err.Error())
}
