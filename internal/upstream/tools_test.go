package upstream_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/toolproto"
	"github.com/capsem/capsem/internal/upstream"
)

// pages answers tools/list page by page.
func pages(byCursor map[string]string) func(*process) error {
	return orderly(func(p *process, m *toolproto.Message) error {
		if m.Call == nil {
			return nil
		}
		raw, _ := jsonrpc.Member(m.Call.Params, "cursor")
		cursor, _ := jsonrpc.String(raw)
		return p.say(toolproto.Message{Result: &toolproto.Result{ID: m.Call.ID, Message: fmt.Appendf(nil, `{"jsonrpc":"2.0","id":1,"result":%s}`, byCursor[cursor])}})
	})
}

func TestAllPagesOfToolsAreListedAsTheyCame(t *testing.T) {
	u := start(t, upstream.Options{StartProcess: serve(t, pages(map[string]string{
		"":       `{"tools":[{"name":"a", "x":1.0}],"nextCursor":"\u0062"}`,
		"b":      `{"tools":[],"nextCursor":"quo\"te"}`,
		`quo"te`: `{"tools":[ {"name":"b"} ,{"name":"c"}]}`,
	}))})
	got, err := u.ListTools(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := []json.RawMessage{json.RawMessage(`{"name":"a", "x":1.0}`), json.RawMessage(`{"name":"b"}`), json.RawMessage(`{"name":"c"}`)}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestAListThatIsNoneIsRefused(t *testing.T) {
	for name, test := range map[string]struct {
		pages map[string]string
		want  string
	}{
		"circle":    {map[string]string{"": `{"tools":[],"nextCursor":"a"}`, "a": `{"tools":[],"nextCursor":"b"}`, "b": `{"tools":[],"nextCursor":"a"}`}, "its pages go round in a circle"},
		"no list":   {map[string]string{"": `{"tools":{}}`}, "no array tools"},
		"no object": {map[string]string{"": `{"tools":[1]}`}, "no object"},
		"twice":     {map[string]string{"": `{"tools":[],"tools":[]}`}, "two members of the same name"},
		"many":      {map[string]string{"": `{"tools":[` + strings.Repeat(`{},`, upstream.MaxTools) + `{}]}`}, "more than 10000 tools"},
	} {
		u := start(t, upstream.Options{StartProcess: serve(t, pages(test.pages))})
		_, err := u.ListTools(t.Context())
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q", name, err, test.want)
		}
	}
}
