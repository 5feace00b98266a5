package aggregator_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"github.com/capsem/capsem/internal/jsonrpc"
)

// TestMain lets the test binary be an MCP server that misbehaves.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "chaos" {
		os.Exit(chaos(os.Args[2]))
	}
	os.Exit(m.Run())
}

// chaos is a server on stdio. mode says what is wrong with it as a whole; what is
// wrong with a single answer, the tool's name says.
func chaos(mode string) int {
	in, out := bufio.NewReader(os.Stdin), os.Stdout
	switch mode {
	case "exit":
		fmt.Fprintln(os.Stderr, "first words")
		fmt.Fprintln(os.Stderr, "missing API key")
		return 3
	case "banner":
		fmt.Fprint(out, "Welcome to Chaos 1.0!\n\n  \r\n[info] listening\n{not json}\n")
	case "stderr-long", "stderr-cr":
		unit, total := bytes.Repeat([]byte("x"), 1<<20), 100<<20
		if mode == "stderr-cr" {
			unit, total = bytes.Repeat([]byte("progress 50%\r"), 1<<16), 10<<20
		}
		for written := 0; written < total; written += len(unit) {
			if _, err := os.Stderr.Write(unit); err != nil {
				return 4
			}
		}
	case "junk":
		for {
			if _, err := fmt.Fprintln(out, "nothing but noise"); err != nil {
				return 4
			}
		}
	case "stubborn":
		signal.Ignore(syscall.SIGTERM, syscall.SIGHUP)
	}
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			if mode == "stubborn" {
				never := make(chan os.Signal, 1)
				signal.Notify(never, syscall.SIGUSR2)
				<-never
			}
			return 0
		}
		m, err := jsonrpc.Parse(line)
		if err != nil {
			fmt.Fprintln(os.Stderr, "bad line from client:", err)
			return 5
		}
		answer(out, mode, &m)
	}
}

func answer(out io.Writer, mode string, m *jsonrpc.Message) {
	say := func(format string, args ...any) { fmt.Fprintf(out, format+"\n", args...) }
	end := ""
	if mode == "banner" {
		end = "  \r"
	}
	switch m.Method {
	case "initialize":
		switch mode {
		case "silent":
		case "old":
			say(`{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2024-11-05","capabilities":{},"serverInfo":{"name":"old"}}}`, m.ID)
		case "unknown-version":
			say(`{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"1999-01-01","capabilities":{}}}`, m.ID)
		case "refuses":
			say(`{"jsonrpc":"2.0","id":%s,"error":{"code":-32000,"message":"licence expired"}}`, m.ID)
		default:
			say(`{"jsonrpc":"2.0","id":%s,"result":{ "protocolVersion":"2025-11-25", "capabilities":{"tools":{}}, "x":1.50}}%s`, m.ID, end)
		}
	case "tools/call":
		name, _ := jsonrpc.Member(m.Params, "name")
		text, _ := jsonrpc.String(name)
		callTool(out, text, m)
	case "notifications/cancelled":
		fmt.Fprintf(os.Stderr, "cancelled %s\n", m.Params)
	}
}

// callTool gives the answer that a tool is named after.
func callTool(out io.Writer, name string, m *jsonrpc.Message) {
	say := func(format string, args ...any) { fmt.Fprintf(out, format+"\n", args...) }
	switch name {
	case "params": // what came, as it came
		say(`{"jsonrpc":"2.0","id":%s,"result":%s}`, m.ID, m.Params)
	case "environ":
		env, err := json.Marshal(os.Environ())
		if err != nil {
			panic(err)
		}
		say(`{"jsonrpc":"2.0","id":%s,"result":%s}`, m.ID, env)
	case "never":
	case "crash":
		fmt.Fprintln(os.Stderr, "panic: out of cheese")
		os.Exit(7)
	case "killed":
		if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
			panic(err)
		}
	case "huge-first", "huge-last": // a line over the limit
		id, last := fmt.Sprintf(`"id":%s,`, m.ID), ""
		if name == "huge-last" {
			id, last = "", fmt.Sprintf(`,"id":%s`, m.ID)
		}
		say(`{%s"jsonrpc":"2.0","result":{"text":"%s"}%s}`, id, strings.Repeat("h", 17<<20), last)
	case "large": // exactly at the limit
		head, tail := fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":{"t":"`, m.ID), `"}}`
		say("%s%s%s", head, strings.Repeat("l", 16<<20-len(head)-len(tail)), tail)
	case "duplicate":
		say(`{"jsonrpc":"2.0","id":%s,"result":{"a":1,"a":2}}`, m.ID)
	case "case":
		say(`{"jsonrpc":"2.0","id":%s,"Result":{},"result":{}}`, m.ID)
	case "surrogate":
		say(`{"jsonrpc":"2.0","id":%s,"result":"\ud800"}`, m.ID)
	case "pretty":
		say("{\n  \"jsonrpc\": \"2.0\",\n  \"id\": %s,\n  \"result\": {}\n}", m.ID)
	case "strangers": // answers to nothing, then the answer
		say(`{"jsonrpc":"2.0","id":99999,"result":{}}`)
		say(`{"jsonrpc":"2.0","id":"%s","result":{}}`, m.ID)
		say(`{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"?"}}`)
		say(`[{"jsonrpc":"2.0","id":%s,"result":{}}]`, m.ID)
		say(`{"jsonrpc":"2.0","id":%s,"result":{"real":true}}`, m.ID)
	case "notify":
		say(`{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken" : 1.0,"progress":50}}`)
		say(`{"jsonrpc":"2.0","id":%s,"result":{}}`, m.ID)
	case "ask":
		say(`{"jsonrpc":"2.0","id":"s-1","method":"roots/list"}`)
	case "bytewise":
		for _, b := range fmt.Appendf(nil, `{"jsonrpc":"2.0","id":%s,"result":{"text":"日本"}}`+"\n", m.ID) {
			if _, err := out.Write([]byte{b}); err != nil {
				return
			}
		}
	default:
		say(`{"jsonrpc":"2.0","id":%s,"error":{"code":-32602,"message":"unknown tool","data":{"n":9007199254740993}}}`, m.ID)
	}
}
