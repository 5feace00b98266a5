package ledger

import (
	"fmt"
	"strings"
)

// schemaVersion is the version that this code writes, kept in user_version.
const schemaVersion = 1

// applicationID marks the file as a ledger ("CpLg"), kept in application_id.
const applicationID = 0x43704c67

// Stage says when a column gets its value.
type Stage int

// The two stages of a row.
const (
	// Intent columns are known when the row is written, and never change.
	Intent Stage = iota
	// Outcome columns may change once, while the row is pending.
	Outcome
)

// Column is one column of a table: the one place that its name, its SQL type,
// its stage and its meaning are written down.
type Column struct {
	Name, Type string
	Stage      Stage
	Doc        string
}

// Table is one table of the ledger. The statements that create it, write it and
// guard it are derived from this description, as is the reference page.
type Table struct {
	Name, Doc string
	// State names the column that holds the event.Status, "" for a table whose
	// rows are complete when they are written.
	State string
	// Unique says that an event has at most one row here.
	Unique  bool
	Columns []Column
}

// tableID is an index into Tables().
type tableID int

const (
	toolCalls tableID = iota
	execEvents
	netEvents
	fsEvents
	protocolEvents
	vmEvents
	securityRuleEvents
	eventBodyBlobs
)

const tableCount = int(eventBodyBlobs) + 1

// Tables lists the tables that hold events, each with all of its columns but
// `id`, `begin_digest` and `digest`, which every one of them has. The tables
// `bodies` and `ledger_chain` are no event tables; see supportSQL.
func Tables() []Table {
	return []Table{
		toolCallsTable(), execEventsTable(), netEventsTable(), fsEventsTable(),
		protocolEventsTable(), vmEventsTable(), securityRuleEventsTable(), eventBodyBlobsTable(),
	}
}

func text(name, doc string) Column { return Column{Name: name, Type: "TEXT", Doc: doc} }
func number(name, doc string) Column {
	return Column{Name: name, Type: "INTEGER", Doc: doc}
}

func outcomes(columns ...Column) []Column {
	for i := range columns {
		columns[i].Stage = Outcome
	}
	return columns
}

func columns(groups ...[]Column) []Column {
	var all []Column
	for _, group := range groups {
		all = append(all, group...)
	}
	return all
}

// common are the columns that say when an event was, and by whom it was caused.
func common() []Column {
	return []Column{
		{Name: "event_id", Type: "TEXT NOT NULL", Doc: "UUIDv7 of the event; sorts by time"},
		{Name: "timestamp", Type: "TEXT NOT NULL", Doc: "when the event was seen: RFC 3339, microseconds, UTC"},
		text("trace_id", "groups the events of one cause"),
		text("turn_id", "groups the events of one agent turn"),
		text("initiator_kind", "what caused the event: person, host_agent, guest_agent, routine, deployment, handoff"),
		text("initiator_id", "what is known of the initiator"),
		text("actor_id", "whose authority the initiator borrows"),
		text("process_name", "the guest process, as the guest says: a claim"),
	}
}

// judged are the outcome columns that every table of acts begins with. The
// first is the state column.
func judged(state string) []Column {
	return outcomes(
		Column{Name: state, Type: "TEXT NOT NULL CHECK (" + state +
			" IN ('pending','done','failed','timeout','cancelled','blocked','interrupted'))", Doc: "how far the event got"},
		text("decision", "allow, ask, block or rewrite"),
		text("rule_id", "the rule that decided"),
		text("reason", "the rule's own text"),
		number("carried_out", "1 when the act was begun"),
		number("duration_us", "microseconds from the act's start to its end"),
		text("error_message", "why it failed, as the caller was told"),
	)
}

