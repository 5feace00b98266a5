package builtin_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/builtin"
	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/toolproto"
)

// rig is the supervisor's end of the built-in tools.
type rig struct {
	t    *testing.T
	conn *toolproto.Conn
	hang func()
	done chan error
	last uint64
}

func newRig(t *testing.T) *rig {
	t.Helper()
	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	r := &rig{t: t, conn: toolproto.NewConn(outR, inW), hang: func() { _ = inW.Close() }, done: make(chan error, 1)} // a pipe in memory
	go func() {
		err := builtin.Run(context.Background(), inR, outW, slog.New(slog.DiscardHandler))
		r.done <- errors.Join(err, outW.Close())
	}()
	t.Cleanup(func() {
		r.hang()
		_ = outR.Close()
	})
	if m := r.read(); m.Hello == nil || m.Hello.Version != toolproto.Version {
		t.Fatalf("%+v", m)
	}
	r.write(toolproto.Message{Configure: &toolproto.Configure{Version: toolproto.Version, Server: toolproto.Server{Name: "builtin"}}})
	if m := r.read(); m.Ready == nil || !json.Valid(m.Ready.InitializeResult) {
		t.Fatalf("%+v", m)
	}
	return r
}

func (r *rig) write(m toolproto.Message) {
	r.t.Helper()
	if err := r.conn.Write(&m); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) read() *toolproto.Message {
	r.t.Helper()
	m, err := r.conn.Read()
	if err != nil {
		r.t.Fatal(err)
	}
	return m
}

func (r *rig) begin(method, params string) uint64 {
	r.t.Helper()
	r.last++
	c := &toolproto.Call{ID: r.last, Method: method}
	if params != "" {
		c.Params = []byte(params)
	}
	r.write(toolproto.Message{Call: c})
	return r.last
}

// answer reads the next message, which must be the answer to the last call.
func (r *rig) answer() jsonrpc.Message {
	r.t.Helper()
	m := r.read()
	if m.Result == nil || m.Result.ID != r.last || m.Result.Error != nil {
		r.t.Fatalf("%+v", m)
	}
	answer, err := jsonrpc.Parse(m.Result.Message)
	if err != nil || string(answer.ID) != fmt.Sprint(r.last) {
		r.t.Fatalf("%v: %s", err, m.Result.Message)
	}
	return answer
}

func (r *rig) call(params string) string {
	r.t.Helper()
	r.begin("tools/call", params)
	answer := r.answer()
	if answer.Error != nil {
		return string(answer.Error)
	}
	return string(answer.Result)
}

// fetch calls a tool and answers the request that it makes.
func (r *rig) fetch(params string, result toolproto.HTTPResult) (toolproto.HTTPRequest, string) {
	r.t.Helper()
	id := r.begin("tools/call", params)
	m := r.read()
	if m.HTTPRequest == nil || m.HTTPRequest.CallID != id {
		r.t.Fatalf("%+v %+v", m, m.Result)
	}
	result.ID = m.HTTPRequest.ID
	r.write(toolproto.Message{HTTPResult: &result})
	return *m.HTTPRequest, string(r.answer().Result)
}

func TestToolsAreListedWithSchemasAndAnnotations(t *testing.T) {
	r := newRig(t)
	r.begin("tools/list", "")
	var list struct {
		Tools []struct {
			Name, Title, Description string
			InputSchema              struct {
				Type       string
				Properties map[string]struct{ Type, Description string }
				Required   []string
			}
			Annotations map[string]any
		}
	}
	if err := json.Unmarshal(r.answer().Result, &list); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, tool := range list.Tools {
		names = append(names, tool.Name)
		if tool.Title == "" || len(tool.Description) < 40 || tool.InputSchema.Type != "object" || len(tool.InputSchema.Required) != 1 {
			t.Errorf("%+v", tool)
		}
		for name, p := range tool.InputSchema.Properties {
			if p.Type == "" || p.Description == "" {
				t.Errorf("%s: %s is not described", tool.Name, name)
			}
		}
		_, hasBody := tool.InputSchema.Properties["body"]
		reads := tool.Name == "echo" || tool.Name == "http_get" || tool.Name == "http_head"
		if tool.Annotations["readOnlyHint"] != reads || hasBody == reads {
			t.Errorf("%s: annotations %v, body %t", tool.Name, tool.Annotations, hasBody)
		}
	}
	want := []string{"echo", "http_get", "http_post", "http_put", "http_patch", "http_delete", "http_head"}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Error(diff)
	}
}

