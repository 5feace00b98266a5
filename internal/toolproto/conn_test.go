package toolproto_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/frame"
	"github.com/capsem/capsem/internal/msgpack"
	"github.com/capsem/capsem/internal/toolproto"
)

func messages() []*toolproto.Message {
	headers := []toolproto.Header{{Name: "A", Value: []byte{0xff}}}
	return []*toolproto.Message{
		{Hello: &toolproto.Hello{Version: 1}},
		{Configure: &toolproto.Configure{Version: 1, Server: toolproto.Server{Name: "s", Command: "npx", Args: []string{"-y"}, Env: []toolproto.EnvVar{{Name: "N", Value: []byte("v")}}, Headers: headers, StartTimeout: time.Minute}}},
		{Ready: &toolproto.Ready{InitializeResult: []byte(`{"a": 1}`)}},
		{Call: &toolproto.Call{ID: 1 << 63, Method: "tools/call", Params: []byte(` {"x":1.0} `), TimeoutMS: 1}},
		{Cancel: &toolproto.Cancel{ID: 1, Reason: "r"}},
		{Notify: &toolproto.Notify{Method: "n"}},
		{Result: &toolproto.Result{ID: 1, Message: []byte("{}"), Error: nil}},
		{Result: &toolproto.Result{ID: 1, Error: &toolproto.Error{Code: -32603, Message: "m"}}},
		{ServerRequest: &toolproto.ServerRequest{ID: 1, Message: []byte("{}")}},
		{ServerResult: &toolproto.ServerResult{ID: 1, Message: []byte("{}")}},
		{HTTPRequest: &toolproto.HTTPRequest{ID: 1, CallID: 2, Method: "GET", URL: "http://x", Headers: headers, Body: []byte{0}}},
		{HTTPResult: &toolproto.HTTPResult{ID: 1, Status: 200, Headers: headers, Truncated: true}},
		{Event: &toolproto.Event{Kind: toolproto.EventStderr, Text: "t", Count: 3}},
		{Shutdown: &toolproto.Shutdown{}},
	}
}

func TestEveryMessageArrivesAsItWasSent(t *testing.T) {
	var wire bytes.Buffer
	c := toolproto.NewConn(&wire, &wire)
	for _, m := range messages() {
		if err := c.Write(m); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range messages() {
		got, err := c.Read()
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%v (-want +got):\n%s", err, diff)
		}
	}
	if _, err := c.Read(); err != io.EOF {
		t.Errorf("at the end: %v", err)
	}
}

func TestPayloadsAreOpaqueUpToTheirBound(t *testing.T) {
	for _, size := range []int{0, 1, 255, 256, 1 << 16, toolproto.MaxPayload - 1, toolproto.MaxPayload} {
		payload := bytes.Repeat([]byte{0xff, '\n', 0, '{'}, size/4+1)[:size]
		var wire bytes.Buffer
		c := toolproto.NewConn(&wire, &wire)
		if err := c.Write(&toolproto.Message{Result: &toolproto.Result{ID: 1, Message: payload}}); err != nil {
			t.Fatal(err)
		}
		if m, err := c.Read(); err != nil || !bytes.Equal(m.Result.Message, payload) {
			t.Errorf("%d bytes came back changed: %v", size, err)
		}
	}
}

func TestFramesAreBoundedInBothDirections(t *testing.T) {
	var wire bytes.Buffer
	c := toolproto.NewConn(&wire, &wire)
	empty, err := msgpack.Marshal(&toolproto.Message{Ready: &toolproto.Ready{InitializeResult: make([]byte, 1<<20)}})
	if err != nil {
		t.Fatal(err)
	}
	room := toolproto.MaxMessage - len(empty) + 1<<20
	var tooLarge *frame.TooLargeError
	for _, extra := range []int{-1, 0, 1} {
		err := c.Write(&toolproto.Message{Ready: &toolproto.Ready{InitializeResult: make([]byte, room+extra)}})
		if errors.As(err, &tooLarge) != (extra > 0) {
			t.Errorf("writing %+d: %v", extra, err)
		}
		if extra > 0 {
			continue
		}
		if m, err := c.Read(); err != nil || len(m.Ready.InitializeResult) != room+extra {
			t.Errorf("reading %+d: %v", extra, err)
		}
	}
	head := binary.BigEndian.AppendUint32(nil, toolproto.MaxMessage+1)
	if _, err := toolproto.NewConn(bytes.NewReader(head), nil).Read(); !errors.As(err, &tooLarge) {
		t.Errorf("reading a length over the bound: %v", err)
	}
}

