package tests

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// The flags of a frame.
const (
	flagNotify = 1
	flagMore   = 2
)

// frame is one frame as WIRE has it, built by hand: the codec under test has no
// part in what it is given.
type frame struct {
	magic, flags    uint16
	version, header uint8
	stream          uint32
	name, payload   string
	// total and nameLen are what the frame says, -1 for the truth.
	total, nameLen int
}

func request(stream uint32, payload string) frame {
	return frame{magic: 0x4D43, version: 1, header: 16, stream: stream, name: "wire", payload: payload, total: -1, nameLen: -1}
}

func (f frame) with(change func(*frame)) frame {
	change(&f)
	return f
}

func (f frame) bytes() []byte {
	total, nameLen := f.total, f.nameLen
	if total < 0 {
		total = 16 + len(f.name) + len(f.payload)
	}
	if nameLen < 0 {
		nameLen = len(f.name)
	}
	b := binary.BigEndian.AppendUint32(nil, uint32(total))
	b = binary.BigEndian.AppendUint16(b, f.magic)
	b = append(b, f.version, f.header)
	b = binary.BigEndian.AppendUint32(b, f.stream)
	b = binary.BigEndian.AppendUint16(b, f.flags)
	b = binary.BigEndian.AppendUint16(b, uint16(nameLen))
	b = binary.BigEndian.AppendUint32(b, uint32(len(f.payload)))
	return append(append(b, f.name...), f.payload...)
}

// port is a connection of the guest to the host's MCP port.
type port struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out io.ReadCloser
}

func dialPort(t *testing.T, h *home, vm string) *port {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), answerLimit)
	t.Cleanup(cancel)
	p := &port{cmd: h.command(ctx, "capsem", "exec", "-i", vm, "--", "/tmp/vsockcat", "5002")}
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if p.out, err = p.cmd.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.write(t, []byte("\x00CAPSEM_META:wire test\n"))
	return p
}

func (p *port) write(t *testing.T, b []byte) {
	t.Helper()
	if _, err := p.in.Write(b); err != nil {
		t.Fatalf("writing to the port: %v", err)
	}
}

// read returns the next frame, io.EOF at the end of the connection.
func (p *port) read() (stream uint32, flags uint16, payload []byte, err error) {
	var head [20]byte
	if _, err := io.ReadFull(p.out, head[:]); err != nil {
		return 0, 0, nil, err
	}
	body := make([]byte, binary.BigEndian.Uint32(head[:])-16)
	if _, err := io.ReadFull(p.out, body); err != nil {
		return 0, 0, nil, fmt.Errorf("reading a frame's body: %w", err)
	}
	name := binary.BigEndian.Uint16(head[14:])
	return binary.BigEndian.Uint32(head[8:]), binary.BigEndian.Uint16(head[12:]), body[name:], nil
}

// close ends the connection and returns what still came.
func (p *port) close(t *testing.T) []byte {
	t.Helper()
	if err := p.in.Close(); err != nil {
		t.Error(err)
	}
	rest, err := io.ReadAll(p.out)
	if err := errors.Join(err, p.cmd.Wait()); err != nil {
		t.Errorf("ending the connection: %v", err)
	}
	return rest
}

// wireCase is one line of WIRE's table.
type wireCase struct {
	name string
	// setup goes before bad, both as they are.
	setup, bad []byte
	// stream, code and id are of the answer to bad; code 0 is no answer.
	stream uint32
	code   int
	id     string
	// dead says that the connection ends.
	dead bool
	// detail is what protocol_events says of it.
	detail string
}

const ping = `{"jsonrpc":"2.0","id":1,"method":"ping"}`

