package policy

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/pelletier/go-toml/v2"

	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/event"
)

// suite is a file of testdata: rules, and events with the verdicts they get.
type suite struct {
	Profile string
	Corp    string
	Case    []testCase
}

type testCase struct {
	Name string
	// Type is "mcp.tool_call" where it is not given, Phase "request".
	Type, Phase                               string
	Initiator, Tool, Method, ID, Args         string
	Host, Scheme, Path, User, Content, Result string
	Error                                     string
	Port, Status, Exit                        int
	Headers                                   map[string]string
	Argv                                      []string

	Want, Rule, Reason string
	Broken             bool
}

func (c testCase) event() *event.Event {
	ev := &event.Event{Type: event.MCPToolCall, Time: time.Unix(0, 0), Initiator: event.Initiator{Kind: event.InitiatorKind(c.Initiator)}}
	if c.Type != "" {
		ev.Type = event.Type(c.Type)
	}
	switch familyOf(ev.Type) {
	case familyMCP:
		ev.MCP = &event.MCP{Method: c.Method, RequestID: raw(c.ID), Arguments: raw(c.Args), Params: raw(c.Args)}
		if ev.Type == event.MCPToolCall {
			ev.Intent, ev.MCP.Method = event.IntentWriteTool, "tools/call"
			server, tool, _ := strings.Cut(c.Tool, "__")
			ev.MCP.Server, ev.MCP.Tool = server, &event.Tool{Name: c.Tool, Tool: tool}
		}
	case familyHTTP:
		ev.Intent = event.IntentHTTPRequest
		ev.HTTP = &event.HTTPRequest{Method: "GET", Scheme: c.Scheme, Host: c.Host, Port: c.Port, Path: c.Path, Headers: c.Headers}
		if ev.HTTP.Scheme == "" {
			ev.HTTP.Scheme = "https"
		}
	case familyFile:
		ev.File = &event.File{Op: strings.TrimPrefix(string(ev.Type), "file."), Path: c.Path}
		if c.Content != "" {
			ev.File.Content = []byte(c.Content)
		}
	case familyProcess:
		ev.Intent = event.IntentRunCommand
		ev.Exec = &event.Command{Argv: c.Argv, User: c.User}
	case always:
	}
	return ev
}

func (c testCase) outcome() *event.Outcome {
	out := &event.Outcome{Status: event.Done}
	switch {
	case c.Result != "":
		out.MCP = &event.MCPResponse{Message: raw(`{"jsonrpc":"2.0","id":1,"result":` + c.Result + `}`), Result: raw(c.Result)}
	case c.Error != "":
		out.Error = &event.Error{Code: -32603, Message: c.Error}
	case c.Status != 0:
		out.HTTP = &event.HTTPResponse{Status: c.Status}
	case c.Exit != 0:
		out.Exec = &event.ExecResult{ExitCode: c.Exit}
	default:
		return nil
	}
	return out
}

func raw(s string) json.RawMessage {
	if s == "" {
		return nil
	}
	return json.RawMessage(s)
}

// sources reads rules as they stand in files.
func sources(t testing.TB, profile, corp string) []Source {
	t.Helper()
	p, err := config.ParseProfile("profile.toml", []byte(profile))
	if err != nil {
		t.Fatal(err)
	}
	var corps []config.Corp
	if corp != "" {
		file := filepath.Join(t.TempDir(), "corp.toml")
		if err := os.WriteFile(file, []byte(corp), 0o600); err != nil {
			t.Fatal(err)
		}
		if corps, err = config.LoadCorp([]string{file}); err != nil {
			t.Fatal(err)
		}
	}
	return FromProfile(p, corps...)
}

