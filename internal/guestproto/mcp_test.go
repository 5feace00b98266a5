package guestproto_test

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/guestproto"
)

// rawFrame is a frame of which a test can spoil any part.
type rawFrame struct {
	magic           uint16
	version, header uint8
	stream          uint32
	flags           uint16
	name, payload   string
	// nameLen, payloadLen and total are what is declared; -1 is the truth.
	nameLen, payloadLen, total int64
}

func good(stream uint32, flags uint16, payload string) rawFrame {
	return rawFrame{
		magic: 0x4d43, version: 1, header: 16, stream: stream, flags: flags,
		name: "agent", payload: payload, nameLen: -1, payloadLen: -1, total: -1,
	}
}

func (f rawFrame) bytes() []byte {
	or := func(declared int64, truth int) uint32 {
		if declared >= 0 {
			return uint32(declared)
		}
		return uint32(truth)
	}
	be := binary.BigEndian
	b := be.AppendUint32(nil, or(f.total, 16+len(f.name)+len(f.payload)))
	b = be.AppendUint16(b, f.magic)
	b = append(b, f.version, f.header)
	b = be.AppendUint32(b, f.stream)
	b = be.AppendUint16(b, f.flags)
	b = be.AppendUint16(b, uint16(or(f.nameLen, len(f.name))))
	b = be.AppendUint32(b, or(f.payloadLen, len(f.payload)))
	return append(append(b, f.name...), f.payload...)
}

const notify, more = 1, 2

// outcome is what one Read gave, in a form that is easy to compare.
func outcome(f guestproto.MCPFrame, err error) string {
	var bad *guestproto.FrameError
	switch {
	case err == nil:
		return fmt.Sprintf("%d %s %.20s", f.Stream, f.Process, f.Payload)
	case errors.As(err, &bad) && bad.Fatal:
		return "fatal: " + bad.Detail
	case errors.As(err, &bad):
		return fmt.Sprintf("refused on %d: %s", bad.Stream, bad.Detail)
	}
	return err.Error()
}

// read returns the outcome of every Read to the one that ends the stream.
func read(src io.Reader, more bool) []string {
	var all []string
	r := guestproto.NewMCPReader(bufio.NewReader(src), more)
	defer r.Close()
	for {
		f, err := r.Read()
		all = append(all, outcome(f, err))
		var bad *guestproto.FrameError
		if err != nil && (!errors.As(err, &bad) || bad.Fatal) {
			return all
		}
	}
}

func join(frames ...rawFrame) []byte {
	var b []byte
	for _, f := range frames {
		b = append(b, f.bytes()...)
	}
	return b
}