func wireCases() []wireCase {
	plain := request(7, ping)
	refusedFrame := func(name, detail string, change func(*frame)) wireCase {
		return wireCase{name: name, bad: plain.with(change).bytes(), stream: 7, code: -32600, id: "null", detail: detail}
	}
	refusedPayload := func(name, payload, id, detail string) wireCase {
		return wireCase{name: name, bad: request(7, payload).bytes(), stream: 7, code: -32600, id: id, detail: detail}
	}
	notParsed := func(name, payload, detail string) wireCase {
		return wireCase{name: name, bad: request(7, payload).bytes(), stream: 7, code: -32700, id: "null", detail: detail}
	}
	dropped := func(name, payload, detail string) wireCase {
		return wireCase{name: name, bad: request(0, payload).with(func(f *frame) { f.flags = flagNotify }).bytes(), detail: detail}
	}
	deep := strings.Repeat("[", 200) + strings.Repeat("]", 200)
	never := request(7, `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"peer__never"}}`)
	cases := []wireCase{
		{name: "total length under the header", bad: plain.with(func(f *frame) { f.total = 15 }).bytes(), dead: true, detail: "frame: %"},
		{name: "total length over the limit", bad: plain.with(func(f *frame) { f.total = 1_052_673 }).bytes(), dead: true, detail: "frame: %"},
		{name: "stream in flight", setup: never.bytes(), bad: request(7, ping).bytes(), dead: true, detail: "stream: still in flight"},
		refusedFrame("magic", "frame: %magic%", func(f *frame) { f.magic = 0x4D44 }),
		refusedFrame("version", "frame: %version%", func(f *frame) { f.version = 2 }),
		refusedFrame("header length", "frame: %header length%", func(f *frame) { f.header = 20 }),
		refusedFrame("reserved flag", "frame: %reserved flag%", func(f *frame) { f.flags = 4 }),
		refusedFrame("notification flag on a stream", "frame: %flag and stream%", func(f *frame) { f.flags = flagNotify }),
		refusedFrame("long name", "frame: %name too long%", func(f *frame) { f.name = strings.Repeat("n", 129) }),
		refusedFrame("lengths that do not add up", "frame: %lengths%", func(f *frame) { f.nameLen = 3 }),
		refusedFrame("name not UTF-8", "frame: %UTF-8%", func(f *frame) { f.name = "\xff" }),
		{name: "stream 0 without the flag", bad: request(0, ping).bytes(), detail: "frame: %flag and stream%"},
		{name: "stream seen before", setup: request(7, ping).bytes(), bad: request(7, ping).bytes(), stream: 7, code: -32600, id: "null", detail: "stream: %"},
		{name: "stream not increasing", setup: request(7, ping).bytes(), bad: request(6, ping).bytes(), stream: 6, code: -32600, id: "null", detail: "stream: %"},
		{name: "answer that nobody asked for", bad: request(0x80000000, `{"jsonrpc":"2.0","id":1,"result":{}}`).bytes(), stream: 0x80000000, code: -32600, id: "null", detail: "stream: %"},
		notParsed("no JSON", `{"jsonrpc":"2.0","id":1,`, "%"),
		notParsed("no UTF-8", "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"\xff\"}", "%"),
		refusedPayload("no object", `"ping"`, "null", "%"),
		refusedPayload("version 1.0", `{"jsonrpc":"1.0","id":1.50,"method":"ping"}`, "1.50", "%"),
		refusedPayload("no method", `{"jsonrpc":"2.0","id":"a b"}`, `"a b"`, "%"),
		refusedPayload("empty method", `{"jsonrpc":"2.0","id":9007199254740993,"method":""}`, "9007199254740993", "%"),
		refusedPayload("method no string", `{"jsonrpc":"2.0","id":1,"method":7}`, "1", "%"),
		refusedPayload("params no structure", `{"jsonrpc":"2.0","id":1,"method":"ping","params":"x"}`, "1", "%"),
		refusedPayload("batch", `[`+ping+`]`, "null", "%batch%"),
		refusedPayload("id null", `{"jsonrpc":"2.0","id":null,"method":"ping"}`, "null", "%"),
		refusedPayload("no id", `{"jsonrpc":"2.0","method":"ping"}`, "null", "id_missing"),
		refusedPayload("a name twice", `{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":{"b":1,"b":2}}}`, "1", "%"),
		refusedPayload("names that differ in case", `{"jsonrpc":"2.0","id":1,"method":"ping","params":{"name":1,"Name":2}}`, "1", "%"),
		refusedPayload("lone surrogate", `{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":"\ud800"}}`, "1", "%"),
		refusedPayload("nesting", `{"jsonrpc":"2.0","id":1,"method":"ping","params":`+deep+`}`, "1", "%"),
		dropped("notification with an id", `{"jsonrpc":"2.0","id":1,"method":"notifications/initialized"}`, "notification: it has an id"),
		dropped("notification no JSON", `{`, "%"),
	}
	return cases
}

