package guest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"sync"
	"time"

	"github.com/capsem/capsem/internal/guestproto"
)

// ReadFile writes a regular file of the guest to w: at most limit bytes (0 for
// all) from offset on. It returns what the guest says of the file, with the digest
// of what was written, which is checked. What w has taken before an error is a
// part of the file.
func (g *Guest) ReadFile(ctx context.Context, path string, offset, limit int64, w io.Writer) (guestproto.FileInfo, error) {
	var info guestproto.FileInfo
	_, s, err := g.open(ctx, &guestproto.Stream{ReadFile: &guestproto.ReadFile{Path: []byte(path), Offset: offset, Limit: limit}})
	if err != nil {
		return info, err
	}
	defer s.close()
	first, err := s.info(path)
	if err != nil {
		return info, err
	}
	sum := sha256.New()
	if err := s.receive(io.MultiWriter(w, sum), most(first.Size, offset, limit)); err != nil {
		return info, err
	}
	last, err := s.info(path)
	if err != nil {
		return info, err
	}
	if !bytes.Equal(last.SHA256, sum.Sum(nil)) {
		return info, &ProtocolError{"the digest of a file is not that of its bytes"}
	}
	return last, nil
}

// most is how many bytes of a file may come.
func most(size, offset, limit int64) int64 {
	n := max(0, size-offset)
	if size == 0 { // the guest does not know
		n = maxUnsized
	}
	if limit > 0 && (n > limit || size == 0) {
		n = limit
	}
	return n
}

// answer reads the next message about a file.
func (s *stream) answer() (*guestproto.Stream, error) {
	if err := s.conn.SetReadDeadline(time.Now().Add(answerTimeout)); err != nil {
		return nil, s.because(fmt.Errorf("setting a deadline: %w", err))
	}
	m, err := s.next()
	if err == nil && m.Error != nil {
		err = reported(m.Error)
	}
	return m, err
}

// info reads what the guest says of a file.
func (s *stream) info(path string) (guestproto.FileInfo, error) {
	m, err := s.answer()
	if err != nil {
		return guestproto.FileInfo{}, err
	}
	return checkInfo(m.Info, path)
}

// checkInfo bounds what the guest says of a file.
func checkInfo(i *guestproto.FileInfo, path string) (guestproto.FileInfo, error) {
	switch {
	case i == nil:
		return guestproto.FileInfo{}, &ProtocolError{"something other than a file's info"}
	case i.Size < 0:
		return guestproto.FileInfo{}, &ProtocolError{fmt.Sprintf("a file of %d bytes", i.Size)}
	case len(i.Target) > maxText || len(i.SHA256) > sha256.Size:
		return guestproto.FileInfo{}, &ProtocolError{"a file's info is too long"}
	}
	info := *i
	info.Path = []byte(path) // what was asked about, whatever the guest calls it
	return info, nil
}

// receive writes a file's bytes to w until its end, and no more than limit.
func (s *stream) receive(w io.Writer, limit int64) error {
	// Bytes are written and confirmed as they come, so nothing is held; the
	// intake only keeps the sender to its window.
	in := guestproto.NewIntake()
	for {
		m, err := s.answer()
		switch {
		case err != nil:
			return err
		case m.EOF != nil && m.EOF.Stream == guestproto.Out:
			return nil
		case m.Data == nil || m.Data.Stream != guestproto.Out:
			return &ProtocolError{"a message that has no place in a file"}
		}
		if err := in.Receive(m.Data); err != nil {
			return &ProtocolError{err.Error()}
		}
		d, _ := in.Next() // what Receive took
		if limit -= int64(len(d.Bytes)); limit < 0 {
			return &ProtocolError{"more bytes than the file has, or than were asked for"}
		}
		if _, err := w.Write(d.Bytes); err != nil {
			return fmt.Errorf("handing on a file: %w", err)
		}
		if ack := in.Consume(len(d.Bytes)); ack != nil {
			if err := s.c.Write(&guestproto.Stream{Ack: ack}); err != nil {
				return s.because(fmt.Errorf("confirming a file's bytes: %w", err))
			}
		}
	}
}

// WriteFile writes what r has, to its end, into a file of the guest. The file is
// in place, on the guest's disk, when WriteFile returns nil; on an error it is as
// it was before. It returns what the guest says of the file, with the digest,
// which is checked. A Read of r that is under way is waited for.
func (g *Guest) WriteFile(ctx context.Context, f guestproto.WriteFile, r io.Reader) (guestproto.FileInfo, error) {
	var info guestproto.FileInfo
	_, s, err := g.open(ctx, &guestproto.Stream{WriteFile: &f})
	if err != nil {
		return info, err
	}
	defer s.close()
	credit := guestproto.NewCredit()
	sum := sha256.New()
	var sender sync.WaitGroup
	var sendErr error
	sender.Go(func() { sendErr = s.send(credit, r, sum) })
	answer, err := s.hearWrite(credit, string(f.Path))
	credit.Close()
	if err != nil {
		s.cancel(err)
	}
	sender.Wait()
	if err != nil {
		return info, err // sendErr is the same, or came of it
	}
	if sendErr != nil {
		return info, &ProtocolError{"a file is said to be in place before its end was sent"}
	}
	if !bytes.Equal(answer.SHA256, sum.Sum(nil)) {
		return info, &ProtocolError{"the digest of a file is not that of its bytes"}
	}
	return answer, nil
}

// hearWrite takes in acks until the guest says that the file is in place.
func (s *stream) hearWrite(credit *guestproto.Credit, path string) (guestproto.FileInfo, error) {
	for {
		// No deadline: the guest waits for r as we do. Silence of the whole
		// guest ends the stream.
		m, err := s.next()
		switch {
		case err != nil:
			return guestproto.FileInfo{}, err
		case m.Error != nil:
			return guestproto.FileInfo{}, reported(m.Error)
		case m.Ack == nil:
			return checkInfo(m.Info, path)
		}
		if err := credit.Confirm(*m.Ack); err != nil {
			return guestproto.FileInfo{}, &ProtocolError{err.Error()}
		}
	}
}

// send sends what r has, then the end. If r fails, the stream ends without it, and
// the guest drops what it has.
func (s *stream) send(credit *guestproto.Credit, r io.Reader, sum hash.Hash) error {
	buf := make([]byte, guestproto.MaxData)
	for {
		n, err := r.Read(buf)
		sum.Write(buf[:n]) // a hash does not fail
		if err := sendData(s.c, credit, buf[:n]); err != nil {
			return err
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			err = fmt.Errorf("reading what is to be written: %w", err)
			s.cancel(err)
			return err
		}
	}
	return s.c.Write(&guestproto.Stream{EOF: &guestproto.EOF{Stream: guestproto.In}})
}

// Stat returns what the guest says of a path itself: of a symlink, not of what it
// points at.
func (g *Guest) Stat(ctx context.Context, path string) (guestproto.FileInfo, error) {
	_, s, err := g.open(ctx, &guestproto.Stream{Stat: &guestproto.Stat{Path: []byte(path)}})
	if err != nil {
		return guestproto.FileInfo{}, err
	}
	defer s.close()
	return s.info(path)
}