func toolCallsTable() Table {
	return Table{
		Name: "tool_calls", State: "status", Unique: true,
		Doc: "one tool call, whoever made it",
		Columns: columns(common(), []Column{
			text("origin", "mcp, builtin, native, host, computer or routine"),
			text("transport", "how the call came in: vsock or host"),
			text("server_name", "the server that would act"),
			text("method", "the JSON-RPC method"),
			text("tool_name", "the tool's name as the caller sees it"),
			text("tool", "the tool's name at its server"),
			text("call_id", "the caller's id, as JSON text"),
			text("effect", "read or write"),
			text("arguments", "display form of the arguments, at most 4 KiB; whole in event_body_blobs"),
			text("policy_digest", "the rules that judged"),
			text("tool_digest", "the definition of the tool"),
		}, judged("status"), outcomes(
			number("error_code", "JSON-RPC error code"),
			number("is_error", "1 when the result says isError"),
			text("response", "display form of the result or error, at most 4 KiB"),
			number("bytes_sent", "payload bytes to the server"),
			number("bytes_received", "payload bytes from the server"),
			Column{
				Name: "duration_ms",
				Type: "REAL GENERATED ALWAYS AS (duration_us / 1000.0) VIRTUAL", Doc: "duration_us in milliseconds",
			},
		)),
	}
}

func execEventsTable() Table {
	return Table{
		Name: "exec_events", State: "status", Unique: true,
		Doc: "a command run in the guest",
		Columns: columns(common(), []Column{
			text("exec_id", "the command's id"),
			text("argv", `JSON array of strings; an argument that is not UTF-8 is {"base64":"..."}; at most 4 KiB, a longer one is whole in event_body_blobs`),
			text("cwd", "working directory"),
			text("user", "user in the guest"),
			text("policy_digest", "the rules that judged"),
		}, judged("status"), outcomes(
			number("exit_code", "exit status, as the guest says"),
			text("signal", "signal that ended the command"),
			number("timed_out", "1 when the time limit ended it"),
			number("oom", "1 when it ran out of memory"),
			number("truncated", "1 when output was cut"),
			number("leaked", "1 when others still held its pipes"),
			number("stdout_bytes", "bytes written to stdout"),
			number("stderr_bytes", "bytes written to stderr"),
		)),
	}
}

func netEventsTable() Table {
	return Table{
		Name: "net_events", State: "state", Unique: true,
		Doc: "a request out, one redirect hop at a time",
		Columns: columns(common(), []Column{
			text("scheme", "http or https; https for a tunnel"),
			text("host", "host name or address"),
			number("port", "TCP port"),
			text("method", "HTTP method"),
			text("path", "path of the URL"),
			text("query", "query of the URL"),
			text("redirected_from", "the URL whose answer led here"),
			text("via", "who asked: builtin, or the MCP server in whose jail the request was made"),
			text("policy_digest", "the rules that judged"),
		}, judged("state"), outcomes(
			number("status", "HTTP status"),
			number("bytes_sent", "payload bytes sent"),
			number("bytes_received", "payload bytes received"),
		)),
	}
}

func fsEventsTable() Table {
	return Table{
		Name: "fs_events", State: "status", Unique: true,
		Doc: "a file moved between host and guest, or a change in the workspace",
		Columns: columns(common(), []Column{
			text("op", "import, export, create, write, delete or rename"),
			text("path", "the file"),
			text("to_path", "the new name"),
			number("size", "bytes"),
			text("source", "guest, host or snapshot"),
			number("count", "how many equal events this row stands for"),
			text("policy_digest", "the rules that judged"),
		}, judged("status")),
	}
}

func protocolEventsTable() Table {
	return Table{
		Name: "protocol_events", State: "status", Unique: true,
		Doc: "an MCP message that is no tool call, or input that was refused",
		Columns: columns(common(), []Column{
			text("event_type", "the event's type, or mcp.malformed"),
			text("direction", "to_server or to_client"),
			text("method", "the JSON-RPC method"),
			text("request_id", "the sender's id, as JSON text"),
			text("server_name", "the server that would act"),
			text("subject", "the resource's URI or the prompt's name"),
			text("detail", "what was wrong with the message"),
			number("count", "how many equal messages this row stands for"),
			text("policy_digest", "the rules that judged"),
		}, judged("status"), outcomes(
			number("error_code", "JSON-RPC error code"),
		)),
	}
}

