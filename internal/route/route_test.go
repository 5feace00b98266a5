package route_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/route"
)

func tools(names ...string) []route.Tool {
	var list []route.Tool
	for _, n := range names {
		list = append(list, route.Tool{Name: n, Definition: []byte(`{"name":"` + n + `"}`)})
	}
	return list
}

func TestNamesAreFoundExactly(t *testing.T) {
	table, conflicts := route.New([]route.Server{
		{Name: "a", Tools: tools("b__c", "plain", "with-dash")},
		{Name: "builtin", Tools: tools("echo")},
	})
	if len(conflicts) != 0 {
		t.Fatalf("conflicts: %v", conflicts)
	}
	for name, want := range map[string][2]string{
		"a__b__c":       {"a", "b__c"},
		"a__plain":      {"a", "plain"},
		"a__with-dash":  {"a", "with-dash"},
		"builtin__echo": {"builtin", "echo"},
	} {
		got, ok := table.Tool(name)
		if !ok || got.Server != want[0] || got.Tool != want[1] {
			t.Errorf("Tool(%q) = %+v, %v; want %v", name, got, ok, want)
		}
	}
	for _, name := range []string{"", "echo", "b__c", "A__plain", "a__plain ", "a_plain"} {
		if e, ok := table.Tool(name); ok {
			t.Errorf("Tool(%q) found %+v", name, e)
		}
	}
}

func TestAServerCannotTakeAnothersName(t *testing.T) {
	table, conflicts := route.New([]route.Server{
		{Name: "a", Tools: tools("b__c", "x")},
		{Name: "a__b", Tools: tools("c")},
	})
	if len(conflicts) != 1 || conflicts[0].Kept.Server != "a" || conflicts[0].Dropped.Server != "a__b" {
		t.Fatalf("conflicts: %v", conflicts)
	}
	if msg := conflicts[0].Error(); !strings.Contains(msg, "b__c") || !strings.Contains(msg, "a__b") {
		t.Errorf("the message names only one side: %s", msg)
	}
	if got, _ := table.Tool("a__b__c"); got.Server != "a" {
		t.Errorf("the name went to %s", got.Server)
	}
}

func TestAToolListedTwiceIsOffereredOnce(t *testing.T) {
	table, conflicts := route.New([]route.Server{{Name: "a", Tools: tools("x", "x")}})
	if len(table.Tools()) != 1 || len(conflicts) != 1 {
		t.Errorf("got %d tools, %d conflicts", len(table.Tools()), len(conflicts))
	}
}

func TestNamesThatClientsRefuseAreReplacedAndStayApart(t *testing.T) {
	long := strings.Repeat("x", 70)
	seen := map[string]string{}
	for _, tool := range []string{"a.b", "a:b", "a/b", "a_b", "ä", "", long, long + "y", strings.Repeat("é", 40), "tab\there"} {
		name := route.Name("srv", tool)
		if len(name) > route.MaxName {
			t.Errorf("Name(%q) has %d bytes", tool, len(name))
		}
		if strings.Trim(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") != "" {
			t.Errorf("Name(%q) = %q", tool, name)
		}
		if name != route.Name("srv", tool) {
			t.Errorf("Name(%q) is not stable", tool)
		}
		if other, taken := seen[name]; taken {
			t.Errorf("%q and %q are both %q", tool, other, name)
		}
		seen[name] = tool
	}
}

func TestANameOfExactlyTheLimitIsKept(t *testing.T) {
	for n, kept := range map[int]bool{route.MaxName - 1: true, route.MaxName: true, route.MaxName + 1: false} {
		tool := strings.Repeat("t", n-len("s"+route.Separator))
		if got := route.Name("s", tool) == "s__"+tool; got != kept {
			t.Errorf("a name of %d bytes kept: %v, want %v", n, got, kept)
		}
	}
}

func TestTablesAreEqualWhenAGuestSeesTheSame(t *testing.T) {
	of := func(names ...string) *route.Table {
		table, _ := route.New([]route.Server{{Name: "a", Tools: tools(names...)}})
		return table
	}
	if !of("x", "y").Equal(of("x", "y")) {
		t.Error("the same tools differ")
	}
	for _, other := range []*route.Table{of("x"), of("y", "x"), of("x", "z"), of()} {
		if of("x", "y").Equal(other) {
			t.Errorf("equal to %v", cmp.Diff(other.Tools(), nil))
		}
	}
}
