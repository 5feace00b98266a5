package builtin

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/toolproto"
)

// fetch asks the supervisor for one HTTP request. An error means that no answer
// came.
type fetch func(ctx context.Context, req toolproto.HTTPRequest) (toolproto.HTTPResult, error)

// tool is one tool as it is listed, and what it does.
type tool struct {
	name, title, description string
	// parameters are the properties of its input schema, in their order.
	parameters []parameter
	// annotations is the JSON object of MCP's tool annotations.
	annotations string
	// run returns the result of a call: a CallToolResult.
	run func(ctx context.Context, do fetch, arguments json.RawMessage) json.RawMessage
}

// parameter is one argument of a tool.
type parameter struct {
	name     string
	required bool
	// schema is its JSON schema, which has a description.
	schema string
}

func tools() []tool {
	return append([]tool{echoTool()}, httpTools()...)
}

// definition is the tool as an element of tools/list.
func (t *tool) definition() []byte {
	out := fmt.Appendf(nil, `{"name":%s,"title":%s,"description":%s,"inputSchema":{"type":"object","properties":{`,
		jsonrpc.Quote(t.name), jsonrpc.Quote(t.title), jsonrpc.Quote(t.description))
	var required []string
	for i, p := range t.parameters {
		if i > 0 {
			out = append(out, ',')
		}
		out = fmt.Appendf(out, `%s:%s`, jsonrpc.Quote(p.name), p.schema)
		if p.required {
			required = append(required, string(jsonrpc.Quote(p.name)))
		}
	}
	return fmt.Appendf(out, `},"required":[%s],"additionalProperties":false},"annotations":%s}`,
		strings.Join(required, ","), t.annotations)
}

// arguments takes the arguments of a call apart. The error is for the caller, who
// can correct it.
func (t *tool) arguments(raw json.RawMessage) (map[string]json.RawMessage, error) {
	args := make(map[string]json.RawMessage)
	for name, value := range jsonrpc.Members(raw) {
		if !t.takes(name) {
			return nil, fmt.Errorf("%s takes no argument %q; it takes %s", t.name, name, t.names())
		}
		if string(value) != "null" { // as good as absent
			args[name] = value
		}
	}
	for _, p := range t.parameters {
		if _, ok := args[p.name]; p.required && !ok {
			return nil, fmt.Errorf("%s needs the argument %q", t.name, p.name)
		}
	}
	return args, nil
}

func (t *tool) takes(name string) bool {
	for _, p := range t.parameters {
		if p.name == name {
			return true
		}
	}
	return false
}

func (t *tool) names() string {
	var names []string
	for _, p := range t.parameters {
		names = append(names, p.name)
	}
	return strings.Join(names, ", ")
}

// textResult is a result of texts alone.
func textResult(texts ...string) json.RawMessage {
	return append(content(texts), '}')
}

// errorResult is a result that says what went wrong in doing what the tool does.
func errorResult(format string, args ...any) json.RawMessage {
	return append(content([]string{fmt.Sprintf(format, args...)}), `,"isError":true}`...)
}

// content begins a result.
func content(texts []string) []byte {
	out := []byte(`{"content":[`)
	for i, text := range texts {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(jsonrpc.AppendQuote(append(out, `{"type":"text","text":`...), text), '}')
	}
	return append(out, ']')
}

func echoTool() tool {
	t := tool{
		name: "echo", title: "Echo",
		description: "Returns the given text unchanged. Use it to check that tool calls reach the sandbox's supervisor and come back.",
		parameters: []parameter{
			{"text", true, `{"type":"string","description":"The text to return."}`},
		},
		annotations: `{"title":"Echo","readOnlyHint":true,"idempotentHint":true,"openWorldHint":false}`,
	}
	t.run = func(_ context.Context, _ fetch, raw json.RawMessage) json.RawMessage {
		args, err := t.arguments(raw)
		if err != nil {
			return errorResult("%v", err)
		}
		text, ok := jsonrpc.String(args["text"])
		if !ok {
			return errorResult(`the argument "text" must be a string`)
		}
		return textResult(text)
	}
	return t
}

// Definitions are the tools as elements of tools/list, for the documentation.
func Definitions() []json.RawMessage {
	var all []json.RawMessage
	for _, t := range tools() {
		all = append(all, t.definition())
	}
	return all
}
