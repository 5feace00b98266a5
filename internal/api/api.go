// Package api is the HTTP contract between capsem's programs: what the CLI and
// capsem-mcp say to the service over its two sockets, and what the service
// passes on to a VM's own socket.
//
// The protocol is HTTP/1.1 over Unix sockets with JSON bodies in snake_case.
// Which socket a request came in on decides who caused it; no member of a
// request can say so. Every error is an Error inside an ErrorBody, with the
// HTTP status of its code.
package api

import (
	"encoding/json"
	"net/http"
	"time"
)

// Version of this contract. The service and its clients come from one build;
// a client that meets another version says so and how to restart the service.
const Version = 1

// MaxBody is the size of a request's JSON body, in bytes. Files are streamed
// and have no such bound.
const MaxBody = 24 << 20

// StreamProtocol is the Upgrade token of a connection that carries guestproto
// stream messages after its 101 response.
const StreamProtocol = "capsem-stream"

// Headers that the service sets towards a VM's socket. A client's own are
// dropped.
const (
	// HeaderInitiator is `kind` or `kind:id` of what caused the request.
	HeaderInitiator = "Capsem-Initiator"
	// HeaderTrace groups all events of one request.
	HeaderTrace = "Capsem-Trace"
	// HeaderTool is set by capsem-mcp to the name of the host tool on whose
	// behalf the request is made; the process that serves it records the tool
	// call. HeaderToolArguments has its arguments, base64 of JSON.
	HeaderTool          = "Capsem-Tool"
	HeaderToolArguments = "Capsem-Tool-Arguments"
	HeaderToolCall      = "Capsem-Tool-Call"
	// HeaderClient is what an MCP client says of itself, a claim.
	HeaderClient = "Capsem-Client"
)

// Code names a kind of failure, for programs.
type Code string

// The codes.
const (
	CodeInvalid     Code = "invalid"     // the request is malformed: 400
	CodeNotFound    Code = "not_found"   // no such VM, file, image: 404
	CodeExists      Code = "exists"      // the name is taken: 409
	CodeState       Code = "wrong_state" // the VM's state does not allow it: 409
	CodeBlocked     Code = "blocked"     // policy refused: 403
	CodeTooLarge    Code = "too_large"   // a bound was exceeded: 413
	CodeBusy        Code = "busy"        // too much at once: 429
	CodeUnavailable Code = "unavailable" // a part that is needed is not there: 503
	CodeTimeout     Code = "timeout"     // it took longer than allowed: 504
	CodeFailed      Code = "failed"      // the act failed: 500
	CodeUnreachable Code = "guest_lost"  // the guest does not answer: 502
	CodeReplaced    Code = "vm_replaced" // the VM was restarted meanwhile: 409
)

// Status is the HTTP status that goes with the code.
func (c Code) Status() int {
	switch c {
	case CodeInvalid:
		return http.StatusBadRequest
	case CodeNotFound:
		return http.StatusNotFound
	case CodeExists, CodeState, CodeReplaced:
		return http.StatusConflict
	case CodeBlocked:
		return http.StatusForbidden
	case CodeTooLarge:
		return http.StatusRequestEntityTooLarge
	case CodeBusy:
		return http.StatusTooManyRequests
	case CodeUnavailable:
		return http.StatusServiceUnavailable
	case CodeTimeout:
		return http.StatusGatewayTimeout
	case CodeUnreachable:
		return http.StatusBadGateway
	case CodeFailed:
		return http.StatusInternalServerError
	}
	return http.StatusInternalServerError
}

// Error is a failure as a person or a program is told it.
type Error struct {
	Code    Code   `json:"code"`
	Message string `json:"message"`
	// Hint says what to do next, "" where there is nothing to say.
	Hint string `json:"hint,omitempty"`
	// Rule is the id of the rule that blocked.
	Rule string `json:"rule,omitempty"`
	// VM is the id of the VM concerned, for example of the one that has the
	// name already.
	VM string `json:"vm,omitempty"`
}

// Error returns the message, with the hint after it.
func (e *Error) Error() string {
	if e.Hint == "" {
		return e.Message
	}
	return e.Message + " (" + e.Hint + ")"
}

