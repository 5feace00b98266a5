package event

import (
	"encoding/json"
	"time"
)

// Status is how an event ended, the ledger's word for it.
type Status string

// The statuses. A row is Pending between intent and outcome; Interrupted is
// written on recovery for rows whose process died in between.
const (
	Pending     Status = "pending"
	Done        Status = "done"
	Failed      Status = "failed"
	Timeout     Status = "timeout"
	Cancelled   Status = "cancelled"
	Blocked     Status = "blocked"
	Interrupted Status = "interrupted"
)

// Outcome is what came of an event.
type Outcome struct {
	Status Status
	// CarriedOut says that the act was begun: false for what was blocked before
	// it, true also for an act whose response was blocked or lost.
	CarriedOut bool
	Duration   time.Duration
	// Error is why the act failed, nil for Done.
	Error *Error
	// MCP, HTTP and Exec hold the answer, by the family of the event.
	MCP  *MCPResponse
	HTTP *HTTPResponse
	Exec *ExecResult
	// BytesSent and BytesReceived count payload bytes to and from the far end.
	BytesSent, BytesReceived int64
}

// Error is a failure as the caller is told it. For MCP, Code is the JSON-RPC
// code; elsewhere it is 0.
type Error struct {
	Code    int
	Message string
	// Data is a JSON value or nil.
	Data json.RawMessage
	// Rule is the id of the rule that blocked, "" for any other failure.
	Rule string
}

// Error makes an Error usable as a Go error.
func (e *Error) Error() string { return e.Message }

// MCPResponse is a server's answer.
type MCPResponse struct {
	// Message is the whole answer as the server sent it, one JSON object.
	Message json.RawMessage
	// Result is its result member, nil when it has an error member.
	Result json.RawMessage
	// IsError is result.isError of a tool call.
	IsError bool
}

// HTTPResponse is a far server's answer.
type HTTPResponse struct {
	Status  int
	Headers map[string]string
	Body    []byte
	// Truncated says that the body went over the limit and was cut.
	Truncated bool
}

// ExecResult is how a command ended, as the guest says: a claim.
type ExecResult struct {
	ExitCode                 int
	Signal                   string
	TimedOut, OOM            bool
	Truncated, Leaked        bool
	StdoutBytes, StderrBytes int64
}