func TestEchoReturnsItsText(t *testing.T) {
	r := newRig(t)
	got := r.call(`{"name":"echo","arguments":{"text":"a\u00e9\n\"<日本>\u0000"}}`)
	var result struct{ Content []struct{ Type, Text string } }
	if err := json.Unmarshal([]byte(got), &result); err != nil {
		t.Fatal(err)
	}
	if len(result.Content) != 1 || result.Content[0].Text != "aé\n\"<日本>\x00" {
		t.Error(got)
	}
}

func TestWhatIsNoToolCallIsAnError(t *testing.T) {
	r := newRig(t)
	for params, want := range map[string]string{
		`{"arguments":{}}`:                     `{"code":-32602,"message":"params.name must be a string"}`,
		`{"name":1}`:                           `{"code":-32602,"message":"params.name must be a string"}`,
		`{"name":"nothing","arguments":{}}`:    `{"code":-32602,"message":"unknown tool"}`,
		`{"name":"echo","arguments":"{\"a\""}`: `{"code":-32602,"message":"params.arguments must be an object"}`,
		`{"name":"echo","arguments":null}`:     `{"code":-32602,"message":"params.arguments must be an object"}`,
	} {
		if diff := cmp.Diff(want, r.call(params)); diff != "" {
			t.Errorf("%s: %s", params, diff)
		}
	}
	r.begin("resources/list", "")
	if diff := cmp.Diff(`{"code":-32601,"message":"method not found"}`, string(r.answer().Error)); diff != "" {
		t.Error(diff)
	}
	r.begin("ping", "")
	if diff := cmp.Diff(`{}`, string(r.answer().Result)); diff != "" {
		t.Error(diff)
	}
}

func TestWrongArgumentsAreExplainedToTheModel(t *testing.T) {
	r := newRig(t)
	for _, test := range []struct{ name, arguments, want string }{
		{"echo", `{}`, `echo needs the argument "text"`},
		{"echo", `{"text":5}`, `the argument "text" must be a string`},
		{"echo", `{"text":"a","Text":"b"}`, `echo takes no argument "Text"; it takes text`},
		{"http_get", `{}`, `http_get needs the argument "url"`},
		{"http_get", `{"url":""}`, `the argument "url" must be a string that is not empty`},
		{"http_get", `{"url":"http://x/","body":"b"}`, `http_get takes no argument "body"; it takes url, headers, timeoutSeconds, maxBytes`},
		{"http_post", `{"url":"http://x/","body":{"a":1}}`, `the argument "body" must be a string; write JSON as a string too`},
		{"http_get", `{"url":"http://x/","timeoutSeconds":301}`, `the argument "timeoutSeconds" must be a whole number from 1 to 300`},
		{"http_get", `{"url":"http://x/","maxBytes":0}`, `the argument "maxBytes" must be a whole number from 1 to 1048576`},
		{"http_get", `{"url":"http://x/","maxBytes":1.5}`, `the argument "maxBytes" must be a whole number from 1 to 1048576`},
		{"http_get", `{"url":"http://x/","headers":[]}`, `the argument "headers" must be an object of strings`},
		{"http_get", `{"url":"http://x/","headers":{"a b":"c"}}`, `"a b" is no header name`},
		{"http_get", `{"url":"http://x/","headers":{"a":1}}`, `the header "a" must be a string`},
		{"http_get", `{"url":"http://x/","headers":{"a":"b\r\nc: d"}}`, `the header "a" has a line break in its value`},
	} {
		got := r.call(fmt.Sprintf(`{"name":%q,"arguments":%s}`, test.name, test.arguments))
		want := `{"content":[{"type":"text","text":` + string(jsonrpc.Quote(test.want)) + `}],"isError":true}`
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", test.arguments, diff)
		}
	}
}

