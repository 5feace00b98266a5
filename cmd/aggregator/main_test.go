package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/launch"
	"github.com/capsem/capsem/internal/toolproto"
	"github.com/capsem/capsem/internal/upstream"
)

// TestMain lets the test binary be the launcher, an init, capsem-aggregator, and
// a trivial MCP server.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case launch.ServeCommand:
			log := slog.New(slog.NewTextHandler(os.Stderr, nil))
			if err := launch.Serve(context.Background(), os.NewFile(launch.SocketFD, "socket"), log); err != nil {
				os.Exit(1)
			}
			os.Exit(0)
		case launch.InitCommand:
			os.Exit(launch.Init(os.Stderr))
		case "aggregator":
			os.Exit(run(context.Background(), nil, os.Stdin, os.Stdout, os.Stderr))
		case "server":
			os.Exit(trivial(os.Stdin, os.Stdout))
		}
	}
	os.Exit(m.Run())
}

// trivial is an MCP server that answers initialize, and every other request with
// its params.
func trivial(stdin io.Reader, stdout io.Writer) int {
	in := bufio.NewReaderSize(stdin, 1<<20)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return 0
		}
		m, err := jsonrpc.Parse(line)
		if err != nil {
			return 1
		}
		result := m.Params
		switch {
		case m.Kind != jsonrpc.Request:
			continue
		case m.Method == "initialize":
			result = json.RawMessage(`{"protocolVersion":"2025-11-25","capabilities":{}}`)
		case m.Method == "start-daemon":
			// A process in a session of its own whose parent is gone.
			seconds, _ := jsonrpc.String(member(m.Params, "seconds"))
			if err := exec.Command("/bin/sh", "-c", "setsid sleep "+seconds+" >/dev/null 2>&1 &").Run(); err != nil {
				return 1
			}
		}
		if _, err := stdout.Write(append(jsonrpc.AppendResult(nil, m.ID, result), '\n')); err != nil {
			return 1
		}
	}
}

// member returns a member of params, nil for none.
func member(params json.RawMessage, name string) json.RawMessage {
	raw, _ := jsonrpc.Member(params, name)
	return raw
}

// start keeps a server running as the supervisor does: below a launcher, in the
// real program.
func start(t testing.TB, server toolproto.Server) (*launch.Client, *upstream.Upstream) {
	t.Helper()
	client, err := launch.Start(t.Context(), "/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if server.Name == "" {
		server.Name = "server"
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	peers, err := filepath.Abs("../../tests/npm/node_modules")
	if err != nil {
		t.Fatal(err)
	}
	u := upstream.Start(t.Context(), upstream.Options{
		Server:  server,
		Command: child.Command{Path: self, Args: []string{"aggregator"}},
		StartProcess: func(ctx context.Context, cmd child.Command) (upstream.Process, error) {
			return client.Start(ctx, launch.Jail{Profile: launch.Aggregator, Read: []string{peers}}, cmd)
		},
		Log: slog.New(slog.DiscardHandler),
	})
	t.Cleanup(func() {
		u.Close()
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	})
	return client, u
}

func trivialServer() toolproto.Server {
	return toolproto.Server{Command: "/proc/self/exe", Args: []string{"server"}}
}

func TestCallsGoThroughTheWholeChain(t *testing.T) {
	_, u := start(t, trivialServer())
	for _, size := range []int{0, 64<<10 - 1, 64 << 10, 64<<10 + 1, 1 << 20, 5 << 20} {
		params := fmt.Sprintf(`{ "n":9007199254740993,"pad":%q}`, strings.Repeat("p", size))
		answer, err := u.Call(t.Context(), "tools/call", []byte(params), time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		m, err := jsonrpc.Parse(answer)
		if err != nil || string(m.Result) != params {
			t.Errorf("%d bytes: %v, %d bytes came back", size, err, len(m.Result))
		}
	}
}

func TestServersThatDoNotWorkAreExplained(t *testing.T) {
	for name, test := range map[string]struct {
		server toolproto.Server
		want   string
	}{
		"missing": {toolproto.Server{Command: "no-such-server", Env: []toolproto.EnvVar{{Name: "PATH", Value: []byte("/bin")}}}, `server server exited: starting no-such-server: no such program in PATH "/bin"`},
		"exits":   {toolproto.Server{Command: "/bin/sh", Args: []string{"-c", "echo no key >&2; exit 3"}}, "server server exited: exit status 3: no key"},
	} {
		_, u := start(t, test.server)
		_, err := u.Call(t.Context(), "tools/list", nil, time.Minute)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q", name, err, test.want)
		}
	}
}

func TestNothingOfAServerOutlivesItsSupervisor(t *testing.T) {
	client, u := start(t, trivialServer())
	// A number of seconds by which this test's process is told from others.
	seconds := strconv.Itoa(1e6 + os.Getpid())
	if _, err := u.Call(t.Context(), "start-daemon", []byte(`{"seconds":"`+seconds+`"}`), time.Minute); err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(10 * time.Second); sleepers(t, seconds) != 1; <-tick.C {
		if time.Now().After(deadline) {
			t.Fatal("no daemon was started")
		}
	}
	u.Close()
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	if n := sleepers(t, seconds); n != 0 {
		t.Errorf("%d daemons are left", n)
	}
}

// sleepers counts the processes that run `sleep seconds`.
func sleepers(t *testing.T, seconds string) (n int) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		// One that cannot be read has ended since.
		if cmdline, err := os.ReadFile(file); err == nil && string(cmdline) == "sleep\x00"+seconds+"\x00" {
			n++
		}
	}
	return n
}

