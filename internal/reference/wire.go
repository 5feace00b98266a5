package reference

import (
	"fmt"
	"strconv"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/endpoint"
	"github.com/capsem/capsem/internal/guestproto"
	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/msgpack"
	"github.com/capsem/capsem/internal/toolproto"
)

// bound is a constant of the wire.
type bound struct {
	name  string
	value string
	text  string
}

func wirePage() string {
	p := newPage("Wire", "Bounds, ports and codes of the protocols, from the constants that hold them.")
	p.heading(2, "vsock ports of the host")
	p.rows([]string{"port", "direction", "what"}, [][]string{
		{count(guestproto.PortControl), "guest → host", "control: one connection for each life of the guest's agent"},
		{count(guestproto.PortMCP), "guest → host", "framed MCP"},
		{count(guestproto.PortStreams), "host → guest", "streams: one connection for each command or file"},
	})
	p.text("Every other port refuses.")
	p.bounds("Framed MCP between guest and host", mcpBounds())
	p.bounds("JSON-RPC messages", jsonBounds())
	p.bounds("Control messages and streams", streamBounds())
	p.bounds("Jailed tool processes", toolBounds())
	p.bounds("The MCP endpoint", endpointBounds())
	p.bounds("The service's HTTP API", apiBounds())
	p.heading(2, "JSON-RPC error codes")
	p.rows([]string{"code", "what"}, [][]string{
		{count(jsonrpc.CodeParse), "not JSON, or not UTF-8"},
		{count(jsonrpc.CodeInvalidRequest), "malformed, or blocked by a rule"},
		{count(jsonrpc.CodeMethodNotFound), "no such method"},
		{count(jsonrpc.CodeInvalidParams), "the parameters are wrong, or there is no such tool"},
		{count(jsonrpc.CodeInternal), "Capsem or the server failed"},
		{count(jsonrpc.CodeTimeout), "it took too long, or too much is under way"},
		{count(jsonrpc.CodeTransport), "the connection was lost, or the message is too large"},
		{count(jsonrpc.CodeNoResource), "no such resource"},
	})
	p.heading(2, "Codes of the HTTP API")
	var rows [][]string
	for _, c := range apiCodes() {
		rows = append(rows, []string{code(string(c.code)), strconv.Itoa(c.code.Status()), c.text})
	}
	p.rows([]string{"code", "status", "what"}, rows)
	return p.String()
}

func (p *page) bounds(title string, bounds []bound) {
	p.heading(2, title)
	var rows [][]string
	for _, b := range bounds {
		rows = append(rows, []string{b.value, b.text, code(b.name)})
	}
	p.rows([]string{"bound", "of what", "constant"}, rows)
}

func mcpBounds() []bound {
	return []bound{
		{"guestproto.MCPHeader", bytes(guestproto.MCPHeader), "the header of a frame after its length, and so the smallest length"},
		{"guestproto.MaxMCPFrame", bytes(guestproto.MaxMCPFrame), "a frame after its length"},
		{"guestproto.MaxMCPMessage", bytes(guestproto.MaxMCPMessage), "a message, in however many frames"},
		{"guestproto.MaxPartial", count(guestproto.MaxPartial), "messages of one connection that arrive in pieces at one time"},
		{"guestproto.MaxProcess", bytes(guestproto.MaxProcess), "a process name in a frame"},
		{"guestproto.MaxMeta", bytes(guestproto.MaxMeta), "the metadata line with which a connection begins"},
	}
}

func jsonBounds() []bound {
	return []bound{
		{"jsonrpc.MaxDepth", count(jsonrpc.MaxDepth), "nesting of a message, itself included"},
		{"jsonrpc.MaxSize", bytes(jsonrpc.MaxSize), "a message at all; the transports have lower bounds"},
	}
}

