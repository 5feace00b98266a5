package guestproto_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/frame"
	"github.com/capsem/capsem/internal/guestproto"
	"github.com/capsem/capsem/internal/msgpack"
)

// stream is both directions of a connection, in memory.
type stream struct {
	io.Reader
	io.Writer
}

func controls() []*guestproto.Control {
	return []*guestproto.Control{
		{Hello: &guestproto.Hello{Protocol: 1, AgentVersion: "v", BootID: "b", Epoch: 1 << 40}},
		{Boot: &guestproto.Boot{TimeNS: 1, Hostname: "h", Env: [][]byte{{'A', '=', 0xff}}, Files: []guestproto.File{{Path: "/x", Mode: 0o644, Data: []byte{0}}}, CA: []byte{}, Entropy: make([]byte, 300), More: true}},
		{Ready: &guestproto.Ready{Timings: []guestproto.Timing{{Stage: "s", NS: -1}}}},
		{Ping: &guestproto.Ping{Seq: 7}},
		{Pong: &guestproto.Pong{Seq: 7}},
		{Shutdown: &guestproto.Shutdown{GraceMS: 5}},
		{ShutdownRequest: &guestproto.ShutdownRequest{}},
		{Error: &guestproto.Error{Code: "io", Message: "m"}},
	}
}

func streams() []*guestproto.Stream {
	return []*guestproto.Stream{
		{Exec: &guestproto.Exec{ID: "e", Argv: [][]byte{[]byte("sh"), {0xff}}, Env: [][]byte{}, Cwd: []byte("/"), User: "root", Stdin: true, TimeoutMS: 1}},
		{ReadFile: &guestproto.ReadFile{Path: []byte{0xff}, Offset: 1, Limit: 2}},
		{WriteFile: &guestproto.WriteFile{Path: []byte("/p"), Size: -1, Parents: true}},
		{Stat: &guestproto.Stat{Path: []byte("/p")}},
		{Started: &guestproto.Started{PID: 9}},
		{Data: &guestproto.Data{Stream: guestproto.Err, Bytes: make([]byte, guestproto.MaxData)}},
		{Ack: &guestproto.Ack{Bytes: 1}},
		{Signal: &guestproto.Signal{Name: "TERM"}},
		{EOF: &guestproto.EOF{Stream: guestproto.Out}},
		{Exit: &guestproto.Exit{Code: 143, Signal: "TERM", TimedOut: true}},
		{Info: &guestproto.FileInfo{Path: []byte{}, Target: []byte("t"), SHA256: make([]byte, 32)}},
		{Error: &guestproto.Error{Code: "busy"}},
	}
}

func TestEveryMessageArrivesAsItWasSent(t *testing.T) {
	var wire bytes.Buffer
	c := guestproto.NewControlConn(&wire)
	for _, m := range controls() {
		if err := c.Write(m); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range controls() {
		got, err := c.Read()
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%v (-want +got):\n%s", err, diff)
		}
	}
	if _, err := c.Read(); err != io.EOF {
		t.Errorf("at the end: %v", err)
	}

	s := guestproto.NewStreamConn(&wire)
	for _, m := range streams() {
		if err := s.Write(m); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range streams() {
		got, err := s.Read()
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%v (-want +got):\n%s", err, diff)
		}
	}
}

func TestExactlyOneMemberIsSet(t *testing.T) {
	var out bytes.Buffer
	c := guestproto.NewControlConn(stream{nil, &out})
	for _, m := range []*guestproto.Control{
		{}, {Ping: &guestproto.Ping{}, Pong: &guestproto.Pong{}}, {Ping: &guestproto.Ping{}, Error: &guestproto.Error{}},
	} {
		if err := c.Write(m); err == nil || out.Len() > 0 {
			t.Errorf("%+v was sent: %v", m, err)
		}
	}
	if err := c.Write(&guestproto.Control{Pong: &guestproto.Pong{}}); err != nil {
		t.Errorf("after refused messages: %v", err)
	}
	for name, in := range map[string]any{
		"none":    struct{}{},
		"nil":     map[string]*guestproto.Ping{"ping": nil},
		"unknown": map[string]guestproto.Ping{"future": {}},
		"two":     map[string]guestproto.Ping{"ping": {}, "pong": {}},
	} {
		b, err := msgpack.Marshal(in)
		if err != nil {
			t.Fatal(err)
		}
		wire := append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...)
		if m, err := guestproto.NewControlConn(stream{bytes.NewReader(wire), nil}).Read(); err == nil {
			t.Errorf("%s: read %+v", name, m)
		}
	}
}

