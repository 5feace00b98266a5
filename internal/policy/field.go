package policy

import (
	"path"
	"strings"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"

	"github.com/capsem/capsem/internal/event"
)

// family is a group of fields that events of some types carry.
type family string

// The families. Fields of the family always are bound for every event.
const (
	always        family = ""
	familyMCP     family = "mcp"
	familyHTTP    family = "http"
	familyFile    family = "file"
	familyProcess family = "process"
)

// familyOf says which family events of a type carry, always if none.
func familyOf(t event.Type) family {
	switch t {
	case event.MCPToolCall, event.MCPResourceRead, event.MCPPromptGet, event.MCPCompletion,
		event.MCPInitialize, event.MCPPing, event.MCPList, event.MCPNotification, event.MCPOther:
		return familyMCP
	case event.HTTP:
		return familyHTTP
	case event.FileImport, event.FileExport:
		return familyFile
	case event.Exec:
		return familyProcess
	case event.Boot, event.Admin:
		return always
	}
	return always
}

// field is one thing that a rule can read. This declaration builds the CEL
// environment, the values, the checks of rules and the generated reference.
type field struct {
	name   string
	typ    *cel.Type
	family family
	// response says that the field is known only when the act is done: a rule
	// that reads it runs then.
	response bool
	// optional says that an event of the family may lack the field.
	optional bool
	// words are all values that the field can have, nil where that is open.
	words []string
	doc   string
	// read returns the field's value, nil where the event lacks it. An error
	// value breaks the rules that read it.
	read func(*facts) ref.Val
}

// Field describes a field for the reference.
type Field struct {
	// Name is what a rule writes: `mcp.server.name`.
	Name string
	// Type is CEL's name of the field's type: `string`, `map(string, dyn)`.
	Type string
	// Family is whose events carry the field, "" for all events.
	Family string
	// Phase is "request" or "response": when the field is first known.
	Phase string
	// Optional says that events of the family may lack it.
	Optional bool
	// Words are all values that it can have, nil where that is open.
	Words []string
	Doc   string
}

// Fields lists all fields, in the order of the reference.
func Fields() []Field {
	declared := declaredFields()
	out := make([]Field, len(declared))
	for i, f := range declared {
		out[i] = Field{
			Name: f.name, Type: f.typ.String(), Family: string(f.family), Phase: event.Request.String(),
			Optional: f.optional, Words: f.words, Doc: f.doc,
		}
		if f.response {
			out[i].Phase = event.Response.String()
		}
	}
	return out
}

// laterRoots are the families that the design has and this version does not.
func laterRoots() []string {
	return []string{"dns", "ip", "tcp", "udp", "model", "element", "page", "key", "command", "computer"}
}

func declaredFields() []*field {
	var all []*field
	for _, part := range [][]*field{alwaysFields(), mcpFields(), responseFields(), httpFields(), fileFields(), processFields()} {
		all = append(all, part...)
	}
	return all
}

// text makes the reader of a string field.
func text(get func(*event.Event) string) func(*facts) ref.Val {
	return func(f *facts) ref.Val { return types.String(get(f.ev)) }
}

func words[T ~string](all ...T) []string {
	out := make([]string, len(all))
	for i, w := range all {
		out[i] = string(w)
	}
	return out
}

