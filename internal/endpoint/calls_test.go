package endpoint_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/endpoint"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/route"
)

func bufioReader(r io.Reader) *bufio.Reader { return bufio.NewReader(r) }

// blockUntil answers when the channel is closed, or not at all when the caller
// gives up first.
func blockUntil(release <-chan struct{}) func(context.Context, string, json.RawMessage) (json.RawMessage, error) {
	return func(ctx context.Context, _ string, _ json.RawMessage) (json.RawMessage, error) {
		select {
		case <-release:
			return json.RawMessage(`{"jsonrpc":"2.0","id":1,"result":{}}`), nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func call(id, name, arguments string) string {
	return `{"jsonrpc":"2.0","id":` + id + `,"method":"tools/call","params":{"name":"` + name + `","arguments":` + arguments + `}}`
}

func TestTheServersBytesArriveButForTheID(t *testing.T) {
	w := newWorld()
	w.call = func(context.Context, string, json.RawMessage) (json.RawMessage, error) {
		return json.RawMessage(`{ "result" : {"content":[],"n":1.50,"u":"\u00e9","x-new":null} ,"extra":true,"jsonrpc":"2.0","id":41 }`), nil
	}
	g := connect(t, w.endpoint(), false)
	for _, id := range []string{"9007199254740993", "-0", "1e3", "1.5", `""`, `"` + strings.Repeat("i", 10<<10) + `"`} {
		got := g.ask(call(id, "srv__echo", `{"a": 1}`))
		want := `{ "result" : {"content":[],"n":1.50,"u":"\u00e9","x-new":null} ,"extra":true,"jsonrpc":"2.0","id":` + id + ` }`
		if got != want {
			t.Errorf("id %.20s: got %s", id, got)
		}
	}
}

func TestTheServerGetsTheGuestsBytesButForTheName(t *testing.T) {
	w := newWorld()
	g := connect(t, w.endpoint(), false)
	g.ask(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{ "arguments" : {"n":1.0,"e":"\u0065"}, "name":"srv__a__b" ,"_meta":{"k":[ ]}}}`)
	want := []string{`srv { "arguments" : {"n":1.0,"e":"\u0065"}, "name":"a__b" ,"_meta":{"k":[ ]}}`}
	if diff := cmp.Diff(want, w.sent); diff != "" {
		t.Error(diff)
	}
}

func TestABlockedCallDoesNotReachTheServerAndTheGuestLearnsTheRule(t *testing.T) {
	w := newWorld()
	w.rule = func(ev *event.Event, p event.Phase, _ *event.Outcome) string {
		if p == event.Request && ev.Type == event.MCPToolCall && strings.Contains(string(ev.MCP.Arguments), "evil-marker") {
			return "profile.no_evil"
		}
		return ""
	}
	g := connect(t, w.endpoint(), false)
	got := g.ask(call("7", "srv__echo", `{"pad":"`+strings.Repeat("x", 900<<10)+`","text":"evil-marker"}`))
	want := `{"jsonrpc":"2.0","id":7,"error":{"code":-32600,"message":"blocked by rule profile.no_evil: Because.",` +
		`"data":{"capsem":{"decision":"block","rule":"profile.no_evil","event":"` + w.begun[0].ID + `"}}}}`
	if got != want || len(w.sent) != 0 || w.toolCalls() != 1 {
		t.Errorf("got %s; sent %q; %d rows", got, w.sent, w.toolCalls())
	}
}

func TestABlockedAnswerDoesNotReachTheGuest(t *testing.T) {
	w := newWorld()
	w.call = func(context.Context, string, json.RawMessage) (json.RawMessage, error) {
		return json.RawMessage(`{"jsonrpc":"2.0","id":1,"result":{"content":[{"type":"text","text":"classified"}]}}`), nil
	}
	w.rule = func(_ *event.Event, p event.Phase, out *event.Outcome) string {
		if p == event.Response && out.MCP != nil && strings.Contains(string(out.MCP.Result), "classified") {
			return "profile.out"
		}
		return ""
	}
	g := connect(t, w.endpoint(), false)
	got := g.ask(call("7", "srv__echo", `{}`))
	if strings.Contains(got, "classified") || !strings.Contains(got, "profile.out") || len(w.sent) != 1 {
		t.Errorf("got %s", got)
	}
}

func TestAServersErrorPassesWithItsCodeAndData(t *testing.T) {
	w := newWorld()
	w.call = func(context.Context, string, json.RawMessage) (json.RawMessage, error) {
		return json.RawMessage(`{"jsonrpc":"2.0","id":1,"error":{"code":-1234,"message":"no","data":{"d":1}}}`), nil
	}
	g := connect(t, w.endpoint(), false)
	if got, want := g.ask(call("7", "srv__echo", `{}`)), `{"jsonrpc":"2.0","id":7,"error":{"code":-1234,"message":"no","data":{"d":1}}}`; got != want {
		t.Errorf("got %s", got)
	}
	if w.ends[0].Status != event.Failed || w.ends[0].Error.Code != -1234 {
		t.Errorf("recorded %+v", w.ends[0])
	}
}

func TestAnAnswerThatTwoParsersCouldReadDifferentlyIsKeptFromTheGuest(t *testing.T) {
	for name, answer := range map[string]string{
		"duplicate":     `{"jsonrpc":"2.0","id":1,"result":{"a":"classified","a":2}}`,
		"result+error":  `{"jsonrpc":"2.0","id":1,"result":"classified","error":{"code":1,"message":"m"}}`,
		"not JSON":      `classified`,
		"a request":     `{"jsonrpc":"2.0","id":1,"method":"classified"}`,
		"surrogate":     `{"jsonrpc":"2.0","id":1,"result":"classified\ud800"}`,
		"error no code": `{"jsonrpc":"2.0","id":1,"error":{"message":"classified"}}`,
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			w.call = func(context.Context, string, json.RawMessage) (json.RawMessage, error) {
				return json.RawMessage(answer), nil
			}
			g := connect(t, w.endpoint(), false)
			got := g.ask(call("7", "srv__echo", `{}`))
			if strings.Contains(got, "classified") || !strings.Contains(got, `"code":-32603`) {
				t.Errorf("got %s", got)
			}
			g.alive()
		})
	}
}

func TestEveryToolCallHasOneRowWhateverBecomesOfIt(t *testing.T) {
	w := newWorld()
	w.call = func(context.Context, string, json.RawMessage) (json.RawMessage, error) {
		return nil, &event.Error{Code: jsonrpc.CodeInternal, Message: "server srv exited: signal: killed"}
	}
	g := connect(t, w.endpoint(), false)
	for i, tt := range []struct{ message, want string }{
		{call("1", "srv__nothing", `{}`), `{"jsonrpc":"2.0","id":1,"error":{"code":-32602,"message":"unknown tool"}}`},
		{call("1", "down__x", `{}`), `{"jsonrpc":"2.0","id":1,"error":{"code":-32603,"message":"server down is not up (backoff)"}}`},
		{call("2", "srv__echo", `"text"`), `"code":-32602`},
		{call("3", "srv__echo", `null`), `"code":-32602`},
		{`{"jsonrpc":"2.0","id":4,"method":"tools/call"}`, `"code":-32602`},
		{`{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{"name":7}}`, `"code":-32602`},
		{`{"jsonrpc":"2.0","id":6,"method":"tools/call","params":{"Name":"srv__echo","name2":1}}`, `"code":-32602`},
		{call("7", "srv__echo", `{}`), `{"jsonrpc":"2.0","id":7,"error":{"code":-32603,"message":"server srv exited: signal: killed"}}`},
	} {
		if got := g.ask(tt.message); !strings.Contains(got, tt.want) {
			t.Errorf("%s: got %s", tt.message, got)
		}
		if w.toolCalls() != i+1 {
			t.Errorf("%d rows after %d calls", w.toolCalls(), i+1)
		}
	}
}

func TestTheListIsTheServersOwnButForTheNames(t *testing.T) {
	w := newWorld()
	g := connect(t, w.endpoint(), false)
	got := g.ask(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`)
	want := `{"jsonrpc":"2.0","id":1,"result":{"tools":[` +
		`{"name":"srv__echo","inputSchema":{"type":"object"},"x-unknown":[1,2]},{"name":"srv__a__b","inputSchema":{"type":"object"},"x-unknown":[1,2]}]}}`
	if got != want {
		t.Errorf("got %s", got)
	}
}

func TestALongListComesInPages(t *testing.T) {
	w := newWorld()
	var tools []route.Tool
	for i := range 40 {
		tools = append(tools, route.Tool{Name: fmt.Sprintf("t%02d", i), Definition: json.RawMessage(
			fmt.Sprintf(`{"name":"t%02d","description":%q}`, i, strings.Repeat("d", 50<<10)))})
	}
	w.table, _ = route.New([]route.Server{{Name: "srv", Tools: tools}})
	g := connect(t, w.endpoint(), false)
	var names []string
	pages, cursor := 0, ""
	for {
		pages++
		var answer struct {
			Result struct {
				Tools      []struct{ Name string }
				NextCursor string
			}
		}
		params := "{}"
		if cursor != "" {
			params = `{"cursor":"` + cursor + `"}`
		}
		if err := json.Unmarshal([]byte(g.ask(`{"jsonrpc":"2.0","id":1,"method":"tools/list","params":`+params+`}`)), &answer); err != nil {
			t.Fatal(err)
		}
		for _, tool := range answer.Result.Tools {
			names = append(names, tool.Name)
		}
		if cursor = answer.Result.NextCursor; cursor == "" {
			break
		}
	}
	if len(names) != 40 || names[0] != "srv__t00" || names[39] != "srv__t39" || pages < 4 {
		t.Errorf("%d pages: %v", pages, names)
	}
	for _, bad := range []string{`"x"`, `7`, `"MTpvdGhlcg"`} {
		if got := g.ask(`{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"cursor":` + bad + `}}`); !strings.Contains(got, "-32602") {
			t.Errorf("cursor %s: %s", bad, got)
		}
	}
}

func TestAChangedListIsToldOnceAndOnlyToWhomItMatters(t *testing.T) {
	w := newWorld()
	e := w.endpoint()
	g := connect(t, e, false)
	g.ask(`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18"}}`)
	g.notify(`{"jsonrpc":"2.0","method":"notifications/initialized"}`)
	g.ask(`{"jsonrpc":"2.0","id":2,"method":"tools/list"}`)
	same, _ := route.New([]route.Server{{Name: "srv", Tools: []route.Tool{tool("echo"), tool("a__b")}}})
	e.Changed(same)
	other, _ := route.New([]route.Server{{Name: "srv", Tools: []route.Tool{tool("echo")}}})
	e.Changed(other)
	e.Changed(other)
	if stream, got := g.read(); stream != 0 || got != `{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}` {
		t.Errorf("got %d %s", stream, got)
	}
	g.alive() // nothing else is in between
}

func TestInitializeAgreesOnAVersion(t *testing.T) {
	for asked, want := range map[string]string{
		"2024-11-05": "2024-11-05", "2025-03-26": "2025-03-26", "2025-06-18": "2025-06-18", "2025-11-25": "2025-11-25",
		"1999-01-01": "2025-11-25", "2099-01-01": "2025-11-25",
	} {
		g := connect(t, newWorld().endpoint(), false)
		got := g.ask(`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"` + asked + `"}}`)
		if !strings.Contains(got, `"protocolVersion":"`+want+`"`) {
			t.Errorf("%s: got %s", asked, got)
		}
	}
	g := connect(t, newWorld().endpoint(), false)
	if got := g.ask(`{"jsonrpc":"2.0","id":1,"method":"initialize"}`); !strings.Contains(got, "-32602") {
		t.Errorf("without a version: %s", got)
	}
}

func TestASlowCallHoldsUpNothing(t *testing.T) {
	w := newWorld()
	release := make(chan struct{})
	w.call = blockUntil(release)
	g := connect(t, w.endpoint(), false)
	slow := g.send(call("1", "srv__echo", `{}`))
	for range 100 {
		g.alive()
	}
	close(release)
	if stream, _ := g.read(); stream != slow {
		t.Errorf("the answer came on stream %d", stream)
	}
}

func TestCancellingARequestReachesItAndEndsItsStream(t *testing.T) {
	w := newWorld()
	started, ended := make(chan struct{}), make(chan error, 1)
	w.call = func(ctx context.Context, _ string, _ json.RawMessage) (json.RawMessage, error) {
		close(started)
		<-ctx.Done()
		ended <- context.Cause(ctx)
		return nil, context.Cause(ctx)
	}
	g := connect(t, w.endpoint(), false)
	slow := g.send(call(`"a"`, "srv__echo", `{}`))
	<-started
	g.notify(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"b"}}`)
	g.notify(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"a"}}`)
	<-ended
	if stream, payload := g.read(); stream != slow || payload != "" {
		t.Errorf("got %d %s, want the end of the stream without an answer", stream, payload)
	}
	g.alive()
	if got := w.ends[len(w.ends)-2].Status; got != event.Cancelled && w.ends[len(w.ends)-3].Status != event.Cancelled {
		t.Errorf("recorded %v", got)
	}
}

