package msgpack_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/msgpack"
)

// sample has one field of each type that messages use.
type sample struct {
	Name   string            `msgpack:"name"`
	Bytes  []byte            `msgpack:"bytes"`
	Argv   [][]byte          `msgpack:"argv"`
	Env    map[string]string `msgpack:"env"`
	Int    int64             `msgpack:"int"`
	Uint   uint64            `msgpack:"uint"`
	Float  float64           `msgpack:"float"`
	Flag   bool              `msgpack:"flag"`
	Nested *sample           `msgpack:"nested,omitempty"`
	List   []sample          `msgpack:"list"`
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestValuesComeBackAsTheyWere(t *testing.T) {
	sizes := []int{0, 1, 15, 16, 31, 32, 255, 256, 65535, 65536}
	for i, n := range []int64{
		0, 1, 127, 128, 255, 256, 65535, 65536, 1<<32 - 1, 1 << 32, math.MaxInt64,
		-1, -32, -33, -128, -129, -32768, -32769, -1 << 31, -1<<31 - 1, math.MinInt64,
	} {
		size := sizes[i%len(sizes)]
		want := sample{
			Name:  strings.Repeat("ä", size/2),
			Bytes: bytes.Repeat([]byte{0xff}, size),
			Argv:  [][]byte{{0xff, 0}, {}},
			Env:   map[string]string{"b": "2", "a": "1"},
			Int:   n, Uint: uint64(n), Float: 1.5, Flag: true,
			Nested: &sample{Name: "inner", Bytes: []byte{}, Argv: [][]byte{}, List: []sample{}},
			List:   []sample{},
		}
		b, err := msgpack.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		var got sample
		if err := msgpack.Unmarshal(b, &got); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("n %d, size %d (-want +got):\n%s", n, size, diff)
		}
	}
}

func TestMalformedValuesAreRefusedWithTheirReason(t *testing.T) {
	tests := []struct {
		name, in string
		want     msgpack.Kind
	}{
		{"nothing", "", msgpack.Truncated},
		{"array of four billion", "dd ff ff ff ff", msgpack.Truncated},
		{"map of four billion", "df ff ff ff ff", msgpack.Truncated},
		{"bin of four billion", "c6 ff ff ff ff", msgpack.Truncated},
		{"string of four billion", "db ff ff ff ff", msgpack.Truncated},
		{"array one element short", "92 c0", msgpack.Truncated},
		{"map one value short", "81 a1 61", msgpack.Truncated},
		{"string one byte short", "a2 61", msgpack.Truncated},
		{"length field cut", "dc 00", msgpack.Truncated},
		{"number cut", "cf 01 02", msgpack.Truncated},
		{"float cut", "cb 01 02", msgpack.Truncated},
		{"second value", "c0 c0", msgpack.Trailing},
		{"never used code", "c1", msgpack.Type},
		{"fixext", "d4 01 00", msgpack.Type},
		{"ext8", "c7 00 01", msgpack.Type},
		{"timestamp", "d6 ff 00 00 00 00", msgpack.Type},
		{"float 32", "ca 00 00 00 00", msgpack.Type},
		{"uint8 that fits in a fixint", "cc 7f", msgpack.NotMinimal},
		{"uint16 that fits in a uint8", "cd 00 ff", msgpack.NotMinimal},
		{"uint32 that fits in a uint16", "ce 00 00 ff ff", msgpack.NotMinimal},
		{"uint64 that fits in a uint32", "cf 00 00 00 00 ff ff ff ff", msgpack.NotMinimal},
		{"int8 that fits in a fixint", "d0 e0", msgpack.NotMinimal},
		{"positive int8", "d0 05", msgpack.NotMinimal},
		{"int16 that fits in an int8", "d1 ff 80", msgpack.NotMinimal},
		{"int32 that fits in an int16", "d2 ff ff 80 00", msgpack.NotMinimal},
		{"int64 that fits in an int32", "d3 ff ff ff ff 80 00 00 00", msgpack.NotMinimal},
		{"positive int64", "d3 7f ff ff ff ff ff ff ff", msgpack.NotMinimal},
		{"str8 that fits in a fixstr", "d9 01 61", msgpack.NotMinimal},
		{"str16 that fits in a str8", "da 00 01 61", msgpack.NotMinimal},
		{"bin16 that fits in a bin8", "c5 00 01 61", msgpack.NotMinimal},
		{"bin32 that fits in a bin16", "c6 00 00 01 00" + strings.Repeat("00", 256), msgpack.NotMinimal},
		{"array16 that fits in a fixarray", "dc 00 01 c0", msgpack.NotMinimal},
		{"map16 that fits in a fixmap", "de 00 00", msgpack.NotMinimal},
		{"number as a key", "81 01 c0", msgpack.KeyType},
		{"bin as a key", "81 c4 01 61 c0", msgpack.KeyType},
		{"map as a key", "81 80 c0", msgpack.KeyType},
		{"equal keys", "82 a1 61 c0 a1 61 c0", msgpack.Duplicate},
		{"equal keys around a map with another", "82 a1 61 81 a1 61 c0 a1 61 c0", msgpack.Duplicate},
		{"string that is not UTF-8", "a1 ff", msgpack.NotUTF8},
		{"key that is not UTF-8", "81 a1 ff c0", msgpack.NotUTF8},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := msgpack.Check(unhex(t, tt.in), msgpack.DefaultLimits())
			var ce *msgpack.CheckError
			if !errors.As(err, &ce) || ce.Kind != tt.want {
				t.Errorf("got error %v, want kind %q", err, tt.want)
			}
		})
	}
}

