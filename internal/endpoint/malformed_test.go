package endpoint_test

import (
	"encoding/binary"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/guestproto"
)

// raw is a frame of the wire's layout, every field of which can be wrong.
type raw struct {
	total         uint32
	magic         uint16
	version, head uint8
	stream        uint32
	flags, name   uint16
	payload       uint32
	rest          string
}

func frame(stream uint32, payload string) raw {
	return raw{
		total: uint32(16 + len("agent") + len(payload)), magic: 0x4D43, version: 1, head: 16,
		stream: stream, name: 5, payload: uint32(len(payload)), rest: "agent" + payload,
	}
}

func (r raw) bytes() []byte {
	b := binary.BigEndian.AppendUint32(nil, r.total)
	b = binary.BigEndian.AppendUint16(b, r.magic)
	b = append(b, r.version, r.head)
	b = binary.BigEndian.AppendUint32(b, r.stream)
	b = binary.BigEndian.AppendUint16(b, r.flags)
	b = binary.BigEndian.AppendUint16(b, r.name)
	b = binary.BigEndian.AppendUint32(b, r.payload)
	return append(b, r.rest...)
}

const ping = `{"jsonrpc":"2.0","id":9,"method":"ping"}`

func TestAFrameThatIsNoneIsAnsweredWhereThatIsPossibleAndTheConnectionLives(t *testing.T) {
	change := func(f func(*raw)) raw {
		r := frame(1, ping)
		f(&r)
		return r
	}
	for name, tt := range map[string]struct {
		frame    raw
		answered bool
	}{
		"magic":            {change(func(r *raw) { r.magic = 0x4D44 }), true},
		"version":          {change(func(r *raw) { r.version = 2 }), true},
		"header length":    {change(func(r *raw) { r.head = 17 }), true},
		"reserved flag":    {change(func(r *raw) { r.flags = 4 }), true},
		"flag on a stream": {change(func(r *raw) { r.flags = 1 }), true},
		"no flag on 0":     {change(func(r *raw) { r.stream = 0 }), false},
		"lengths":          {change(func(r *raw) { r.payload-- }), true},
		"name not UTF-8":   {change(func(r *raw) { r.rest = "\xff" + r.rest[1:] }), true},
		"name longer": {change(func(r *raw) {
			r.name = 129
			r.rest = strings.Repeat("n", 129) + ping
			r.total = uint32(16 + 129 + len(ping))
		}), true},
		"empty, impossible": {raw{total: 16, magic: 0x4D43, version: 1, head: 16, stream: 0}, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			g := connect(t, w.endpoint(), false)
			g.write(tt.frame.bytes())
			if tt.answered {
				stream, answer := g.read()
				if stream != 1 || !strings.Contains(answer, `"code":-32600`) || !strings.Contains(answer, `"id":null`) {
					t.Errorf("answered on %d: %s", stream, answer)
				}
			}
			g.next = 1
			g.alive()
			if len(w.details()) != 1 || !strings.HasPrefix(w.details()[0], "frame: ") {
				t.Errorf("recorded %q", w.details())
			}
		})
	}
}

func TestFramingThatCannotBeFollowedEndsTheConnection(t *testing.T) {
	for name, b := range map[string][]byte{
		"too short":    {0, 0, 0, 15},
		"too long":     binary.BigEndian.AppendUint32(nil, guestproto.MaxMCPFrame+1),
		"no meta line": nil,
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			var g *guest
			if b == nil {
				g = dial(t, w.endpoint())
				g.in = guestproto.NewMCPReader(bufioReader(g.conn), false)
				g.write([]byte("GET / HTTP/1.1\r\n"))
			} else {
				g = connect(t, w.endpoint(), false)
				g.write(append(b, make([]byte, 16)...))
			}
			g.gone()
			if len(w.details()) != 1 {
				t.Errorf("recorded %q", w.details())
			}
		})
	}
}

func TestAConnectionThatBreaksInsideAFrameIsRecorded(t *testing.T) {
	w := newWorld()
	e := w.endpoint()
	g := connect(t, e, false)
	g.write(frame(1, ping).bytes()[:20])
	if err := g.conn.Close(); err != nil {
		t.Fatal(err)
	}
	<-g.closed
	if len(w.details()) != 1 {
		t.Errorf("recorded %q", w.details())
	}
}

func TestAConnectionThatEndsBetweenFramesIsNoFault(t *testing.T) {
	w := newWorld()
	g := connect(t, w.endpoint(), false)
	g.alive()
	if err := g.conn.Close(); err != nil {
		t.Fatal(err)
	}
	<-g.closed
	if len(w.details()) != 0 {
		t.Errorf("recorded %q", w.details())
	}
}

