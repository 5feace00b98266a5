package jsonrpc_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/capsem/capsem/internal/jsonrpc"
)

func seed(f *testing.F) {
	for _, tt := range refusals {
		if len(tt.in) < 4096 {
			f.Add([]byte(tt.in))
		}
	}
	f.Add([]byte(`{"jsonrpc":"2.0","id":9007199254740993,"method":"tools/call","params":{"name":"a__b","arguments":{"x":[1,2.5e-3,{"y\n":"\ud83d\ude00"}]}}}`))
	f.Add([]byte("{\"jsonrpc\":\"2.0\",\n\"id\":\"\",\r\n\"result\":{\"tools\":[{\"name\":\"é\"},{}]}}"))
	f.Add([]byte(`{"jsonrpc":"2.0","method":"n","params":["a",null,true,false,-0]}`))
}

// FuzzParse proves that what is accepted is the same message to two other
// decoders, and that putting in what is there already changes nothing.
func FuzzParse(f *testing.F) {
	seed(f)
	f.Fuzz(func(t *testing.T, in []byte) {
		before := bytes.Clone(in)
		m, err := jsonrpc.Parse(in)
		if !bytes.Equal(in, before) {
			t.Fatal("the input was changed")
		}
		if err != nil {
			refused(t, in, err)
			return
		}
		accepted(t, in, m)
	})
}

// accepted verifies a message that Parse took.
func accepted(t *testing.T, in []byte, m jsonrpc.Message) {
	t.Helper()
	if !bytes.Equal(m.Raw, bytes.Trim(in, " \t\r\n")) {
		t.Fatalf("Raw is %q", m.Raw)
	}
	if err := strict(in); err != nil {
		t.Fatalf("jsontext refuses it: %v", err)
	}
	var std struct {
		ID, Params, Result, Error json.RawMessage
		Method                    string
	}
	if err := json.Unmarshal(in, &std); err != nil {
		t.Fatalf("encoding/json refuses it: %v", err)
	}
	// A null is absent to encoding/json.
	same := func(got, want json.RawMessage) bool {
		return bytes.Equal(got, want) || want == nil && string(got) == "null"
	}
	if std.Method != m.Method || !same(m.ID, std.ID) || !same(m.Params, std.Params) || !same(m.Result, std.Result) || !same(m.Error, std.Error) {
		t.Fatalf("encoding/json reads %+v, Parse %+v", std, m)
	}
	if got := m.WithID(m.ID); !bytes.Equal(got, m.Raw) {
		t.Fatalf("its own id makes it %q", got)
	}
	edits := []jsonrpc.Edit{m.SetID(m.ID)}
	for name, value := range jsonrpc.Members(m.Params) {
		e, ok := m.SetParam(value, name)
		if !ok {
			t.Fatalf("params member %q is not found again", name)
		}
		edits = append(edits, e)
	}
	if got := jsonrpc.Splice(m.Raw, edits...); !bytes.Equal(got, m.Raw) {
		t.Fatalf("its own params make it %q", got)
	}
	line := jsonrpc.Line(m.Raw)
	if again, err := jsonrpc.Parse(line); err != nil || len(line) != len(m.Raw) || bytes.ContainsAny(line, "\r\n") || again.Method != m.Method {
		t.Fatalf("its line is %q: %v", line, err)
	}
	text, want := jsonrpc.Text(m.Raw), stdText(t, m.Raw)
	if text != want || len(text) > len(m.Raw) {
		t.Fatalf("its text is %q, want %q", text, want)
	}
}

// refused verifies the error of a message that Parse did not take.
func refused(t *testing.T, in []byte, err error) {
	t.Helper()
	var e *jsonrpc.Error
	if !errors.As(err, &e) || e.Detail == "" || e.Offset < 0 || e.Offset > len(in) {
		t.Fatalf("got error %#v", err)
	}
	valid := json.Valid(in) && utf8.Valid(in)
	if e.Code == jsonrpc.CodeParse && valid {
		t.Fatalf("%s at %d, but encoding/json takes it", e.Detail, e.Offset)
	}
	if e.Code == jsonrpc.CodeInvalidRequest && !valid && !deep(in) {
		t.Fatalf("%s, but encoding/json says it is no JSON", e.Detail)
	}
	answer, err := jsonrpc.Parse(e.Response())
	if err != nil || answer.Kind != jsonrpc.Response {
		t.Fatalf("the answer %s is not one: %v", e.Response(), err)
	}
}

// deep reports whether there are enough brackets for a message that is too deep,
// the inside of which Parse does not read.
func deep(in []byte) bool {
	return bytes.Count(in, []byte("["))+bytes.Count(in, []byte("{")) > jsonrpc.MaxDepth
}

// strict reads one value with jsontext, which refuses equal names at any depth and
// lone surrogates.
func strict(in []byte) error {
	d := jsontext.NewDecoder(bytes.NewReader(in))
	if _, err := d.ReadValue(); err != nil {
		return err
	}
	if _, err := d.ReadToken(); err != io.EOF {
		return fmt.Errorf("after the value: %w", err)
	}
	return nil
}

// stdText is Text by way of encoding/json's tokens.
func stdText(t *testing.T, in []byte) string {
	t.Helper()
	var all []string
	for d := json.NewDecoder(bytes.NewReader(in)); ; {
		token, err := d.Token()
		if err == io.EOF {
			return strings.Join(all, "\n")
		}
		if err != nil {
			t.Fatal(err)
		}
		if s, ok := token.(string); ok {
			all = append(all, s)
		}
	}
}