// TestHostileFramesGetWhatTheTableSays sends each line of WIRE's table of
// malformed input from a real guest. On a connection that lives, a ping after it
// is answered; each line leaves a row.
func TestHostileFramesGetWhatTheTableSays(t *testing.T) {
	needVM(t)
	t.Parallel()
	h := newHome(t)
	if err := h.writeProfile("wire", "[[mcp.servers]]\nname = \"peer\"\ncommand = \"$BIN/mcpserver\"\n"); err != nil {
		t.Fatal(err)
	}
	h.capsem("create", "--name", "box", "--profile", "wire")
	h.upload("box", h.path("bin/vsockcat"), "/tmp/vsockcat")
	cases := wireCases()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			p := dialPort(t, h, "box")
			if len(c.setup) > 0 {
				p.write(t, c.setup)
				if !c.dead {
					if _, _, payload, err := p.read(); err != nil || !bytes.Contains(payload, []byte(`"result"`)) {
						t.Fatalf("the first request got %s, %v", payload, err)
					}
				}
			}
			p.write(t, c.bad)
			c.check(t, p)
		})
	}
	t.Run("the stream ends inside a frame", func(t *testing.T) {
		p := dialPort(t, h, "box")
		p.write(t, request(7, ping).bytes()[:30])
		if rest := p.close(t); len(rest) > 0 {
			t.Errorf("there came %q", rest)
		}
	})
	t.Run("the stream ends between frames", func(t *testing.T) {
		if rest := dialPort(t, h, "box").close(t); len(rest) > 0 {
			t.Errorf("there came %q", rest)
		}
	})
	// Repetitions are counted in one row, at the latest when the ledger closes.
	h.capsem("stop", "box")
	for _, c := range cases {
		if h.refusals(c.detail) == 0 {
			t.Errorf("%s: protocol_events has nothing like %q", c.name, c.detail)
		}
	}
	if got, want := h.refusals("%"), len(cases)+1; got != want {
		t.Errorf("protocol_events counts %d refusals, want %d", got, want)
	}
	if pending := h.capsem("sql", "--format", "csv", "box", "SELECT count(*) FROM tool_calls WHERE status = 'pending'"); !strings.HasSuffix(pending, "\n0\n") {
		t.Errorf("calls are still pending: %s", pending)
	}
}

// check reads what comes after the bad frame.
func (c wireCase) check(t *testing.T, p *port) {
	t.Helper()
	if c.dead {
		if rest := p.close(t); len(rest) > 0 {
			t.Errorf("the connection was to end; there came %q", rest)
		}
		return
	}
	if c.code != 0 {
		stream, flags, payload, err := p.read()
		if err != nil {
			t.Fatalf("reading the answer: %v", err)
		}
		var answer struct {
			ID    json.RawMessage `json:"id"`
			Error struct {
				Code int `json:"code"`
			} `json:"error"`
		}
		if err := json.Unmarshal(payload, &answer); err != nil {
			t.Fatalf("the answer is %q: %v", payload, err)
		}
		if stream != c.stream || flags != 0 || answer.Error.Code != c.code || string(answer.ID) != c.id {
			t.Errorf("stream %#x, flags %d: %s\nwant stream %#x, flags 0, code %d, id %s", stream, flags, payload, c.stream, c.code, c.id)
		}
	}
	p.write(t, request(99, ping).bytes())
	if stream, _, payload, err := p.read(); err != nil || stream != 99 || !bytes.Contains(payload, []byte(`"result":{}`)) {
		t.Errorf("a ping after it got %s on stream %d, %v", payload, stream, err)
	}
	if rest := p.close(t); len(rest) > 0 {
		t.Errorf("there came more: %q", rest)
	}
}

// upload puts a program into a guest.
func (h *home) upload(vm, from, to string) {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(h.t.Context(), time.Minute)
	defer cancel()
	cmd := h.command(ctx, "sh", "-c", `capsem exec -i "$1" -- sh -c 'cat >"$0" && chmod 755 "$0"' "$3" <"$2"`, "upload", vm, from, to)
	if out, err := cmd.CombinedOutput(); err != nil {
		h.t.Fatalf("uploading %s: %v\n%s", from, err, out)
	}
}

// refusals counts what protocol_events has of malformed input like detail.
func (h *home) refusals(detail string) int {
	h.t.Helper()
	query := "SELECT coalesce(sum(count), 0) FROM protocol_events WHERE event_type = 'mcp.malformed' AND detail LIKE '" + detail + "'"
	out := h.capsem("sql", "--format", "csv", "box", query)
	var n int
	if _, err := fmt.Sscan(out[strings.IndexByte(out, '\n'):], &n); err != nil {
		h.t.Fatalf("reading %q: %v", out, err)
	}
	return n
}
