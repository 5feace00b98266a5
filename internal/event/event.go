// Package event holds the three things that the gate is about: what is tried
// (Event), what is decided (Verdict), and what came of it (Outcome).
//
// Everything that a sandbox does becomes an Event before it happens: a tool
// call from the guest, a command that a host agent runs, an HTTP request of a
// built-in tool. Package inspect makes them, policy judges them, gate enforces
// the judgement, and ledger keeps all three. The zero value of every decision
// in this package is the safe one: a Verdict that nobody filled in blocks.
//
// Raw members (Params, Arguments, Result ...) are the bytes that were parsed
// and that will be forwarded. They are never edited in place: holders may share
// them.
package event

import (
	"encoding/json"
	"time"
)

// Type names what kind of thing is tried. It decides which families of fields a
// rule can read, and into which ledger table the event goes.
type Type string

// The types of event, by the family that they carry.
const (
	// MCP acts: something happens at a server.
	MCPToolCall     Type = "mcp.tool_call"
	MCPResourceRead Type = "mcp.resource_read"
	MCPPromptGet    Type = "mcp.prompt_get"
	MCPCompletion   Type = "mcp.completion"
	// MCP messages that are no act.
	MCPInitialize   Type = "mcp.initialize"
	MCPPing         Type = "mcp.ping"
	MCPList         Type = "mcp.list"
	MCPNotification Type = "mcp.notification"
	MCPOther        Type = "mcp.other"
	// HTTP is one request out, one redirect hop at a time.
	HTTP Type = "http.request"
	// Exec is a command run in the guest.
	Exec Type = "process.exec"
	// FileImport goes into the guest, FileExport comes out of it.
	FileImport Type = "file.import"
	FileExport Type = "file.export"
	// Boot is a machine about to start; Admin is what is done to one.
	Boot  Type = "vm.boot"
	Admin Type = "vm.admin"
)

// Types lists every type, in the order of the constants.
func Types() []Type {
	return []Type{
		MCPToolCall, MCPResourceRead, MCPPromptGet, MCPCompletion,
		MCPInitialize, MCPPing, MCPList, MCPNotification, MCPOther,
		HTTP, Exec, FileImport, FileExport, Boot, Admin,
	}
}

// Act reports whether events of this type do something in the world, so that
// the profile's default decides where no rule matches. Messages that are no act
// (lists, pings, lifecycle) are allowed unless a rule matches.
func (t Type) Act() bool {
	switch t {
	case MCPToolCall, MCPResourceRead, MCPPromptGet, MCPCompletion, HTTP, Exec, FileImport, FileExport:
		return true
	case MCPInitialize, MCPPing, MCPList, MCPNotification, MCPOther, Boot, Admin:
		return false
	}
	return true
}

// Intent says in one word what an event is for, derived from what is done and
// never from the caller's word.
type Intent string

// The intents that exist so far.
const (
	IntentRead        Intent = "read"
	IntentList        Intent = "list"
	IntentReadFile    Intent = "read_file"
	IntentWriteFile   Intent = "write_file"
	IntentListFiles   Intent = "list_files"
	IntentReadTool    Intent = "read_tool"
	IntentWriteTool   Intent = "write_tool"
	IntentRunCommand  Intent = "run_command"
	IntentHTTPRequest Intent = "http_request"
	IntentBoot        Intent = "boot"
	IntentAdmin       Intent = "admin"
)

// InitiatorKind is what caused an event.
type InitiatorKind string

// The kinds of initiator. Which one applies is decided by the process that
// accepted the connection, never read from a message.
const (
	Person     InitiatorKind = "person"
	HostAgent  InitiatorKind = "host_agent"
	GuestAgent InitiatorKind = "guest_agent"
	Routine    InitiatorKind = "routine"
	Deployment InitiatorKind = "deployment"
	Handoff    InitiatorKind = "handoff"
)

// Initiator is what caused an event. ID is what is known of it: a uid, a client
// name (a claim), a routine's name.
type Initiator struct {
	Kind InitiatorKind
	ID   string
}

// VM is the machine an event concerns.
type VM struct {
	ID, Name, Profile string
}

// Effect is what a tool does to the world, as its annotations claim. Unknown
// counts as a write.
type Effect string

// The two effects.
const (
	Read  Effect = "read"
	Write Effect = "write"
)

// Origin is where a tool call came from, the ledger's word for it.
type Origin string

// The origins of a tool call.
const (
	OriginMCP     Origin = "mcp"     // an external server's tool
	OriginBuiltin Origin = "builtin" // one of our own tools
	OriginHost    Origin = "host"    // a tool of capsem-mcp
)

// Event is one thing that is about to happen. Exactly one of MCP, HTTP, Exec
// and File is set, by the family of Type; none is for Boot and Admin.
type Event struct {
	// ID is a UUIDv7, unique among all events of all machines.
	ID   string
	Type Type
	// Time is when the event was seen.
	Time time.Time
	// TraceID groups the events of one cause; TurnID those of one agent turn.
	TraceID, TurnID string
	Intent          Intent
	Initiator       Initiator
	// Actor is whose authority the initiator borrows.
	Actor string
	VM    VM
	// Process is the guest process that spoke, as the guest says: a claim.
	Process string
	// Detail says in a few words what a Boot or Admin event is about.
	Detail string

	MCP  *MCP
	HTTP *HTTPRequest
	Exec *Command
	File *File
}

// MCP is a message on its way to a server.
type MCP struct {
	Origin Origin
	// Transport is "vsock" for a guest, "host" for capsem-mcp.
	Transport string
	Method    string
	// Server is the name of the server that would act, "" where none would.
	Server string
	// Tool is set for tools/call.
	Tool *Tool
	// RequestID is the caller's id as it stood in the message; nil for a
	// notification.
	RequestID json.RawMessage
	// Params is the whole params member, nil when absent; Arguments the
	// arguments member inside it, for tools/call.
	Params, Arguments json.RawMessage
	// ResourceURI and PromptName are set for the methods that have them.
	ResourceURI, PromptName string
}

// Tool is the tool that a tools/call names.
type Tool struct {
	// Name is namespaced (`github__create_issue`), Tool the server's own name.
	Name, Tool string
	Effect     Effect
	// DefinitionChanged says that the tool's definition is not the one that the
	// guest saw first. Digest identifies the definition.
	DefinitionChanged bool
	Digest            string
}

// HTTPRequest is one request out, one hop.
type HTTPRequest struct {
	Method, Scheme, Host string
	Port                 int
	Path, Query          string
	// Headers have lower-case names; several values are joined by ", ".
	Headers map[string]string
	Body    []byte
	// RedirectedFrom is the URL whose answer led here, "" for the first hop.
	RedirectedFrom string
	// Via says who asked: "builtin", or the name of the MCP server in whose jail
	// the request was made.
	Via string
}

// Command is a command to run in the guest. argv is bytes: a Go string here may
// hold invalid UTF-8.
type Command struct {
	ID   string
	Argv []string
	Cwd  string
	User string
}

// File is a file moved between host and guest.
type File struct {
	// Op is "import" or "export".
	Op   string
	Path string
	Size int64
	// Content is the whole content where it is at hand before the act, else nil.
	Content []byte
}
