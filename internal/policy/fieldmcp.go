package policy

import (
	"encoding/json"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"

	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/jsonrpc"
)

// toolName is the namespaced name of the tool that an event calls, or "".
func toolName(e *event.Event) string {
	if e.MCP == nil || e.MCP.Tool == nil {
		return ""
	}
	return e.MCP.Tool.Name
}

func mcp(read func(*event.MCP) ref.Val) func(*facts) ref.Val {
	return func(f *facts) ref.Val {
		if f.ev.MCP == nil {
			return nil
		}
		return read(f.ev.MCP)
	}
}

func tool(read func(*event.Tool) ref.Val) func(*facts) ref.Val {
	return mcp(func(m *event.MCP) ref.Val {
		if m.Tool == nil {
			return nil
		}
		return read(m.Tool)
	})
}

// some is a string field that is absent where it is empty.
func some(s string) ref.Val {
	if s == "" {
		return nil
	}
	return types.String(s)
}

func mcpFields() []*field {
	str := cel.StringType
	object := cel.MapType(str, cel.DynType)
	return []*field{
		{name: "mcp.method", typ: str, family: familyMCP, doc: "the message's method", read: mcp(func(m *event.MCP) ref.Val { return types.String(m.Method) })},
		{name: "mcp.server.name", typ: str, family: familyMCP, doc: "the server that would act, \"\" where none would", read: mcp(func(m *event.MCP) ref.Val { return types.String(m.Server) })},
		{name: "mcp.tool_call.name", typ: str, family: familyMCP, optional: true, doc: "the tool, namespaced (`github__create_issue`)", read: tool(func(t *event.Tool) ref.Val { return types.String(t.Name) })},
		{name: "mcp.tool_call.tool", typ: str, family: familyMCP, optional: true, doc: "the tool by the server's own name", read: tool(func(t *event.Tool) ref.Val { return types.String(t.Tool) })},
		{
			name: "mcp.tool_call.effect", typ: str, family: familyMCP, optional: true, words: words(event.Read, event.Write),
			doc: "what the tool's annotations claim; unknown counts as `write`",
			read: tool(func(t *event.Tool) ref.Val {
				if t.Effect == event.Read {
					return types.String(event.Read)
				}
				return types.String(event.Write)
			}),
		},
		{
			name: "mcp.tool_call.definition_changed", typ: cel.BoolType, family: familyMCP, optional: true,
			doc:  "whether the tool's definition is not the one that the guest saw first",
			read: tool(func(t *event.Tool) ref.Val { return types.Bool(t.DefinitionChanged) }),
		},
		{
			name: "mcp.request.id", typ: cel.DynType, family: familyMCP, optional: true, doc: "the caller's id, a string or a number",
			read: mcp(func(m *event.MCP) ref.Val {
				if m.RequestID == nil {
					return nil
				}
				return jsonValue(m.RequestID)
			}),
		},
		{
			name: "mcp.request.arguments", typ: object, family: familyMCP, doc: "the arguments of a tool call, empty where there are none",
			read: mcp(func(m *event.MCP) ref.Val {
				if m.Arguments == nil {
					return emptyObject()
				}
				return lazyObject(m.Arguments)
			}),
		},
		{
			name: "mcp.request.text", typ: str, family: familyMCP,
			doc:  "all decoded string keys and values of the request's params, one per line",
			read: mcp(func(m *event.MCP) ref.Val { return messageText(m.Params, m.Arguments) }),
		},
		{name: "mcp.resource.uri", typ: str, family: familyMCP, optional: true, doc: "the resource that is read", read: mcp(func(m *event.MCP) ref.Val { return some(m.ResourceURI) })},
		{name: "mcp.prompt.name", typ: str, family: familyMCP, optional: true, doc: "the prompt that is got", read: mcp(func(m *event.MCP) ref.Val { return some(m.PromptName) })},
	}
}

// messageText is the text of params, or of arguments where an event was made
// without a message around them.
func messageText(params, arguments json.RawMessage) ref.Val {
	if params == nil {
		params = arguments
	}
	if params == nil {
		return types.String("")
	}
	return types.String(jsonrpc.Text(params))
}

func responseFields() []*field {
	object := cel.MapType(cel.StringType, cel.DynType)
	return []*field{
		{
			name: "mcp.response.content", typ: cel.ListType(cel.DynType), family: familyMCP, response: true, optional: true,
			doc: "the content list of a tool's result", read: resultMember("content", jsonList),
		},
		{
			name: "mcp.response.structured", typ: object, family: familyMCP, response: true, optional: true,
			doc: "the structured content of a tool's result", read: resultMember("structuredContent", lazyObject),
		},
		{
			name: "mcp.response.is_error", typ: cel.BoolType, family: familyMCP, response: true, optional: true,
			doc: "whether the answer is an error, of the protocol or of the tool",
			read: func(f *facts) ref.Val {
				if f.out == nil || (f.out.MCP == nil && f.out.Error == nil) {
					return nil
				}
				return types.Bool(f.out.Error != nil || f.out.MCP.IsError || f.out.MCP.Result == nil)
			},
		},
		{
			name: "mcp.response.text", typ: cel.StringType, family: familyMCP, response: true, optional: true,
			doc:  "all decoded string keys and values of the answer, one per line",
			read: responseText,
		},
	}
}

// resultMember reads a member of the result that the server sent.
func resultMember(name string, convert func(json.RawMessage) ref.Val) func(*facts) ref.Val {
	return func(f *facts) ref.Val {
		if f.out == nil || f.out.MCP == nil || f.out.MCP.Result == nil {
			return nil
		}
		raw, ok := jsonrpc.Member(f.out.MCP.Result, name)
		if !ok {
			return nil
		}
		return convert(raw)
	}
}

// responseText covers everything that could reach the caller: the server's whole
// message, and the error that stands in for one.
func responseText(f *facts) ref.Val {
	if f.out == nil {
		return nil
	}
	text, known := "", false
	if m := f.out.MCP; m != nil {
		message := m.Message
		if message == nil {
			message = m.Result
		}
		if message != nil {
			text, known = jsonrpc.Text(message), true
		}
	}
	if e := f.out.Error; e != nil {
		text, known = text+"\n"+e.Message, true
		if e.Data != nil {
			text += "\n" + jsonrpc.Text(e.Data)
		}
	}
	if !known {
		return nil
	}
	return types.String(text)
}