func TestAGuestThatGoesAwayCancelsWhatItAsked(t *testing.T) {
	w := newWorld()
	started, ended := make(chan struct{}), make(chan error, 1)
	w.call = func(ctx context.Context, _ string, _ json.RawMessage) (json.RawMessage, error) {
		close(started)
		<-ctx.Done()
		ended <- context.Cause(ctx)
		return nil, context.Cause(ctx)
	}
	g := connect(t, w.endpoint(), false)
	g.send(call("1", "srv__echo", `{}`))
	<-started
	if err := g.conn.Close(); err != nil {
		t.Fatal(err)
	}
	<-g.closed
	if err := <-ended; !strings.Contains(err.Error(), "disconnected") {
		t.Errorf("ended by %v", err)
	}
	if w.ends[0].Status != event.Cancelled {
		t.Errorf("recorded %v", w.ends[0].Status)
	}
}

func TestTooManyRequestsAreAnsweredBusyAndRecorded(t *testing.T) {
	w := newWorld()
	release := make(chan struct{})
	w.call = blockUntil(release)
	g := connect(t, w.endpoint(), false)
	for range endpoint.MaxInFlightConn {
		g.send(call("1", "srv__echo", `{}`))
	}
	if got := g.ask(call("2", "srv__echo", `{}`)); !strings.Contains(got, `"code":-32000`) || !strings.Contains(got, "busy") {
		t.Errorf("got %s", got)
	}
	close(release)
	for range endpoint.MaxInFlightConn {
		g.read()
	}
	g.alive()
	if w.toolCalls() != endpoint.MaxInFlightConn+1 {
		t.Errorf("%d rows for %d calls", w.toolCalls(), endpoint.MaxInFlightConn+1)
	}
}