func compile(t testing.TB, profile string) *Policy {
	t.Helper()
	p, err := Compile(sources(t, profile, ""))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// suites reads all of testdata.
func suites(t testing.TB) map[string]suite {
	t.Helper()
	files, err := filepath.Glob("testdata/*.toml")
	if err != nil || len(files) == 0 {
		t.Fatalf("finding test data: %v, %v", files, err)
	}
	out := map[string]suite{}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var s suite
		if err := toml.NewDecoder(strings.NewReader(string(data))).DisallowUnknownFields().Decode(&s); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		out[file] = s
	}
	return out
}

func TestRulesJudgeAsTheirFilesSay(t *testing.T) {
	for file, s := range suites(t) {
		p, err := Compile(sources(t, s.Profile, s.Corp))
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for _, c := range s.Case {
			t.Run(strings.TrimSuffix(filepath.Base(file), ".toml")+"/"+c.Name, func(t *testing.T) {
				phase := event.Request
				if c.Phase == "response" {
					phase = event.Response
				}
				v := p.Judge(t.Context(), c.event(), phase, c.outcome())
				if v.Decision.String() != c.Want || v.Rule != c.Rule {
					t.Errorf("got %s by %q (%s), want %s by %q", v.Decision, v.Rule, v.Reason, c.Want, c.Rule)
				}
				if c.Reason != "" && v.Reason != c.Reason {
					t.Errorf("got reason %q, want %q", v.Reason, c.Reason)
				}
				broken := len(v.Matches) > 0 && v.Matches[0].Broken
				if broken != c.Broken {
					t.Errorf("got broken = %t (%s), want %t", broken, v.Reason, c.Broken)
				}
				if v.Policy != p.Digest() || v.Policy == "" {
					t.Errorf("the verdict names policy %q, want %q", v.Policy, p.Digest())
				}
			})
		}
	}
}

// TestNoRuleBreaksOnAnotherFamily judges every event of the test data by every
// rule file, in both phases: only rules of the event's own file may be broken.
func TestNoRuleBreaksOnAnotherFamily(t *testing.T) {
	all := suites(t)
	for ruleFile, rules := range all {
		p, err := Compile(sources(t, rules.Profile, rules.Corp))
		if err != nil {
			t.Fatal(err)
		}
		for _, typ := range event.Types() {
			c := testCase{Type: string(typ), Argv: []string{"ls"}, Path: "/w/x", Host: "a"}
			for _, phase := range []event.Phase{event.Request, event.Response} {
				v := p.Judge(t.Context(), c.event(), phase, c.outcome())
				for _, m := range v.Matches {
					if m.Broken {
						t.Errorf("%s: rule %s broke on a plain %s: %s", ruleFile, m.Rule, typ, m.Reason)
					}
				}
			}
		}
	}
}

