package mcptools_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/mcptools"
)

// hello are the lines with which a client begins.
const hello = `{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"a \"client\"\nof ünusual name","version":"1"}}}
{"jsonrpc":"2.0","method":"notifications/initialized"}
`

// talk serves input to its end, and returns the lines that came back.
func talk(t *testing.T, o mcptools.Options, input string) []string {
	t.Helper()
	var out strings.Builder
	if err := mcptools.Serve(t.Context(), o, strings.NewReader(input), &out); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	for _, line := range lines {
		if !json.Valid([]byte(line)) {
			t.Errorf("a line is no JSON: %q", line)
		}
	}
	return lines
}

func TestWhatWasAskedBeforeTheEndOfInputIsAnswered(t *testing.T) {
	_, o := newService(t, reply(api.VMList{}))
	lines := talk(t, o, hello+`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"capsem_list"}}
{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"capsem_list","arguments":{}}}`)
	if len(lines) != 3 {
		t.Errorf("got %d lines: %q", len(lines), lines)
	}
}

func TestALineThatIsNoMessageIsAnsweredAndEndsNothing(t *testing.T) {
	_, o := newService(t, reply(api.VMList{}))
	for line, code := range map[string]string{
		"junk": "-32700", `{"jsonrpc":"2.0",`: "-32700", "\xff": "-32700",
		`[]`: "-32600", `[{"jsonrpc":"2.0","id":9,"method":"ping"}]`: "-32600", `{"jsonrpc":"1.0","id":1,"method":"ping"}`: "-32600", `3`: "-32600",
	} {
		lines := talk(t, o, hello+line+"\r\n\n"+`{"jsonrpc":"2.0","id":1,"method":"ping"}`+"\n")
		if !slices.ContainsFunc(lines, func(l string) bool {
			return strings.Contains(l, `"id":null`) && strings.Contains(l, code)
		}) {
			t.Errorf("%q: no answer with %s in %q", line, code, lines)
		}
		if !slices.ContainsFunc(lines, func(l string) bool { return strings.Contains(l, `"id":1,`) && strings.Contains(l, "result") }) {
			t.Errorf("%q: the next request has no answer in %q", line, lines)
		}
	}
}

func TestTheRequestIdIsRecordedWhateverTheClientPutsInMeta(t *testing.T) {
	for id, want := range map[string]string{
		`5`: "5", `"five"`: "five", `"a\nb"`: `a\nb`, `9007199254740991`: "9007199254740991",
		`"` + strings.Repeat("é", 1000) + `"`: strings.Repeat(`\u00e9`, 43)[:256],
	} {
		far, o := newService(t, reply(api.VMList{}))
		talk(t, o, hello+`{"jsonrpc":"2.0","id":`+id+`,"method":"tools/call","params":{"_meta":{"capsem/requestId":"forged","x":1},"name":"capsem_list"}}`+"\n")
		if got := far.last(t).Call; got != want {
			t.Errorf("%s is recorded as %q", id, got)
		}
		if got, want := far.last(t).Client, `a "client"\nof \u00fcnusual name/1`; got != want {
			t.Errorf("the client is recorded as %q", got)
		}
	}
}

func TestAMessageOverTheBoundIsAnsweredAndEndsNothing(t *testing.T) {
	const bound = 17 << 20
	far, o := newService(t, reply(api.ExecResult{}))
	// message is one of size bytes, with its id where before and after have it.
	message := func(size int, before, after string) string {
		before = "{" + before + `"jsonrpc":"2.0","method":"tools/call","params":{"name":"capsem_exec","arguments":{"id":"box","command":"`
		after = `"}}` + after + "}\n"
		return before + strings.Repeat("x", size-len(before)-len(after)) + after
	}
	for name, test := range map[string]struct {
		size          int
		before, after string
		id, what      string
	}{
		"at the bound":            {bound, `"id":5,`, "", "5", "result"},
		"over it, id first":       {bound + 1, `"id":5,`, "", "5", "-32001"},
		"far over it, id last":    {bound + 1<<20, "", `,"id":"a"`, `"a"`, "-32001"},
		"id in the middle":        {bound + 1, "", `,"id":5,"y":{}`, "null", "-32001"},
		"id of something else":    {bound + 1, "", `,"y":{"id":5}`, "null", "-32001"},
		"a name that ends in id":  {bound + 1, "", `,"\"id":5`, "null", "-32001"},
		"an id that is an object": {bound + 1, `"id":{},`, "", "null", "-32001"},
	} {
		t.Run(name, func(t *testing.T) {
			far.requests = nil
			lines := talk(t, o, hello+message(test.size, test.before, test.after)+`{"jsonrpc":"2.0","id":"next","method":"ping"}`+"\n")
			var answered, next bool
			for _, line := range lines {
				answered = answered || strings.Contains(line, `"id":`+test.id+`,`) && strings.Contains(line, test.what)
				next = next || strings.Contains(line, `"id":"next"`)
			}
			if !answered || !next {
				t.Errorf("got %.300q", lines)
			}
			if served := len(far.requests); served != 0 && test.what != "result" {
				t.Errorf("%d requests were made", served)
			}
		})
	}
}

// Whoever ends the server ends what it runs, also where the client has closed
// already and the server only waits for answers.
func TestTheServerEndsWhileACommandRuns(t *testing.T) {
	for name, closes := range map[string]bool{"the client is there": false, "the client has closed": true} {
		t.Run(name, func(t *testing.T) {
			arrived, ended := make(chan struct{}), make(chan struct{})
			_, o := newService(t, func(_ http.ResponseWriter, r *http.Request) {
				close(arrived)
				<-r.Context().Done()
				close(ended)
			})
			in, feed := io.Pipe()
			ctx, stop := context.WithCancel(t.Context())
			served := make(chan error, 1)
			go func() { served <- mcptools.Serve(ctx, o, in, io.Discard) }()
			io.WriteString(feed, hello+`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"capsem_exec","arguments":{"id":"box","command":"sleep 1000"}}}`+"\n")
			if closes {
				feed.Close()
			}
			<-arrived
			stop()
			if err := <-served; err != nil {
				t.Error(err)
			}
			<-ended
		})
	}
}

func TestACallIsAnsweredWhileAnotherTakesItsTime(t *testing.T) {
	release := make(chan struct{})
	_, o := newService(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			<-release
			api.WriteJSON(w, http.StatusOK, api.ExecResult{})
			return
		}
		api.WriteJSON(w, http.StatusOK, api.VMList{})
	})
	in, feed := io.Pipe()
	answers, out := io.Pipe()
	served := make(chan error, 1)
	go func() { served <- mcptools.Serve(t.Context(), o, in, out) }()
	go io.WriteString(feed, hello+`{"jsonrpc":"2.0","id":"slow","method":"tools/call","params":{"name":"capsem_exec","arguments":{"id":"box","command":"x"}}}
{"jsonrpc":"2.0","id":"quick","method":"tools/call","params":{"name":"capsem_list"}}
`)
	lines := bufio.NewScanner(answers)
	var order []string
	for lines.Scan() {
		var m struct{ ID any }
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			t.Fatal(err)
		}
		if id, ok := m.ID.(string); ok {
			order = append(order, id)
			if id == "quick" {
				close(release)
				feed.Close()
			}
		}
		if len(order) == 2 {
			break
		}
	}
	if !slices.Equal(order, []string{"quick", "slow"}) {
		t.Errorf("answered in the order %q", order)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
}
