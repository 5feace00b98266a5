package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/capsem/capsem/internal/config"
)

func TestTheCommandLineIsAnswered(t *testing.T) {
	for _, test := range []struct {
		args           string
		code           int
		stdout, stderr string
	}{
		{"--version", 0, "capsem-mcp dev\n", ""},
		{"--help", 0, usage, ""},
		{"serve", 2, "", usage},
		{"--version now", 2, "", usage},
	} {
		var stdout, stderr strings.Builder
		code := run(t.Context(), strings.Fields(test.args), strings.NewReader(""), &stdout, &stderr)
		if code != test.code || stdout.String() != test.stdout || stderr.String() != test.stderr {
			t.Errorf("capsem-mcp %s: %d, %q, %q", test.args, code, stdout.String(), stderr.String())
		}
	}
}

func TestNothingToServeIsNoFailure(t *testing.T) {
	var stdout, stderr strings.Builder
	if code := run(t.Context(), nil, strings.NewReader(""), &stdout, &stderr); code != 0 || stdout.Len() > 0 || stderr.Len() > 0 {
		t.Errorf("%d, %q, %q", code, stdout.String(), stderr.String())
	}
}

// A client shows what a tool answers; a server that does not start it only calls
// broken.
func TestAHomeThatCannotBeUsedIsToldByTools(t *testing.T) {
	t.Setenv(config.EnvHome, filepath.Join("/dev/null", "home"))
	const calls = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}
{"jsonrpc":"2.0","method":"notifications/initialized"}
{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"capsem_list"}}
`
	var stdout, stderr strings.Builder
	if code := run(t.Context(), nil, strings.NewReader(calls), &stdout, &stderr); code != 0 {
		t.Errorf("%d: %s", code, stderr.String())
	}
	if !strings.Contains(stdout.String(), `"isError":true`) || !strings.Contains(stdout.String(), config.EnvHome) {
		t.Errorf("the tool answered %s", stdout.String())
	}
}
