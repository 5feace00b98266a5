package guestproto

import (
	"encoding/binary"
	"fmt"
	"io"
	"sync"
	"unicode/utf8"
)

// Bounds of framed MCP on port 5002, in bytes unless stated otherwise.
const (
	// MaxMCPFrame is the largest total_len: what follows the length of a frame.
	MaxMCPFrame = 1_052_672
	// MCPHeader is the size of what stands between the length and the process
	// name, and so the smallest total_len.
	MCPHeader = 16
	// MaxMCPMessage is the size of a message, in however many frames.
	MaxMCPMessage = 16 << 20
	// MaxPartial is how many messages of a connection may be under way in
	// pieces at one time.
	MaxPartial = 8
	// MaxProcess is the size of a process name.
	MaxProcess = 128
)

// Stream ids. 0 is for notifications alone.
const (
	// FirstHostStream is the lowest id of a request that the host makes; those
	// of the guest's requests are below.
	FirstHostStream uint32 = 0x80000000
)

// The fixed parts of a frame's header, and its flags.
const (
	mcpMagic       = 0x4d43 // "MC"
	mcpVersion     = 1
	mcpLength      = 4 // total_len itself
	flagNotify     = 1 << 0
	flagMore       = 1 << 1
	maxMCPNoSplit  = MaxMCPFrame - MCPHeader // process name and payload of a frame
	keepFrame      = 64 << 10                // the largest buffer an idle MCPWriter keeps
	firstFrameRead = 32 << 10                // what a payload's buffer begins with
)

// MCPFrame is one message of framed MCP, or the answer to one, as it stands in one
// frame or several.
type MCPFrame struct {
	// Stream joins a request and its answer. It is 0 for a notification and for
	// nothing else.
	Stream       uint32
	Notification bool
	// Process is the guest process that speaks: a claim. The host echoes it.
	Process string
	// Payload is one JSON-RPC message. An answer without payload says that none
	// will come.
	Payload []byte
}

// FrameError is a frame, or a message in several, that a MCPReader refused, or that
// cannot be sent.
type FrameError struct {
	// Fatal says that the stream cannot be read further.
	Fatal bool
	// Stream is where an answer belongs; 0 means that none may be sent.
	Stream uint32
	// Oversize says that the message exceeds Max bytes. Size is what it has at
	// least; the rest is passed over.
	Oversize  bool
	Size, Max int
	// Busy says that MCPReader.Reserve had no room.
	Busy bool
	// Detail is which rule was broken, in a few constant words.
	Detail string
}

// Error implements error.
func (e *FrameError) Error() string {
	if e.Oversize {
		return fmt.Sprintf("MCP message of %d bytes or more exceeds the limit of %d", e.Size, e.Max)
	}
	return "MCP frame refused: " + e.Detail
}

// AppendMCP appends f to dst: as one frame, or where it does not fit and more says
// that the peer takes pieces, as several that belong together and must be written
// without another frame of stream 0 between them. The process name is sanitised.
// The error is a *[FrameError]; dst is then unchanged.
func AppendMCP(dst []byte, f MCPFrame, more bool) ([]byte, error) {
	process, err := checkMCP(&f, more)
	if err != nil {
		return dst, err
	}
	for payload := f.Payload; ; {
		piece := payload[:min(len(payload), maxMCPNoSplit-len(process))]
		payload = payload[len(piece):]
		dst = appendFrame(dst, &f, process, piece, len(payload) > 0)
		if len(payload) == 0 {
			return dst, nil
		}
	}
}

// checkMCP refuses what cannot be sent and returns the sanitised process name.
func checkMCP(f *MCPFrame, more bool) (process string, err error) {
	process = SanitizeProcess(f.Process)
	limit := MaxMCPMessage
	if !more {
		limit = maxMCPNoSplit - len(process)
	}
	switch {
	case f.Notification != (f.Stream == 0):
		return "", &FrameError{Stream: f.Stream, Detail: "notifications, and nothing else, are on stream 0"}
	case len(f.Payload) > limit:
		return "", &FrameError{Stream: f.Stream, Oversize: true, Size: len(f.Payload), Max: limit, Detail: "message too large"}
	}
	return process, nil
}