func TestAPayloadThatIsNoRequestIsAnsweredAsTheTableSays(t *testing.T) {
	deep := strings.Repeat("[", 129) + strings.Repeat("]", 129)
	for name, tt := range map[string]struct {
		payload, id string
		code        string
	}{
		"not JSON":           {`{"jsonrpc":`, "null", "-32700"},
		"not UTF-8":          {"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"a\xff\"}", "null", "-32700"},
		"not an object":      {`7`, "null", "-32600"},
		"version":            {`{"jsonrpc":"1.0","id":5,"method":"ping"}`, "5", "-32600"},
		"no version":         {`{"id":"x","method":"ping"}`, `"x"`, "-32600"},
		"no method":          {`{"jsonrpc":"2.0","id":5}`, "5", "-32600"},
		"empty method":       {`{"jsonrpc":"2.0","id":5,"method":""}`, "5", "-32600"},
		"method no string":   {`{"jsonrpc":"2.0","id":5,"method":7}`, "5", "-32600"},
		"params no object":   {`{"jsonrpc":"2.0","id":9007199254740993,"method":"ping","params":7}`, "9007199254740993", "-32600"},
		"batch":              {`[{"jsonrpc":"2.0","id":1,"method":"ping"}]`, "null", "-32600"},
		"id null":            {`{"jsonrpc":"2.0","id":null,"method":"ping"}`, "null", "-32600"},
		"no id":              {`{"jsonrpc":"2.0","method":"ping"}`, "null", "-32600"},
		"duplicate member":   {`{"jsonrpc":"2.0","id":5,"method":"ping","method":"tools/call"}`, "5", "-32600"},
		"duplicate deep":     {`{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{"name":"srv__echo","arguments":{"a":{"b":1,"\u0062":2}}}}`, "5", "-32600"},
		"differ in case":     {`{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{"name":"srv__echo","Name":"other"}}`, "5", "-32600"},
		"lone surrogate":     {`{"jsonrpc":"2.0","id":5,"method":"ping","params":{"a":"\ud800"}}`, "5", "-32600"},
		"nested too deep":    {`{"jsonrpc":"2.0","id":5,"method":"ping","params":{"a":` + deep + `}}`, "5", "-32600"},
		"answer to nothing":  {`{"jsonrpc":"2.0","id":5,"result":{}}`, "5", "-32600"},
		"request and answer": {`{"jsonrpc":"2.0","id":5,"method":"ping","result":{}}`, "5", "-32600"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			g := connect(t, w.endpoint(), false)
			answer := g.ask(tt.payload)
			if !strings.Contains(answer, `"id":`+tt.id+`,`) || !strings.Contains(answer, `"code":`+tt.code+`,`) {
				t.Errorf("answered %s, want id %s and code %s", answer, tt.id, tt.code)
			}
			g.alive()
			if len(w.details()) != 1 || len(w.sent) != 0 || w.toolCalls() != 0 {
				t.Errorf("recorded %q, forwarded %q, %d tool calls", w.details(), w.sent, w.toolCalls())
			}
		})
	}
}

func TestNotificationsAreNeverAnsweredHoweverWrong(t *testing.T) {
	w := newWorld()
	g := connect(t, w.endpoint(), false)
	for _, payload := range []string{
		`{`, `[]`, `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"srv__echo"}}`,
		`{"jsonrpc":"2.0","method":7}`, `{"jsonrpc":"2.0","id":3,"result":{}}`,
	} {
		g.notify(payload)
	}
	g.alive()
	if len(w.details()) != 5 || len(w.sent) != 0 || w.toolCalls() != 0 {
		t.Errorf("recorded %q, forwarded %q", w.details(), w.sent)
	}
}

func TestAStreamInFlightCannotBeUsedAgain(t *testing.T) {
	w := newWorld()
	w.call = blockUntil(nil)
	g := connect(t, w.endpoint(), false)
	g.send(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"srv__echo"}}`)
	g.sendOn(1, ping)
	g.gone()
	if diff := cmp.Diff([]string{"stream: still in flight"}, w.details()); diff != "" {
		t.Error(diff)
	}
}

func TestAStreamThatIsOldOrNotOursToAnswerIsRefusedAndTheConnectionLives(t *testing.T) {
	w := newWorld()
	g := connect(t, w.endpoint(), false)
	g.next = 6
	g.alive()
	for _, stream := range []uint32{7, 3, guestproto.FirstHostStream, 1<<32 - 1} {
		g.sendOn(stream, ping)
		got, answer := g.read()
		if got != stream || !strings.Contains(answer, `"code":-32600`) {
			t.Errorf("stream %d: %d %s", stream, got, answer)
		}
	}
	g.next = 7
	g.alive()
	if len(w.details()) != 4 {
		t.Errorf("recorded %q", w.details())
	}
}