func TestMistakesInRulesAreToldWithPlaceAndRemedy(t *testing.T) {
	tests := []struct{ name, match, want string }{
		{"field", `mcp.srver.name == "x"`, "profile.toml:2:14: unknown field mcp.srver (did you mean mcp.server?)"},
		{"field in the middle of a line", `intent == "x" && mcp.server.nme == "x"`, "profile.toml:2:"},
		{"last part", `mcp.server.nme == "x"`, "unknown field mcp.server.nme (did you mean mcp.server.name?)"},
		{"nothing near", `mcp.server.zebra == "x"`, "mcp.server has mcp.server.name"},
		{"root", `mpc.method == "x"`, "unknown field mpc (did you mean mcp?)"},
		{"later root", `dns.qname == "x"`, "the fields of dns are not supported by this version"},
		{"bare root", `mcp == mcp`, "mcp is a group of fields, not a field: choose one of mcp.method"},
		{"bare group", `mcp.server == "x"`, "mcp.server is a group of fields"},
		{"index of a root", `mcp["method"] == "x"`, "mcp is a group of fields"},
		{"has of a group", `has(mcp.server)`, "mcp.server is a group of fields"},
		{"member of a string", `mcp.method.x == "x"`, "does not support field selection"},
		{"not a boolean", `mcp.method`, "a rule must be true or false, and this is string"},
		{"maybe not a boolean", `mcp.request.arguments.ok`, "a rule must be true or false, and this is dyn"},
		{"types", `mcp.method == 5`, "no matching overload"},
		{"syntax", `mcp.method == `, "profile.toml:2:"},
		{"function", `mcp.method.contans("x")`, "unknown function contans() (did you mean contains()?)"},
		{"later function", `mcp.request.text.contains_pii()`, "not supported by this version"},
		{"pattern", `mcp.method.matches("(")`, "the pattern of matches() is not valid"},
		{"chosen pattern", `mcp.method.matches(mcp.request.text)`, "the pattern of matches() must be a literal"},
		{"growing replacement", `mcp.method.replace("a", mcp.request.text) == "x"`, "replace() takes two literals"},
		{"hiding variable", `mcp.request.arguments.l.exists(mcp, mcp.method == "x")`, "variable mcp hides the fields"},
		{"second plan's operator", `@worst_or(true, true)`, "profile.toml:2:"},
		{"not", `!mcp.request.arguments.path.startsWith("/ws")`, "write the exception as `unless`"},
		{"not equal", `mcp.request.arguments.path != "/ws"`, "has(mcp.request.arguments.path)"},
		{"equal false", `mcp.request.arguments.path.startsWith("/ws") == false`, "must not negate"},
		{"equal to a test", `mcp.request.arguments.path.startsWith("/ws") == (1 == 2)`, "must not negate"},
		{"choice", `mcp.request.arguments.path.startsWith("/ws") ? false : true`, "must not negate"},
		{"not of a field", `!mcp.response.is_error`, "has(mcp.response.is_error)"},
		{"not of an element", `mcp.request.arguments.l.exists(x, x.path != "/ws")`, "has(x.path)"},
		{"not, tested elsewhere", `has(mcp.request.arguments.other) && mcp.request.arguments.path != "/ws"`, "must not negate"},
		{"not, nested, tested at the end only", `has(mcp.request.arguments.a.b) && mcp.request.arguments.a.b != "/ws"`, "has(mcp.request.arguments.a)"},
		{"not, a name that is no identifier", `http.headers["x-a"] != "1"`, `"x-a" in http.headers`},
		{"not, index", `mcp.request.arguments["path"] != "/ws"`, "has(mcp.request.arguments.path)"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Compile(sources(t, "[rules.r]\nmatch='''"+tt.match+"'''\naction='block'\n", ""))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %s", err, tt.want)
			}
		})
	}
}

func TestNegationThatSaysWhatAbsenceMeansLoads(t *testing.T) {
	for _, match := range []string{
		`!has(mcp.request.arguments.path) || mcp.request.arguments.path != "/ws"`,
		`"path" in mcp.request.arguments && mcp.request.arguments.path != "/ws"`,
		`has(mcp.request.arguments.a) && has(mcp.request.arguments.a.b) && mcp.request.arguments.a.b != 1`,
		`mcp.server.name != "github"`,
		`!(intent == "read")`,
		`has(mcp.response.is_error) && !mcp.response.is_error`,
	} {
		compile(t, "[rules.r]\nmatch='''"+match+"'''\naction='block'\n")
	}
}

func TestPlaceOfAMistakeOnALaterLine(t *testing.T) {
	_, err := Compile(sources(t, "[rules.r]\nmatch = '''\nintent == \"x\" &&\n  mcp.srver.name == \"x\"'''\naction='block'\n", ""))
	if err == nil || !strings.HasPrefix(err.Error(), "profile.toml:4:") {
		t.Errorf("got %v, want an error on line 4", err)
	}
}

func TestOneMistakeRefusesTheFile(t *testing.T) {
	p, err := Compile(sources(t, "[rules.good]\nmatch='true'\naction='block'\n[rules.bad]\nmatch='tru'\naction='block'\n[rules.worse]\nmatch='mcp'\naction='allow'\n", ""))
	if p != nil || err == nil {
		t.Fatalf("got %v, %v, want no policy", p, err)
	}
	for _, want := range []string{"profile.toml:5:8", "profile.toml:8:8"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want a mistake at %s", err, want)
		}
	}
}