// appendFrame appends one frame.
func appendFrame(dst []byte, f *MCPFrame, process string, piece []byte, more bool) []byte {
	var flags uint16
	if f.Notification {
		flags |= flagNotify
	}
	if more {
		flags |= flagMore
	}
	dst = binary.BigEndian.AppendUint32(dst, uint32(MCPHeader+len(process)+len(piece)))
	dst = binary.BigEndian.AppendUint16(dst, mcpMagic)
	dst = append(dst, mcpVersion, MCPHeader)
	dst = binary.BigEndian.AppendUint32(dst, f.Stream)
	dst = binary.BigEndian.AppendUint16(dst, flags)
	dst = binary.BigEndian.AppendUint16(dst, uint16(len(process)))
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(piece)))
	dst = append(dst, process...)
	return append(dst, piece...)
}

// MCPWriter writes messages as frames, each frame in one Write. It may be used by
// several goroutines; a message's frames stay together, so that no more than one is
// ever partial.
type MCPWriter struct {
	more bool

	mu  sync.Mutex // guards what follows, and the order of frames
	dst io.Writer
	buf []byte
	err error
}

// NewMCPWriter returns a MCPWriter to dst. more says that the peer takes messages
// in pieces.
func NewMCPWriter(dst io.Writer, more bool) *MCPWriter {
	return &MCPWriter{dst: dst, more: more}
}

// Write sends one message and keeps none of it. A *[FrameError] means that it
// cannot be sent and that nothing was; any other error ends the stream and is
// returned by every later call.
func (w *MCPWriter) Write(f MCPFrame) error {
	process, err := checkMCP(&f, w.more)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for payload := f.Payload; w.err == nil; {
		piece := payload[:min(len(payload), maxMCPNoSplit-len(process))]
		payload = payload[len(piece):]
		w.buf = appendFrame(w.buf[:0], &f, process, piece, len(payload) > 0)
		if _, err := w.dst.Write(w.buf); err != nil {
			w.err = fmt.Errorf("writing an MCP frame: %w", err)
		}
		if len(payload) == 0 {
			break
		}
	}
	if cap(w.buf) > keepFrame {
		w.buf = nil
	}
	return w.err
}

// header is the fixed part of a frame.
type header struct {
	total, stream uint32
	flags         uint16
	name, payload uint32
}

// parseHeader reads the length and the 16 bytes after it. detail is the first rule
// that it breaks, "" for none; the stream and the flags are right as far as they can
// be in any case.
func parseHeader(b []byte, more bool) (h header, detail string) {
	u16, u32 := binary.BigEndian.Uint16, binary.BigEndian.Uint32
	h = header{
		total: u32(b), stream: u32(b[8:]), flags: u16(b[12:]),
		name: uint32(u16(b[14:])), payload: u32(b[16:]),
	}
	known := uint16(flagNotify)
	if more {
		known |= flagMore
	}
	switch {
	case u16(b[4:]) != mcpMagic:
		return h, "bad magic"
	case b[6] != mcpVersion:
		return h, "bad version"
	case b[7] != MCPHeader:
		return h, "bad header length"
	case h.flags&^known != 0:
		return h, "reserved flag"
	case (h.flags&flagNotify != 0) != (h.stream == 0):
		return h, "flag and stream do not match"
	case h.name > MaxProcess:
		return h, "process name too long"
	case uint64(MCPHeader)+uint64(h.name)+uint64(h.payload) != uint64(h.total):
		return h, "lengths do not add up"
	}
	return h, ""
}

// parseName reads the process name.
func parseName(b []byte) (name, detail string) {
	if !utf8.Valid(b) {
		return "", "process name is not UTF-8"
	}
	return SanitizeProcess(string(b)), ""
}
