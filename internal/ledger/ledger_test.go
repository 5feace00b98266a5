package ledger

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"lukechampine.com/blake3"

	"github.com/capsem/capsem/internal/event"
)

func openTest(tb testing.TB, options Options) *Ledger {
	tb.Helper()
	return openAt(tb, filepath.Join(tb.TempDir(), "session.db"), options)
}

func openAt(tb testing.TB, path string, options Options) *Ledger {
	tb.Helper()
	l, err := Open(tb.Context(), path, options)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := l.Close(); err != nil {
			tb.Error(err)
		}
	})
	return l
}

func newID(tb testing.TB) string {
	tb.Helper()
	id, err := uuid.NewV7()
	if err != nil {
		tb.Fatal(err)
	}
	return id.String()
}

func toolCallEvent(tb testing.TB, arguments string) *event.Event {
	return &event.Event{
		ID: newID(tb), Type: event.MCPToolCall, Time: time.Now(), TraceID: "trace-1", TurnID: "turn-1", Intent: event.IntentWriteTool,
		Initiator: event.Initiator{Kind: event.GuestAgent, ID: "claude"}, Actor: "ada", Process: "node",
		MCP: &event.MCP{
			Origin: event.OriginMCP, Transport: "vsock", Method: "tools/call", Server: "github", RequestID: json.RawMessage(`"a1"`),
			Tool:      &event.Tool{Name: "github__create_issue", Tool: "create_issue", Effect: event.Write, Digest: "tooldigest"},
			Params:    json.RawMessage(`{"name":"create_issue","arguments":` + arguments + `}`),
			Arguments: json.RawMessage(arguments),
		},
	}
}

func execEvent(tb testing.TB, argv ...string) *event.Event {
	return &event.Event{
		ID: newID(tb), Type: event.Exec, Time: time.Now(), Initiator: event.Initiator{Kind: event.Person, ID: "1000"},
		Exec: &event.Command{ID: "e1", Argv: argv, Cwd: "/workspace", User: "agent"},
	}
}

func httpEvent(tb testing.TB, body string) *event.Event {
	return &event.Event{
		ID: newID(tb), Type: event.HTTP, Time: time.Now(), Initiator: event.Initiator{Kind: event.GuestAgent},
		HTTP: &event.HTTPRequest{
			Method: "POST", Scheme: "https", Host: "example.org", Port: 443, Path: "/a", Query: "q=1", Via: "builtin",
			RedirectedFrom: "https://example.com/", Headers: map[string]string{"content-type": "text/plain"}, Body: []byte(body),
		},
	}
}

func messageEvent(tb testing.TB, t event.Type, method string) *event.Event {
	return &event.Event{
		ID: newID(tb), Type: t, Time: time.Now(), Initiator: event.Initiator{Kind: event.GuestAgent}, Process: "node",
		MCP: &event.MCP{Method: method, RequestID: json.RawMessage(`1`), Params: json.RawMessage(`{"a":1}`)},
	}
}

func allow() event.Verdict { return event.Verdict{Decision: event.Allow, Policy: "policydigest"} }

func block(rule string) event.Verdict {
	return event.Verdict{
		Decision: event.Block, Rule: rule, Reason: "no", Policy: "policydigest",
		Matches: []event.Match{{Rule: rule, Reason: "no", Severity: "high", Action: "block", Digest: "ruledigest"}},
	}
}

func response(result string) event.Outcome {
	return event.Outcome{
		Status: event.Done, CarriedOut: true, Duration: 1500 * time.Microsecond, BytesSent: 10, BytesReceived: 20,
		MCP: &event.MCPResponse{
			Message: json.RawMessage(`{"jsonrpc":"2.0","id":7,"result":` + result + `}`), Result: json.RawMessage(result),
		},
	}
}

// call takes one event through the ledger as the gate does.
func call(tb testing.TB, l *Ledger, ev *event.Event, out event.Outcome) {
	tb.Helper()
	r, err := l.Begin(tb.Context(), ev, allow())
	if err != nil {
		tb.Fatal(err)
	}
	if err := l.End(tb.Context(), r, out, allow()); err != nil {
		tb.Fatal(err)
	}
}

// rows reads with a reader of its own, as anybody else would.
func rows(tb testing.TB, path, query string) [][]any {
	tb.Helper()
	r, err := OpenReader(path)
	if err != nil {
		tb.Fatal(err)
	}
	defer func() {
		if err := r.Close(); err != nil {
			tb.Error(err)
		}
	}()
	result, err := r.Query(tb.Context(), query, Limits{})
	if err != nil {
		tb.Fatal(err)
	}
	return result.Rows
}

