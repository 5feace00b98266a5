// Package inspect turns what a boundary decoded into the event that the gate
// judges.
//
// Everything here is derived from what is being done, from one parse of the
// bytes that will be forwarded, and never from what a caller says of itself:
// the intent from the method, the initiator from the connection, the server
// from the catalogue. What a guest claims (its process name) stays marked as a
// claim.
package inspect

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/capsem/capsem/internal/event"
)

// Caller is what the process that accepted a connection knows about who is on
// the other side.
type Caller struct {
	VM        event.VM
	Initiator event.Initiator
	Actor     string
	// Process is the guest process's claim, "" for callers on the host.
	Process string
	// TraceID is the cause that this belongs to; "" starts a trace of its own.
	TraceID string
}

func (c Caller) event(t event.Type, intent event.Intent) *event.Event {
	id := NewID()
	trace := c.TraceID
	if trace == "" {
		trace = id
	}
	return &event.Event{
		ID: id, Type: t, Time: time.Now().UTC(), TraceID: trace, Intent: intent,
		Initiator: c.Initiator, Actor: c.Actor, VM: c.VM, Process: c.Process,
	}
}

// NewID returns a fresh event id, a UUIDv7 (RFC 9562): ids sort by time.
func NewID() string {
	// NewV7 fails only when the system has no randomness, and then nothing in
	// this process is safe to go on.
	return uuid.Must(uuid.NewV7()).String()
}

// Exec is a command about to run in the guest.
func (c Caller) Exec(cmd event.Command) *event.Event {
	ev := c.event(event.Exec, event.IntentRunCommand)
	ev.Exec = &cmd
	return ev
}

// HTTP is a request about to leave.
func (c Caller) HTTP(req event.HTTPRequest) *event.Event {
	ev := c.event(event.HTTP, event.IntentHTTPRequest)
	ev.HTTP = &req
	return ev
}

// Import is a file about to go into the guest.
func (c Caller) Import(f event.File) *event.Event {
	f.Op = "import"
	ev := c.event(event.FileImport, event.IntentWriteFile)
	ev.File = &f
	return ev
}

// Export is a file about to come out of the guest.
func (c Caller) Export(f event.File) *event.Event {
	f.Op = "export"
	ev := c.event(event.FileExport, event.IntentReadFile)
	ev.File = &f
	return ev
}

// Boot is a machine about to start.
func (c Caller) Boot(detail string) *event.Event {
	ev := c.event(event.Boot, event.IntentBoot)
	ev.Detail = detail
	return ev
}

// Admin is something about to be done to a machine or its rules.
func (c Caller) Admin(detail string) *event.Event {
	ev := c.event(event.Admin, event.IntentAdmin)
	ev.Detail = detail
	return ev
}

// Message is a JSON-RPC request or notification, already parsed strictly.
type Message struct {
	Method string
	// ID is the caller's id as it stood, nil for a notification.
	ID json.RawMessage
	// Params are the bytes as they came, nil when absent.
	Params json.RawMessage
	// Origin and Transport are as in event.MCP.
	Origin    event.Origin
	Transport string
	// Call and Target are set for a tools/call. A Target without a server is a
	// tool that does not exist.
	Call   *ToolCall
	Target Target
}

// Target is where a tools/call would go, from the catalogue.
type Target struct {
	Server, Tool string
	ReadOnly     bool
	Digest       string
}

// MCP is a message on its way to a server.
func (c Caller) MCP(m Message) *event.Event {
	t := TypeOf(m.Method)
	ev := c.event(t, intentOf(t))
	ev.MCP = &event.MCP{
		Origin: m.Origin, Transport: m.Transport, Method: m.Method, Server: m.Target.Server,
		RequestID: m.ID, Params: m.Params,
	}
	if m.Call != nil {
		ev.MCP.Arguments = m.Call.Arguments
		ev.MCP.Tool = &event.Tool{Name: m.Call.Name, Tool: m.Target.Tool, Effect: event.Write, Digest: m.Target.Digest}
		ev.Intent = event.IntentWriteTool
		if m.Target.ReadOnly {
			ev.MCP.Tool.Effect, ev.Intent = event.Read, event.IntentReadTool
		}
	}
	return ev
}

// TypeOf is the type of event that a method makes.
func TypeOf(method string) event.Type {
	switch method {
	case "tools/call":
		return event.MCPToolCall
	case "resources/read":
		return event.MCPResourceRead
	case "prompts/get":
		return event.MCPPromptGet
	case "completion/complete":
		return event.MCPCompletion
	case "initialize":
		return event.MCPInitialize
	case "ping":
		return event.MCPPing
	}
	switch {
	case strings.HasPrefix(method, "notifications/"):
		return event.MCPNotification
	case strings.HasSuffix(method, "/list"):
		return event.MCPList
	}
	return event.MCPOther
}

func intentOf(t event.Type) event.Intent {
	switch t {
	case event.MCPResourceRead, event.MCPPromptGet, event.MCPCompletion:
		return event.IntentRead
	case event.MCPToolCall:
		return event.IntentWriteTool
	case event.MCPInitialize, event.MCPPing, event.MCPNotification, event.MCPOther:
		return event.IntentAdmin
	case event.MCPList:
		return event.IntentList
	case event.HTTP:
		return event.IntentHTTPRequest
	case event.Exec:
		return event.IntentRunCommand
	case event.FileImport:
		return event.IntentWriteFile
	case event.FileExport:
		return event.IntentReadFile
	case event.Boot:
		return event.IntentBoot
	case event.Admin:
		return event.IntentAdmin
	}
	return event.IntentAdmin
}

// ParseInitiator reads the `kind` or `kind:id` that the service puts before a
// request that it passes on.
func ParseInitiator(s string) (event.Initiator, error) {
	kind, id, _ := strings.Cut(s, ":")
	switch k := event.InitiatorKind(kind); k {
	case event.Person, event.HostAgent, event.Routine, event.Deployment, event.Handoff:
		return event.Initiator{Kind: k, ID: id}, nil
	case event.GuestAgent:
	}
	return event.Initiator{}, fmt.Errorf("reading the initiator: %q is not one that a host can be", s)
}

// FormatInitiator is the inverse of ParseInitiator.
func FormatInitiator(i event.Initiator) string {
	if i.ID == "" {
		return string(i.Kind)
	}
	return string(i.Kind) + ":" + i.ID
}
