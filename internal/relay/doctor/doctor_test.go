package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestFilterSelectsAsPytestDoes(t *testing.T) {
	names := []string{"kernel", "vsock_5000_open", "vsock_5003_closed", "mcp_echo", "mcp_tools_list"}
	for _, tt := range []struct{ expr, want string }{
		{"", "kernel vsock_5000_open vsock_5003_closed mcp_echo mcp_tools_list"},
		{"vsock", "vsock_5000_open vsock_5003_closed"},
		{"VSOCK and not closed", "vsock_5000_open"},
		{"kernel or echo", "kernel mcp_echo"},
		{"not vsock and not mcp", "kernel"},
		{"not (vsock or mcp)", "kernel"},
		{"mcp and (echo or list)", "mcp_echo mcp_tools_list"},
		{"kernel or vsock and closed", "kernel vsock_5003_closed"},
		{"not not kernel", "kernel"},
		{"nothing_like_it", ""},
	} {
		f, err := ParseFilter(tt.expr)
		if err != nil {
			t.Errorf("%q: %v", tt.expr, err)
			continue
		}
		var got []string
		for _, n := range names {
			if f(n) {
				got = append(got, n)
			}
		}
		if s := strings.Join(got, " "); s != tt.want {
			t.Errorf("%q selects %q, want %q", tt.expr, s, tt.want)
		}
	}
}

func TestFilterRefusesWhatItCannotRead(t *testing.T) {
	for _, expr := range []string{"and", "a and", "or b", "(a", "a)", "not", "a b", "()", strings.Repeat("(", 100) + "a" + strings.Repeat(")", 100), strings.Repeat("not ", 100) + "a"} {
		if _, err := ParseFilter(expr); err == nil {
			t.Errorf("%.40q was read", expr)
		}
	}
}

func FuzzParseFilter(f *testing.F) {
	f.Add("a and (b or not c)")
	f.Fuzz(func(t *testing.T, expr string) {
		if filter, err := ParseFilter(expr); err == nil {
			filter("some_name") // must not panic
		}
	})
}

func checks() []Check {
	return []Check{
		{"good", func(context.Context) (string, error) { return "fine", nil }},
		{"bad", func(context.Context) (string, error) { return "", errors.New("it is broken") }},
	}
}

func TestExitStatusSaysWhetherAllIsWell(t *testing.T) {
	for _, tt := range []struct {
		args   []string
		code   int
		stdout string
	}{
		{nil, 1, "ok   good               fine\nFAIL bad                it is broken\n"},
		{[]string{"-k", "good"}, 0, "ok   good               fine\n"},
		{[]string{"-k", "neither"}, 2, ""},
		{[]string{"-k", "("}, 2, ""},
		{[]string{"--what"}, 2, ""},
		{[]string{"extra"}, 2, ""},
	} {
		var out, errs strings.Builder
		code := Run(t.Context(), checks(), tt.args, &out, &errs)
		if code != tt.code || out.String() != tt.stdout || (code == 2 && errs.Len() == 0) {
			t.Errorf("%q: status %d, output %q, errors %q", tt.args, code, out.String(), errs.String())
		}
	}
}

func TestReportAsJSON(t *testing.T) {
	var out, errs strings.Builder
	if code := Run(t.Context(), checks(), []string{"--json"}, &out, &errs); code != 1 {
		t.Errorf("status %d, %s", code, &errs)
	}
	var got Report
	if err := json.Unmarshal([]byte(out.String()), &got); err != nil {
		t.Fatal(err)
	}
	for i := range got.Results {
		got.Results[i].DurationMS = 0
	}
	want := Report{Results: []Result{{Name: "good", OK: true, Detail: "fine"}, {Name: "bad", Detail: "it is broken"}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
