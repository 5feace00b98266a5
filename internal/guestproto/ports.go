// Package guestproto is every message that crosses vsock between a guest and
// its host: the control messages of port 5000, the framed MCP of port 5002 and
// the streams of port 5005. Both ends import it; neither trusts the other.
//
// Control messages and streams are MessagePack values with a length before
// them; framed MCP has the layout that the original Capsem guests speak, so
// that either side can talk to one of theirs. Every bound is a constant here,
// and both ends apply it to what they read and to what they write.
package guestproto

import "time"

// The vsock ports of the host (PortControl, PortMCP) and of the guest
// (PortStreams). Every other port refuses.
const (
	PortControl uint32 = 5000
	PortMCP     uint32 = 5002
	PortStreams uint32 = 5005
)

// ProtocolVersion is what Hello carries. A host that does not know a guest's
// version answers with an Error of code "version" and closes.
const ProtocolVersion = 1

// Bounds of control messages and streams.
const (
	// MaxMessage is the size of one control or stream message, in bytes.
	MaxMessage = 2 << 20
	// MaxData is the size of the bytes in one Data message.
	MaxData = 64 << 10
	// Window is how many bytes of Data may be under way unconfirmed, per
	// direction of a connection.
	Window = 256 << 10
)

// KillAfter is how long a guest gives a command between TERM and KILL once its
// time is over. A host waits longer than that before it gives a guest up.
const KillAfter = 2 * time.Second
