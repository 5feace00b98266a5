package config

// Key describes one key of a configuration file, for the documentation. A test
// holds this list against what is read.
type Key struct {
	// Table is where the key stands: "" for the top of the file,
	// "[[mcp.servers]]", "[rules.ID]".
	Table, Name string
	// Type is the kind of value in TOML, for people.
	Type string
	// Default is what holds where the key is left out, "" where nothing does.
	Default string
	// Example is a value as it is written in the file.
	Example string
	Doc     string
}

// SettingsKeys are the keys of config.toml.
func SettingsKeys() []Key {
	return []Key{
		{Name: "accelerator", Type: "string", Default: AcceleratorAuto, Example: `"tcg"`, Doc: "what runs guests: `auto` boots a guest once to find out, and remembers; `kvm`; `tcg`, which is emulation and works everywhere. " + EnvAccelerator + " overrides it"},
		{Name: "durability", Type: "string", Default: DurabilityProcess, Example: `"power"`, Doc: "what an acknowledged row of a ledger survives: the death of every `process`, or the loss of `power` too, which costs a sync for each row"},
		{Name: "log_level", Type: "string", Default: "info", Example: `"debug"`, Doc: "the least level that is logged: `debug`, `info`, `warn` or `error`"},
	}
}

// ProfileKeys are the keys of profiles/NAME.toml.
func ProfileKeys() []Key {
	const servers = "[[mcp.servers]]"
	return append([]Key{
		{Name: "image", Type: "string", Default: "tiny", Example: `"tiny"`, Doc: "the image to boot: a name, or `name@sha256:…` for one build of it"},
		{Name: "cpus", Type: "integer", Default: "1", Example: "2", Doc: "how many processors, at most 64"},
		{Name: "memory", Type: "size", Default: "512MiB", Example: `"1GiB"`, Doc: "how much memory, from 128MiB to 1TiB"},
		{Name: "env", Type: "table of strings", Example: `{ LANG = "C.UTF-8" }`, Doc: "the environment of every command in the VM"},
		{Name: "default", Type: "string", Default: DefaultAllow, Example: `"block"`, Doc: "what holds where no rule decides: `allow` or `block`"},
		{Name: "record_blocked", Type: "string", Default: RecordDigest, Example: `"full"`, Doc: "what the ledger keeps of a blocked call's data: its `digest`, or the data in `full`"},
		{Name: "http_allow", Type: "list of strings", Example: `["127.0.0.1:8080"]`, Doc: "private addresses, each with its port, that the built-in HTTP tools may reach; public ones are rules' business"},
		{Name: "isolation", Type: "string", Default: IsolationStrict, Example: `"weak"`, Doc: "`strict` starts no program that this host has no complete jail for; `weak` takes what there is, and `capsem info` says what is missing"},
		{Table: servers, Name: "name", Type: "string", Example: `"files"`, Doc: "the server's name, which its tools have before theirs: `files__read`"},
		{Table: servers, Name: "command", Type: "string", Example: `"mcp-server-filesystem"`, Doc: "the program that is the server, speaking on stdin and stdout; a server has this or `url`"},
		{Table: servers, Name: "args", Type: "list of strings", Example: `["/srv"]`, Doc: "the program's arguments"},
		{Table: servers, Name: "env", Type: "table of strings", Example: `{ LANG = "C" }`, Doc: "the program's environment, beside LANG, LOGNAME, PATH, SHELL, TERM and USER, which it gets from here, and HOME, which is a folder of its own"},
		{Table: servers, Name: "secrets", Type: "table of strings", Example: `{ TOKEN = "files-token" }`, Doc: "variables of the program and the secret (`capsem secret`) that each has as its value"},
		{Table: servers, Name: "read", Type: "list of strings", Example: `["/srv/docs"]`, Doc: "files and folders of the host, by absolute path, that the program may read; its jail shows it the system's programs, its own package, and the paths among `args`"},
		{Table: servers, Name: "write", Type: "list of strings", Example: `["/srv/inbox"]`, Doc: "those that it may change too; beside them, it can write to a HOME of its own, which goes with the VM"},
		{Table: servers, Name: "url", Type: "string", Example: `"https://mcp.example.com/mcp"`, Doc: "where the server speaks streamable HTTP"},
		{Table: servers, Name: "headers", Type: "table of strings", Example: `{ Authorization = "Bearer ${files-token}" }`, Doc: "headers of every request to `url`; `${NAME}` stands for a secret"},
		{Table: servers, Name: "egress", Type: "list of strings", Example: `["api.example.com:443", "127.0.0.1:3000"]`, Doc: "what the server may reach, exactly: names and addresses, each with its port (default: nothing, but for the host of `url`). A name that leads to a private address needs that address in the list too; `localhost` does not"},
		{Table: servers, Name: "tools", Type: "list of strings", Example: `["read_*", "list_*"]`, Doc: "patterns of the tools that are offered (default: all); `*` stands for any characters"},
	}, RuleKeys()...)
}

// RuleKeys are the keys of a rule, in a profile and in corp.toml.
func RuleKeys() []Key {
	const rule = "[rules.ID]"
	return []Key{
		{Table: rule, Name: "match", Type: "CEL", Example: `'mcp.request.arguments.path.startsWith("/etc")'`, Doc: "when the rule applies: an expression over the [fields of events](event-fields.md)"},
		{Table: rule, Name: "unless", Type: "CEL", Example: `'initiator.kind == "person"'`, Doc: "when it does not apply after all"},
		{Table: rule, Name: "action", Type: "string", Example: `"block"`, Doc: "`allow` or `block`"},
		{Table: rule, Name: "reason", Type: "string", Example: `"system files are not for agents"`, Doc: "what a caller is told who is blocked"},
	}
}
