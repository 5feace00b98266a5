package mcptools_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"flag"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/client"
	"github.com/capsem/capsem/internal/mcptools"
)

var update = flag.Bool("update", false, "write testdata again")

// service is the far side: a small server of the API's contract, which keeps the
// requests that it got.
type service struct {
	answer http.HandlerFunc

	mu       sync.Mutex
	requests []request
}

// request is what the service saw of one.
type request struct {
	Method, URI, Tool, Call, Client, Arguments, Body string
	headerBytes                                      int
}

func (s *service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	arguments, err := base64.StdEncoding.DecodeString(r.Header.Get(api.HeaderToolArguments))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	q := request{
		Method: r.Method, URI: r.URL.RequestURI(), Tool: r.Header.Get(api.HeaderTool), Call: r.Header.Get(api.HeaderToolCall),
		Client: r.Header.Get(api.HeaderClient), Arguments: string(arguments), Body: string(body),
	}
	for name, values := range r.Header {
		q.headerBytes += len(name) + len(strings.Join(values, ""))
	}
	s.mu.Lock()
	s.requests = append(s.requests, q)
	s.mu.Unlock()
	s.answer(w, r)
}

// last is the newest request.
func (s *service) last(t *testing.T) request {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.requests) == 0 {
		t.Fatal("the service got no request")
	}
	return s.requests[len(s.requests)-1]
}

// newService serves answer on a socket, and returns the options that lead there.
func newService(t *testing.T, answer http.HandlerFunc) (*service, mcptools.Options) {
	t.Helper()
	s := &service{answer: answer}
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewUnstartedServer(s)
	srv.Listener.Close()
	srv.Listener = l
	srv.Start()
	t.Cleanup(srv.Close)
	return s, mcptools.Options{
		Version: "v1.2.3", Log: slog.New(slog.DiscardHandler),
		Connect: func(context.Context) (*client.Client, error) { return client.New(socket), nil },
	}
}

// connect runs the server in memory, and returns a session with it.
func connect(t *testing.T, o mcptools.Options, co *mcp.ClientOptions) *mcp.ClientSession {
	t.Helper()
	near, far := mcp.NewInMemoryTransports()
	server, err := mcptools.New(o).Connect(t.Context(), far, nil)
	if err != nil {
		t.Fatal(err)
	}
	session, err := mcp.NewClient(&mcp.Implementation{Name: "editor", Version: "9"}, co).Connect(t.Context(), near, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		session.Close()
		server.Wait()
	})
	return session
}

// reply answers every request with a value.
func reply(v any) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.Header.Get("Accept"), api.ProgressType) {
			result, err := json.Marshal(v)
			if err != nil {
				panic(err)
			}
			w.Header().Set("Content-Type", api.ProgressType)
			json.NewEncoder(w).Encode(api.Progress{Step: "booting"})
			json.NewEncoder(w).Encode(api.Progress{Step: "waiting for the guest"})
			json.NewEncoder(w).Encode(api.Progress{Result: result})
			return
		}
		api.WriteJSON(w, http.StatusOK, v)
	}
}