func streamBounds() []bound {
	return []bound{
		{"guestproto.ProtocolVersion", count(guestproto.ProtocolVersion), "the version that both sides must speak"},
		{"guestproto.MaxMessage", bytes(guestproto.MaxMessage), "a control or stream message"},
		{"guestproto.MaxData", bytes(guestproto.MaxData), "the bytes in one data message"},
		{"guestproto.Window", bytes(guestproto.Window), "data under way that is not confirmed, in each direction"},
		{"guestproto.KillAfter", guestproto.KillAfter.String(), "from TERM to KILL, for a command whose time is over"},
	}
}

func toolBounds() []bound {
	return []bound{
		{"toolproto.Version", count(toolproto.Version), "the version that both sides must speak"},
		{"toolproto.MaxPayload", bytes(toolproto.MaxPayload), "a JSON-RPC message"},
		{"toolproto.MaxMessage", bytes(toolproto.MaxMessage), "a frame: a message and what is around it"},
		{"toolproto.MaxEventText", bytes(toolproto.MaxEventText), "the text of an event, such as a line of stderr"},
		{"msgpack.MaxDepth", count(msgpack.MaxDepth), "nesting of a MessagePack value, checked before it is decoded"},
		{"msgpack.MaxKeys", count(msgpack.MaxKeys), "keys of one map"},
		{"msgpack.MaxNodes", count(msgpack.MaxNodes), "values in one message"},
	}
}

func endpointBounds() []bound {
	return []bound{
		{"endpoint.MaxInFlightConn", count(endpoint.MaxInFlightConn), "requests of one connection at one time; more are answered \"busy\""},
		{"endpoint.MaxInFlight", count(endpoint.MaxInFlight), "requests of one VM at one time"},
		{"endpoint.MaxHeld", bytes(endpoint.MaxHeld), "held for one VM: pieces, requests under way, queued answers"},
		{"endpoint.MaxQueued", bytes(endpoint.MaxQueued), "answers that one connection does not take; over it, it is closed"},
		{"endpoint.StuckAfter", endpoint.StuckAfter.String(), "how long answers may not move before the connection is closed"},
		{"endpoint.ListWait", endpoint.ListWait.String(), "how long a list waits for servers in their first start"},
		{"endpoint.CallTimeout", endpoint.CallTimeout.String(), "a `tools/call`"},
		{"endpoint.RequestTimeout", endpoint.RequestTimeout.String(), "any other request"},
		{"endpoint.ListPage", bytes(endpoint.ListPage), "one page of a list"},
	}
}

func apiBounds() []bound {
	return []bound{
		{"api.Version", count(api.Version), "the version that both sides must speak"},
		{"api.MaxBody", bytes(api.MaxBody), "the JSON of a request, and the answer to a host tool"},
		{"api.DefaultMaxOutput", bytes(api.DefaultMaxOutput), "each stream of a captured command, where no other bound is asked for"},
		{"api.DefaultStop", api.DefaultStop.String(), "how long a guest gets to shut down"},
	}
}

// apiCode is a code of the HTTP API.
type apiCode struct {
	code api.Code
	text string
}

func apiCodes() []apiCode {
	return []apiCode{
		{api.CodeInvalid, "the request is malformed"},
		{api.CodeNotFound, "there is no such VM, file or image"},
		{api.CodeExists, "the name is taken"},
		{api.CodeState, "the VM's state does not allow it"},
		{api.CodeBlocked, "a rule refused it"},
		{api.CodeTooLarge, "a bound was exceeded"},
		{api.CodeBusy, "too much at once"},
		{api.CodeUnavailable, "a part that is needed is not there"},
		{api.CodeTimeout, "it took longer than allowed"},
		{api.CodeFailed, "the act failed"},
		{api.CodeUnreachable, "the guest does not answer"},
		{api.CodeReplaced, "the VM was started anew meanwhile"},
	}
}

// bytes is a size for people, exact.
func bytes(n int) string {
	for _, unit := range []struct {
		size int
		name string
	}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= unit.size && n%unit.size == 0 {
			return fmt.Sprintf("%d %s", n/unit.size, unit.name)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}

func count[T ~int | ~uint32](n T) string { return fmt.Sprint(n) }
