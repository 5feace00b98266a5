// Package mcptools is the MCP server that a host agent uses: the tools of
// capsem-mcp, one file a tool.
//
// A tool turns its arguments into one request to the service, and the answer
// into a result: structured, and the same JSON as text for clients that read no
// structure. It decides nothing. The request goes in by the agents' socket and
// names the tool and its arguments, so that the process which serves it judges
// and records the call before it acts; a call of which the service never hears
// had no effect. Arguments are decoded once, and what is recorded is what is
// acted on.
//
// A command that fails is a result; a tool error is Capsem's own failure or
// refusal, and says what happened, which rule, and what to do next. Output is
// never altered to fit: each value is UTF-8 or base64 as a whole, says which,
// and where it was cut gives the true size. Cancelling a call cancels its
// request, which ends the command.
//
// Names are camelCase here and snake_case on HTTP; shapes.go is where one
// becomes the other.
package mcptools

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"

	"github.com/google/jsonschema-go/jsonschema"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/capsem/capsem/internal/client"
)

// maxCalls is how many calls are under way at once. More are refused.
const maxCalls = 64

// instructions is what a client's model is told about the server as a whole.
const instructions = `Capsem runs commands in disposable virtual machines. What a VM does is judged by the operator's rules and recorded.

- For one command, capsem_run makes a VM, runs it and removes the VM.
- For several, capsem_create makes a VM that stays; capsem_exec runs commands in it; capsem_read_file and capsem_write_file move files; capsem_delete removes it. Delete what you made when you are done.
- A command's exit code is part of its result: a failing command is no tool error.
- A call that is refused by a rule is refused again when it is repeated: tell the person instead.`

// Options are what the server is made of.
type Options struct {
	// Version is this build's.
	Version string
	// Connect returns a client of the service, behind its socket for agents; it
	// starts the service if need be. The server closes the client.
	Connect func(context.Context) (*client.Client, error)
	Log     *slog.Logger
}

// tools are all tools, in the order in which the documentation has them.
func tools() []tool {
	return []tool{
		createTool(), runTool(), execTool(), listTool(), infoTool(), stopTool(), deleteTool(),
		readFileTool(), writeFileTool(), logsTool(), timelineTool(), versionTool(),
	}
}

// New returns the server, with all tools.
func New(o Options) *mcp.Server {
	s := mcp.NewServer(&mcp.Implementation{Name: "capsem", Title: "Capsem", Version: o.Version}, &mcp.ServerOptions{
		Instructions: instructions,
		Capabilities: &mcp.ServerCapabilities{Tools: &mcp.ToolCapabilities{}},
	})
	d := &desk{Options: o, slots: make(chan struct{}, maxCalls)}
	for _, t := range tools() {
		t.add(s, d)
	}
	return s
}

// Serve serves one client, a message a line, until in ends or ctx does. At the
// end of in it answers what is under way, for at most drainTime.
func Serve(ctx context.Context, o Options, in io.Reader, out io.Writer) error {
	if err := New(o).Run(ctx, &stdio{in: in, out: out}); err != nil && ctx.Err() == nil {
		return fmt.Errorf("serving tools: %w", err)
	}
	return nil
}

// Description is a tool as clients are shown it, for the documentation.
type Description struct {
	Name, Title, Text string
	// ReadOnly, Destructive, Idempotent and OpenWorld are the tool's annotations.
	ReadOnly, Destructive, Idempotent, OpenWorld bool
	Parameters, Results                          []Member
}

// Member is one parameter or one member of a result.
type Member struct {
	Name, Type, Text string
	Required         bool
	// Default is JSON, nil where there is none.
	Default json.RawMessage
}

// Describe returns all tools.
func Describe() []Description {
	var all []Description
	for _, t := range tools() {
		all = append(all, Description{
			Name: t.name, Title: t.title, Text: t.text,
			ReadOnly: t.hints.readOnly, Destructive: t.hints.destructive, Idempotent: t.hints.idempotent, OpenWorld: t.hints.openWorld,
			Parameters: members(t.in), Results: members(t.out),
		})
	}
	return all
}

func members(s *jsonschema.Schema) []Member {
	required := make(map[string]bool)
	for _, name := range s.Required {
		required[name] = true
	}
	var all []Member
	for _, name := range s.PropertyOrder {
		p := s.Properties[name]
		all = append(all, Member{Name: name, Type: typeName(p), Text: p.Description, Required: required[name], Default: p.Default})
	}
	return all
}

// typeName names a schema's type for people.
func typeName(s *jsonschema.Schema) string {
	switch {
	case s.Type == "array" && s.Items != nil:
		return "array of " + typeName(s.Items)
	case s.Type == "object" && s.AdditionalProperties != nil && s.AdditionalProperties.Type != "":
		return "object of " + typeName(s.AdditionalProperties)
	default:
		return s.Type
	}
}