func TestMessagesAreBoundedInBothDirections(t *testing.T) {
	empty, err := msgpack.Marshal(&guestproto.Control{Boot: &guestproto.Boot{CA: make([]byte, 1<<20)}})
	if err != nil {
		t.Fatal(err)
	}
	room := guestproto.MaxMessage - len(empty) + 1<<20
	for _, extra := range []int{-1, 0, 1} {
		var wire bytes.Buffer
		c := guestproto.NewControlConn(&wire)
		err := c.Write(&guestproto.Control{Boot: &guestproto.Boot{CA: make([]byte, room+extra)}})
		var tooLarge *frame.TooLargeError
		if errors.As(err, &tooLarge) != (extra > 0) {
			t.Errorf("writing %+d: %v", extra, err)
		}
		if extra <= 0 {
			if m, err := c.Read(); err != nil || len(m.Boot.CA) != room+extra {
				t.Errorf("reading %+d: %v", extra, err)
			}
		}
	}
	wire := binary.BigEndian.AppendUint32(nil, guestproto.MaxMessage+1)
	var tooLarge *frame.TooLargeError
	if _, err := guestproto.NewStreamConn(stream{bytes.NewReader(wire), nil}).Read(); !errors.As(err, &tooLarge) {
		t.Errorf("reading a length over the bound: %v", err)
	}
}

func TestTextOfErrorsMayHoldAnyBytes(t *testing.T) {
	var wire bytes.Buffer
	s := guestproto.NewStreamConn(&wire)
	failed := &guestproto.Stream{Error: &guestproto.Error{Code: "io", Message: "open /\xff: no such file"}}
	exit := &guestproto.Stream{Exit: &guestproto.Exit{Code: 127, Message: "\xff: not found"}}
	for _, m := range []*guestproto.Stream{failed, exit} {
		if err := s.Write(m); err != nil {
			t.Fatal(err)
		}
	}
	if m, err := s.Read(); err != nil || m.Error.Message != "open /\ufffd: no such file" {
		t.Errorf("got %+v, %v", m, err)
	}
	if m, err := s.Read(); err != nil || m.Exit.Message != "\ufffd: not found" || m.Exit.Code != 127 {
		t.Errorf("got %+v, %v", m, err)
	}
	if exit.Exit.Message != "\xff: not found" {
		t.Error("the caller's message was changed")
	}
}

func TestManyMayWriteWhileOneReads(t *testing.T) {
	pr, pw := io.Pipe()
	s := guestproto.NewStreamConn(stream{pr, pw})
	const writers, each = 8, 50
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			for range each {
				if err := s.Write(&guestproto.Stream{Data: &guestproto.Data{Stream: guestproto.StreamID(i), Bytes: bytes.Repeat([]byte{byte(i)}, 1000*i+1)}}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range writers * each {
		m, err := s.Read()
		if err != nil {
			t.Fatal(err)
		}
		id := byte(m.Data.Stream)
		if bytes.Count(m.Data.Bytes, []byte{id}) != 1000*int(id)+1 {
			t.Fatalf("a message of writer %d is mixed", id)
		}
	}
	wg.Wait()
}

// fuzzConn proves that what is read can be sent, and then reads as the same.
func fuzzConn[M any](t *testing.T, in []byte, read func(io.ReadWriter) func() (*M, error), write func(io.ReadWriter) func(*M) error) {
	t.Helper()
	next := read(stream{bytes.NewReader(in), io.Discard})
	for {
		m, err := next()
		if err != nil {
			return
		}
		var wire, second bytes.Buffer
		if err := write(&wire)(m); err != nil {
			var ce *msgpack.CheckError
			if errors.As(err, &ce) && ce.Kind == msgpack.Nodes {
				continue // fields that were absent are written out
			}
			t.Fatalf("%+v cannot be sent: %v", m, err)
		}
		first := bytes.Clone(wire.Bytes())
		again, err := read(&wire)()
		if err != nil {
			t.Fatal(err)
		}
		if err := write(&second)(again); err != nil || !bytes.Equal(first, second.Bytes()) {
			t.Fatalf("%v\n%x\n%x", err, first, second.Bytes())
		}
	}
}

func FuzzControlConn(f *testing.F) {
	for _, m := range controls() {
		var wire bytes.Buffer
		if err := guestproto.NewControlConn(&wire).Write(m); err != nil {
			f.Fatal(err)
		}
		f.Add(wire.Bytes())
	}
	f.Add([]byte{0, 0, 0, 5, 0xdd, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, in []byte) {
		fuzzConn(t, in,
			func(rw io.ReadWriter) func() (*guestproto.Control, error) { return guestproto.NewControlConn(rw).Read },
			func(rw io.ReadWriter) func(*guestproto.Control) error { return guestproto.NewControlConn(rw).Write })
	})
}

func FuzzStreamConn(f *testing.F) {
	for _, m := range streams() {
		var wire bytes.Buffer
		if err := guestproto.NewStreamConn(&wire).Write(m); err != nil {
			f.Fatal(err)
		}
		f.Add(wire.Bytes())
	}
	f.Add([]byte{0, 0, 0, 5, 0xdf, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, in []byte) {
		fuzzConn(t, in,
			func(rw io.ReadWriter) func() (*guestproto.Stream, error) { return guestproto.NewStreamConn(rw).Read },
			func(rw io.ReadWriter) func(*guestproto.Stream) error { return guestproto.NewStreamConn(rw).Write })
	})
}
