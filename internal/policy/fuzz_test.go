package policy

import (
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"testing"

	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/traits"

	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/jsonrpc"
)

// FuzzCompile checks that an expression compiles, and then judges every type of
// event without a failure of the judge itself, or is refused with a position.
func FuzzCompile(f *testing.F) {
	for _, s := range []string{
		`mcp.request.arguments.text.contains("evil")`, `initiator.kind == "routine" && intent == "run_command"`,
		`has(mcp.resource.uri) ? !has(http.body) : mcp.request.arguments.l.exists(x, x.y == 1)`,
		`sets.contains(process.exec.argv, ["a"]) || file.path.matches("^/")`, `.mcp.method == ''`, `mcp["method"]`,
		`"a" in mcp.request.arguments`, `[1, 2].map(x, x > 1, x)[0] == 1`, `event.time < timestamp("2026-01-01T00:00:00Z")`,
		`"%s".format([intent]) == "x"`, `intent.replace("a", "b").split("c")[0] == string(b"d")`, `{"a": mcp.request.arguments}.a.b == 1u`,
	} {
		f.Add(s, s)
	}
	f.Fuzz(func(t *testing.T, match, unless string) {
		rule := config.Rule{
			ID: "r", Match: config.Expression{Text: match, Position: config.Position{File: "p", Line: 3, Column: 9}},
			Unless: config.Expression{Text: unless, Position: config.Position{File: "p", Line: 9, Column: 9}}, Action: config.ActionBlock,
		}
		p, err := Compile([]Source{{Scope: Profile, File: "p", Default: config.DefaultAllow, Rules: []config.Rule{rule}}})
		if err != nil {
			var all config.Errors
			if !errors.As(err, &all) {
				t.Fatalf("error %v has no position", err)
			}
			for _, e := range all {
				if e.Line < 3 || e.Message == "" {
					t.Fatalf("error %v lies outside of the rule", e)
				}
			}
			return
		}
		for _, typ := range event.Types() {
			c := testCase{Type: string(typ), Args: `{"a":1}`, Result: `{"content":[]}`}
			for _, phase := range []event.Phase{event.Request, event.Response} {
				v := p.Judge(t.Context(), c.event(), phase, c.outcome())
				if strings.HasPrefix(v.Reason, "judging failed") {
					t.Fatalf("%s: %s", typ, v.Reason)
				}
			}
		}
	})
}

// FuzzArguments checks that the member that a rule reads is the one that a whole
// conversion gives, and that rules are judged alike by either.
func FuzzArguments(f *testing.F) {
	for _, s := range []string{
		`{}`, `{"a":1}`, `{"a":{"b":[1,2.5,-0,1e3,"\u0065"]}}`, `{"a":1,"a":2}`, `{"\u0061":"x"}`, `[]`, `null`, `{"a":"\ud800"}`,
		`{"a":18446744073709551615,"b":18446744073709551616,"c":1e999}`, ` { "a" : null } `, `{"a":1}x`, "{\"a\":\"\xff\"}",
	} {
		f.Add(s)
	}
	p := compile(f, `
[rules.text]
match = 'mcp.request.arguments.a.contains("x") || mcp.request.arguments.b == 1'
action = "block"
[rules.all]
match = 'mcp.request.arguments.exists(k, k == "c") && size(mcp.request.arguments) > 1'
action = "block"
`)
	f.Fuzz(func(t *testing.T, args string) {
		lazy, whole := lazyObject(json.RawMessage(args)), jsonObject(json.RawMessage(args))
		m, isMap := whole.(traits.Mapper)
		o, isLazy := lazy.(*object)
		if isMap != isLazy {
			t.Fatalf("read lazily %v, read whole %v", lazy, whole)
		}
		if isMap {
			for name := range jsonrpc.Members(json.RawMessage(args)) {
				want, there := m.Find(types.String(name))
				got := o.member(name)
				if !there || got == nil || types.Equal(got, want) != types.True {
					t.Fatalf("member %q: read lazily %v, read whole %v", name, got, want)
				}
			}
			if types.Equal(lazy, whole) != types.True || types.Equal(whole, lazy) != types.True {
				t.Fatalf("read lazily %v is not read whole %v", lazy, whole)
			}
		}
		v := p.Judge(t.Context(), testCase{Args: args}.event(), event.Request, nil)
		if strings.HasPrefix(v.Reason, "judging failed") {
			t.Fatal(v.Reason)
		}
		if args != "" && !isMap && v.Decision != event.Block {
			t.Fatalf("arguments that cannot be read are allowed: %+v", v)
		}
	})
}

func TestOnePolicyJudgesOnManyGoroutines(t *testing.T) {
	s := suites(t)["testdata/absence.toml"]
	p, err := Compile(sources(t, s.Profile, s.Corp))
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for _, c := range s.Case {
				if v := p.Judge(t.Context(), c.event(), event.Request, nil); v.Decision.String() != c.Want {
					t.Errorf("%s: got %s, want %s", c.Name, v.Decision, c.Want)
				}
			}
		})
	}
	wg.Wait()
}