func alwaysFields() []*field {
	str := cel.StringType
	return []*field{
		{
			name: "intent", typ: str, doc: "what the event is for, in one word, derived from what is done",
			words: words(event.IntentRead, event.IntentList, event.IntentReadFile, event.IntentWriteFile, event.IntentListFiles,
				event.IntentReadTool, event.IntentWriteTool, event.IntentRunCommand, event.IntentHTTPRequest, event.IntentBoot, event.IntentAdmin),
			read: text(func(e *event.Event) string { return string(e.Intent) }),
		},
		{
			name: "tool.name", typ: str, doc: "the tool that is called, namespaced (`github__create_issue`), \"\" where the event calls none",
			read: text(toolName),
		},
		{
			name: "initiator.kind", typ: str, doc: "what caused the event, as the process that accepted the connection knows it",
			words: words(event.Person, event.HostAgent, event.GuestAgent, event.Routine, event.Deployment, event.Handoff),
			read:  text(func(e *event.Event) string { return string(e.Initiator.Kind) }),
		},
		{
			name: "initiator.id", typ: str, doc: "what is known of the initiator: a uid, a client's name, a routine's name",
			read: text(func(e *event.Event) string { return e.Initiator.ID }),
		},
		{
			name: "actor.id", typ: str, doc: "whose authority the initiator borrows",
			read: text(func(e *event.Event) string { return e.Actor }),
		},
		{
			name: "vm.id", typ: str, doc: "the id of the VM, \"\" where the event concerns none",
			read: text(func(e *event.Event) string { return e.VM.ID }),
		},
		{
			name: "vm.name", typ: str, doc: "the name of the VM",
			read: text(func(e *event.Event) string { return e.VM.Name }),
		},
		{
			name: "vm.profile", typ: str, doc: "the profile of the VM",
			read: text(func(e *event.Event) string { return e.VM.Profile }),
		},
		{
			name: "process.name", typ: str, doc: "the guest process that spoke, as the guest says: a claim",
			read: text(func(e *event.Event) string { return e.Process }),
		},
		{
			name: "event.type", typ: str, doc: "the type of the event", words: words(event.Types()...),
			read: text(func(e *event.Event) string { return string(e.Type) }),
		},
		{
			name: "event.time", typ: cel.TimestampType, doc: "when the event was seen",
			read: func(f *facts) ref.Val { return types.Timestamp{Time: f.ev.Time} },
		},
	}
}

func httpFields() []*field {
	str := cel.StringType
	get := func(read func(*event.HTTPRequest) string) func(*facts) ref.Val {
		return func(f *facts) ref.Val {
			if f.ev.HTTP == nil {
				return nil
			}
			return types.String(read(f.ev.HTTP))
		}
	}
	return []*field{
		{name: "http.method", typ: str, family: familyHTTP, doc: "the request's method, upper case; `CONNECT` for a tunnel of TLS, of which only scheme, host and port are known", read: get(func(h *event.HTTPRequest) string { return h.Method })},
		{name: "http.scheme", typ: str, family: familyHTTP, doc: "`http` or `https`", read: get(func(h *event.HTTPRequest) string { return h.Scheme })},
		{name: "http.host", typ: str, family: familyHTTP, doc: "the host, lower case, without port", read: get(func(h *event.HTTPRequest) string { return h.Host })},
		{
			name: "http.port", typ: cel.IntType, family: familyHTTP, doc: "the port",
			read: func(f *facts) ref.Val {
				if f.ev.HTTP == nil {
					return nil
				}
				return types.Int(f.ev.HTTP.Port)
			},
		},
		{name: "http.path", typ: str, family: familyHTTP, doc: "the path of the URL", read: get(func(h *event.HTTPRequest) string { return h.Path })},
		{name: "http.query", typ: str, family: familyHTTP, doc: "the query of the URL, without `?`, \"\" where there is none", read: get(func(h *event.HTTPRequest) string { return h.Query })},
		{
			name: "http.headers", typ: cel.MapType(str, str), family: familyHTTP, doc: "the request's headers; names are lower case, several values are joined by \", \"",
			read: func(f *facts) ref.Val {
				if f.ev.HTTP == nil {
					return nil
				}
				return types.NewStringStringMap(types.DefaultTypeAdapter, f.ev.HTTP.Headers)
			},
		},
		{name: "http.body", typ: str, family: familyHTTP, doc: "the request's body, \"\" where there is none", read: get(func(h *event.HTTPRequest) string { return string(h.Body) })},
		{name: "http.redirected_from", typ: str, family: familyHTTP, doc: "the URL whose answer led here, \"\" for the first hop", read: get(func(h *event.HTTPRequest) string { return h.RedirectedFrom })},
		{
			name: "http.status", typ: cel.IntType, family: familyHTTP, response: true, optional: true, doc: "the status of the answer",
			read: func(f *facts) ref.Val {
				if f.out == nil || f.out.HTTP == nil {
					return nil
				}
				return types.Int(f.out.HTTP.Status)
			},
		},
	}
}