// ErrorBody is the body of every response that is not a success.
type ErrorBody struct {
	Error *Error `json:"error"`
}

// State is where a VM is in its life.
type State string

// The states of a VM. Deleting is seen only when a deletion was interrupted.
const (
	StateCreating  State = "creating"
	StateRunning   State = "running"
	StateStopped   State = "stopped"
	StateSuspended State = "suspended"
	StateFailed    State = "failed"
	StateDeleting  State = "deleting"
	// StateDeleted is of a VM that is gone, of which a sealed ledger is kept.
	StateDeleted State = "deleted"
)

// VM is what is known of one machine: GET /v1/vms/{id}.
type VM struct {
	ID      string `json:"id"`
	Name    string `json:"name"`
	State   State  `json:"state"`
	Profile string `json:"profile"`
	// Image is `name@sha256:digest`.
	Image string `json:"image"`
	// PID is of the VM's host process, 0 while it does not run.
	PID         int    `json:"pid"`
	Accelerator string `json:"accelerator"`
	// Isolation is how the processes under the VM's host process are held.
	Isolation string    `json:"isolation"`
	CreatedAt time.Time `json:"created_at"`

	CPUs        int   `json:"cpus"`
	MemoryBytes int64 `json:"memory_bytes"`
	// Incarnation counts the starts of this VM, from 1.
	Incarnation int `json:"incarnation"`
	// Reason says why the VM failed or stopped.
	Reason string `json:"reason,omitempty"`
	// StartedAt and BootMS are of the current start: when, and how long it took
	// until a command would succeed.
	StartedAt *time.Time `json:"started_at,omitempty"`
	BootMS    int64      `json:"boot_ms,omitempty"`
	// Ephemeral VMs are deleted when they stop.
	Ephemeral bool `json:"ephemeral,omitempty"`
	// Notes are what a user should know, for example that nothing written to a
	// tiny image outlives a stop.
	Notes []string `json:"notes,omitempty"`
	// Servers are the MCP servers of a running VM.
	Servers []Server `json:"servers,omitempty"`
}

// Server is one MCP server of a VM.
type Server struct {
	Name  string `json:"name"`
	State string `json:"state"`
	// Detail says why the server is in that state.
	Detail string `json:"detail,omitempty"`
	Tools  int    `json:"tools"`
}

// CreateRequest makes a VM: POST /v1/vms. The response is a VM, sent when a
// command would succeed.
type CreateRequest struct {
	Name    string `json:"name,omitempty"`
	Profile string `json:"profile,omitempty"`
	Image   string `json:"image,omitempty"`
	// CPUs and MemoryBytes override the profile's when they are not 0.
	CPUs        int               `json:"cpus,omitempty"`
	MemoryBytes int64             `json:"memory_bytes,omitempty"`
	Env         map[string]string `json:"env,omitempty"`
	Ephemeral   bool              `json:"ephemeral,omitempty"`
	// RequestKey makes a repeated request return the VM that the first made.
	RequestKey string `json:"request_key,omitempty"`
}

// VMList is every VM: GET /v1/vms.
type VMList struct {
	VMs []VM `json:"vms"`
}

// ExecRequest runs a command: POST /v1/vms/{id}/exec. Without an Upgrade header
// it is captured and answered as an ExecResult; with `Upgrade: capsem-stream`
// the body is the same and the connection then carries guestproto.Stream
// messages (Data, Ack, Signal, EOF from the client; Started, Data, Ack, EOF,
// Exit, Error to it).
type ExecRequest struct {
	// Argv is the command, each argument as bytes (base64 in JSON), so that
	// nothing has to be UTF-8.
	Argv [][]byte `json:"argv"`
	Env  [][]byte `json:"env,omitempty"`
	Cwd  string   `json:"cwd,omitempty"`
	User string   `json:"user,omitempty"`
	// Stdin is what the command reads, in a captured exec.
	Stdin []byte `json:"stdin,omitempty"`
	// OpenStdin says that a streamed exec will send stdin.
	OpenStdin bool  `json:"open_stdin,omitempty"`
	TimeoutMS int64 `json:"timeout_ms,omitempty"`
	// MaxOutput bounds each captured stream, 0 for DefaultMaxOutput.
	MaxOutput int64 `json:"max_output,omitempty"`
	// StopAfter ends the VM when this command has, or when its caller is gone.
	StopAfter bool `json:"stop_after,omitempty"`
}