func TestLargeMessagesPassWhereBothSidesAgreed(t *testing.T) {
	big := strings.Repeat("x", 5<<20)
	answer := json.RawMessage(`{"jsonrpc":"2.0","id":1,"result":{"text":"` + big + `"}}`)
	w := newWorld()
	w.call = func(context.Context, string, json.RawMessage) (json.RawMessage, error) { return answer, nil }
	g := connect(t, w.endpoint(), true)
	if got := g.ask(call("1", "srv__echo", `{"text":"`+big+`"}`)); got != string(answer) {
		t.Errorf("got %d bytes: %.80s", len(got), got)
	}
	old := connect(t, w.endpoint(), false)
	got := old.ask(call("1", "srv__echo", `{}`))
	if !strings.Contains(got, `"code":-32001`) || !strings.Contains(got, "too large") {
		t.Errorf("without the agreement: %.200s", got)
	}
	old.alive()
}

func TestALedgerThatCannotRecordStopsTheCall(t *testing.T) {
	w := newWorld()
	e := endpoint.New(endpoint.Options{
		Gate: failing{}, Catalog: w, Log: quiet(),
		Refuse: func(context.Context, endpoint.Refused) error { return errors.New("disk full") },
	})
	g := connect(t, e, false)
	if got := g.ask(call("1", "srv__echo", `{}`)); !strings.Contains(got, "cannot be recorded") || len(w.sent) != 0 {
		t.Errorf("got %s", got)
	}
	if got := g.ask(`[]`); !strings.Contains(got, "-32600") {
		t.Errorf("got %s", got)
	}
}

// failing is a gate whose ledger is full.
type failing struct{}

func (failing) Do(context.Context, *event.Event, func(context.Context) event.Outcome) (event.Verdict, event.Outcome) {
	return event.Verdict{}, event.Outcome{Status: event.Blocked, Error: &event.Error{Message: "the action cannot be recorded: disk full"}}
}
