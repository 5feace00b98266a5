package inspect

import (
	"encoding/json"
	"errors"

	"github.com/capsem/capsem/internal/jsonrpc"
)

// ToolCall is what the params of a tools/call say.
type ToolCall struct {
	// Name is the tool as the guest calls it.
	Name string
	// Arguments is the arguments object, nil when absent.
	Arguments json.RawMessage
}

// Errors of ParseToolCall; each is an invalid-params answer to the caller.
var (
	errNoName      = errors.New("params.name must be a string that names a tool")
	errNoArguments = errors.New("params.arguments must be an object")
	errLookalike   = errors.New("params has a member that differs from name or arguments only in case")
)

// ParseToolCall reads the params of a tools/call. Arguments that are no object
// are refused here: some servers do not survive them.
func ParseToolCall(params json.RawMessage) (ToolCall, error) {
	// A server that ignores case would act on what was not judged.
	if _, found := jsonrpc.Lookalike(params, "name", "arguments"); found {
		return ToolCall{}, errLookalike
	}
	raw, ok := jsonrpc.Member(params, "name")
	if !ok {
		return ToolCall{}, errNoName
	}
	name, ok := jsonrpc.String(raw)
	if !ok || name == "" {
		return ToolCall{}, errNoName
	}
	arguments, ok := jsonrpc.Member(params, "arguments")
	if ok && (len(arguments) == 0 || arguments[0] != '{') {
		return ToolCall{Name: name}, errNoArguments
	}
	return ToolCall{Name: name, Arguments: arguments}, nil
}