func TestTheProgramTakesNoArguments(t *testing.T) {
	var stderr bytes.Buffer
	if code := run(t.Context(), []string{"--help"}, os.Stdin, io.Discard, &stderr); code != 2 || !strings.Contains(stderr.String(), "usage: capsem-aggregator") {
		t.Errorf("%d, %s", code, stderr.String())
	}
}

// everything is the command of @modelcontextprotocol/server-everything.
func everything(t testing.TB) []string {
	t.Helper()
	script, err := filepath.Abs("../../tests/npm/node_modules/@modelcontextprotocol/server-everything/dist/index.js")
	if err == nil {
		_, err = os.Stat(script)
	}
	var node string
	if err == nil {
		node, err = exec.LookPath("node")
	}
	if err != nil {
		if config.TestRequires(config.OSEnv(), "npm") {
			t.Fatalf("CAPSEM_TEST_REQUIRE has npm, but: %v", err)
		}
		t.Skipf("%v: run `just setup`, which installs what tests/npm lists", err)
	}
	return []string{node, script, "stdio"}
}

func TestToolsOfARealServerEqualThoseListedDirectly(t *testing.T) {
	command := everything(t)
	env := []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=" + t.TempDir()}
	direct := newDirect(t, child.Command{Path: command[0], Args: command[1:], Env: env})
	answer := direct.call("tools/list", "")
	list, _ := jsonrpc.Member(answer.Result, "tools")
	var want []string
	for tool := range jsonrpc.Elements(list) {
		want = append(want, string(tool))
	}
	var vars []toolproto.EnvVar
	for _, kv := range env {
		name, value, _ := strings.Cut(kv, "=")
		vars = append(vars, toolproto.EnvVar{Name: name, Value: []byte(value)})
	}
	_, u := start(t, toolproto.Server{Name: "everything", Command: command[0], Args: command[1:], Env: vars})
	tools, err := u.ListTools(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, tool := range tools {
		got = append(got, string(tool))
	}
	if diff := cmp.Diff(want, got); diff != "" || len(want) < 5 {
		t.Errorf("%d tools directly: %s", len(want), diff)
	}
	params := `{"name":"echo","arguments":{"message":"\u00e9\u65e5"}}`
	message, err := u.Call(t.Context(), "tools/call", []byte(params), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	m, err := jsonrpc.Parse(message)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(direct.call("tools/call", params).Result), string(m.Result)); diff != "" {
		t.Error(diff)
	}
}

// direct is a client of a server on stdio without anything in between.
type direct struct {
	t  testing.TB
	in *os.File
	r  *bufio.Reader
	id uint64
}

func newDirect(t testing.TB, cmd child.Command) *direct {
	t.Helper()
	inR, inW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	outR, outW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin, cmd.Stdout = inR, outW
	p, err := child.Start(t.Context(), cmd)
	if err := errors.Join(err, inR.Close(), outW.Close()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(inW.Close(), p.Stop(context.Background()), outR.Close()); err != nil {
			t.Error(err)
		}
	})
	d := &direct{t: t, in: inW, r: bufio.NewReaderSize(outR, 1<<20)}
	d.call("initialize", `{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"capsem","version":"1"}}`)
	if _, err := d.in.Write(append(jsonrpc.AppendNotification(nil, "notifications/initialized", nil), '\n')); err != nil {
		t.Fatal(err)
	}
	return d
}