// FuzzStrictness proves that a document is refused for what it is, rather than for
// the message that it fails to be, exactly when jsontext refuses it.
func FuzzStrictness(f *testing.F) {
	for _, s := range []string{`{"a":1,"\u0061":2}`, `["\ud800"]`, `"\udbff\udfff"`, `[1.0e+5,-0,true]`, `{"a":{"b":{}},"b":[]}`, `"é"`, "\"\xff\"", `01`, `{"a" :1 , "b": 2}`} {
		f.Add(fmt.Appendf(nil, `{"v":%s}`, s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		_, err := jsonrpc.Parse(in)
		var e *jsonrpc.Error
		if !errors.As(err, &e) {
			e = &jsonrpc.Error{}
		}
		refused := false
		switch e.Detail {
		case jsonrpc.NotJSON, jsonrpc.NotUTF8, jsonrpc.DuplicateMember, jsonrpc.LoneSurrogate:
			refused = true
		case jsonrpc.TooDeep, jsonrpc.CaseVariant, jsonrpc.NotObject, jsonrpc.Batch:
			return // jsontext knows nothing of it, or it hides another fault
		}
		if want := strict(in); refused != (want != nil) {
			t.Fatalf("got %v, jsontext says %v", err, want)
		}
	})
}

// FuzzValues proves that reading parts of arbitrary bytes neither panics nor hands
// out anything but slices of them.
func FuzzValues(f *testing.F) {
	seed(f)
	f.Fuzz(func(t *testing.T, in []byte) {
		for name, value := range jsonrpc.Members(in) {
			jsonrpc.Member(in, name)
			jsonrpc.Text(value)
		}
		for value := range jsonrpc.Elements(in) {
			jsonrpc.String(value)
		}
		jsonrpc.Lookalike(in, "name")
		jsonrpc.ParseError(in)
		jsonrpc.Line(in)
		if !json.Valid(in) || !utf8.Valid(in) {
			return
		}
		var members map[string]json.RawMessage
		if json.Unmarshal(in, &members) == nil && strict(in) == nil {
			got := map[string]json.RawMessage{}
			for name, value := range jsonrpc.Members(in) {
				got[name] = value
			}
			if len(got)+len(members) > 0 && !reflect.DeepEqual(got, members) {
				t.Fatalf("members %q, want %q", got, members)
			}
		}
		var elements []json.RawMessage
		if json.Unmarshal(in, &elements) == nil {
			var got []json.RawMessage
			for value := range jsonrpc.Elements(in) {
				got = append(got, value)
			}
			if len(got)+len(elements) > 0 && !reflect.DeepEqual(got, elements) {
				t.Fatalf("elements %q, want %q", got, elements)
			}
		}
	})
}

// messages are what the benchmarks read.
func messages() map[string][]byte {
	call := func(arguments string) []byte {
		return []byte(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"everything__echo","arguments":` + arguments + `,"_meta":{"progressToken":1}}}`)
	}
	member := `"description":"a \"quoted\" line\nand another","count":12345,"tags":["x","yy","zzz"],"nested":{"ok":true,"none":null}`
	var many []string
	for i := range 6_000 {
		many = append(many, fmt.Sprintf(`"key%d":{%s}`, i, member))
	}
	return map[string][]byte{
		"small":        call(`{"message":"hello"}`),
		"1KiB":         call(`{"message":"` + strings.Repeat("hello world, ", 70) + `"}`),
		"900KiB-text":  call(`{"message":"` + strings.Repeat("hello world, ", 70_000) + `"}`),
		"900KiB-tree":  call(`{` + strings.Join(many, ",") + `}`),
		"900KiB-names": call(`{"` + names(80_000) + `}`),
		"900KiB-\\u":   call(`{"message":"` + strings.Repeat(`\u0065`, 150_000) + `"}`),
	}
}

func names(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `%d":0,"`, i)
	}
	return b.String() + `":0`
}

func BenchmarkParse(b *testing.B) {
	for name, in := range messages() {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(in)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := jsonrpc.Parse(in); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkJSONText is what the strictest ready-made scanner takes for validity
// alone.
func BenchmarkJSONText(b *testing.B) {
	for name, in := range messages() {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(in)))
			for b.Loop() {
				if !jsontext.Value(in).IsValid() {
					b.Fatal("invalid")
				}
			}
		})
	}
}

func BenchmarkText(b *testing.B) {
	for name, in := range messages() {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(in)))
			b.ReportAllocs()
			for b.Loop() {
				if jsonrpc.Text(in) == "" {
					b.Fatal("no text")
				}
			}
		})
	}
}

func BenchmarkWithID(b *testing.B) {
	for name, in := range messages() {
		m, err := jsonrpc.Parse(in)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(in)))
			for b.Loop() {
				m.WithID([]byte("12345"))
			}
		})
	}
}

// TestTextOfLargeArgumentsIsFast guards a bar of 10 ms at ten times that.
func TestTextOfLargeArgumentsIsFast(t *testing.T) {
	for name, in := range messages() {
		start := time.Now()
		if jsonrpc.Text(in) == "" {
			t.Error("no text")
		}
		if took := time.Since(start); took > 100*time.Millisecond {
			t.Errorf("%s took %v", name, took)
		}
	}
}