func TestZeroPolicyAndBadEventsAreBlocked(t *testing.T) {
	good := compile(t, "[rules.a]\nmatch='true'\naction='allow'\n")
	var missing *Policy
	for name, v := range map[string]event.Verdict{
		"no policy":    missing.Judge(t.Context(), &event.Event{Type: event.Boot}, event.Request, nil),
		"zero policy":  new(Policy).Judge(t.Context(), &event.Event{Type: event.Boot}, event.Request, nil),
		"no event":     good.Judge(t.Context(), nil, event.Request, nil),
		"zero event":   good.Judge(t.Context(), &event.Event{}, event.Request, nil),
		"unknown type": good.Judge(t.Context(), &event.Event{Type: "new.thing"}, event.Request, nil),
		"empty call":   good.Judge(t.Context(), &event.Event{Type: event.MCPToolCall}, event.Request, nil),
		"no tool":      good.Judge(t.Context(), &event.Event{Type: event.MCPToolCall, MCP: &event.MCP{}}, event.Request, nil),
		"third phase":  good.Judge(t.Context(), &event.Event{Type: event.Boot}, 2, nil),
	} {
		if v.Decision != event.Block || v.Reason == "" {
			t.Errorf("%s: got %s (%q), want a block with its reason", name, v.Decision, v.Reason)
		}
	}
}

func TestPanicWhileJudgingBlocks(t *testing.T) {
	p := compile(t, "[rules.a]\nmatch='vm.name == \"x\"'\naction='allow'\n")
	for _, f := range p.vocabulary.fields {
		f.read = nil
	}
	v := p.Judge(t.Context(), &event.Event{Type: event.Exec, Exec: &event.Command{}}, event.Request, nil)
	if v.Decision == event.Allow && v.Rule != ruleDefault {
		t.Errorf("got %+v, want no allow by the rule that panics", v)
	}
	p.vocabulary = nil
	v = p.Judge(t.Context(), &event.Event{Type: event.Exec, Exec: &event.Command{}}, event.Request, nil)
	if v.Decision != event.Block || !strings.Contains(v.Reason, "judging failed") {
		t.Errorf("got %+v, want a block", v)
	}
}

func TestPanicInABlockCountsAsBroken(t *testing.T) {
	p := compile(t, "[rules.a]\nmatch='vm.name == \"x\"'\naction='block'\n")
	for _, f := range p.vocabulary.fields {
		f.read = nil
	}
	v := p.Judge(t.Context(), &event.Event{Type: event.Exec, Exec: &event.Command{}}, event.Request, nil)
	if v.Decision != event.Block || v.Rule != "profile.a" || !v.Matches[0].Broken {
		t.Errorf("got %+v, want a block by the broken rule", v)
	}
}

func TestMarkerAtTheEndOfLongArgumentsIsSeen(t *testing.T) {
	p := compile(t, `
[rules.text]
match = 'mcp.request.text.contains("evil-marker")'
action = "block"
[rules.arg]
match = 'mcp.request.arguments.text.contains("evil-marker")'
action = "block"
[rules.fold]
match = 'mcp.request.arguments.text.icontains("EVIL-marker")'
action = "block"
`)
	args := `{"text":"` + strings.Repeat("x", 900<<10) + `evil-marker"}`
	v := p.Judge(t.Context(), testCase{Args: args}.event(), event.Request, nil)
	if len(v.Matches) != 3 || v.Matches[0].Broken || v.Matches[1].Broken || v.Matches[2].Broken {
		t.Errorf("got %+v, want three matches", v.Matches)
	}
}