func TestBadFramesAreDroppedAndTheNextIsRead(t *testing.T) {
	change := func(f func(*rawFrame)) rawFrame {
		raw := good(7, 0, "{}")
		f(&raw)
		return raw
	}
	tests := []struct {
		name, want string
		bad        rawFrame
	}{
		{"magic", "refused on 7: bad magic", change(func(f *rawFrame) { f.magic++ })},
		{"version", "refused on 7: bad version", change(func(f *rawFrame) { f.version = 2 })},
		{"header length", "refused on 7: bad header length", change(func(f *rawFrame) { f.header = 20 })},
		{"reserved flag", "refused on 7: reserved flag", change(func(f *rawFrame) { f.flags = 1 << 15 })},
		{"more, not offered", "refused on 7: reserved flag", change(func(f *rawFrame) { f.flags = more })},
		{"notification on a stream", "refused on 7: flag and stream do not match", change(func(f *rawFrame) { f.flags = notify })},
		{"request on stream 0", "refused on 0: flag and stream do not match", change(func(f *rawFrame) { f.stream = 0 })},
		{"name of 129 bytes", "refused on 7: process name too long", change(func(f *rawFrame) { f.name = strings.Repeat("n", 129) })},
		{"payload length too small", "refused on 7: lengths do not add up", change(func(f *rawFrame) { f.payloadLen = 1 })},
		{"payload length that overflows", "refused on 7: lengths do not add up", change(func(f *rawFrame) { f.payloadLen = 1<<32 - 1 })},
		{"name length too large", "refused on 7: lengths do not add up", change(func(f *rawFrame) { f.nameLen = 100 })},
		{"name that is not UTF-8", "refused on 7: process name is not UTF-8", change(func(f *rawFrame) { f.name = "a\xff" })},
		{"bad magic on stream 0", "refused on 0: bad magic", change(func(f *rawFrame) { f.magic, f.stream = 0, 0 })},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			wire := join(tt.bad, good(8, 0, "next"))
			got := read(iotest.OneByteReader(bytes.NewReader(wire)), false)
			if diff := cmp.Diff([]string{tt.want, "8 agent next", "EOF"}, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestLengthOutOfBoundsEndsTheStream(t *testing.T) {
	for _, total := range []int64{0, 15, 16, guestproto.MaxMCPFrame - 1, guestproto.MaxMCPFrame, guestproto.MaxMCPFrame + 1, 1<<32 - 1} {
		f := good(1, 0, "")
		f.name, f.total = "", total
		legal := total >= 16 && total <= guestproto.MaxMCPFrame
		if legal {
			f.payload = strings.Repeat("x", int(total)-16)
		}
		got := read(bytes.NewReader(f.bytes()), false)
		want := "fatal: length out of bounds"
		if legal {
			want = fmt.Sprintf("1  %.20s", f.payload)
		}
		if got[0] != want {
			t.Errorf("total_len %d: got %q, want %q", total, got[0], want)
		}
	}
}

func TestStreamThatEndsInsideAFrameIsFatal(t *testing.T) {
	bad := good(3, 0, "dropped")
	bad.name = "\xff"
	for _, wire := range [][]byte{good(1, 0, "payload").bytes(), bad.bytes()} {
		for n := range wire {
			got := read(bytes.NewReader(wire[:n]), false)
			want := "fatal: the stream ends inside a frame"
			if n == 0 {
				want = "EOF"
			}
			if got[len(got)-1] != want {
				t.Errorf("after %d bytes: got %q, want %q", n, got, want)
			}
		}
	}
}

func TestNameIsAcceptedUpToItsBound(t *testing.T) {
	for _, n := range []int{0, 1, 127, 128} {
		f := good(1, 0, "{}")
		f.name = strings.Repeat("n", n)
		if got := read(bytes.NewReader(f.bytes()), false); got[0] != "1 "+f.name+" {}" {
			t.Errorf("%d bytes: %q", n, got)
		}
	}
}

func TestMessagesInPiecesArePutTogether(t *testing.T) {
	wire := join(
		good(1, more, "one "), good(2, more, "two "), good(3, 0, "three"), good(1, more, "goes "), good(2, 0, "ends"),
		good(0, notify|more, "a "), good(0, notify|more, ""), good(0, notify, "note"), good(1, 0, "on"), good(4, more, ""), good(4, 0, ""),
	)
	got := read(iotest.HalfReader(bytes.NewReader(wire)), true)
	want := []string{"3 agent three", "2 agent two ends", "0 agent a note", "1 agent one goes on", "4 agent ", "EOF"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestPiecesOfStreamZeroAreContiguous(t *testing.T) {
	got := read(bytes.NewReader(join(good(0, notify|more, "a"), good(1, 0, "b"), good(0, notify, "c"))), true)
	if diff := cmp.Diff([]string{"fatal: another stream between the pieces of stream 0"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestEightMessagesMayBePartial(t *testing.T) {
	for _, n := range []int{7, 8, 9} {
		var frames []rawFrame
		var want []string
		for i := range n {
			frames = append(frames, good(uint32(i+1), more, "a"))
		}
		for i := range n {
			frames = append(frames, good(uint32(i+1), 0, "b"))
			want = append(want, fmt.Sprintf("%d agent ab", i+1))
		}
		want = append(want, "EOF")
		if n > guestproto.MaxPartial {
			want = []string{"fatal: too many partial messages"}
		}
		if diff := cmp.Diff(want, read(bytes.NewReader(join(frames...)), true)); diff != "" {
			t.Errorf("%d (-want +got):\n%s", n, diff)
		}
	}
}

func TestMessageOverItsBoundIsRefusedOnceAndPassedOver(t *testing.T) {
	const piece = 1 << 20
	for _, extra := range []int{-1, 0, 1} {
		var frames []rawFrame
		for range guestproto.MaxMCPMessage/piece - 1 {
			frames = append(frames, good(1, more, strings.Repeat("x", piece)))
		}
		frames = append(frames,
			good(1, more, strings.Repeat("x", piece+extra)), good(2, 0, "between"), good(1, 0, ""), good(1, 0, "next"))
		got := read(bytes.NewReader(join(frames...)), true)
		want := []string{"2 agent between", "1 agent xxxxxxxxxxxxxxxxxxxx", "1 agent next", "EOF"}
		if extra > 0 {
			want = []string{"refused on 1: message too large", "2 agent between", "1 agent next", "EOF"}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%+d byte (-want +got):\n%s", extra, diff)
		}
	}
}

func TestBadPieceTakesItsWholeMessageWithIt(t *testing.T) {
	spoilt := func(flags uint16) rawFrame {
		f := good(1, flags, "c")
		f.name = "\xff"
		return f
	}
	for name, frames := range map[string][]rawFrame{
		"first":  {spoilt(more), good(1, more, "b"), good(1, 0, "c"), good(2, 0, "x")},
		"middle": {good(1, more, "a"), spoilt(more), good(1, 0, "c"), good(2, 0, "x")},
		"last":   {good(1, more, "a"), good(1, more, "b"), spoilt(0), good(2, 0, "x")},
	} {
		want := []string{"refused on 1: process name is not UTF-8", "2 agent x", "EOF"}
		if diff := cmp.Diff(want, read(bytes.NewReader(join(frames...)), true)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestFramesAreWrittenAsTheyAreRead(t *testing.T) {
	const most = guestproto.MaxMCPFrame - guestproto.MCPHeader - len("agent")
	for _, tt := range []struct {
		size   int
		more   bool
		frames int // 0: refused
	}{
		{0, false, 1},
		{1, false, 1},
		{most - 1, false, 1},
		{most, false, 1},
		{most + 1, false, 0},
		{0, true, 1},
		{most, true, 1},
		{most + 1, true, 2},
		{2 * most, true, 2},
		{2*most + 1, true, 3},
		{guestproto.MaxMCPMessage - 1, true, 16},
		{guestproto.MaxMCPMessage, true, 16},
		{guestproto.MaxMCPMessage + 1, true, 0},
	} {
		payload := bytes.Repeat([]byte("0123456789abcdef"), tt.size/16+1)[:tt.size]
		f := guestproto.MCPFrame{Stream: 5, Process: "agent", Payload: payload}
		wire, err := guestproto.AppendMCP([]byte("x"), f, tt.more)
		var c chunks
		writeErr := guestproto.NewMCPWriter(&c, tt.more).Write(f)
		if tt.frames == 0 {
			var bad *guestproto.FrameError
			if !errors.As(err, &bad) || !bad.Oversize || bad.Stream != 5 || bad.Size != tt.size || string(wire) != "x" {
				t.Errorf("%d bytes: %v", tt.size, err)
			}
			if !errors.As(writeErr, &bad) || !bad.Oversize || len(c.writes) != 0 {
				t.Errorf("writing %d bytes: %v", tt.size, writeErr)
			}
			continue
		}
		if err != nil || writeErr != nil {
			t.Errorf("%d bytes: %v, %v", tt.size, err, writeErr)
			continue
		}
		if len(c.writes) != tt.frames || !bytes.Equal(bytes.Join(c.writes, nil), wire[1:]) {
			t.Errorf("%d bytes: %d writes, want %d; or they differ from AppendMCP's", tt.size, len(c.writes), tt.frames)
		}
		got, err := guestproto.NewMCPReader(bufio.NewReader(bytes.NewReader(wire[1:])), tt.more).Read()
		if err != nil || !bytes.Equal(got.Payload, payload) || got.Stream != 5 || got.Process != "agent" {
			t.Errorf("%d bytes came back as %d: %v", tt.size, len(got.Payload), err)
		}
	}
}

// chunks records each write, and fails when broken.
type chunks struct {
	writes [][]byte
	broken error
}

func (c *chunks) Write(p []byte) (int, error) {
	if c.broken != nil {
		return 0, c.broken
	}
	c.writes = append(c.writes, bytes.Clone(p))
	return len(p), nil
}

func TestOnlyNotificationsAreSentOnStreamZero(t *testing.T) {
	for _, f := range []guestproto.MCPFrame{{Stream: 0}, {Stream: 1, Notification: true}} {
		if _, err := guestproto.AppendMCP(nil, f, false); err == nil {
			t.Errorf("%+v was encoded", f)
		}
	}
}

func TestMCPWriterEndsAfterAFailedWrite(t *testing.T) {
	c := chunks{broken: io.ErrClosedPipe}
	w := guestproto.NewMCPWriter(&c, false)
	for range 2 {
		if err := w.Write(guestproto.MCPFrame{Stream: 1}); !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("got %v", err)
		}
		c.broken = nil
	}
}

func TestMessagesOfConcurrentWritersStayWhole(t *testing.T) {
	pr, pw := io.Pipe()
	w := guestproto.NewMCPWriter(pw, true)
	sizes := []int{0, 100, 2 << 20, 5 << 20}
	var wg sync.WaitGroup
	for i, size := range sizes {
		wg.Go(func() {
			f := guestproto.MCPFrame{Stream: uint32(i), Notification: i == 0, Payload: bytes.Repeat([]byte{byte(i)}, size)}
			if err := w.Write(f); err != nil {
				t.Error(err)
			}
		})
	}
	r := guestproto.NewMCPReader(bufio.NewReader(pr), true)
	for range sizes {
		f, err := r.Read()
		if err != nil {
			t.Fatal(err)
		}
		if len(f.Payload) != sizes[f.Stream] || bytes.Count(f.Payload, []byte{byte(f.Stream)}) != len(f.Payload) {
			t.Errorf("stream %d has %d bytes", f.Stream, len(f.Payload))
		}
	}
	wg.Wait()
}

func TestHeldBytesAreReservedAndGivenBack(t *testing.T) {
	wire := join(
		good(1, more, strings.Repeat("x", 100_000)), good(2, more, strings.Repeat("y", 1_000_000)),
		good(3, 0, "small"), good(2, 0, "y"), good(1, 0, "x"), good(4, more, "left over"),
	)
	for _, budget := range []int{10, 400_000, 8 << 20} {
		held, most := 0, 0
		r := guestproto.NewMCPReader(bufio.NewReader(bytes.NewReader(wire)), true)
		r.Reserve = func(n int) bool {
			if n > 0 && held+n > budget {
				return false
			}
			held += n
			most = max(most, held)
			return true
		}
		var got []string
		for {
			f, err := r.Read()
			if err == io.EOF {
				break
			}
			got = append(got, outcome(f, err))
		}
		want := map[int][]string{
			10:      {"refused on 1: too many bytes are held", "refused on 2: too many bytes are held", "3 agent small", "refused on 4: too many bytes are held"},
			400_000: {"refused on 2: too many bytes are held", "3 agent small", "1 agent xxxxxxxxxxxxxxxxxxxx"},
			8 << 20: {"3 agent small", "2 agent yyyyyyyyyyyyyyyyyyyy", "1 agent xxxxxxxxxxxxxxxxxxxx"},
		}[budget]
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("budget %d (-want +got):\n%s", budget, diff)
		}
		r.Close()
		if held != 0 || most > budget {
			t.Errorf("budget %d: at most %d were held, and %d at the end", budget, most, held)
		}
	}
}

func TestMemoryGrowsWithWhatArrives(t *testing.T) {
	f := good(1, 0, "")
	f.name, f.total, f.payloadLen = "", guestproto.MaxMCPFrame, guestproto.MaxMCPFrame-16
	for _, sent := range []int{0, 100_000} {
		r := guestproto.NewMCPReader(bufio.NewReader(bytes.NewReader(append(f.bytes(), make([]byte, sent)...))), false)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := r.Read()
		runtime.ReadMemStats(&after)
		var bad *guestproto.FrameError
		if !errors.As(err, &bad) || !bad.Fatal {
			t.Fatal(err)
		}
		if grown := after.TotalAlloc - before.TotalAlloc; grown > uint64(64<<10+5*sent) {
			t.Errorf("%d bytes sent cost %d", sent, grown)
		}
	}
}

func TestMetadataLineIsReadInAnyPieces(t *testing.T) {
	long := strings.Repeat("n", guestproto.MaxMeta-len("\x00CAPSEM_META:\n"))
	tests := []struct {
		in   string
		want guestproto.Meta
		err  bool
	}{
		{"\x00CAPSEM_META:codex\n", guestproto.Meta{Process: "codex"}, false},
		{"\x00CAPSEM_META:codex;more=1\n", guestproto.Meta{Process: "codex", More: true}, false},
		{"\x00CAPSEM_META:codex;more=2\n", guestproto.Meta{Process: "codex;more=2"}, false},
		{"\x00CAPSEM_META:\n", guestproto.Meta{}, false},
		{"\x00CAPSEM_META:a b\x1b\xff\n", guestproto.Meta{Process: "a_b__"}, false},
		{"\x00CAPSEM_META:" + long[1:] + "\n", guestproto.Meta{Process: long[:128]}, false},
		{"\x00CAPSEM_META:" + long + "\n", guestproto.Meta{Process: long[:128]}, false},
		{"\x00CAPSEM_META:" + long + "n\n", guestproto.Meta{}, true},
		{"\x00CAPSEM_META:" + long + long, guestproto.Meta{}, true},
		{"\x00CAPSEM_META", guestproto.Meta{}, true},
		{"\x00CAPSEM-META:x\n", guestproto.Meta{}, true},
		{"\x16\x03\x01", guestproto.Meta{}, true},
		{"", guestproto.Meta{}, true},
	}
	for _, tt := range tests {
		for name, src := range map[string]io.Reader{
			"whole":        strings.NewReader(tt.in + "rest"),
			"byte by byte": iotest.OneByteReader(strings.NewReader(tt.in + "rest")),
		} {
			if tt.err {
				src = strings.NewReader(tt.in)
			}
			r := bufio.NewReader(src)
			got, err := guestproto.ReadMeta(r)
			if got != tt.want || (err != nil) != tt.err {
				t.Errorf("%s %.40q: got %+v, %v", name, tt.in, got, err)
			}
			if rest, _ := io.ReadAll(r); !tt.err && string(rest) != "rest" {
				t.Errorf("%s %.40q: left %q", name, tt.in, rest)
			}
		}
	}
}

func TestMetadataIsReadAsItWasWritten(t *testing.T) {
	for _, m := range []guestproto.Meta{{}, {Process: "codex"}, {Process: "é", More: true}, {More: true}} {
		got, err := guestproto.ReadMeta(bufio.NewReader(bytes.NewReader(guestproto.AppendMeta(nil, m))))
		if err != nil || got != m {
			t.Errorf("got %+v, %v, want %+v", got, err, m)
		}
	}
	wire := guestproto.AppendMeta(nil, guestproto.Meta{Process: "x;more=1"})
	if got, err := guestproto.ReadMeta(bufio.NewReader(bytes.NewReader(wire))); err != nil || got.More {
		t.Errorf("a process's name offered pieces: %+v, %v", got, err)
	}
}

func TestProcessNamesAreMadeHarmless(t *testing.T) {
	for in, want := range map[string]string{
		"":                               "",
		"node":                           "node",
		"a b\tc\nd\x00e\x7f\u0085\u00a0": "a_b_c_d_e___",
		"\u202eevil\u2066":               "_evil_",
		"\xff\xfe":                       "__",
		strings.Repeat("é", 64):          strings.Repeat("é", 64),
		"x" + strings.Repeat("é", 64):    "x" + strings.Repeat("é", 63),
		strings.Repeat("😀", 33):          strings.Repeat("😀", 32),
		strings.Repeat("n", 128):         strings.Repeat("n", 128),
		strings.Repeat("n", 129):         strings.Repeat("n", 128),
	} {
		if got := guestproto.SanitizeProcess(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}

// FuzzMCPReader proves that what a reader takes, encoded again, is what came, up to
// the sanitising of the name, and reads as the same.
func FuzzMCPReader(f *testing.F) {
	f.Add(join(good(1, 0, `{"jsonrpc":"2.0","id":1,"method":"ping"}`), good(0, notify, "{}")), false)
	f.Add(join(good(1, more, "a"), good(2, more, "b"), good(1, 0, "c"), good(0, notify|more, "d"), good(0, notify, "e")), true)
	f.Add([]byte{0, 0, 0, 16}, false)
	f.Add([]byte{0xff, 0xff, 0xff, 0xff}, true)
	bad := good(9, more, "x")
	bad.magic = 1
	f.Add(join(bad, good(9, 0, "y")), true)
	f.Fuzz(func(t *testing.T, in []byte, pieces bool) {
		held := 0
		r := guestproto.NewMCPReader(bufio.NewReader(bytes.NewReader(in)), pieces)
		r.Reserve = func(n int) bool { held += n; return held < 1<<20 }
		for at := 0; ; {
			f, err := r.Read()
			var bad *guestproto.FrameError
			if err != nil && (!errors.As(err, &bad) || bad.Fatal) {
				break
			}
			if !pieces { // one frame a Read: the next begins where this one ends
				frame := in[at : at+4+int(binary.BigEndian.Uint32(in[at:]))]
				at += len(frame)
				if err == nil {
					roundTrip(t, f, frame)
				}
			} else if err == nil {
				roundTrip(t, f, nil)
			}
		}
		r.Close()
		if held != 0 {
			t.Fatalf("%d bytes are still reserved", held)
		}
	})
}

// roundTrip encodes f and verifies that it gives frame, where that is known, and f.
func roundTrip(t *testing.T, f guestproto.MCPFrame, frame []byte) {
	t.Helper()
	again, err := guestproto.AppendMCP(nil, f, true)
	if err != nil {
		t.Fatal(err)
	}
	if frame != nil {
		name := string(frame[20 : 20+int(binary.BigEndian.Uint16(frame[14:]))])
		if name == f.Process && !bytes.Equal(again, frame) {
			t.Fatalf("the frame %x is encoded as %x", frame, again)
		}
	}
	back, err := guestproto.NewMCPReader(bufio.NewReader(bytes.NewReader(again)), true).Read()
	if err != nil {
		t.Fatal(err)
	}
	if back.Payload == nil {
		back.Payload = f.Payload
	}
	if diff := cmp.Diff(f, back); diff != "" {
		t.Fatalf("(-want +got):\n%s", diff)
	}
}

func BenchmarkMCP(b *testing.B) {
	for _, size := range []int{1 << 10, 1 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			f := guestproto.MCPFrame{Stream: 1, Process: "agent", Payload: make([]byte, size)}
			var wire []byte
			src := bytes.NewReader(nil)
			buffered := bufio.NewReaderSize(src, 64<<10)
			r := guestproto.NewMCPReader(buffered, false)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				var err error
				if wire, err = guestproto.AppendMCP(wire[:0], f, false); err != nil {
					b.Fatal(err)
				}
				src.Reset(wire)
				buffered.Reset(src)
				if _, err := r.Read(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