func vmEventsTable() Table {
	return Table{
		Name: "vm_events", State: "status", Unique: true,
		Doc: "what happened to the machine or to this ledger: boot, ready, crash, reload, seal",
		Columns: columns(common(), []Column{
			text("kind", "what happened, one word"),
			text("detail", "more about it"),
			text("policy_digest", "the rules that judged"),
		}, judged("status")),
	}
}

func securityRuleEventsTable() Table {
	return Table{
		Name: "security_rule_events",
		Doc:  "one rule that matched one event",
		Columns: columns(common(), []Column{
			text("event_type", "the event's type"),
			text("rule_id", "the rule"),
			text("action", "what the rule asks for"),
			text("severity", "informational, low, medium, high or critical"),
			text("phase", "request or response"),
			text("reason", "the rule's own text, or why it is broken"),
			number("broken", "1 when the rule failed to evaluate and counted as matching"),
			text("rule_digest", "the rule's text"),
			text("event", "JSON of the event that was judged, without bodies"),
		}),
	}
}

func eventBodyBlobsTable() Table {
	return Table{
		Name: "event_body_blobs",
		Doc:  "one body of one event, in one direction",
		Columns: []Column{
			common()[0], common()[1],
			text("event_type", "the event's type"),
			text("direction", "request, response or rewritten"),
			text("media_type", "what the body is"),
			number("size", "bytes of the whole body, also when it was cut"),
			number("truncated", "1 when only the first 16 MiB were kept"),
			text("omitted", "why the bytes are not in bodies: blocked, quota or content; NULL when they are"),
			text("body_digest", "BLAKE3, hex: of the bytes kept, or of the whole body where they were omitted"),
		},
	}
}

// supportSQL creates the tables that hold no events. A body is stored once,
// whoever refers to it: a second insert of the same digest changes nothing.
// kept_total is the running sum of stored bytes, so that the quota is known
// without reading the table.
const supportSQL = `
CREATE TABLE bodies (
	digest     TEXT PRIMARY KEY,
	encoding   TEXT NOT NULL CHECK (encoding IN ('zstd','none')),
	body       BLOB NOT NULL,
	kept_total INTEGER NOT NULL
) STRICT;
CREATE TRIGGER bodies_once BEFORE INSERT ON bodies
WHEN EXISTS (SELECT 1 FROM bodies WHERE digest = NEW.digest)
BEGIN SELECT RAISE(IGNORE); END;
CREATE TABLE ledger_chain (
	seq    INTEGER PRIMARY KEY,
	rows   INTEGER NOT NULL,
	digest BLOB NOT NULL,
	hash   BLOB NOT NULL
) STRICT;
`

const insertBodySQL = `INSERT INTO bodies (digest, encoding, body, kept_total) VALUES (?, ?, ?, ?)`

// schemaSQL is the whole schema of schemaVersion.
func schemaSQL() string {
	var b strings.Builder
	for _, t := range Tables() {
		t.writeCreate(&b)
		t.writeGuards(&b)
	}
	b.WriteString(supportSQL)
	for _, name := range []string{"bodies", "ledger_chain"} {
		writeFrozen(&b, name, "DELETE")
		writeFrozen(&b, name, "UPDATE")
	}
	fmt.Fprintf(&b, "CREATE TRIGGER ledger_chain_once BEFORE INSERT ON ledger_chain "+
		"WHEN EXISTS (SELECT 1 FROM ledger_chain WHERE seq = NEW.seq) "+
		"BEGIN SELECT RAISE(ABORT, 'ledger_chain is append-only'); END;\n")
	return b.String()
}

func (t Table) writeCreate(b *strings.Builder) {
	fmt.Fprintf(b, "CREATE TABLE %s (\n\tid INTEGER PRIMARY KEY,\n", t.Name)
	for _, c := range t.Columns {
		fmt.Fprintf(b, "\t%s %s,\n", c.Name, c.Type)
	}
	b.WriteString("\tbegin_digest BLOB,\n\tdigest BLOB\n) STRICT;\n")
	unique := ""
	if t.Unique {
		unique = "UNIQUE "
	}
	fmt.Fprintf(b, "CREATE %sINDEX %s_by_event ON %s (event_id);\n", unique, t.Name, t.Name)
	if t.has("trace_id") {
		fmt.Fprintf(b, "CREATE INDEX %s_by_trace ON %s (trace_id, event_id) WHERE trace_id IS NOT NULL;\n", t.Name, t.Name)
	}
	if t.State != "" {
		fmt.Fprintf(b, "CREATE INDEX %s_pending ON %s (id) WHERE %s = 'pending';\n", t.Name, t.Name, t.State)
	}
}