// oneRow is rows for a query that must give one, as text by column.
func oneRow(tb testing.TB, path, query string) map[string]string {
	tb.Helper()
	r, err := OpenReader(path)
	if err != nil {
		tb.Fatal(err)
	}
	defer func() {
		if err := r.Close(); err != nil {
			tb.Error(err)
		}
	}()
	result, err := r.Query(tb.Context(), query, Limits{})
	if err != nil {
		tb.Fatal(err)
	}
	if len(result.Rows) != 1 {
		tb.Fatalf("%s: got %d rows, want 1", query, len(result.Rows))
	}
	m := map[string]string{}
	for i, name := range result.Columns {
		if v := result.Rows[0][i]; v != nil {
			m[name] = fmt.Sprint(v)
		}
	}
	return m
}

func checkIntegrity(tb testing.TB, l *Ledger) {
	tb.Helper()
	if err := l.Close(); err != nil {
		tb.Fatal(err)
	}
	c, err := openConn(l.path)
	if err != nil {
		tb.Fatal(err)
	}
	defer c.close()
	got, err := c.first("PRAGMA integrity_check")
	if err != nil || got != "ok" {
		tb.Errorf("integrity_check: %q, %v", got, err)
	}
}

func digestOf(s string) string {
	sum := blake3.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

func TestToolCallIsOneRowWithEveryColumn(t *testing.T) {
	l := openTest(t, Options{})
	ev := toolCallEvent(t, `{ "title": "x y" }`)
	ev.Time = time.Date(2026, 5, 4, 3, 2, 1, 987654321, time.FixedZone("", 3600))
	call(t, l, ev, response(`{"content": [], "isError": false}`))
	got := oneRow(t, l.path, "SELECT * FROM tool_calls")
	want := map[string]string{
		"id": "1", "event_id": ev.ID, "timestamp": "2026-05-04T02:02:01.987654Z", "trace_id": "trace-1", "turn_id": "turn-1",
		"initiator_kind": "guest_agent", "initiator_id": "claude", "actor_id": "ada", "process_name": "node",
		"origin": "mcp", "transport": "vsock", "server_name": "github", "method": "tools/call", "tool_name": "github__create_issue",
		"tool": "create_issue", "call_id": `"a1"`, "effect": "write", "arguments": `{"title":"x y"}`, "policy_digest": "policydigest",
		"tool_digest": "tooldigest", "status": "done", "decision": "allow", "carried_out": "1", "duration_us": "1500",
		"duration_ms": "1.5", "is_error": "0", "response": `{"content":[],"isError":false}`, "bytes_sent": "10", "bytes_received": "20",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestOtherTablesHaveEveryColumn(t *testing.T) {
	l := openTest(t, Options{})
	call(t, l, execEvent(t, "sh", "-c", "exit 7", "\xff"), event.Outcome{
		Status: event.Failed, CarriedOut: true, Duration: time.Millisecond, Error: &event.Error{Message: "exited"},
		Exec: &event.ExecResult{ExitCode: 7, Signal: "TERM", TimedOut: true, OOM: true, Truncated: true, Leaked: true, StdoutBytes: 3, StderrBytes: 4},
	})
	call(t, l, httpEvent(t, "hello"), event.Outcome{
		Status: event.Done, CarriedOut: true, Duration: time.Millisecond, BytesSent: 5, BytesReceived: 6,
		HTTP: &event.HTTPResponse{Status: 204, Body: []byte("world!"), Headers: map[string]string{"content-type": "text/html"}},
	})
	imported := &event.Event{ID: newID(t), Type: event.FileImport, Time: time.Now(), File: &event.File{Op: "import", Path: "/workspace/a", Size: 3, Content: []byte("abc")}}
	call(t, l, imported, event.Outcome{Status: event.Done, CarriedOut: true})
	call(t, l, &event.Event{ID: newID(t), Type: event.Boot, Time: time.Now(), Detail: "tiny"}, event.Outcome{Status: event.Done, CarriedOut: true})
	if err := l.VMEvent(t.Context(), "ready", "in 1 s"); err != nil {
		t.Fatal(err)
	}
	resource := messageEvent(t, event.MCPResourceRead, "resources/read")
	resource.MCP.ResourceURI, resource.MCP.Server = "file:///a", "files"
	call(t, l, resource, event.Outcome{Status: event.Failed, CarriedOut: true, Error: &event.Error{Code: -32002, Message: "not found"}})

	for _, tc := range []struct{ query, want string }{
		{
			"SELECT exec_id, argv, cwd, user, policy_digest, status, decision, carried_out, duration_us, error_message, exit_code, signal, timed_out, oom, truncated, leaked, stdout_bytes, stderr_bytes FROM exec_events",
			`e1 ["sh","-c","exit 7",{"base64":"/w=="}] /workspace agent policydigest failed allow 1 1000 exited 7 TERM 1 1 1 1 3 4`,
		},
		{
			"SELECT scheme, host, port, method, path, query, redirected_from, via, policy_digest, state, decision, carried_out, duration_us, status, bytes_sent, bytes_received FROM net_events",
			"https example.org 443 POST /a q=1 https://example.com/ builtin policydigest done allow 1 1000 204 5 6",
		},
		{"SELECT op, path, size, source, count, status, carried_out FROM fs_events", "import /workspace/a 3 host 1 done 1"},
		{"SELECT kind, detail, status, decision FROM vm_events WHERE kind = 'boot'", "boot tiny done allow"},
		{"SELECT kind, detail, status FROM vm_events WHERE kind = 'ready'", "ready in 1 s done"},
		{
			"SELECT event_type, direction, method, request_id, server_name, subject, count, status, error_code, error_message FROM protocol_events",
			"mcp.resource_read to_server resources/read 1 files file:///a 1 failed -32002 not found",
		},
		{
			"SELECT direction, media_type, size, truncated, body_digest FROM event_body_blobs WHERE event_type = 'http.request' AND direction = 'response'",
			"response text/html 6 0 " + digestOf("world!"),
		},
		{
			"SELECT size, omitted, body_digest FROM event_body_blobs WHERE event_type = 'file.import'",
			"3 content " + digestOf("abc"),
		},
	} {
		got := rows(t, l.path, tc.query)
		if len(got) != 1 {
			t.Errorf("%s: %d rows", tc.query, len(got))
			continue
		}
		if line := strings.TrimSuffix(fmt.Sprintln(got[0]...), "\n"); line != tc.want {
			t.Errorf("%s:\n got %s\nwant %s", tc.query, line, tc.want)
		}
	}
}

func TestEveryOutcomeIsExactlyOneRow(t *testing.T) {
	for _, status := range []event.Status{event.Done, event.Failed, event.Timeout, event.Cancelled, event.Blocked} {
		t.Run(string(status), func(t *testing.T) {
			l := openTest(t, Options{})
			r, err := l.Begin(t.Context(), toolCallEvent(t, `{}`), allow())
			if err != nil {
				t.Fatal(err)
			}
			after := allow()
			if status == event.Blocked {
				after = block("profile.secret")
			}
			if err := l.End(t.Context(), r, event.Outcome{Status: status, CarriedOut: true}, after); err != nil {
				t.Fatal(err)
			}
			if err := l.End(t.Context(), r, event.Outcome{Status: event.Done}, allow()); !errors.Is(err, errEnded) {
				t.Errorf("a second End: %v, want %v", err, errEnded)
			}
			got := rows(t, l.path, "SELECT status, decision, carried_out FROM tool_calls")
			want := [][]any{{string(status), after.Decision.String(), int64(1)}}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestIntentIsThereBeforeBeginReturns(t *testing.T) {
	l := openTest(t, Options{})
	for _, ev := range []*event.Event{toolCallEvent(t, `{}`), execEvent(t, "true"), httpEvent(t, "x"), messageEvent(t, event.MCPPromptGet, "prompts/get")} {
		if _, err := l.Begin(t.Context(), ev, allow()); err != nil {
			t.Fatal(err)
		}
		spec := Tables()[tableOf(ev.Type)]
		got := rows(t, l.path, fmt.Sprintf("SELECT %s FROM %s", spec.State, spec.Name))
		if diff := cmp.Diff([][]any{{"pending"}}, got); diff != "" {
			t.Errorf("%s: %s", ev.Type, diff)
		}
	}
}

func TestBlockedRequestIsFinishedAndKeepsDigestOnly(t *testing.T) {
	for _, mode := range []string{"", "full"} {
		t.Run("record_blocked="+mode, func(t *testing.T) {
			l := openTest(t, Options{RecordBlocked: mode})
			const arguments = `{"card":"4111-1111"}`
			r, err := l.Begin(t.Context(), toolCallEvent(t, arguments), block("profile.no_cards"))
			if err != nil {
				t.Fatal(err)
			}
			if err := l.End(t.Context(), r, response(`{}`), allow()); err == nil {
				t.Error("End of a blocked event: no error")
			}
			got := oneRow(t, l.path, "SELECT status, decision, rule_id, reason, carried_out, arguments FROM tool_calls")
			want := map[string]string{"status": "blocked", "decision": "block", "rule_id": "profile.no_cards", "reason": "no", "carried_out": "0"}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
			blob := oneRow(t, l.path, "SELECT size, omitted, body_digest FROM event_body_blobs")
			if blob["size"] != fmt.Sprint(len(arguments)) || blob["body_digest"] != digestOf(arguments) {
				t.Errorf("blob is %v", blob)
			}
			bodies := len(rows(t, l.path, "SELECT 1 FROM bodies"))
			if wantBodies := map[string]int{"": 0, "full": 1}[mode]; bodies != wantBodies {
				t.Errorf("%d bodies, want %d", bodies, wantBodies)
			}
			rule := oneRow(t, l.path, "SELECT event_type, rule_id, action, severity, phase, reason, broken, rule_digest FROM security_rule_events")
			wantRule := map[string]string{
				"event_type": "mcp.tool_call", "rule_id": "profile.no_cards", "action": "block", "severity": "high",
				"phase": "request", "reason": "no", "broken": "0", "rule_digest": "ruledigest",
			}
			if diff := cmp.Diff(wantRule, rule); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestBlockedResponseLeavesNoByteOfIt(t *testing.T) {
	l := openTest(t, Options{RecordBlocked: "full"})
	r, err := l.Begin(t.Context(), toolCallEvent(t, `{}`), allow())
	if err != nil {
		t.Fatal(err)
	}
	out := response(`{"content":"TOPSECRET-7261"}`)
	out.Status, out.Error = event.Blocked, &event.Error{Code: -1, Message: "TOPSECRET-7261"}
	if err := l.End(t.Context(), r, out, block("profile.no_secrets")); err != nil {
		t.Fatal(err)
	}
	blob := oneRow(t, l.path, "SELECT size, omitted, body_digest FROM event_body_blobs WHERE direction = 'response'")
	want := map[string]string{"size": fmt.Sprint(len(out.MCP.Message)), "omitted": "blocked", "body_digest": digestOf(string(out.MCP.Message))}
	if diff := cmp.Diff(want, blob); diff != "" {
		t.Error(diff)
	}
	checkAbsent(t, l, "TOPSECRET-7261")
}

// checkAbsent closes the ledger and looks for text in its file and its bodies.
func checkAbsent(t *testing.T, l *Ledger, text string) {
	t.Helper()
	for _, row := range rows(t, l.path, "SELECT digest FROM bodies") {
		r, err := OpenReader(l.path)
		if err != nil {
			t.Fatal(err)
		}
		body, err := r.Body(t.Context(), fmt.Sprint(row[0]))
		if err := errors.Join(err, r.Close()); err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(body, []byte(text)) {
			t.Errorf("a body holds %q", text)
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	file, err := os.ReadFile(l.path)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(file, []byte(text)) {
		t.Errorf("the file holds %q", text)
	}
}

func TestSecretsAreInNoColumnAndNoBody(t *testing.T) {
	const secret = `tok/"9f8e7d6c`
	redactor, err := NewRedactor(secret)
	if err != nil {
		t.Fatal(err)
	}
	l := openTest(t, Options{Redactor: redactor})
	quoted := `tok\/\"9f8e7d6c`
	ev := toolCallEvent(t, `{"a":"`+quoted+`","b":"\u0074ok/\u0022\u0039f8e7d6c"}`)
	ev.Process, ev.Initiator.ID, ev.MCP.Tool.Name = "p "+secret, secret, secret
	verdict := allow()
	verdict.Matches = []event.Match{{Rule: "profile.seen", Reason: secret, Action: "allow"}}
	r, err := l.Begin(t.Context(), ev, verdict)
	if err != nil {
		t.Fatal(err)
	}
	out := response(`{"content":"` + quoted + strings.Repeat(" x", 300) + `"}`)
	out.Error = &event.Error{Message: secret}
	if err := l.End(t.Context(), r, out, allow()); err != nil {
		t.Fatal(err)
	}
	web := httpEvent(t, secret)
	web.HTTP.Query = "key=tok%2F%229f8e7d6c"
	call(t, l, web, event.Outcome{Status: event.Done})
	call(t, l, execEvent(t, "curl", secret), event.Outcome{Status: event.Done})
	got := oneRow(t, l.path, "SELECT arguments, process_name FROM tool_calls")
	want := map[string]string{"arguments": `{"a":"[redacted]","b":"[redacted]"}`, "process_name": "p [redacted]"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	checkAbsent(t, l, "9f8e7d6c")
}

func TestDisplayFormsAreCutAtARune(t *testing.T) {
	l := openTest(t, Options{})
	for _, tc := range []struct {
		name, arguments string
		cut             bool
	}{
		{"at the bound", `"` + strings.Repeat("é", (MaxText-2)/2) + `"`, false},
		{"one over", `"a` + strings.Repeat("é", (MaxText-2)/2) + `"`, true},
		{"far over", `{"a": "` + strings.Repeat("日", 100_000) + `"}`, true},
		{"white space does not count", `[1,` + strings.Repeat(" \n", MaxText) + `2]`, false},
		{"not UTF-8", `"` + strings.Repeat("a\xff", MaxText) + `"`, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ev := toolCallEvent(t, tc.arguments)
			call(t, l, ev, response(tc.arguments))
			got := oneRow(t, l.path, "SELECT arguments, response FROM tool_calls WHERE event_id = '"+ev.ID+"'")
			for _, column := range []string{"arguments", "response"} {
				s := got[column]
				if len(s) > MaxText || !utf8.ValidString(s) || strings.HasSuffix(s, ellipsis) != tc.cut {
					t.Errorf("%s has %d bytes, ends in %q", column, len(s), s[max(0, len(s)-8):])
				}
				if tc.cut && len(s) < MaxText-2*utf8.UTFMax {
					t.Errorf("%s was cut to %d bytes", column, len(s))
				}
			}
		})
	}
}

func TestBodyIsKeptWholeUpToTheBoundAndItsSizeIsTrueBeyond(t *testing.T) {
	l := openTest(t, Options{})
	for _, tc := range []struct{ size, kept int }{{MaxBody, MaxBody}, {MaxBody + 1, MaxBody}} {
		body := bytes.Repeat([]byte("0123456789abcdef"), tc.size/16+1)[:tc.size]
		ev := httpEvent(t, string(body))
		call(t, l, ev, event.Outcome{Status: event.Done})
		blob := oneRow(t, l.path, "SELECT size, truncated, body_digest FROM event_body_blobs WHERE event_id = '"+ev.ID+"'")
		want := map[string]string{
			"size": fmt.Sprint(tc.size), "truncated": fmt.Sprint(truth(tc.kept < tc.size)), "body_digest": digestOf(string(body[:tc.kept])),
		}
		if diff := cmp.Diff(want, blob); diff != "" {
			t.Error(diff)
		}
		r, err := OpenReader(l.path)
		if err != nil {
			t.Fatal(err)
		}
		got, err := r.Body(t.Context(), blob["body_digest"])
		if err := errors.Join(err, r.Close()); err != nil || !bytes.Equal(got, body[:tc.kept]) {
			t.Errorf("reading %d bytes back: %d bytes, %v", tc.kept, len(got), err)
		}
	}
}

func TestEqualBodiesAreStoredOnce(t *testing.T) {
	l := openTest(t, Options{})
	for range 3 {
		call(t, l, toolCallEvent(t, `{"same":"arguments"}`), response(`{"same":"result"}`))
	}
	if got := rows(t, l.path, "SELECT (SELECT count(*) FROM event_body_blobs), (SELECT count(*) FROM bodies)"); !cmp.Equal(got, [][]any{{int64(6), int64(2)}}) {
		t.Errorf("blobs and bodies: %v", got)
	}
	if l.bodies.Load() != l.keptTotal || l.keptTotal == 0 {
		t.Errorf("quota counts %d bytes, stored are %d", l.bodies.Load(), l.keptTotal)
	}
}

func TestBodiesOverTheQuotaAreDigestsAndARowSaysSo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "session.db")
	l := openAt(t, path, Options{BodyQuota: 1000})
	for i := range 3 {
		call(t, l, httpEvent(t, strings.Repeat(fmt.Sprint(i), 250)+"unlike"), event.Outcome{Status: event.Done})
	}
	random := make([]byte, 1000)
	if _, err := rand.NewChaCha8([32]byte{}).Read(random); err != nil {
		t.Fatal(err)
	}
	call(t, l, httpEvent(t, string(random)), event.Outcome{Status: event.Done})
	call(t, l, httpEvent(t, string(random[1:])), event.Outcome{Status: event.Done})
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	total := rows(t, path, "SELECT sum(length(body)), max(kept_total) FROM bodies")[0]
	if total[0] != total[1] || total[0].(int64) > 1000 {
		t.Errorf("%v bytes are stored, %v counted, the quota is 1000", total[0], total[1])
	}
	if got := rows(t, path, "SELECT count(*) FROM event_body_blobs WHERE omitted = 'quota' AND length(body_digest) = 64"); !cmp.Equal(got, [][]any{{int64(2)}}) {
		t.Errorf("omitted bodies: %v", got)
	}
	if got := rows(t, path, "SELECT count(*) FROM vm_events WHERE kind = 'body_quota'"); !cmp.Equal(got, [][]any{{int64(1)}}) {
		t.Errorf("rows that say so: %v", got)
	}
	again := openAt(t, path, Options{})
	if again.bodies.Load() != total[0] {
		t.Errorf("after reopening %d bytes are counted, want %d", again.bodies.Load(), total[0])
	}
}

func TestMessageThatIsNoActIsWrittenOnce(t *testing.T) {
	l := openTest(t, Options{})
	r, err := l.Begin(t.Context(), messageEvent(t, event.MCPInitialize, "initialize"), allow())
	if err != nil {
		t.Fatal(err)
	}
	if got := rows(t, l.path, "SELECT 1 FROM protocol_events"); len(got) != 0 {
		t.Errorf("%d rows before the end", len(got))
	}
	if err := l.End(t.Context(), r, response(`{"ok":true}`), allow()); err != nil {
		t.Fatal(err)
	}
	got := rows(t, l.path, "SELECT event_type, method, status, decision, carried_out, duration_us, count FROM protocol_events")
	if diff := cmp.Diff([][]any{{"mcp.initialize", "initialize", "done", "allow", int64(1), int64(1500), int64(1)}}, got); diff != "" {
		t.Error(diff)
	}
	if _, err := l.Begin(t.Context(), messageEvent(t, event.MCPList, "tools/list"), block("corp.no_lists")); err != nil {
		t.Fatal(err)
	}
	got = rows(t, l.path, "SELECT status, rule_id FROM protocol_events WHERE method = 'tools/list'")
	if diff := cmp.Diff([][]any{{"blocked", "corp.no_lists"}}, got); diff != "" {
		t.Error(diff)
	}
}

func TestCancelledCallerStillGetsItsOutcomeRecorded(t *testing.T) {
	l := openTest(t, Options{})
	ctx, cancel := context.WithCancel(t.Context())
	r, err := l.Begin(ctx, toolCallEvent(t, `{}`), allow())
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := l.End(ctx, r, event.Outcome{Status: event.Cancelled}, allow()); err != nil {
		t.Fatal(err)
	}
	if got := rows(t, l.path, "SELECT status FROM tool_calls"); !cmp.Equal(got, [][]any{{"cancelled"}}) {
		t.Errorf("got %v", got)
	}
}

func TestOneBadRowDoesNotTakeItsBatchWithIt(t *testing.T) {
	l := openTest(t, Options{})
	good, bad := toolCallEvent(t, `{"a":1}`), toolCallEvent(t, `{"b":2}`)
	call(t, l, bad, response(`{}`))
	ops := make([]*op, 0, 3)
	for _, ev := range []*event.Event{good, bad, toolCallEvent(t, `{"c":3}`)} {
		o := newOp()
		o.intent(toolCalls, ev, event.Pending, allow())
		ops = append(ops, o)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	var err error
	if l.conn, err = openConn(l.path); err != nil {
		t.Fatal(err)
	}
	if err := l.conn.prepareAll(); err != nil {
		t.Fatal(err)
	}
	l.commitBatch(ops)
	l.conn.close()
	for i, wantErr := range []bool{false, true, false} {
		if (ops[i].err != nil) != wantErr {
			t.Errorf("op %d: %v", i, ops[i].err)
		}
	}
	if got := rows(t, l.path, "SELECT count(*) FROM tool_calls"); !cmp.Equal(got, [][]any{{int64(3)}}) {
		t.Errorf("rows: %v", got)
	}
}
