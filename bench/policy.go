package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/inspect"
	"github.com/capsem/capsem/internal/policy"
)

func policyBenchmark() benchmark {
	return benchmark{
		name: "policy",
		about: "one tool call judged by 100 rules that are all evaluated, and by 1,000 of which the index leaves one; one rule alone is reported beside them. " +
			"The bars are absolute",
		run: benchPolicy,
	}
}

func benchPolicy(ctx context.Context, l *lab) ([]row, error) {
	one, err := l.rules("one", 1, false)
	if err != nil {
		return nil, err
	}
	hundred, err := l.rules("hundred", 100, false)
	if err != nil {
		return nil, err
	}
	thousand, err := l.rules("thousand", 1000, true)
	if err != nil {
		return nil, err
	}
	allocs := map[*policy.Policy]int64{}
	judge := func(p *policy.Policy) side {
		return func(context.Context) (float64, error) {
			r := testing.Benchmark(func(b *testing.B) { judgeCall(b, p) })
			allocs[p] = r.AllocsPerOp()
			return float64(r.NsPerOp()) / 1000, nil
		}
	}
	all, err := alternate(ctx, l.rounds(5), judge(hundred), judge(one), judge(thousand))
	if err != nil {
		return nil, err
	}
	return []row{
		absolute("policy, 100 rules", "µs", all[0], atMost(10), fmt.Sprintf("one rule alone %s", amount(all[1].median(), "µs"))),
		absolute("policy, 100 rules", "allocations", series{float64(allocs[hundred])}, atMost(10), ""),
		absolute("policy, 1,000 rules with an index", "µs", all[2], atMost(5), ""),
		absolute("policy, 1,000 rules with an index", "allocations", series{float64(allocs[thousand])}, atMost(10), ""),
	}, nil
}

// rules are of the usual form, each for another tool where they are selective,
// and one more for the tool that is called.
func (l *lab) rules(name string, n int, selective bool) (*policy.Policy, error) {
	var b strings.Builder
	for i := range n {
		tool := "s__write"
		if selective && i > 0 {
			tool = fmt.Sprintf("s__tool_%d", i)
		}
		fmt.Fprintf(&b, "[rules.r%d]\nmatch = 'mcp.server.name == \"s\" && tool.name == \"%s\" && mcp.request.arguments.title.startsWith(\"x%d\")'\naction = \"block\"\n", i, tool, i)
	}
	path := filepath.Join(l.dir, name+".toml")
	if err := os.WriteFile(path, []byte("default = \"allow\"\n"+b.String()), 0o600); err != nil {
		return nil, fmt.Errorf("writing rules: %w", err)
	}
	return policy.Load(path)
}

func judgeCall(b *testing.B, p *policy.Policy) {
	caller := inspect.Caller{VM: event.VM{ID: "vm", Name: "vm", Profile: "p"}, Initiator: event.Initiator{Kind: event.GuestAgent}}
	arguments := json.RawMessage(`{"title":"a title","body":"some text","labels":["a","b"],"n":5}`)
	ev := caller.MCP(inspect.Message{
		Method: "tools/call", ID: json.RawMessage("1"), Params: json.RawMessage(`{"name":"s__write","arguments":` + string(arguments) + `}`),
		Origin: event.OriginMCP, Transport: "vsock", Call: &inspect.ToolCall{Name: "s__write", Arguments: arguments},
		Target: inspect.Target{Server: "s", Tool: "write"},
	})
	b.ReportAllocs()
	for b.Loop() {
		if v := p.Judge(context.Background(), ev, event.Request, nil); v.Decision != event.Allow {
			b.Fatalf("the call is judged %v", v)
		}
	}
}