// DefaultMaxOutput is how much of each stream a captured exec keeps, in bytes.
const DefaultMaxOutput = 10 << 20

// ExecResult is how a captured command ended.
type ExecResult struct {
	ID       string `json:"id"`
	ExitCode int    `json:"exit_code"`
	Signal   string `json:"signal,omitempty"`
	TimedOut bool   `json:"timed_out,omitempty"`
	Stdout   []byte `json:"stdout"`
	Stderr   []byte `json:"stderr"`
	// StdoutBytes and StderrBytes are true also where the copies were cut.
	StdoutBytes int64 `json:"stdout_bytes"`
	StderrBytes int64 `json:"stderr_bytes"`
	Truncated   bool  `json:"truncated,omitempty"`
	Leaked      bool  `json:"leaked,omitempty"`
	// Message says why a command could not be started.
	Message    string `json:"message,omitempty"`
	DurationUS int64  `json:"duration_us"`
	EventID    string `json:"event_id"`
}

// RunRequest makes an ephemeral VM, runs one captured command in it and removes
// it: POST /v1/run.
type RunRequest struct {
	Create CreateRequest `json:"create"`
	Exec   ExecRequest   `json:"exec"`
}

// RunResult is what came of it. VM is as it was when the command started.
type RunResult struct {
	VM   VM         `json:"vm"`
	Exec ExecResult `json:"exec"`
}

// FileInfo is a file in the guest: HEAD and GET /v1/vms/{id}/files?path=P (the
// bytes, with this as the Capsem-File header) and PUT of the same (answered
// with this). Mode is octal permission bits.
//
// GET takes &offset=N&limit=N in bytes as well; what is a part is then answered
// with status 206. PUT takes &mode=0644, &append=true, and &parents=true, which
// makes the folders that are missing on the way.
type FileInfo struct {
	Path string `json:"path"`
	// Size is of the whole file, also where a part of it is sent.
	Size   int64  `json:"size"`
	Mode   string `json:"mode"`
	Mtime  string `json:"mtime,omitempty"`
	SHA256 string `json:"sha256,omitempty"`
}

// HeaderFile carries a FileInfo as JSON.
const HeaderFile = "Capsem-File"

// StopRequest ends a VM in an orderly way: POST /v1/vms/{id}/stop.
type StopRequest struct {
	// TimeoutMS is how long the guest gets, 0 for DefaultStop.
	TimeoutMS int64 `json:"timeout_ms,omitempty"`
	// Force pulls the plug at once.
	Force bool `json:"force,omitempty"`
}

// DefaultStop is how long a guest gets to power off.
const DefaultStop = 10 * time.Second

// SQLRequest runs one read-only statement over a VM's ledger:
// POST /v1/vms/{id}/sql.
type SQLRequest struct {
	Query     string `json:"query"`
	Rows      int    `json:"rows,omitempty"`
	TimeoutMS int64  `json:"timeout_ms,omitempty"`
}

// SQLResult is what it selected. A value is null, a number, a string, or
// {"base64": "…"} for bytes.
type SQLResult struct {
	Columns []string            `json:"columns"`
	Rows    [][]json.RawMessage `json:"rows"`
	// Truncated names the limit that cut the result ("rows" or "bytes").
	Truncated string `json:"truncated,omitempty"`
}

// TimelineEntry is one thing that happened: GET /v1/vms/{id}/timeline?layers=
// &since=&trace=&limit=&before=. Text in it may be the guest's.
type TimelineEntry struct {
	Timestamp     string `json:"timestamp"`
	Layer         string `json:"layer"`
	EventID       string `json:"event_id"`
	TraceID       string `json:"trace_id,omitempty"`
	InitiatorKind string `json:"initiator_kind,omitempty"`
	InitiatorID   string `json:"initiator_id,omitempty"`
	Process       string `json:"process_name,omitempty"`
	// Subject says what it is about: a tool, a command, a URL, a rule.
	Subject  string `json:"subject"`
	Status   string `json:"status,omitempty"`
	Decision string `json:"decision,omitempty"`
	Rule     string `json:"rule_id,omitempty"`
	Detail   string `json:"detail,omitempty"`
	// DurationUS is 0 where the thing has no length.
	DurationUS int64 `json:"duration_us,omitempty"`
}

