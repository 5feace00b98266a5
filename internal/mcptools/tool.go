package mcptools

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"github.com/google/jsonschema-go/jsonschema"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/client"
)

// spec is what a client is told of a tool.
type spec struct {
	name, title string
	// text is the description: what it does, when to use it, what comes back,
	// and its limits.
	text  string
	hints hints
	// refine adds to the parameters' schema what Go types do not say.
	refine func(properties map[string]*jsonschema.Schema)
}

// hints are a tool's annotations, as MCP has them: about the effect of a call
// on what is outside this server.
type hints struct{ readOnly, destructive, idempotent, openWorld bool }

// reads are the hints of a tool that changes nothing.
var reads = hints{readOnly: true, idempotent: true}

// tool is a spec with its schemas and what carries a call out.
type tool struct {
	spec
	in, out *jsonschema.Schema
	add     func(*mcp.Server, *desk)
}

// call is one call of a tool: a client whose requests are recorded as this call,
// and a way to tell the caller how it goes.
type call struct {
	*client.Client
	step func(string)
	// version is this build's.
	version string
}

// desk is what all tools share.
type desk struct {
	Options
	// slots has an element for each call that is under way.
	slots chan struct{}
}

// define makes a tool of a function. The schemas are those of its types; one
// without a schema is a mistake of this package that the first test finds.
func define[In, Out any](s spec, do func(context.Context, *call, In) (Out, error)) tool {
	in, out := schemaOf[In](), schemaOf[Out]()
	if s.refine != nil {
		s.refine(in.Properties)
	}
	return tool{spec: s, in: in, out: out, add: func(srv *mcp.Server, d *desk) {
		mcp.AddTool(srv, &mcp.Tool{
			Name: s.name, Title: s.title, Description: s.text, InputSchema: in, OutputSchema: out,
			Annotations: &mcp.ToolAnnotations{
				Title: s.title, ReadOnlyHint: s.hints.readOnly, DestructiveHint: &s.hints.destructive,
				IdempotentHint: s.hints.idempotent, OpenWorldHint: &s.hints.openWorld,
			},
		}, func(ctx context.Context, req *mcp.CallToolRequest, args In) (*mcp.CallToolResult, Out, error) {
			result, err := serve(ctx, d, req, args, do)
			if err != nil {
				return nil, result, failure(err)
			}
			text, err := render(result)
			return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: text}}}, result, err
		})
	}}
}

// serve carries one call out.
func serve[In, Out any](ctx context.Context, d *desk, req *mcp.CallToolRequest, args In, do func(context.Context, *call, In) (Out, error)) (result Out, err error) {
	select {
	case d.slots <- struct{}{}:
		defer func() { <-d.slots }()
	default:
		return result, &api.Error{Code: api.CodeBusy, Message: fmt.Sprintf("%d calls are under way already", maxCalls)}
	}
	recorded, err := recordedArguments(args)
	if err != nil {
		return result, err
	}
	c, err := d.Connect(ctx)
	if err != nil {
		return result, err
	}
	defer c.Close()
	return do(ctx, &call{
		Client: c.For(client.ToolCall{
			Name: req.Params.Name, ID: callID(req.Params.Meta), Arguments: recorded, Client: clientName(req.Session),
		}),
		step: d.stepper(ctx, req), version: d.Version,
	}, args)
}

// stepper tells the caller of each step, if it wants to hear of progress.
func (d *desk) stepper(ctx context.Context, req *mcp.CallToolRequest) func(string) {
	token := req.Params.GetProgressToken()
	if token == nil {
		return func(string) {}
	}
	var steps float64
	return func(step string) {
		steps++
		err := req.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ProgressToken: token, Progress: steps, Message: step})
		if err != nil {
			d.Log.Debug("progress was not told", "error", err)
		}
	}
}

// clientName is what the MCP client says of itself, fit for a header.
func clientName(s *mcp.ServerSession) string {
	p := s.InitializeParams()
	if p == nil || p.ClientInfo == nil {
		return ""
	}
	name := p.ClientInfo.Name
	if p.ClientInfo.Version != "" {
		name += "/" + p.ClientInfo.Version
	}
	return headerText(name)
}

// render is a result as text: its JSON, indented, and nothing else.
func render(v any) (string, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return "", fmt.Errorf("encoding the result: %w", err)
	}
	return string(bytes.TrimSuffix(b.Bytes(), []byte("\n"))), nil
}

// schemaOf is the schema of a Go type. It says nothing that clients are known to
// trip over: no type is a list of types.
func schemaOf[T any]() *jsonschema.Schema {
	s, err := jsonschema.For[T](nil)
	if err != nil {
		panic(fmt.Sprintf("the schema of a tool: %v", err))
	}
	simplify(s)
	return s
}

// simplify removes null from the types that a slice gets; lists that are absent
// are left out, and never null.
func simplify(s *jsonschema.Schema) {
	if s == nil {
		return
	}
	if len(s.Types) == 2 && s.Types[0] == "null" {
		s.Type, s.Types = s.Types[1], nil
	}
	for _, p := range s.Properties {
		simplify(p)
	}
	simplify(s.Items)
	if s.AdditionalProperties != nil {
		simplify(s.AdditionalProperties)
	}
}

// oneOf limits a parameter to some words.
func oneOf(p *jsonschema.Schema, words ...string) {
	for _, w := range words {
		p.Enum = append(p.Enum, w)
	}
}

// between limits a number.
func between(p *jsonschema.Schema, least, most float64) { p.Minimum, p.Maximum = &least, &most }

// fallback gives a parameter the value that it has where it is absent.
func fallback(p *jsonschema.Schema, value string) { p.Default = json.RawMessage(value) }
