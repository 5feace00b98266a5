//go:build linux

package guest_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/capsem/capsem/internal/guest"
	"github.com/capsem/capsem/internal/guestproto"
)

func started() *guestproto.Stream {
	return &guestproto.Stream{Started: &guestproto.Started{PID: 7}}
}

func data(id guestproto.StreamID, b string) *guestproto.Stream {
	return &guestproto.Stream{Data: &guestproto.Data{Stream: id, Bytes: []byte(b)}}
}

func exit(code int) *guestproto.Stream {
	return &guestproto.Stream{Exit: &guestproto.Exit{Code: code}}
}

func ack(n int64) *guestproto.Stream { return &guestproto.Stream{Ack: &guestproto.Ack{Bytes: n}} }

// overWindow is more data than may be unconfirmed, all at once.
func overWindow() []*guestproto.Stream {
	m := []*guestproto.Stream{started()}
	for range guestproto.Window/guestproto.MaxData + 1 {
		m = append(m, data(guestproto.Out, strings.Repeat("x", guestproto.MaxData)))
	}
	return m
}

// lies are what a hostile guest may answer to a command; none of them may be
// taken for an answer.
func lies() map[string][]*guestproto.Stream {
	return map[string][]*guestproto.Stream{
		"output before start":       {data(guestproto.Out, "x")},
		"two starts":                {started(), started()},
		"start as process 0":        {{Started: &guestproto.Started{}}},
		"output on stdin":           {started(), data(guestproto.In, "x")},
		"output on a fourth stream": {started(), data(3, "x")},
		"empty data":                {started(), data(guestproto.Out, "")},
		"too much in one message":   {started(), data(guestproto.Out, strings.Repeat("x", guestproto.MaxData+1))},
		"data after its end":        {started(), {EOF: &guestproto.EOF{Stream: guestproto.Out}}, data(guestproto.Out, "x")},
		"data after exit":           {started(), exit(0), data(guestproto.Out, "x")},
		"two exits":                 {started(), exit(0), exit(0)},
		"a status of 256":           {started(), exit(256)},
		"a status of -1":            {started(), exit(-1)},
		"ack of nothing":            {started(), ack(1)},
		"ack of less than nothing":  {started(), ack(-1)},
		"a file's info":             {started(), {Info: &guestproto.FileInfo{}}},
		"a host's message":          {{Signal: &guestproto.Signal{Name: "TERM"}}},
		"an exec of its own":        {{Exec: &guestproto.Exec{}}},
		"nothing at all":            {},
		"an end in the middle":      {started(), data(guestproto.Out, "x")},
		"a name as long as a book":  {started(), {Exit: &guestproto.Exit{Signal: strings.Repeat("x", 1000)}}},
	}
}

