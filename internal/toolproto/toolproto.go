// Package toolproto is every message between the supervisor and a jailed tool
// process: capsem-aggregator, which holds one external MCP server, and
// capsem-builtin, which holds our own tools.
//
// A frame is a big-endian u32 length and one MessagePack value. The process on
// the other end may be an attacker's: a value's declared sizes are checked
// against the bytes that are there before anything is decoded. JSON-RPC
// payloads travel as opaque bytes and arrive as they were sent.
package toolproto

// Version is what Hello and Configure carry. A process that does not know the
// other's version says so and exits.
const Version = 1

// Bounds of the protocol, in bytes.
const (
	// MaxPayload is the size of one JSON-RPC message.
	MaxPayload = 16 << 20
	// MaxMessage is the size of one frame: a payload and what is around it.
	MaxMessage = MaxPayload + 64<<10
	// MaxEventText is the size of an Event's text.
	MaxEventText = 4 << 10
)