func TestHostileFramesAreErrors(t *testing.T) {
	for name, body := range map[string][]byte{
		"nothing":               {},
		"array of four billion": {0xdd, 0xff, 0xff, 0xff, 0xff},
		"map of four billion":   {0xdf, 0xff, 0xff, 0xff, 0xff},
		"ten million arrays":    bytes.Repeat([]byte{0x91}, 10_000_000),
		"no member":             {0x80},
		"unknown member":        {0x81, 0xa1, 'x', 0x80},
		"null":                  {0xc0},
		"bytes behind":          {0x81, 0xa8, 's', 'h', 'u', 't', 'd', 'o', 'w', 'n', 0x80, 0},
		"two members":           append([]byte{0x82, 0xa8}, "shutdown\x80\xa5hello\x80"...),
	} {
		wire := append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)
		if m, err := toolproto.NewConn(bytes.NewReader(wire), nil).Read(); err == nil {
			t.Errorf("%s: read %+v", name, m)
		}
	}
}

func TestSecondMemberIsNotSent(t *testing.T) {
	var wire bytes.Buffer
	c := toolproto.NewConn(&wire, &wire)
	m := &toolproto.Message{Event: &toolproto.Event{}, Shutdown: &toolproto.Shutdown{}}
	if err := c.Write(m); err == nil || wire.Len() > 0 {
		t.Errorf("sent: %v", err)
	}
}

func TestServersTextMayHoldAnyBytes(t *testing.T) {
	var wire bytes.Buffer
	c := toolproto.NewConn(&wire, &wire)
	sent := []*toolproto.Message{
		{Event: &toolproto.Event{Kind: toolproto.EventStderr, Text: "a\xff"}},
		{Result: &toolproto.Result{Error: &toolproto.Error{Message: "a\xff"}}},
		{HTTPResult: &toolproto.HTTPResult{Error: "a\xff"}},
	}
	var got []string
	for _, m := range sent {
		if err := c.Write(m); err != nil {
			t.Fatal(err)
		}
		m, err := c.Read()
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case m.Event != nil:
			got = append(got, m.Event.Text)
		case m.Result != nil:
			got = append(got, m.Result.Error.Message)
		case m.HTTPResult != nil:
			got = append(got, m.HTTPResult.Error)
		}
	}
	if diff := cmp.Diff([]string{"a\ufffd", "a\ufffd", "a\ufffd"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if sent[0].Event.Text != "a\xff" || sent[1].Result.Error.Message != "a\xff" || sent[2].HTTPResult.Error != "a\xff" {
		t.Error("the caller's message was changed")
	}
}

func TestLargeAndSmallMessagesOfManyWritersStayWhole(t *testing.T) {
	pr, pw := io.Pipe()
	in, out := toolproto.NewConn(pr, nil), toolproto.NewConn(nil, pw)
	const writers, each = 6, 20
	size := func(i int) int { return 100 + i%2*(1<<20) }
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			for range each {
				m := &toolproto.Message{Result: &toolproto.Result{ID: uint64(i), Message: bytes.Repeat([]byte{byte(i)}, size(i))}}
				if err := out.Write(m); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range writers * each {
		m, err := in.Read()
		if err != nil {
			t.Fatal(err)
		}
		id := int(m.Result.ID)
		if bytes.Count(m.Result.Message, []byte{byte(id)}) != size(id) {
			t.Fatalf("a message of writer %d is mixed", id)
		}
	}
	wg.Wait()
}

// FuzzConn proves that what is read can be sent, and then reads as the same.
func FuzzConn(f *testing.F) {
	for _, m := range messages() {
		var wire bytes.Buffer
		if err := toolproto.NewConn(nil, &wire).Write(m); err != nil {
			f.Fatal(err)
		}
		f.Add(wire.Bytes())
	}
	f.Add([]byte{0, 0, 0, 5, 0xdd, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, in []byte) {
		r := toolproto.NewConn(bytes.NewReader(in), nil)
		for {
			m, err := r.Read()
			if err != nil {
				return
			}
			var wire, second bytes.Buffer
			if err := toolproto.NewConn(nil, &wire).Write(m); err != nil {
				var ce *msgpack.CheckError
				if errors.As(err, &ce) && ce.Kind == msgpack.Nodes {
					continue // fields that were absent are written out
				}
				t.Fatalf("%+v cannot be sent: %v", m, err)
			}
			first := bytes.Clone(wire.Bytes())
			again, err := toolproto.NewConn(&wire, nil).Read()
			if err != nil {
				t.Fatal(err)
			}
			if err := toolproto.NewConn(nil, &second).Write(again); err != nil || !bytes.Equal(first, second.Bytes()) {
				t.Fatalf("%v\n%x\n%x", err, first, second.Bytes())
			}
		}
	})
}

func BenchmarkConn(b *testing.B) {
	var wire bytes.Buffer
	c := toolproto.NewConn(&wire, &wire)
	m := &toolproto.Message{Call: &toolproto.Call{ID: 7, Method: "tools/call", Params: make([]byte, 1<<10)}}
	b.ReportAllocs()
	for b.Loop() {
		if err := c.Write(m); err != nil {
			b.Fatal(err)
		}
		if _, err := c.Read(); err != nil {
			b.Fatal(err)
		}
	}
}