func call(t *testing.T, s *mcp.ClientSession, tool string, arguments any) *mcp.CallToolResult {
	t.Helper()
	r, err := s.CallTool(t.Context(), &mcp.CallToolParams{Name: tool, Arguments: arguments})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func text(t *testing.T, r *mcp.CallToolResult) string {
	t.Helper()
	if len(r.Content) != 1 {
		t.Fatalf("the result has %d parts", len(r.Content))
	}
	return r.Content[0].(*mcp.TextContent).Text
}

// result decodes what a tool returned, and checks that its text is the same and
// nothing else.
func result(t *testing.T, r *mcp.CallToolResult) map[string]any {
	t.Helper()
	if r.IsError {
		t.Fatalf("the tool failed: %s", text(t, r))
	}
	var fromText map[string]any
	if err := json.Unmarshal([]byte(text(t, r)), &fromText); err != nil {
		t.Fatalf("the text is not JSON: %v", err)
	}
	structured := r.StructuredContent.(map[string]any)
	if diff := cmp.Diff(structured, fromText); diff != "" {
		t.Errorf("structured content and text differ:\n%s", diff)
	}
	return structured
}

// The contract that clients rely on: run with -update to write it again, and
// look at the difference.
func TestToolsAreTheContract(t *testing.T) {
	_, o := newService(t, reply(nil))
	list, err := connect(t, o, nil).ListTools(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(list.Tools, func(a, b *mcp.Tool) int { return strings.Compare(a.Name, b.Name) })
	got, err := json.MarshalIndent(list.Tools, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	got = append(got, '\n')
	const golden = "testdata/tools.json"
	if *update {
		if err := os.WriteFile(golden, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("the tools changed (go test ./internal/mcptools -update):\n%s", diff)
	}
}

func TestEveryToolSaysWhatAClientNeeds(t *testing.T) {
	_, o := newService(t, reply(nil))
	list, err := connect(t, o, nil).ListTools(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	names := []string{
		"capsem_create", "capsem_delete", "capsem_exec", "capsem_info", "capsem_list", "capsem_read_file", "capsem_run",
		"capsem_stop", "capsem_timeline", "capsem_version", "capsem_vm_logs", "capsem_write_file",
	}
	camel := regexp.MustCompile(`^[a-z][a-zA-Z0-9]*$`)
	var got []string
	for _, tool := range list.Tools {
		got = append(got, tool.Name)
		a := tool.Annotations
		if tool.Title == "" || a == nil || a.DestructiveHint == nil || a.OpenWorldHint == nil {
			t.Errorf("%s lacks a title or an annotation", tool.Name)
		}
		if a.ReadOnlyHint && *a.DestructiveHint {
			t.Errorf("%s is both read-only and destructive", tool.Name)
		}
		if !strings.Contains(tool.Description, "Use it") || !strings.Contains(tool.Description, "Returns") && tool.Name != "capsem_info" && tool.Name != "capsem_version" {
			t.Errorf("the description of %s does not say when to use it and what it returns:\n%s", tool.Name, tool.Description)
		}
		for what, schema := range map[string]any{"parameter": tool.InputSchema, "member": tool.OutputSchema} {
			properties, ok := schema.(map[string]any)["properties"].(map[string]any)
			if !ok && what == "member" {
				t.Errorf("%s has no schema of its result", tool.Name)
			}
			for name, p := range properties {
				if !camel.MatchString(name) {
					t.Errorf("%s: the %s %s is not camelCase", tool.Name, what, name)
				}
				if p.(map[string]any)["description"] == nil {
					t.Errorf("%s: the %s %s has no description", tool.Name, what, name)
				}
				if _, single := p.(map[string]any)["type"].(string); !single {
					t.Errorf("%s: the %s %s does not have one type", tool.Name, what, name)
				}
			}
		}
	}
	slices.Sort(got)
	if diff := cmp.Diff(names, got); diff != "" {
		t.Error(diff)
	}
}

// Each tool with all its parameters: the one request that it makes, and what it
// is recorded as.
func TestEachToolMakesOneRequest(t *testing.T) {
	tests := []struct {
		tool, arguments   string
		method, uri, body string
		recorded          string // "" for the arguments as they were given
		answer            any
	}{
		{
			tool: "capsem_create", arguments: `{"name":"box","image":"tiny","profile":"work","env":{"A":"b"},"ramMb":512,"cpuCount":2}`,
			method: "POST", uri: "/v1/vms", answer: api.VM{},
			body: `{"name":"box","profile":"work","image":"tiny","cpus":2,"memory_bytes":536870912,"env":{"A":"b"}}`,
		},
		{
			tool: "capsem_run", arguments: `{"command":"ls | wc","profile":"work","env":{"A":"b"},"ramMb":512,"cpuCount":2}`,
			recorded: `{"command":"ls | wc","timeoutSeconds":60,"profile":"work","env":{"A":"b"},"ramMb":512,"cpuCount":2}`,
			method:   "POST", uri: "/v1/run", answer: api.RunResult{},
			body: `{"create":{"profile":"work","cpus":2,"memory_bytes":536870912,"env":{"A":"b"},"ephemeral":true},` +
				`"exec":{"argv":["c2g=","LWM=","bHMgfCB3Yw=="],"timeout_ms":60000,"max_output":1048576}}`,
		},
		{
			tool: "capsem_exec", arguments: `{"id":"box","argv":["cat","-"],"cwd":"/tmp","user":"agent","env":{"B":"2","A":"1"},"stdin":"AP8=","stdinEncoding":"base64","timeoutSeconds":0.0001,"encoding":"base64"}`,
			recorded: `{"id":"box","argv":["cat","-"],"cwd":"/tmp","user":"agent","env":{"A":"1","B":"2"},"stdin":"AP8=","stdinEncoding":"base64","timeoutSeconds":0.0001,"encoding":"base64"}`,
			method:   "POST", uri: "/v1/vms/box/exec", answer: api.ExecResult{},
			body: `{"argv":["Y2F0","LQ=="],"env":["QT0x","Qj0y"],"cwd":"/tmp","user":"agent","stdin":"AP8=","timeout_ms":1,"max_output":1048576}`,
		},
		{tool: "capsem_list", arguments: `{}`, method: "GET", uri: "/v1/vms", answer: api.VMList{}},
		{tool: "capsem_info", arguments: `{"id":"vm-0123456789ab"}`, method: "GET", uri: "/v1/vms/vm-0123456789ab", answer: api.VM{}},
		{tool: "capsem_stop", arguments: `{"id":"box","force":true}`, method: "POST", uri: "/v1/vms/box/stop", body: `{"force":true}`, answer: api.VM{}},
		{tool: "capsem_delete", arguments: `{"id":"box"}`, method: "DELETE", uri: "/v1/vms/box?force=true", answer: api.VM{}},
		{
			tool: "capsem_write_file", arguments: `{"id":"box","path":"/a b&c","content":"aGk=","encoding":"base64","mode":"0755","append":true}`,
			method: "PUT", uri: "/v1/vms/box/files?append=true&mode=0755&parents=true&path=%2Fa+b%26c", body: "hi", answer: api.FileInfo{},
		},
		{
			tool: "capsem_vm_logs", arguments: `{"id":"box","source":"process","grep":"a&b","tail":5}`,
			method: "GET", uri: "/v1/vms/box/logs?grep=a%26b&source=process&tail=5", answer: api.Logs{},
		},
		{
			tool: "capsem_timeline", arguments: `{"id":"box","layers":["tool","exec"],"since":"10m","traceId":"t","limit":7,"before":"c"}`,
			method: "GET", uri: "/v1/vms/box/timeline?before=c&layers=tool%2Cexec&limit=7&since=10m&trace=t", answer: api.Timeline{},
		},
		{tool: "capsem_version", arguments: `{}`, method: "GET", uri: "/v1/version", answer: api.ServiceInfo{}},
	}
	for _, test := range tests {
		t.Run(test.tool, func(t *testing.T) {
			far, o := newService(t, reply(test.answer))
			result(t, call(t, connect(t, o, nil), test.tool, json.RawMessage(test.arguments)))
			want := request{
				Method: test.method, URI: test.uri, Tool: test.tool, Client: "editor/9",
				Arguments: test.arguments, Body: test.body,
			}
			if test.recorded != "" {
				want.Arguments = test.recorded
			}
			if len(far.requests) != 1 {
				t.Errorf("%d requests were made", len(far.requests))
			}
			got := far.last(t)
			got.headerBytes = 0
			if diff := cmp.Diff(want, got, cmp.AllowUnexported(request{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestAToolErrorSaysWhatHappenedWhichRuleAndWhatToDo(t *testing.T) {
	tests := []struct {
		name   string
		answer *api.Error
		want   []string
	}{
		{"unknown VM", &api.Error{Code: api.CodeNotFound, Message: `there is no VM "box"`}, []string{`there is no VM "box"`, "Next: capsem_list"}},
		{"blocked", &api.Error{Code: api.CodeBlocked, Message: "blocked by rule corp/no_rm: no", Rule: "corp/no_rm"}, []string{"blocked by rule", "Rule: corp/no_rm", "Next: the operator's rules"}},
		{"name taken", &api.Error{Code: api.CodeExists, Message: "the name is taken", VM: "vm-1"}, []string{"the name is taken", "VM: vm-1", "another name"}},
		{"stopped", &api.Error{Code: api.CodeState, Message: "box is stopped", Hint: "capsem start box"}, []string{"box is stopped", "Hint for the person: capsem start box", "capsem_info"}},
		{"misspelt", &api.Error{Code: api.CodeNotFound, Message: "no", Hint: "did you mean box?"}, []string{"\nHint: did you mean box?"}},
		{"busy", &api.Error{Code: api.CodeBusy, Message: "too much"}, []string{"try again"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, o := newService(t, func(w http.ResponseWriter, _ *http.Request) { api.WriteError(w, test.answer) })
			r := call(t, connect(t, o, nil), "capsem_exec", map[string]any{"id": "box", "command": "ls"})
			if !r.IsError || r.StructuredContent != nil {
				t.Errorf("isError %v, structured %v", r.IsError, r.StructuredContent)
			}
			for _, want := range test.want {
				if !strings.Contains(text(t, r), want) {
					t.Errorf("the error does not have %q:\n%s", want, text(t, r))
				}
			}
		})
	}
}

func TestBadArgumentsAreToolErrorsAndReachNobody(t *testing.T) {
	tests := []struct{ name, tool, arguments, want string }{
		{"neither command nor argv", "capsem_exec", `{"id":"box"}`, "either command"},
		{"both command and argv", "capsem_run", `{"command":"ls","argv":["ls"]}`, "either command"},
		{"a NUL in argv", "capsem_exec", `{"id":"box","argv":["a\u0000b"]}`, "NUL"},
		{"a variable without a name", "capsem_exec", `{"id":"box","command":"ls","env":{"":"x"}}`, "not a variable"},
		{"an id that is a path", "capsem_info", `{"id":"../version"}`, "name or id"},
		{"an id that is empty", "capsem_delete", `{"id":""}`, "name or id"},
		{"an unknown parameter", "capsem_info", `{"id":"box","Id":"other"}`, "Id"},
		{"snake_case", "capsem_create", `{"ram_mb":512}`, "ram_mb"},
		{"no id", "capsem_exec", `{"command":"ls"}`, "id"},
		{"an unknown encoding", "capsem_read_file", `{"id":"box","path":"/f","encoding":"latin1"}`, "latin1"},
		{"no base64", "capsem_write_file", `{"id":"box","path":"/f","content":"*","encoding":"base64"}`, "not base64"},
		{"a negative timeout", "capsem_exec", `{"id":"box","command":"ls","timeoutSeconds":-1}`, "timeoutSeconds"},
		{"a limit over the bound", "capsem_read_file", `{"id":"box","path":"/f","limit":8388609}`, "limit"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			far, o := newService(t, reply(nil))
			r := call(t, connect(t, o, nil), test.tool, json.RawMessage(test.arguments))
			if !r.IsError || !strings.Contains(text(t, r), test.want) {
				t.Errorf("isError %v, want %q in:\n%s", r.IsError, test.want, text(t, r))
			}
			if len(far.requests) != 0 {
				t.Errorf("the service got %+v", far.requests)
			}
		})
	}
}

func TestAServiceThatCannotBeReachedIsAToolError(t *testing.T) {
	o := mcptools.Options{Log: slog.New(slog.DiscardHandler), Connect: func(context.Context) (*client.Client, error) {
		return client.New(filepath.Join(t.TempDir(), "nothing")), nil
	}}
	r := call(t, connect(t, o, nil), "capsem_list", nil)
	if !r.IsError || !strings.Contains(text(t, r), "not running") {
		t.Errorf("isError %v: %s", r.IsError, text(t, r))
	}
}

func TestCancellingACallEndsItsRequest(t *testing.T) {
	arrived, ended := make(chan struct{}), make(chan struct{})
	_, o := newService(t, func(_ http.ResponseWriter, r *http.Request) {
		close(arrived)
		<-r.Context().Done()
		close(ended)
	})
	s := connect(t, o, nil)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-arrived
		cancel()
	}()
	if _, err := s.CallTool(ctx, &mcp.CallToolParams{Name: "capsem_exec", Arguments: map[string]any{"id": "box", "command": "sleep 1000"}}); err == nil {
		t.Error("a cancelled call has a result")
	}
	<-ended
}

func TestStepsAreToldToWhoeverWantsProgress(t *testing.T) {
	for _, wanted := range []bool{true, false} {
		told := make(chan string, 8)
		_, o := newService(t, reply(api.VM{Name: "box"}))
		s := connect(t, o, &mcp.ClientOptions{ProgressNotificationHandler: func(_ context.Context, r *mcp.ProgressNotificationClientRequest) {
			told <- r.Params.Message
		}})
		p := &mcp.CallToolParams{Name: "capsem_create", Arguments: map[string]any{}}
		if wanted {
			p.SetProgressToken("token")
		}
		if _, err := s.CallTool(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		if !wanted {
			s.Close()
			if len(told) != 0 {
				t.Error("progress was told to a client that did not ask for it")
			}
			continue
		}
		if got := []string{<-told, <-told}; !slices.Equal(got, []string{"booting", "waiting for the guest"}) {
			t.Errorf("told %q", got)
		}
	}
}

func TestCallsOverTheBoundAreRefused(t *testing.T) {
	const bound = 64
	release := make(chan struct{})
	var arrived sync.WaitGroup
	arrived.Add(bound)
	_, o := newService(t, func(w http.ResponseWriter, r *http.Request) {
		arrived.Done()
		<-release
		reply(api.VMList{})(w, r)
	})
	s := connect(t, o, nil)
	var calls sync.WaitGroup
	for range bound {
		calls.Go(func() {
			if r, err := s.CallTool(t.Context(), &mcp.CallToolParams{Name: "capsem_list"}); err != nil || r.IsError {
				t.Errorf("a call within the bound: %v, %+v", err, r)
			}
		})
	}
	arrived.Wait()
	if r := call(t, s, "capsem_list", nil); !r.IsError || !strings.Contains(text(t, r), "under way") {
		t.Errorf("the call over the bound: %s", text(t, r))
	}
	close(release)
	calls.Wait()
}