func TestTheHTTPToolsAskTheSupervisor(t *testing.T) {
	r := newRig(t)
	req, got := r.fetch(`{"name":"http_post","arguments":{"url":"http://x/?q=1","headers":{"Content-Type":"text/plain"},"body":"é","timeoutSeconds":5,"maxBytes":10}}`,
		toolproto.HTTPResult{Status: 201, URL: "http://x/there", Headers: []toolproto.Header{{Name: "B", Value: []byte("1")}, {Name: "A", Value: []byte("2")}, {Name: "b", Value: []byte("3")}}, Body: []byte("<ok>")})
	want := toolproto.HTTPRequest{
		ID: 1, CallID: 1, Method: "POST", URL: "http://x/?q=1", Body: []byte("é"), TimeoutMS: 5000, MaxBytes: 10,
		Headers: []toolproto.Header{{Name: "Content-Type", Value: []byte("text/plain")}},
	}
	if diff := cmp.Diff(want, req); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(`{"content":[{"type":"text","text":"<ok>"}],"structuredContent":{"status":201,"url":"http://x/there","headers":{"a":"2","b":"1, 3"},"body":"<ok>","encoding":"utf-8","truncated":false}}`, got); diff != "" {
		t.Error(diff)
	}
}

func TestAnswersThatAreNotPlainAreDescribed(t *testing.T) {
	r := newRig(t)
	for _, test := range []struct {
		name   string
		max    int
		result toolproto.HTTPResult
		want   string
	}{
		{"not found", 100, toolproto.HTTPResult{Status: 404, Body: []byte("no")}, `{"content":[{"type":"text","text":"no"},{"type":"text","text":"HTTP 404 Not Found"}],"structuredContent":{"status":404,"url":"","headers":{},"body":"no","encoding":"utf-8","truncated":false}}`},
		{"empty", 100, toolproto.HTTPResult{Status: 204}, `{"content":[{"type":"text","text":"HTTP 204 No Content"}],"structuredContent":{"status":204,"url":"","headers":{},"body":"","encoding":"utf-8","truncated":false}}`},
		{"cut in a rune", 4, toolproto.HTTPResult{Status: 200, Body: []byte("abc日本")}, `{"content":[{"type":"text","text":"abc"},{"type":"text","text":"HTTP 200 OK; the body is cut after 4 bytes"}],"structuredContent":{"status":200,"url":"","headers":{},"body":"abc","encoding":"utf-8","truncated":true}}`},
		{"binary", 100, toolproto.HTTPResult{Status: 200, Body: []byte{0xff, 0}}, `{"content":[{"type":"text","text":"` + base64.StdEncoding.EncodeToString([]byte{0xff, 0}) + `"},{"type":"text","text":"HTTP 200 OK"}],"structuredContent":{"status":200,"url":"","headers":{},"body":"/wA=","encoding":"base64","truncated":false}}`},
		{"blocked", 100, toolproto.HTTPResult{Blocked: true, Error: "blocked by rule profile.x"}, `{"content":[{"type":"text","text":"the request was refused: blocked by rule profile.x"}],"isError":true}`},
		{"failed", 100, toolproto.HTTPResult{Error: "no such host"}, `{"content":[{"type":"text","text":"the request failed: no such host"}],"isError":true}`},
	} {
		_, got := r.fetch(fmt.Sprintf(`{"name":"http_get","arguments":{"url":"http://x/","maxBytes":%d}}`, test.max), test.result)
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s: %s", test.name, diff)
		}
	}
}

func TestTheWorstBodyStillFitsIntoAMessage(t *testing.T) {
	r := newRig(t)
	body := []byte(strings.Repeat("\x01", builtin.MaxBytes))
	_, got := r.fetch(fmt.Sprintf(`{"name":"http_get","arguments":{"url":"http://x/","maxBytes":%d}}`, builtin.MaxBytes), toolproto.HTTPResult{Status: 200, Body: body})
	if len(got) > toolproto.MaxPayload || !strings.HasSuffix(got, `"truncated":false}}`) {
		t.Errorf("%d bytes", len(got))
	}
}

func TestACancelledCallEnds(t *testing.T) {
	r := newRig(t)
	id := r.begin("tools/call", `{"name":"http_get","arguments":{"url":"http://x/"}}`)
	if m := r.read(); m.HTTPRequest == nil {
		t.Fatalf("%+v", m)
	}
	r.write(toolproto.Message{Cancel: &toolproto.Cancel{ID: id}})
	if got := string(r.answer().Result); !strings.Contains(got, "the request was not made: context canceled") {
		t.Error(got)
	}
}

func TestTheProgramEndsWithItsInput(t *testing.T) {
	r := newRig(t)
	r.begin("tools/call", `{"name":"http_get","arguments":{"url":"http://x/"}}`)
	if m := r.read(); m.HTTPRequest == nil {
		t.Fatalf("%+v", m)
	}
	r.hang()
	r.answer()
	select {
	case err := <-r.done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("it did not end")
	}
}
