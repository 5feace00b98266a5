package toolproto

import "time"

// Message is one frame between the supervisor and a jailed tool process.
// Exactly one member is set.
type Message struct {
	Hello         *Hello         `msgpack:"hello,omitempty"`
	Configure     *Configure     `msgpack:"configure,omitempty"`
	Ready         *Ready         `msgpack:"ready,omitempty"`
	Call          *Call          `msgpack:"call,omitempty"`
	Cancel        *Cancel        `msgpack:"cancel,omitempty"`
	Notify        *Notify        `msgpack:"notify,omitempty"`
	Result        *Result        `msgpack:"result,omitempty"`
	ServerRequest *ServerRequest `msgpack:"server_request,omitempty"`
	ServerResult  *ServerResult  `msgpack:"server_result,omitempty"`
	HTTPRequest   *HTTPRequest   `msgpack:"http_request,omitempty"`
	HTTPResult    *HTTPResult    `msgpack:"http_result,omitempty"`
	Event         *Event         `msgpack:"event,omitempty"`
	Shutdown      *Shutdown      `msgpack:"shutdown,omitempty"`
}

// Hello is the tool process's first frame.
type Hello struct {
	Version int `msgpack:"version"`
}

// Configure is the supervisor's first frame: the one server that this process
// holds. Secrets arrive here and nowhere else.
type Configure struct {
	Version int    `msgpack:"version"`
	Server  Server `msgpack:"server"`
}

// Server defines one MCP server. Command or URL is set; neither is for the
// built-in tools.
type Server struct {
	Name    string   `msgpack:"name"`
	Command string   `msgpack:"command"`
	Args    []string `msgpack:"args"`
	// Env is the server's whole environment, secrets included.
	Env []EnvVar `msgpack:"env"`
	URL string   `msgpack:"url"`
	// Headers are sent with every HTTP request, secrets expanded.
	Headers []Header `msgpack:"headers"`
	// Proxy is the URL of the proxy that URL is reached through, "" for none. A
	// server with a Command finds it in Env.
	Proxy string `msgpack:"proxy"`
	// StartTimeout bounds connecting and initialize.
	StartTimeout time.Duration `msgpack:"start_timeout"`
}

// EnvVar is one variable of a server's environment.
type EnvVar struct {
	Name  string `msgpack:"name"`
	Value []byte `msgpack:"value"`
}

// Header is one HTTP header of a server's requests.
type Header struct {
	Name  string `msgpack:"name"`
	Value []byte `msgpack:"value"`
}

// Ready says that the server answered initialize. InitializeResult is the
// result member of that answer as it came.
type Ready struct {
	InitializeResult []byte `msgpack:"initialize_result"`
}

// Call is one JSON-RPC request for the server.
type Call struct {
	// ID is the supervisor's, never reused within a process's life.
	ID     uint64 `msgpack:"id"`
	Method string `msgpack:"method"`
	// Params are the bytes that the server will see, nil when absent.
	Params []byte `msgpack:"params"`
	// TimeoutMS bounds the call, 0 for none; the supervisor bounds it too.
	TimeoutMS int64 `msgpack:"timeout_ms"`
}

// Cancel ends the interest in a call; the server is told with
// notifications/cancelled. A Result may still come and is dropped.
type Cancel struct {
	ID     uint64 `msgpack:"id"`
	Reason string `msgpack:"reason"`
}

// Notify is a JSON-RPC notification, in either direction.
type Notify struct {
	Method string `msgpack:"method"`
	Params []byte `msgpack:"params"`
}

// Result answers a Call. Message is the server's whole answer as it came, with
// the id that this process used; Error is set instead when there is none.
type Result struct {
	ID      uint64 `msgpack:"id"`
	Message []byte `msgpack:"message"`
	Error   *Error `msgpack:"error"`
}

// Error is the tool process's own failure.
type Error struct {
	// Code is a JSON-RPC code: -32603 for a server that failed, -32000 for a
	// timeout, -32001 for a transport that was lost or a message too large.
	Code    int    `msgpack:"code"`
	Message string `msgpack:"message"`
}

// ServerRequest is what a server asks of its client (sampling, elicitation,
// roots): the whole request as it came.
type ServerRequest struct {
	ID      uint64 `msgpack:"id"`
	Message []byte `msgpack:"message"`
}

// ServerResult answers a ServerRequest with the whole response, the id of which
// is the server's own.
type ServerResult struct {
	ID      uint64 `msgpack:"id"`
	Message []byte `msgpack:"message"`
}

// HTTPRequest is a built-in tool's request, which the supervisor judges and
// makes.
type HTTPRequest struct {
	ID uint64 `msgpack:"id"`
	// CallID is the Call on whose behalf it is made.
	CallID  uint64   `msgpack:"call_id"`
	Method  string   `msgpack:"method"`
	URL     string   `msgpack:"url"`
	Headers []Header `msgpack:"headers"`
	Body    []byte   `msgpack:"body"`
	// TimeoutMS is what the caller asked for, 0 for the supervisor's own
	// bound, which stands in any case.
	TimeoutMS int64 `msgpack:"timeout_ms"`
	// MaxBytes is how much of the answer's body the caller wants, 0 for the
	// supervisor's own bound.
	MaxBytes int64 `msgpack:"max_bytes"`
}

// HTTPResult answers an HTTPRequest.
type HTTPResult struct {
	ID        uint64   `msgpack:"id"`
	Status    int      `msgpack:"status"`
	URL       string   `msgpack:"url"`
	Headers   []Header `msgpack:"headers"`
	Body      []byte   `msgpack:"body"`
	Truncated bool     `msgpack:"truncated"`
	// Error is why there is no answer; Blocked says that a rule was why.
	Error   string `msgpack:"error"`
	Blocked bool   `msgpack:"blocked"`
}

// EventKind says what an Event is about.
type EventKind string

// The kinds of event.
const (
	// EventStderr is one line of the server's stderr.
	EventStderr EventKind = "stderr"
	// EventJunk is a line on the server's stdout that is no JSON-RPC message.
	EventJunk EventKind = "junk"
	// EventExit says that the server is gone; the process ends after it.
	EventExit EventKind = "exit"
)

// Event is something that the supervisor should know. Text is the server's: it
// is cut to MaxEventText by the tool process.
type Event struct {
	Kind EventKind `msgpack:"kind"`
	Text string    `msgpack:"text"`
	// Count is how many like it were left out since the last one.
	Count int `msgpack:"count"`
}

// Shutdown asks the process to stop its server and exit.
type Shutdown struct{}