func TestMatchesIsBrokenOverItsBound(t *testing.T) {
	p := compile(t, "[rules.a]\nmatch='mcp.request.arguments.t.matches(\"^x*$\")'\naction='block'\n[rules.b]\nmatch='matches(mcp.request.text, \"never\") && intent==\"x\"'\naction='block'\n")
	for _, tt := range []struct {
		size   int
		broken bool
	}{{maxMatched, false}, {maxMatched + 1, true}} {
		v := p.Judge(t.Context(), testCase{Args: `{"t":"` + strings.Repeat("x", tt.size) + `"}`}.event(), event.Request, nil)
		if v.Decision != event.Block || v.Rule != "profile.a" || v.Matches[0].Broken != tt.broken {
			t.Errorf("%d bytes: got %+v, want a block with broken = %t", tt.size, v, tt.broken)
		}
	}
}

func TestExpensiveRuleIsBrokenOverItsLimit(t *testing.T) {
	const nested = "[rules.a]\nmatch='mcp.request.arguments.l.exists(x, mcp.request.arguments.l.exists(y, mcp.request.arguments.l.exists(z, x + y + z == -1)))'\naction='block'\n"
	p := compile(t, nested)
	few := p.Judge(t.Context(), testCase{Args: `{"l":[1,2,3]}`}.event(), event.Request, nil)
	if few.Decision != event.Allow {
		t.Errorf("few elements: got %+v, want an allow", few)
	}
	many := p.Judge(t.Context(), testCase{Args: `{"l":[` + strings.Repeat("1,", 2000) + `1]}`}.event(), event.Request, nil)
	if many.Decision != event.Block || !many.Matches[0].Broken || !strings.Contains(many.Reason, "more than the limit") {
		t.Errorf("many elements: got %+v, want a block by the broken rule", many)
	}
}

func TestReasonOfABrokenRuleHoldsNothingOfTheEvent(t *testing.T) {
	p := compile(t, `
[rules.convert]
match = 'int(mcp.response.structured.n) > 5'
action = "block"
[rules.time]
match = 'timestamp(mcp.response.structured.n) < event.time'
action = "block"
[rules.overload]
match = 'mcp.response.structured.l.contains("x")'
action = "block"
[rules.list]
match = 'mcp.response.structured.l[int(mcp.response.structured.i)] == 1'
action = "block"
[rules.kind]
match = 'mcp.response.content.exists(c, c.text == "x")'
action = "block"
`)
	c := testCase{Result: `{"content":{"s3cret":"s3cret"},"structuredContent":{"n":"s3cret","l":["s3cret"],"i":77777}}`}
	v := p.Judge(t.Context(), c.event(), event.Response, c.outcome())
	encoded, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	if len(v.Matches) != 5 || strings.Contains(string(encoded), "s3cret") || strings.Contains(string(encoded), "77777") {
		t.Errorf("got %s, want five broken rules and nothing of the response", encoded)
	}
	c.Result = `{"structuredContent":{"s3cret":1,"s3cret":2}}`
	v = p.Judge(t.Context(), c.event(), event.Response, c.outcome())
	if v.Decision != event.Block || strings.Contains(v.Reason, "s3cret") || !strings.Contains(v.Reason, errUnreadable.Error()) {
		t.Errorf("got %+v, want a block that says why", v)
	}
}

func TestDigestTellsRulesApart(t *testing.T) {
	base := "[rules.a]\nmatch='true'\naction='block'\n"
	a, b := compile(t, base), compile(t, "# moved\n\n"+base)
	if a.Digest() != b.Digest() || a.Digest() == "" {
		t.Errorf("equal rules have digests %s and %s", a.Digest(), b.Digest())
	}
	for _, other := range []string{
		"[rules.b]\nmatch='true'\naction='block'\n", "[rules.a]\nmatch='true '\naction='block'\n",
		"[rules.a]\nmatch='true'\naction='allow'\n", "[rules.a]\nmatch='true'\naction='block'\nreason='r'\n",
		"[rules.a]\nmatch='true'\naction='block'\nunless='false'\n", "default='block'\n" + base,
	} {
		if compile(t, other).Digest() == a.Digest() {
			t.Errorf("other rules have the same digest: %s", other)
		}
	}
}