// writeGuards writes the triggers that make a table append-only. The insert
// guard is there because INSERT OR REPLACE deletes without firing a trigger.
func (t Table) writeGuards(b *strings.Builder) {
	writeFrozen(b, t.Name, "DELETE")
	clash := "id = NEW.id"
	if t.Unique {
		clash += " OR event_id = NEW.event_id"
	}
	fmt.Fprintf(b, "CREATE TRIGGER %[1]s_insert BEFORE INSERT ON %[1]s WHEN EXISTS (SELECT 1 FROM %[1]s WHERE %[2]s) "+
		"BEGIN SELECT RAISE(ABORT, '%[1]s is append-only: the row exists'); END;\n", t.Name, clash)
	if t.State == "" {
		writeFrozen(b, t.Name, "UPDATE")
		return
	}
	frozen := []string{"id", "begin_digest"}
	for _, c := range t.Columns {
		if c.Stage == Intent {
			frozen = append(frozen, c.Name)
		}
	}
	fmt.Fprintf(b, "CREATE TRIGGER %[1]s_intent BEFORE UPDATE OF %[2]s ON %[1]s "+
		"BEGIN SELECT RAISE(ABORT, '%[1]s is append-only: what was begun stays'); END;\n", t.Name, strings.Join(frozen, ", "))
	fmt.Fprintf(b, "CREATE TRIGGER %[1]s_outcome BEFORE UPDATE ON %[1]s "+
		"WHEN OLD.%[2]s <> 'pending' OR NEW.%[2]s = 'pending' "+
		"BEGIN SELECT RAISE(ABORT, '%[1]s is append-only: an outcome is written once'); END;\n", t.Name, t.State)
}

func writeFrozen(b *strings.Builder, table, verb string) {
	fmt.Fprintf(b, "CREATE TRIGGER %[1]s_%[3]s BEFORE %[2]s ON %[1]s "+
		"BEGIN SELECT RAISE(ABORT, '%[1]s is append-only'); END;\n", table, verb, strings.ToLower(verb))
}

func (t Table) has(name string) bool {
	for _, c := range t.Columns {
		if c.Name == name {
			return true
		}
	}
	return false
}

// written lists the columns that statements give values to, in order.
func (t Table) written(stages ...Stage) []string {
	var names []string
	for _, c := range t.Columns {
		for _, stage := range stages {
			if c.Stage == stage && !strings.Contains(c.Type, "GENERATED") {
				names = append(names, c.Name)
			}
		}
	}
	return names
}

// insertSQL writes a row: the intent columns, then the outcome columns.
func (t Table) insertSQL() string {
	names := t.written(Intent, Outcome)
	return fmt.Sprintf("INSERT INTO %s (%s) VALUES (%s)", t.Name, strings.Join(names, ", "),
		strings.TrimSuffix(strings.Repeat("?, ", len(names)), ", "))
}

// finishSQL writes a pending row's outcome columns; NULL leaves one as it is.
// The last parameter is the row's id.
func (t Table) finishSQL() string {
	var sets []string
	for _, name := range t.written(Outcome) {
		sets = append(sets, name+" = coalesce(?, "+name+")")
	}
	return fmt.Sprintf("UPDATE %s SET %s WHERE id = ? AND %s = 'pending'", t.Name, strings.Join(sets, ", "), t.State)
}

// interruptSQL closes what a dead writer left pending.
func (t Table) interruptSQL() string {
	return fmt.Sprintf("UPDATE %[1]s SET %[2]s = 'interrupted' WHERE %[2]s = 'pending'", t.Name, t.State)
}