// call returns the next response. What the server says on its own is skipped.
func (d *direct) call(method, params string) jsonrpc.Message {
	d.t.Helper()
	d.id++
	var raw json.RawMessage
	if params != "" {
		raw = json.RawMessage(params)
	}
	if _, err := d.in.Write(append(jsonrpc.AppendRequest(nil, strconv.AppendUint(nil, d.id, 10), method, raw), '\n')); err != nil {
		d.t.Fatal(err)
	}
	for {
		line, err := d.r.ReadBytes('\n')
		if err != nil {
			d.t.Fatal(err)
		}
		m, err := jsonrpc.Parse(line)
		if err != nil {
			d.t.Fatal(err)
		}
		if m.Kind == jsonrpc.Response {
			return m
		}
	}
}

const benchParams = `{"name":"echo","arguments":{"text":"hello, world"}}`

func BenchmarkDirectCall(b *testing.B) {
	d := newDirect(b, child.Command{Path: "/proc/self/exe", Args: []string{"server"}})
	for b.Loop() {
		d.call("tools/call", benchParams)
	}
}

func BenchmarkCallThroughAggregator(b *testing.B) {
	_, u := start(b, trivialServer())
	if err := u.WaitReady(b.Context()); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := u.Call(b.Context(), "tools/call", []byte(benchParams), time.Minute); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkCallsThroughAggregatorInParallel(b *testing.B) {
	_, u := start(b, trivialServer())
	if err := u.WaitReady(b.Context()); err != nil {
		b.Fatal(err)
	}
	b.SetParallelism(32)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, err := u.Call(b.Context(), "tools/call", []byte(benchParams), time.Minute); err != nil {
				b.Error(err)
			}
		}
	})
}

// BenchmarkRealServer compares a call of server-everything with and without the
// chain in front of it.
func BenchmarkRealServer(b *testing.B) {
	command := everything(b)
	const params = `{"name":"echo","arguments":{"message":"hello, world"}}`
	path := "/usr/local/bin:/usr/bin:/bin"
	b.Run("direct", func(b *testing.B) {
		d := newDirect(b, child.Command{Path: command[0], Args: command[1:], Env: []string{"PATH=" + path}})
		for b.Loop() {
			d.call("tools/call", params)
		}
	})
	b.Run("aggregator", func(b *testing.B) {
		env := []toolproto.EnvVar{{Name: "PATH", Value: []byte(path)}}
		_, u := start(b, toolproto.Server{Command: command[0], Args: command[1:], Env: env})
		if err := u.WaitReady(b.Context()); err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			if _, err := u.Call(b.Context(), "tools/call", []byte(params), time.Minute); err != nil {
				b.Fatal(err)
			}
		}
	})
}