func TestSameRuleIDInTwoFilesOfAScopeIsRefused(t *testing.T) {
	s := sources(t, "[rules.a]\nmatch='true'\naction='block'\n", "")
	s[0].Scope = Corp
	other := s[0]
	_, err := Compile(append(s, other))
	if err == nil || !strings.Contains(err.Error(), "corp.a is declared twice") {
		t.Errorf("got %v, want a refusal", err)
	}
}

func TestFieldsDescribeEveryDeclaration(t *testing.T) {
	seen := map[string]bool{}
	for _, f := range Fields() {
		if f.Doc == "" || f.Type == "" || seen[f.Name] || (f.Phase != "request" && f.Phase != "response") {
			t.Errorf("%+v is not described, or declared twice", f)
		}
		seen[f.Name] = true
	}
	for _, want := range []string{"intent", "process.name", "mcp.request.arguments", "http.redirected_from", "file.import.path", "process.exec.exit_code"} {
		if !seen[want] {
			t.Errorf("%s is not declared", want)
		}
	}
}

func TestCheckFindsWhatLoadsAndStillIsAMistake(t *testing.T) {
	file := filepath.Join(t.TempDir(), "p.toml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(`
[rules.two_families]
match = 'http.host == "a" && mcp.method == "b"'
action = "block"
[rules.two_values]
match = 'tool.name == "a" && tool.name == "b"'
action = "block"
[rules.word]
match = 'intent == "run_comand"'
action = "block"
[rules.type]
match = 'event.type == "mcp.toolcall"'
action = "block"
[rules.all_of_it]
match = 'mcp.server.name=="a"'
action = "block"
[rules.pointless]
match = 'mcp.request.arguments.x == 1 && mcp.server.name == "a"'
action = "allow"
[rules.again]
match = 'mcp.server.name == "a"'
action = "block"
[rules.dear]
match = 'mcp.request.arguments.l.exists(x, mcp.request.arguments.l.exists(y, mcp.request.arguments.l.exists(z, x == y + z)))'
action = "block"
[rules.fine]
match = 'mcp.server.name == "b"'
action = "allow"
`)
	report := Check(file)
	got := map[int]string{}
	for _, f := range report.Files[0].Findings {
		if f.Severity != SeverityWarning || f.File != file {
			t.Errorf("unexpected finding %v", f)
		}
		got[f.Line] += f.Message + "\n"
	}
	want := map[int]string{
		3: "different kinds of event", 6: "cannot have two values", 9: `did you mean "run_command"`, 12: "no event has such a type",
		17: "all_of_it blocks all", 20: "all_of_it blocks all", 24: "is expensive",
	}
	for line, part := range want {
		if !strings.Contains(got[line], part) {
			t.Errorf("line %d: got %q, want %q", line, got[line], part)
		}
		delete(got, line)
	}
	if diff := cmp.Diff(map[int]string{}, got); diff != "" || !report.OK || report.Files[0].Rules != 9 {
		t.Errorf("unexpected findings: %s (ok %t)", diff, report.OK)
	}

	write("[rules.a]\nmatch = 'mcp.srver == 1'\naction='block'\n")
	report = Check(file)
	if report.OK || len(report.Files[0].Findings) != 1 || report.Files[0].Findings[0].Severity != SeverityError || report.Files[0].Findings[0].Line != 2 {
		t.Errorf("got %+v, want one error on line 2", report)
	}
	if encoded, err := json.Marshal(report); err != nil || !strings.Contains(string(encoded), `"line":2`) {
		t.Errorf("got %s, %v, want a report in JSON", encoded, err)
	}
	if report := Check(file + ".none"); report.OK {
		t.Error("a missing file is in order")
	}
}
