package guestproto

// Control is one message on port 5000. Exactly one member is set.
type Control struct {
	Hello           *Hello           `msgpack:"hello,omitempty"`
	Boot            *Boot            `msgpack:"boot,omitempty"`
	Ready           *Ready           `msgpack:"ready,omitempty"`
	Ping            *Ping            `msgpack:"ping,omitempty"`
	Pong            *Pong            `msgpack:"pong,omitempty"`
	Shutdown        *Shutdown        `msgpack:"shutdown,omitempty"`
	ShutdownRequest *ShutdownRequest `msgpack:"shutdown_request,omitempty"`
	Error           *Error           `msgpack:"error,omitempty"`
}

// Hello is the guest's first word on a new control connection.
type Hello struct {
	// Protocol is ProtocolVersion of the guest's build.
	Protocol     int    `msgpack:"protocol"`
	AgentVersion string `msgpack:"agent_version"`
	// BootID is the guest kernel's random boot id.
	BootID string `msgpack:"boot_id"`
	// Epoch counts this agent's control connections, from 1.
	Epoch uint64 `msgpack:"epoch"`
}

// Boot is the host's answer to Hello: who the guest is.
type Boot struct {
	TimeNS    int64    `msgpack:"time_ns"`
	Hostname  string   `msgpack:"hostname"`
	MachineID string   `msgpack:"machine_id"`
	Env       [][]byte `msgpack:"env"`
	Files     []File   `msgpack:"files"`
	// CA is a PEM bundle that guests are to trust, empty until guests have a
	// network.
	CA []byte `msgpack:"ca"`
	// Entropy is mixed into the guest's random pool.
	Entropy []byte `msgpack:"entropy"`
	Epoch   uint64 `msgpack:"epoch"`
	// More says that the host takes MCP messages in several frames.
	More bool `msgpack:"more"`
}

// File is a file that the guest writes before it is ready.
type File struct {
	Path string `msgpack:"path"`
	Mode uint32 `msgpack:"mode"`
	Data []byte `msgpack:"data"`
}

// Ready says that a command would succeed now.
type Ready struct {
	Timings []Timing `msgpack:"timings"`
}

// Timing is when a stage of the guest's boot ended, in nanoseconds after the
// guest's kernel started.
type Timing struct {
	Stage string `msgpack:"stage"`
	NS    int64  `msgpack:"ns"`
}

// Ping asks the other side whether it is there; both sides may send it.
type Ping struct {
	Seq    uint64 `msgpack:"seq"`
	TimeNS int64  `msgpack:"time_ns"`
}

// Pong answers the Ping of the same Seq.
type Pong struct {
	Seq uint64 `msgpack:"seq"`
}

// Shutdown asks the guest to end its processes, sync and power off.
type Shutdown struct {
	// GraceMS is how long processes get between TERM and KILL.
	GraceMS int64 `msgpack:"grace_ms"`
}

// ShutdownRequest is a guest program's wish to power off.
type ShutdownRequest struct{}

// Error is a failure that has a name. The connection may go on.
type Error struct {
	// Code is a short constant: "version", "not_found", "invalid", "io",
	// "too_large", "busy", "exists", "permission".
	Code    string `msgpack:"code"`
	Message string `msgpack:"message"`
}

// Stream is one message on port 5005. Exactly one member is set. The first
// message of a connection goes from host to guest and says what the connection
// is for: Exec, ReadFile, WriteFile or Stat.
type Stream struct {
	Exec      *Exec      `msgpack:"exec,omitempty"`
	ReadFile  *ReadFile  `msgpack:"file_read,omitempty"`
	WriteFile *WriteFile `msgpack:"file_write,omitempty"`
	Stat      *Stat      `msgpack:"stat,omitempty"`

	Started *Started  `msgpack:"started,omitempty"`
	Data    *Data     `msgpack:"data,omitempty"`
	Ack     *Ack      `msgpack:"ack,omitempty"`
	Signal  *Signal   `msgpack:"signal,omitempty"`
	EOF     *EOF      `msgpack:"eof,omitempty"`
	Exit    *Exit     `msgpack:"exit,omitempty"`
	Info    *FileInfo `msgpack:"info,omitempty"`
	Error   *Error    `msgpack:"error,omitempty"`
}