func TestWellFormedValuesPass(t *testing.T) {
	for _, in := range []string{
		"c0", "c2", "c3", "00", "7f", "e0", "ff", "cc 80", "cd 01 00", "ce 00 01 00 00", "cf 00 00 00 01 00 00 00 00",
		"d0 df", "d1 ff 7f", "d2 ff ff 7f ff", "d3 ff ff ff ff 7f ff ff ff", "cb 7f f8 00 00 00 00 00 01",
		"a0", "c4 00", "90", "80", "c4 02 ff 00",
		"82 a1 61 c0 a1 62 c0",
		"82 a1 61 81 a1 62 c0 a1 62 c0", // the same key in a map and in the one around it
		"92 81 a1 61 c0 81 a1 61 c0",    // and in two maps beside each other
	} {
		if err := msgpack.Check(unhex(t, in), msgpack.DefaultLimits()); err != nil {
			t.Errorf("%s: %v", in, err)
		}
	}
}

func TestBoundsHoldAtTheBoundAndOneOver(t *testing.T) {
	kind := func(b []byte, lim msgpack.Limits) msgpack.Kind {
		var ce *msgpack.CheckError
		if errors.As(msgpack.Check(b, lim), &ce) {
			return ce.Kind
		}
		return ""
	}
	nest := func(n int) []byte { return append(bytes.Repeat([]byte{0x91}, n), 0xc0) }
	many := func(n int) []byte { // an array of n-1 scalars is n nodes
		header := []byte{0xdc, byte((n - 1) >> 8), byte(n - 1)}
		if n-1 > 0xffff {
			header = binary.BigEndian.AppendUint32([]byte{0xdd}, uint32(n-1))
		}
		return append(header, make([]byte, n-1)...)
	}
	keys := func(n int) []byte {
		b := []byte{0xde, byte(n >> 8), byte(n)}
		for i := range n {
			b = append(append(b, 0xa3), fmt.Sprintf("%03d", i)...)
			b = append(b, 0xc0)
		}
		return b
	}
	def := msgpack.DefaultLimits()
	tests := []struct {
		name string
		in   []byte
		lim  msgpack.Limits
		want msgpack.Kind
	}{
		{"depth one under", nest(msgpack.MaxDepth - 1), def, ""},
		{"depth at", nest(msgpack.MaxDepth), def, ""},
		{"depth one over", nest(msgpack.MaxDepth + 1), def, msgpack.Depth},
		{"depth of ten million", nest(10_000_000), msgpack.Limits{Depth: 1 << 30, Nodes: 1 << 30}, msgpack.Depth},
		{"lower depth at", nest(3), msgpack.Limits{Depth: 3, Nodes: 10}, ""},
		{"lower depth over", nest(4), msgpack.Limits{Depth: 3, Nodes: 10}, msgpack.Depth},
		{"nodes one under", many(msgpack.MaxNodes - 1), def, ""},
		{"nodes at", many(msgpack.MaxNodes), def, ""},
		{"nodes one over", many(msgpack.MaxNodes + 1), def, msgpack.Nodes},
		{"keys at", keys(msgpack.MaxKeys), def, ""},
		{"keys one over", keys(msgpack.MaxKeys + 1), def, msgpack.Keys},
	}
	for _, tt := range tests {
		if got := kind(tt.in, tt.lim); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestCheckDoesNotAllocate(t *testing.T) {
	b := mustMarshal(t, benchValue(64<<10))
	lim := msgpack.DefaultLimits()
	if n := testing.AllocsPerRun(100, func() {
		if err := msgpack.Check(b, lim); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestFieldsThatTheReceiverDoesNotKnowAreSkipped(t *testing.T) {
	newer := struct {
		Name  string   `msgpack:"name"`
		Extra []sample `msgpack:"extra"`
		Int   int      `msgpack:"int"`
	}{Name: "n", Extra: []sample{{Name: "x"}}, Int: 7}
	var got sample
	if err := msgpack.Unmarshal(mustMarshal(t, newer), &got); err != nil {
		t.Fatal(err)
	}
	if got.Name != "n" || got.Int != 7 {
		t.Errorf("got %+v", got)
	}
}

func TestOnlyMapsAreDecodedAndOnlyIntoStructs(t *testing.T) {
	var s sample
	for _, in := range []string{"c0", "90", "a1 61", "01", "9a c0 c0 c0 c0 c0 c0 c0 c0 c0 c0"} {
		if err := msgpack.Unmarshal(unhex(t, in), &s); err == nil {
			t.Errorf("%s was decoded into a struct", in)
		}
	}
	var a any
	for _, v := range []any{nil, s, (*sample)(nil), &a, &map[string]any{}} {
		if err := msgpack.Unmarshal([]byte{0x80}, v); err == nil {
			t.Errorf("decoded into %T", v)
		}
	}
}

func TestSendersLearnOfWhatPeersWouldRefuse(t *testing.T) {
	deep := &sample{}
	for range msgpack.MaxDepth {
		deep = &sample{Nested: deep}
	}
	dst := []byte("kept")
	for name, v := range map[string]any{
		"not UTF-8": sample{Name: "\xff"},
		"too deep":  deep,
		"float 32":  struct{ F float32 }{1},
		"too many":  struct{ L [][]byte }{make([][]byte, msgpack.MaxNodes)},
	} {
		got, err := msgpack.MarshalAppend(dst, v)
		if err == nil {
			t.Errorf("%s: no error", name)
		}
		if string(got) != "kept" {
			t.Errorf("%s: left %q in the buffer", name, got)
		}
	}
}

func TestDecodedValuesDoNotShareTheInput(t *testing.T) {
	b := mustMarshal(t, sample{Name: "name", Bytes: []byte("bytes"), Argv: [][]byte{[]byte("arg")}})
	var got sample
	if err := msgpack.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	clear(b)
	if got.Name != "name" || string(got.Bytes) != "bytes" || string(got.Argv[0]) != "arg" {
		t.Errorf("got %+v", got)
	}
}

func mustMarshal(t testing.TB, v any) []byte {
	t.Helper()
	b, err := msgpack.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// FuzzUnmarshal proves that whatever decodes is written again as a value that
// decodes to the same, and that the second encoding is a fixed point.
func FuzzUnmarshal(f *testing.F) {
	f.Add(mustMarshal(f, sample{Name: "n", Bytes: []byte("b"), Argv: [][]byte{{1}}, Env: map[string]string{"a": "b"}, Nested: &sample{}}))
	f.Add([]byte{0xdd, 0xff, 0xff, 0xff, 0xff})
	f.Add(bytes.Repeat([]byte{0x91}, 100))
	f.Add([]byte("\x81\xa4list\xdc\x00\x10\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80"))
	f.Fuzz(func(t *testing.T, in []byte) {
		var v sample
		if msgpack.Unmarshal(in, &v) != nil {
			return
		}
		first, err := msgpack.Marshal(v)
		var ce *msgpack.CheckError
		if errors.As(err, &ce) && (ce.Kind == msgpack.Nodes || ce.Kind == msgpack.Keys) {
			return // absent fields are written out, so a value can outgrow the limits
		}
		if err != nil {
			t.Fatalf("decoded value does not encode: %v", err)
		}
		var again sample
		if err := msgpack.Unmarshal(first, &again); err != nil {
			t.Fatalf("own encoding does not decode: %v", err)
		}
		second := mustMarshal(t, again)
		if !bytes.Equal(first, second) {
			t.Fatalf("encodings differ:\n%x\n%x", first, second)
		}
	})
}

func benchValue(size int) sample {
	return sample{
		Name: "tools/call", Int: 1 << 40, Uint: 7, Flag: true,
		Bytes: make([]byte, size), Env: map[string]string{"HOME": "/root", "PATH": "/bin"},
	}
}

func BenchmarkMarshal(b *testing.B) {
	for _, size := range []int{1 << 10, 1 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			v, buf := benchValue(size), []byte(nil)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				var err error
				if buf, err = msgpack.MarshalAppend(buf[:0], &v); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkUnmarshal(b *testing.B) {
	for _, size := range []int{1 << 10, 1 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			in := mustMarshal(b, benchValue(size))
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				var v sample
				if err := msgpack.Unmarshal(in, &v); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkCheck(b *testing.B) {
	in := mustMarshal(b, benchValue(1<<10))
	lim := msgpack.DefaultLimits()
	b.ReportAllocs()
	for b.Loop() {
		if err := msgpack.Check(in, lim); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkCheckWorstCase is what the comparison of keys costs at most: maps
// with as many keys as are allowed, of equal lengths, up to the node limit.
func BenchmarkCheckWorstCase(b *testing.B) {
	var in []byte
	maps := msgpack.MaxNodes / (2*msgpack.MaxKeys + 1)
	in = append(in, 0xdc, byte(maps>>8), byte(maps))
	for range maps {
		in = append(in, 0xde, 0, msgpack.MaxKeys-1)
		for i := range msgpack.MaxKeys - 1 {
			in = append(in, 0xa3, byte('0'+i/100), byte('0'+i/10%10), byte('0'+i%10), 0xc0)
		}
	}
	lim := msgpack.DefaultLimits()
	b.SetBytes(int64(len(in)))
	for b.Loop() {
		if err := msgpack.Check(in, lim); err != nil {
			b.Fatal(err)
		}
	}
}
