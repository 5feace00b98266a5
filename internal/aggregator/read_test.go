package aggregator

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
)

// lines reads everything, with "!" and the size for a line that was skipped.
func lines(r io.Reader, limit int) []string {
	l := newLineReader(r, limit)
	var out []string
	for {
		line, err := l.next()
		var long *tooLongError
		switch {
		case errors.As(err, &long):
			out = append(out, "!"+strings.Repeat("x", int(long.size)))
		case err != nil:
			return out
		default:
			out = append(out, string(line))
		}
	}
}

func TestLinesHoldTheirBound(t *testing.T) {
	for _, size := range []int{64<<10 - 1, 64 << 10, 64<<10 + 1, 1 << 20, 1<<20 + 1, 3 << 20} {
		line := strings.Repeat("x", size)
		want := []string{"a", line, "b", "", "c"}
		if size > 1<<20 {
			want[1] = "!" + line
		}
		got := lines(strings.NewReader("a\n"+line+"\nb\n\nc"), 1<<20)
		if !cmp.Equal(want, got) {
			t.Errorf("%d bytes: %d lines", size, len(got))
		}
	}
}

func TestTheIDOfALineOverTheLimitIsFoundAtEitherEnd(t *testing.T) {
	filler := strings.Repeat("f", 1000)
	for _, test := range []struct {
		line string
		want uint64
		ok   bool
	}{
		{`{"jsonrpc":"2.0","id":17,"result":"` + filler + `"}`, 17, true},
		{`{"result":"` + filler + `","jsonrpc":"2.0","id":18}`, 18, true},
		{`{"result":"` + filler + `","id" : 19 ,"jsonrpc":"2.0"}`, 19, true},
		{`{"jsonrpc":"2.0","method":"m","id":20,"params":"` + filler + `"}`, 0, false},
		{`{"jsonrpc":"2.0","id":"21","result":"` + filler + `"}`, 0, false},
		{`{"result":"` + filler + `"}`, 0, false},
		{`{"result":"` + filler + `","id":22`, 0, false},
	} {
		_, err := newLineReader(strings.NewReader(test.line+"\n"), 100).next()
		var long *tooLongError
		if !errors.As(err, &long) {
			t.Fatal(err)
		}
		if id, ok := long.answers(); id != test.want && test.ok || ok != test.ok {
			t.Errorf("%.60s: %d, %t", test.line, id, ok)
		}
	}
}

// events reads everything, each event as name, id and data.
func events(r io.Reader, limit int) (out [][3]string, err error) {
	s := newSSEReader(r, limit)
	for {
		e, err := s.next()
		if err != nil {
			return out, err
		}
		out = append(out, [3]string{e.name, e.id, string(e.data)})
	}
}

func TestEventsAreReadAsTheStandardSays(t *testing.T) {
	for _, test := range []struct {
		name, in string
		want     [][3]string
	}{
		{"lines of one event", "data: a\ndata: b\n\n", [][3]string{{"", "", "a\nb"}}},
		{"CRLF and CR", "data: a\r\n\r\ndata: b\r\rdata: c\n\n", [][3]string{{"", "", "a"}, {"", "", "b"}, {"", "", "c"}}},
		{"id stays", "id: 1\ndata: a\n\ndata: b\n\nid\ndata: c\n\n", [][3]string{{"", "1", "a"}, {"", "1", "b"}, {"", "", "c"}}},
		{"name does not", "event: x\ndata: a\n\ndata: b\n\n", [][3]string{{"x", "", "a"}, {"", "", "b"}}},
		{"one space only", "data:  a\n\ndata:b\n\n", [][3]string{{"", "", " a"}, {"", "", "b"}}},
		{"no data, no event", "event: x\n\n: comment\n\ndata\n\n", [][3]string{{"", "", ""}}},
		{"byte order mark", "\xEF\xBB\xBFdata: a\n\n", [][3]string{{"", "", "a"}}},
		{"cut off", "data: a\n\ndata: b\n", [][3]string{{"", "", "a"}}},
		{"id with NUL", "id: a\x00b\ndata: a\n\n", [][3]string{{"", "", "a"}}},
	} {
		for _, r := range []io.Reader{strings.NewReader(test.in), iotest.OneByteReader(strings.NewReader(test.in))} {
			got, err := events(r, 1000)
			if diff := cmp.Diff(test.want, got); diff != "" || !errors.Is(err, io.EOF) {
				t.Errorf("%s: %v %s", test.name, err, diff)
			}
		}
	}
}

func TestEventsHoldTheirBound(t *testing.T) {
	for _, in := range []string{
		"data: " + strings.Repeat("x", 2000),
		strings.Repeat("data: 1234567890\n", 200),
		": " + strings.Repeat("x", 2000),
	} {
		if _, err := events(strings.NewReader(in), 1000); !errors.Is(err, errEventTooLarge) {
			t.Errorf("%.20q: %v", in, err)
		}
	}
	if got, err := events(strings.NewReader("data: "+strings.Repeat("x", 1000)+"\n\n"), 1000); len(got) != 1 {
		t.Errorf("an event at the limit: %v", err)
	}
}

func FuzzLines(f *testing.F) {
	f.Add([]byte("a\nbb\n\nccc"), 2)
	f.Add([]byte(strings.Repeat("x", 100)+"\n"), 50)
	f.Fuzz(func(t *testing.T, in []byte, limit int) {
		if limit < 0 || limit > 1<<20 {
			return
		}
		got := lines(bytes.NewReader(in), limit)
		if diff := cmp.Diff(got, lines(iotest.OneByteReader(bytes.NewReader(in)), limit)); diff != "" {
			t.Errorf("it depends on how the bytes arrive: %s", diff)
		}
		want := strings.Split(strings.TrimSuffix(string(in), "\n"), "\n")
		if len(in) == 0 {
			want = nil
		}
		for i, w := range want {
			if len(w) > limit {
				want[i] = "!" + strings.Repeat("x", len(w))
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	})
}

func FuzzEvents(f *testing.F) {
	f.Add([]byte("id: 1\nevent: e\ndata: a\ndata: b\n\n"))
	f.Add([]byte("data: a\r\rdata: b\r\n\r\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		const limit = 64
		got, err := events(bytes.NewReader(in), limit)
		again, err2 := events(iotest.OneByteReader(bytes.NewReader(in)), limit)
		if diff := cmp.Diff(got, again); diff != "" || !errors.Is(err2, err) {
			t.Errorf("it depends on how the bytes arrive: %v, %v %s", err, err2, diff)
		}
		for _, e := range got {
			if len(e[2]) > limit+16 {
				t.Errorf("an event of %d bytes", len(e[2]))
			}
		}
		// What was read, written as events, is read again as the same.
		var out strings.Builder
		for _, e := range got {
			out.WriteString("event: " + e[0] + "\nid: " + e[1] + "\n")
			for line := range strings.SplitSeq(e[2], "\n") {
				out.WriteString("data: " + line + "\n")
			}
			out.WriteString("\n")
		}
		back, err := events(strings.NewReader(out.String()), 1<<20)
		if diff := cmp.Diff(got, back); diff != "" || !errors.Is(err, io.EOF) {
			t.Errorf("%v %s", err, diff)
		}
	})
}