// Exec starts a command. argv and env are bytes: nothing joins, splits or
// re-encodes them, and no shell sees them.
type Exec struct {
	// ID is the host's name for this command.
	ID   string   `msgpack:"id"`
	Argv [][]byte `msgpack:"argv"`
	// Env is added to, and overrides, the guest's base environment.
	Env [][]byte `msgpack:"env"`
	// Cwd is absolute; empty means the user's home.
	Cwd  []byte `msgpack:"cwd"`
	User string `msgpack:"user"`
	// Stdin says that the host will send data for it; without, it is /dev/null.
	Stdin bool `msgpack:"stdin"`
	// TimeoutMS kills the command's whole tree; 0 means never.
	TimeoutMS int64 `msgpack:"timeout_ms"`
}

// ReadFile asks for a regular file's bytes: the guest answers Info, then Data,
// then EOF, then Info again with the SHA256 of what it sent.
type ReadFile struct {
	Path   []byte `msgpack:"path"`
	Offset int64  `msgpack:"offset"`
	// Limit is the most bytes to send, 0 for all.
	Limit int64 `msgpack:"limit"`
}

// WriteFile sends a regular file's bytes: Data, then EOF; the guest answers
// Info when the file is in place. It replaces the path atomically.
type WriteFile struct {
	Path []byte `msgpack:"path"`
	// Mode is the permission bits; 0 keeps those of a file that is there, else
	// 0644.
	Mode uint32 `msgpack:"mode"`
	// Size is the number of bytes to come, -1 when unknown.
	Size int64 `msgpack:"size"`
	// Parents makes missing folders on the way.
	Parents bool `msgpack:"parents"`
	// Append adds to the file instead of replacing it.
	Append bool `msgpack:"append"`
}

// Stat asks for Info about a path, without following a last symlink.
type Stat struct {
	Path []byte `msgpack:"path"`
}

// Started says that the command runs. It precedes every Data of the command.
type Started struct {
	PID int `msgpack:"pid"`
}

// StreamID says which of a command's streams bytes belong to.
type StreamID uint8

// The streams of a command; files use Out for what is read and In for what is
// written.
const (
	In  StreamID = 0
	Out StreamID = 1
	Err StreamID = 2
)

// Data is bytes of one stream. A sender has at most Window bytes unconfirmed,
// over all streams of the connection.
type Data struct {
	Stream StreamID `msgpack:"stream"`
	Bytes  []byte   `msgpack:"bytes"`
}

// Ack confirms that this many bytes more were consumed.
type Ack struct {
	Bytes int64 `msgpack:"bytes"`
}

// Signal is sent to the command's process group, by name ("TERM"): numbers
// differ between systems.
type Signal struct {
	Name string `msgpack:"name"`
}

// EOF ends a stream; no Data of it follows.
type EOF struct {
	Stream StreamID `msgpack:"stream"`
}

// Exit is a command's last message: all its output was sent before.
type Exit struct {
	// Code is the exit status; 128+N where a signal N ended it.
	Code int `msgpack:"code"`
	// Signal is the name of the signal that ended it, "" for none.
	Signal   string `msgpack:"signal"`
	TimedOut bool   `msgpack:"timed_out"`
	OOM      bool   `msgpack:"oom"`
	// Leaked says that processes outside the command's tree still held its
	// pipes when it ended.
	Leaked bool `msgpack:"leaked"`
	// Message says why a command could not be started (then Code is 126 or
	// 127).
	Message string `msgpack:"message"`
}

// FileInfo is what the guest says of a file.
type FileInfo struct {
	Path []byte `msgpack:"path"`
	Size int64  `msgpack:"size"`
	// Mode is st_mode as Linux has it.
	Mode    uint32 `msgpack:"mode"`
	MtimeNS int64  `msgpack:"mtime_ns"`
	UID     uint32 `msgpack:"uid"`
	GID     uint32 `msgpack:"gid"`
	// Target is a symlink's content.
	Target []byte `msgpack:"target"`
	// SHA256 of the bytes that were moved by this request, in the Info that ends
	// it.
	SHA256 []byte `msgpack:"sha256"`
}