// fileFields are declared twice: by what the file is (`file.path`), and by what
// is done to it (`file.import.path`), which is there only for that operation.
func fileFields() []*field {
	plain := []*field{
		{name: "path", typ: cel.StringType, doc: "the path in the guest", read: func(f *facts) ref.Val { return types.String(f.ev.File.Path) }},
		{name: "name", typ: cel.StringType, doc: "the last part of the path", read: func(f *facts) ref.Val { return types.String(path.Base(f.ev.File.Path)) }},
		{name: "ext", typ: cel.StringType, doc: "the extension of the name, with its dot, \"\" where there is none", read: func(f *facts) ref.Val { return types.String(path.Ext(f.ev.File.Path)) }},
		{name: "bytes", typ: cel.IntType, doc: "the size in bytes", read: func(f *facts) ref.Val { return types.Int(f.ev.File.Size) }},
		{
			name: "content", typ: cel.StringType, optional: true, doc: "the content, where it is at hand before the act",
			read: func(f *facts) ref.Val {
				if f.ev.File.Content == nil {
					return nil
				}
				return types.String(f.ev.File.Content)
			},
		},
	}
	ops := []string{"import", "export"}
	all := []*field{{
		name: "file.op", typ: cel.StringType, family: familyFile, words: ops, doc: "what is done: `import` goes into the guest, `export` comes out of it",
		read: func(f *facts) ref.Val {
			if f.ev.File == nil {
				return nil
			}
			return types.String(f.ev.File.Op)
		},
	}}
	for _, op := range append([]string{""}, ops...) {
		for _, p := range plain {
			all = append(all, fileField(op, *p))
		}
	}
	return all
}

func fileField(op string, f field) *field {
	read := f.read
	prefix := "file."
	if op != "" {
		prefix += op + "."
	}
	f.name = prefix + f.name
	f.family = familyFile
	f.read = func(facts *facts) ref.Val {
		if facts.ev.File == nil || (op != "" && facts.ev.File.Op != op) {
			return nil
		}
		return read(facts)
	}
	if op != "" {
		f.optional = true
		f.doc += ", of an " + op
	}
	return &f
}

func processFields() []*field {
	get := func(read func(*event.Command) ref.Val) func(*facts) ref.Val {
		return func(f *facts) ref.Val {
			if f.ev.Exec == nil {
				return nil
			}
			return read(f.ev.Exec)
		}
	}
	command := get(func(c *event.Command) ref.Val { return types.String(strings.Join(c.Argv, " ")) })
	return []*field{
		{name: "process.exec.command", typ: cel.StringType, family: familyProcess, doc: "the arguments joined by spaces, for searching; `argv` tells them apart", read: command},
		{
			name: "process.exec.argv", typ: cel.ListType(cel.StringType), family: familyProcess, doc: "the program and its arguments",
			read: get(func(c *event.Command) ref.Val { return types.NewStringList(types.DefaultTypeAdapter, c.Argv) }),
		},
		{name: "process.exec.cwd", typ: cel.StringType, family: familyProcess, doc: "the working directory, \"\" for the default", read: get(func(c *event.Command) ref.Val { return types.String(c.Cwd) })},
		{name: "process.exec.user", typ: cel.StringType, family: familyProcess, doc: "the user, \"\" for the default", read: get(func(c *event.Command) ref.Val { return types.String(c.User) })},
		{
			name: "process.exec.exit_code", typ: cel.IntType, family: familyProcess, response: true, optional: true, doc: "the exit status, as the guest says: a claim",
			read: func(f *facts) ref.Val {
				if f.out == nil || f.out.Exec == nil {
					return nil
				}
				return types.Int(f.out.Exec.ExitCode)
			},
		},
		{name: "process.command", typ: cel.StringType, family: familyProcess, doc: "short for `process.exec.command`", read: command},
	}
}
