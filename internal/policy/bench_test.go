package policy

import (
	"fmt"
	"strings"
	"testing"

	"github.com/capsem/capsem/internal/event"
)

// benchRules writes n rules of the usual form, each on another tool where
// selective is set, else all on the same server.
func benchRules(n int, selective bool) string {
	var b strings.Builder
	for i := range n {
		tool := "s__write"
		if selective {
			tool = fmt.Sprintf("s__tool_%d", i)
		}
		fmt.Fprintf(&b, "[rules.r%d]\nmatch='mcp.server.name == \"s\" && tool.name == \"%s\" && mcp.request.arguments.title.startsWith(\"x%d\")'\naction=\"block\"\n", i, tool, i)
	}
	return b.String()
}

func benchmarkJudge(b *testing.B, rules, args string) {
	p := compile(b, rules)
	ev := testCase{Tool: "s__write", Args: args}.event()
	b.ReportAllocs()
	for b.Loop() {
		if v := p.Judge(b.Context(), ev, event.Request, nil); v.Decision != event.Allow {
			b.Fatalf("got %+v", v)
		}
	}
}

const benchArgs = `{"title":"a title","body":"some text","labels":["a","b"],"n":5}`

func BenchmarkJudge1Rule(b *testing.B) { benchmarkJudge(b, benchRules(1, false), benchArgs) }

// BenchmarkJudge100Rules evaluates every rule: the index does not help.
func BenchmarkJudge100Rules(b *testing.B) { benchmarkJudge(b, benchRules(100, false), benchArgs) }

// BenchmarkJudge1000RulesIndexed has one candidate among a thousand.
func BenchmarkJudge1000RulesIndexed(b *testing.B) {
	benchmarkJudge(b, benchRules(1000, true)+"[rules.w]\nmatch='tool.name == \"s__write\" && mcp.request.arguments.title.startsWith(\"x\")'\naction=\"block\"\n", benchArgs)
}

// BenchmarkJudge1000RulesNoCandidate reads nothing of the event but the index's
// keys.
func BenchmarkJudge1000RulesNoCandidate(b *testing.B) {
	benchmarkJudge(b, benchRules(1000, true), benchArgs)
}

// BenchmarkJudgeAbsent ends in absence, which costs a second look.
func BenchmarkJudgeAbsent(b *testing.B) {
	benchmarkJudge(b, "[rules.a]\nmatch='mcp.request.arguments.a == \"1\" || mcp.request.arguments.b == \"1\"'\naction=\"block\"\n", benchArgs)
}

// BenchmarkJudgeLongText searches 900 KiB.
func BenchmarkJudgeLongText(b *testing.B) {
	benchmarkJudge(b, "[rules.a]\nmatch='mcp.request.text.contains(\"evil-marker\")'\naction=\"block\"\n", `{"t":"`+strings.Repeat("x", 900<<10)+`"}`)
}

func BenchmarkCompile100Rules(b *testing.B) {
	s := sources(b, benchRules(100, true), "")
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Compile(s); err != nil {
			b.Fatal(err)
		}
	}
}