func TestALyingGuestIsNamedAndNotBelieved(t *testing.T) {
	for name, messages := range lies() {
		t.Run(name, func(t *testing.T) {
			g, _ := start(t, liar(t, func(conn net.Conn, _ *guestproto.StreamConn, _ *guestproto.Stream) {
				send(t, conn, messages...)
			}), guest.Options{})
			awaitReady(t, g)
			if _, err := g.Exec(bounded(t), argv("true"), guest.IO{}); !isProtocolError(err) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestMoreThanTheWindowEndsTheStreamWhileItsReaderIsBusy(t *testing.T) {
	cutOff := make(chan struct{})
	g, _ := start(t, liar(t, func(conn net.Conn, c *guestproto.StreamConn, _ *guestproto.Stream) {
		send(t, conn, overWindow()...)
		_, _ = c.Read() // until the host has had enough
		close(cutOff)
	}), guest.Options{})
	awaitReady(t, g)
	_, err := g.Exec(bounded(t), argv("true"), guest.IO{Stdout: writerFunc(func([]byte) { <-cutOff })})
	if !isProtocolError(err) {
		t.Errorf("got %v", err)
	}
}

func isProtocolError(err error) bool {
	_, ok := errors.AsType[*guest.ProtocolError](err)
	return ok
}

func TestGarbageIsNoAnswer(t *testing.T) {
	for _, garbage := range []string{"\xff\xff\xff\xff", "\x00\x00\x00\x05hello", "\x00\x00\x00\x01\xc0", "\x00\x00\x00\x05\xdd\xff\xff\xff\xff", "\x00\x00"} {
		g, _ := start(t, liar(t, func(conn net.Conn, _ *guestproto.StreamConn, _ *guestproto.Stream) {
			_, _ = io.WriteString(conn, garbage)
		}), guest.Options{})
		awaitReady(t, g)
		if _, err := g.Exec(bounded(t), argv("true"), guest.IO{}); !isProtocolError(err) {
			t.Errorf("%q: got %v", garbage, err)
		}
	}
}

func TestAGuestsWordsAreMadeHarmless(t *testing.T) {
	g, _ := start(t, liar(t, func(conn net.Conn, _ *guestproto.StreamConn, _ *guestproto.Stream) {
		send(t, conn, &guestproto.Stream{Exit: &guestproto.Exit{Code: 127, Message: "\x1b]0;title\x07\nnext \u202eline " + strings.Repeat("é", 5000)}})
	}), guest.Options{})
	awaitReady(t, g)
	_, stderr, r := capture(t, g, argv("true"), nil)
	if r.ExitCode != 127 || strings.ContainsAny(strings.TrimSuffix(stderr, "\n"), "\x1b\x07\n\u202e") || len(stderr) > 4200 {
		t.Errorf("got %+v, %.80q (%d bytes)", r, stderr, len(stderr))
	}
}

// TestAGuestThatNeverEndsACommandIsNotWaitedFor: the host's own timeout.
func TestAGuestThatNeverEndsACommandIsNotWaitedFor(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for the host's grace")
	}
	g, _ := start(t, liar(t, func(conn net.Conn, c *guestproto.StreamConn, _ *guestproto.Stream) {
		send(t, conn, started())
		_, _ = c.Read() // until the host has had enough
	}), guest.Options{})
	awaitReady(t, g)
	e := argv("true")
	e.TimeoutMS = 1
	r, err := g.Exec(bounded(t), e, guest.IO{})
	if err != nil || !r.TimedOut || r.ExitCode != 137 {
		t.Errorf("got %+v, %v", r, err)
	}
}

func TestALyingGuestsFilesAreNotBelieved(t *testing.T) {
	sum := sha256.Sum256([]byte("abc"))
	info := func(size int64, sum []byte) *guestproto.Stream {
		return &guestproto.Stream{Info: &guestproto.FileInfo{Size: size, SHA256: sum}}
	}
	end := &guestproto.Stream{EOF: &guestproto.EOF{Stream: guestproto.Out}}
	for name, messages := range map[string][]*guestproto.Stream{
		"more than it has":      {info(2, nil), data(guestproto.Out, "abc"), end, info(2, sum[:])},
		"another digest":        {info(3, nil), data(guestproto.Out, "abd"), end, info(3, sum[:])},
		"no digest":             {info(3, nil), data(guestproto.Out, "abc"), end, info(3, nil)},
		"no end":                {info(3, nil), data(guestproto.Out, "abc")},
		"no info":               {data(guestproto.Out, "abc"), end, info(3, sum[:])},
		"a size under 0":        {info(-1, nil)},
		"bytes of stderr":       {info(3, nil), data(guestproto.Err, "abc"), end, info(3, sum[:])},
		"an exit":               {info(3, nil), exit(0)},
		"a digest that is huge": {info(3, bytes.Repeat([]byte("x"), 100))},
	} {
		g, _ := start(t, liar(t, func(conn net.Conn, _ *guestproto.StreamConn, _ *guestproto.Stream) {
			send(t, conn, messages...)
		}), guest.Options{})
		awaitReady(t, g)
		if _, err := g.ReadFile(bounded(t), "/x", 0, 0, io.Discard); !isProtocolError(err) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestALyingGuestsWriteIsNotBelieved(t *testing.T) {
	wrong := sha256.Sum256([]byte("something else"))
	for name, answer := range map[string]func(c *guestproto.StreamConn) []*guestproto.Stream{
		"in place before the end": func(*guestproto.StreamConn) []*guestproto.Stream {
			return []*guestproto.Stream{{Info: &guestproto.FileInfo{SHA256: wrong[:]}}}
		},
		"another digest": func(c *guestproto.StreamConn) []*guestproto.Stream {
			for {
				if m, err := c.Read(); err != nil || m.EOF != nil {
					return []*guestproto.Stream{{Info: &guestproto.FileInfo{SHA256: wrong[:]}}}
				}
			}
		},
		"ack of more than came": func(*guestproto.StreamConn) []*guestproto.Stream {
			return []*guestproto.Stream{ack(guestproto.Window + 1)}
		},
	} {
		g, _ := start(t, liar(t, func(conn net.Conn, c *guestproto.StreamConn, _ *guestproto.Stream) {
			send(t, conn, answer(c)...)
		}), guest.Options{})
		awaitReady(t, g)
		_, err := g.WriteFile(bounded(t), guestproto.WriteFile{Path: []byte("/x"), Size: -1}, bytes.NewReader(pattern(1000)))
		if !isProtocolError(err) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}