// Timeline is a page, newest first. Next is the cursor (`before`) of the page
// after it, "" after the last.
type Timeline struct {
	Entries []TimelineEntry `json:"entries"`
	Next    string          `json:"next,omitempty"`
}

// Logs is what a VM and its processes printed: GET /v1/vms/{id}/logs?source=
// (serial, process) &tail=N &grep=S.
type Logs struct {
	Source string `json:"source"`
	Text   string `json:"text"`
	// Truncated says that older lines were left out.
	Truncated bool `json:"truncated,omitempty"`
}

// ReloadResult is what POST /v1/vms/{id}/policy/reload did.
type ReloadResult struct {
	Digest string `json:"digest"`
	Rules  int    `json:"rules"`
	// Waiting names the keys that changed and wait for the next start.
	Waiting []string `json:"waiting,omitempty"`
}

// ServiceInfo is GET /v1/version.
type ServiceInfo struct {
	API     int    `json:"api"`
	Version string `json:"version"`
	PID     int    `json:"pid"`
	Home    string `json:"home"`
}

// Check is one line of a doctor's report: GET /v1/doctor.
type Check struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
	Hint   string `json:"hint,omitempty"`
}

// DoctorReport is what the service found about its machine.
type DoctorReport struct {
	Checks []Check `json:"checks"`
}

// Purged is what POST /v1/purge removed, or would.
type Purged struct {
	VMs    []string `json:"vms"`
	DryRun bool     `json:"dry_run,omitempty"`
}

// PurgeRequest selects what goes: stopped and failed VMs, and with All running
// ones too.
type PurgeRequest struct {
	All    bool `json:"all,omitempty"`
	DryRun bool `json:"dry_run,omitempty"`
}

// DeleteForce is the query of a deletion: DELETE /v1/vms/{id}?force=true stops a running VM first.
const DeleteForce = "force"

// ProgressType is the content type of a response that is a stream of Progress.
const ProgressType = "application/x-ndjson"

// Progress is one line of a streamed response of a request that takes a while
// and was sent with `Accept: application/x-ndjson`: Step lines, then one with
// Result or Error.
type Progress struct {
	Step   string          `json:"step,omitempty"`
	Result json.RawMessage `json:"result,omitempty"`
	Error  *Error          `json:"error,omitempty"`
}

// ImageBuildRequest is POST /v1/images: the response is Progress lines, the
// last with an Image.
type ImageBuildRequest struct {
	Name string `json:"name"`
}

// Image is one built image: GET /v1/images.
type Image struct {
	Name      string    `json:"name"`
	Digest    string    `json:"digest"`
	Kernel    string    `json:"kernel"`
	SizeBytes int64     `json:"size_bytes"`
	BuiltAt   time.Time `json:"built_at"`
	Current   bool      `json:"current"`
}

// ImageList is every built image.
type ImageList struct {
	Images []Image `json:"images"`
}

// SecretList is the names of secrets, never their values: GET /v1/secrets. PUT
// and DELETE /v1/secrets/{name} take the value as the body and answer with the
// name.
type SecretList struct {
	Names []string `json:"names"`
}

// Profile is one profile: GET /v1/profiles. Error says why it does not load.
type Profile struct {
	Name        string `json:"name"`
	File        string `json:"file,omitempty"`
	Image       string `json:"image,omitempty"`
	CPUs        int    `json:"cpus,omitempty"`
	MemoryBytes int64  `json:"memory_bytes,omitempty"`
	Default     string `json:"default,omitempty"`
	Servers     int    `json:"servers"`
	Rules       int    `json:"rules"`
	Error       string `json:"error,omitempty"`
}

// ProfileList is every profile, the built-in one first.
type ProfileList struct {
	Profiles []Profile `json:"profiles"`
}
