//go:build linux

package relay

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"unicode/utf8"
)

func TestLinesAreToldApart(t *testing.T) {
	for _, tt := range []struct {
		line   string
		want   kind
		id     string
		method string
	}{
		{`{"jsonrpc":"2.0","id":1,"method":"ping"}`, request, "1", "ping"},
		{`{"method":"tools/call","params":{"id":7},"jsonrpc":"2.0","id":"a"}`, request, `"a"`, "tools/call"},
		{`{"id":null,"method":"ping"}`, request, "null", "ping"},
		{`{ "id" : 9007199254740993 , "method" : "x" }`, request, "9007199254740993", "x"},
		{`{"id":{"a":[1,2]},"method":"x"}`, request, `{"a":[1,2]}`, "x"},
		{`{"i\u0064":4,"m\u0065thod":"x"}`, request, "4", "x"},
		{`{"id":"a\"},{b","method":"x"}`, request, `"a\"},{b"`, "x"},
		{`{"jsonrpc":"2.0","method":"notifications/initialized"}`, notification, "", "notifications/initialized"},
		{`{"method":"x","params":{"id":1}}`, notification, "", "x"},
		{`{"method":"x","params":["id",{"id":1}]}`, notification, "", "x"},
		{`{}`, notification, "", ""},
		{`{"id":1,"result":{}}`, answer, "1", ""},
		{`{"error":{"code":1,"message":"m"},"id":"q"}`, answer, `"q"`, ""},
		{`{"id":1,"method":"x","result":{}}`, request, "1", "x"},
		{`{"id":1,"method":7}`, request, "1", ""},
		{`not json`, request, "", ""},
		{`{"method":"x"`, request, "", "x"},
		{`[{"id":1}]`, request, "", ""},
		{`"id"`, request, "", ""},
		{`42`, request, "", ""},
		{"{\"method\":\"\xff\"}", request, "", "\uFFFD"},
	} {
		got, m := classify([]byte(tt.line))
		if got != tt.want || string(m.ID) != tt.id || (got != request && m.Method != tt.method) {
			t.Errorf("%s: got kind %d, id %s, method %q; want %d, %s, %q", tt.line, got, m.ID, m.Method, tt.want, tt.id, tt.method)
		}
	}
}

func TestALineOverTheLimitIsSkippedButItsIDIsFound(t *testing.T) {
	const limit = 100
	long := strings.Repeat("x", 300_000)
	for _, tt := range []struct{ name, line, id string }{
		{"id first", `{"jsonrpc":"2.0","id":12,"method":"m","params":{"a":"` + long + `"}}`, "12"},
		{"id last", `{"method":"m","params":{"id":1,"a":"` + long + `"},"jsonrpc":"2.0","id":"last"}`, `"last"`},
		{"no id", `{"method":"m","params":{"id":1,"a":"` + long + `"}}`, ""},
	} {
		r := newLineReader(strings.NewReader(tt.line+"\n{\"next\":1}\n"), limit)
		l, err := r.next()
		if err != nil || l.text != nil || l.size != int64(len(tt.line)) {
			t.Errorf("%s: got text %.20q, size %d, %v", tt.name, l.text, l.size, err)
		}
		if string(l.members.ID) != tt.id || l.members.Method != "m" {
			t.Errorf("%s: found id %s of method %q", tt.name, l.members.ID, l.members.Method)
		}
		if l, err := r.next(); err != nil || string(l.text) != `{"next":1}` {
			t.Errorf("%s: the next line is %q, %v", tt.name, l.text, err)
		}
	}
}

func TestLinesAtTheLimit(t *testing.T) {
	for n, fits := range map[int]bool{99: true, 100: true, 101: false} {
		for _, end := range []string{"\n", "\r\n", ""} {
			r := newLineReader(iotest.OneByteReader(strings.NewReader(strings.Repeat("x", n)+end)), 100)
			l, err := r.next()
			if err != nil || (l.text != nil) != fits {
				t.Errorf("%d bytes ending in %q: text %.10q, size %d, %v", n, end, l.text, l.size, err)
			}
		}
	}
}

func TestBlankLinesAndCarriageReturnsAreTolerated(t *testing.T) {
	r := newLineReader(strings.NewReader("\n\r\n  \n{\"a\":1} \r\n\t\n{\"b\":2}"), 100)
	for _, want := range []string{`{"a":1}`, `{"b":2}`} {
		if l, err := r.next(); err != nil || string(l.text) != want {
			t.Errorf("got %q, %v, want %q", l.text, err, want)
		}
	}
	if _, err := r.next(); !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %v", err)
	}
}

// FuzzClassify compares the scanner with encoding/json on what both can read,
// and feeds every line in pieces too.
func FuzzClassify(f *testing.F) {
	f.Add([]byte(`{"jsonrpc":"2.0","id":1,"method":"ping"}`), 3)
	f.Add([]byte(`{"id":{"a":[1,"}"]},"result":{"id":2}}`), 9)
	f.Add([]byte(`{"i\u0064":"\"","x":[{"id":1}],"method":"m\\"}`), 5)
	f.Add([]byte(`[1]`), 1)
	f.Fuzz(func(t *testing.T, line []byte, cut int) {
		_, whole := classify(line)
		var pieces members
		cut = min(max(cut, 0), len(line))
		pieces.scan(line[:cut])
		pieces.scan(line[cut:])
		if whole.HasID != pieces.HasID || !bytes.Equal(whole.ID, pieces.ID) || whole.Method != pieces.Method {
			t.Errorf("whole %+v, in pieces %+v", whole, pieces)
		}
		if !utf8.Valid(line) || len(line) > maxName {
			return
		}
		keys, ok := topLevelKeys(line)
		if !ok {
			return
		}
		if whole.HasID != keys["id"] || whole.HasMethod != keys["method"] || whole.HasAnswer != (keys["result"] || keys["error"]) {
			t.Errorf("%s: got %+v, encoding/json sees %v", line, whole, keys)
		}
	})
}

// topLevelKeys reads an object's keys with encoding/json.
func topLevelKeys(line []byte) (map[string]bool, bool) {
	var object map[string]json.RawMessage
	if !json.Valid(line) || json.Unmarshal(line, &object) != nil || object == nil {
		return nil, false
	}
	keys := make(map[string]bool)
	for k := range object {
		keys[k] = true
	}
	return keys, true
}
