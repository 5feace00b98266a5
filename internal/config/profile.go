package config

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// DefaultProfile is the profile of a VM that was created without naming one.
const DefaultProfile = "default"

// Bounds of a profile.
const (
	MinMemory Size = Size(128 * MiB)
	MaxMemory Size = Size(1 * TiB)
	MaxCPUs        = 64

	maxServers   = 64
	maxRules     = 10_000
	maxHTTPAllow = 256
	maxPaths     = 64
	maxText      = 16 << 10 // of a reason, an environment value, a header
)

// Decisions for acts that no rule matches.
const (
	DefaultAllow = "allow"
	DefaultBlock = "block"
)

// What the ledger keeps of a blocked call's body.
const (
	RecordDigest = "digest"
	RecordFull   = "full"
)

// What a program gets that the host has no complete jail for.
const (
	IsolationStrict = "strict"
	IsolationWeak   = "weak"
)

// Profile is what a VM is made from and governed by.
type Profile struct {
	// Name is the file's name without its extension. File is "" for the built-in
	// profile.
	Name, File string
	// Image is a name, optionally with `@sha256:` and a digest; "" leaves the
	// choice to the service.
	Image  string
	CPUs   int
	Memory Size
	// Env is the environment of commands in the guest.
	Env map[string]string
	// Default decides about acts that no rule matches.
	Default string
	// DefaultPosition is where Default is set.
	DefaultPosition Position
	// RecordBlocked says what the ledger keeps of a blocked call's body.
	RecordBlocked string
	// HTTPAllow are private addresses and ports that the built-in HTTP tools may
	// reach.
	HTTPAllow []HostPort
	// Isolation says whether a program is started that the host has no complete
	// jail for.
	Isolation string
	Servers   []Server
	Rules     []Rule
}

// LoadProfile reads the profile called name from the home's profiles. The profile
// called default has a built-in form for where there is no such file.
func LoadProfile(h Home, name string) (Profile, error) {
	if err := CheckProfileName(name); err != nil {
		return Profile{}, err
	}
	file := h.Profile(name)
	p, err := LoadProfileFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		if name == DefaultProfile {
			return builtinProfile(), nil
		}
		return Profile{}, fmt.Errorf("loading profile %s: %w", name, err)
	}
	return p, err
}

// LoadProfileFile reads one profile. A file with mistakes is an Errors, or an
// *Error where it is no TOML.
func LoadProfileFile(file string) (Profile, error) {
	data, err := readFile(file)
	if err != nil {
		return Profile{}, err
	}
	return ParseProfile(file, data)
}

// ParseProfile reads a profile from data; file names it in errors.
func ParseProfile(file string, data []byte) (Profile, error) {
	doc, err := parse(file, data)
	if err != nil {
		return Profile{}, err
	}
	p := builtinProfile()
	p.Name, p.File = strings.TrimSuffix(filepath.Base(file), ".toml"), file
	doc.table().profile(&p)
	if err := doc.err(); err != nil {
		return Profile{}, err
	}
	return p, nil
}

// builtinProfile holds the values of keys that a profile leaves out.
func builtinProfile() Profile {
	return Profile{
		Name: DefaultProfile, CPUs: 1, Memory: Size(512 * MiB),
		Default: DefaultAllow, RecordBlocked: RecordDigest, Isolation: IsolationStrict,
	}
}

func (t *table) profile(p *Profile) {
	if s, ok := t.text("image"); ok {
		if p.Image = s; !validImage(s) {
			t.fail("image", "image %q is not valid: use a name, or name@sha256: and 64 hexadecimal digits", s)
		}
	}
	if n, ok := t.integer("cpus", 1, MaxCPUs); ok {
		p.CPUs = int(n)
	}
	if s, ok := t.memory("memory"); ok {
		p.Memory = s
	}
	p.Env = t.textMap("env", CheckEnv)
	p.Default = t.choice("default", p.Default, []string{DefaultAllow, DefaultBlock}, "ask")
	p.DefaultPosition = t.at("default")
	p.RecordBlocked = t.choice("record_blocked", p.RecordBlocked, []string{RecordDigest, RecordFull})
	p.HTTPAllow = t.hostPorts("http_allow")
	p.Isolation = t.choice("isolation", p.Isolation, []string{IsolationStrict, IsolationWeak})
	if mcp := t.sub("mcp"); mcp != nil {
		p.Servers = mcp.servers("servers")
		mcp.close()
	}
	p.Rules = t.rules("rules")
	t.close("disk", "idle", "mounts", "files")
}

func (t *table) memory(key string) (Size, bool) {
	s, ok := t.text(key)
	if !ok {
		return 0, false
	}
	size, err := ParseSize(s)
	if err != nil {
		t.fail(key, "%s: %v", key, err)
		return 0, false
	}
	if err := CheckMemory(size); err != nil {
		t.fail(key, "%v", err)
		return 0, false
	}
	return size, true
}

// CheckMemory returns why a VM cannot have this much memory.
func CheckMemory(s Size) error {
	if s < MinMemory || s > MaxMemory {
		return fmt.Errorf("memory is %s: it must be from %s to %s", s, MinMemory, MaxMemory)
	}
	if int64(s)%MiB != 0 {
		return fmt.Errorf("memory is %s: it must be a multiple of 1MiB", s)
	}
	return nil
}

// CheckCPUs returns why a VM cannot have this many processors.
func CheckCPUs(n int) error {
	if n < 1 || n > MaxCPUs {
		return fmt.Errorf("cpus is %d: it must be from 1 to %d", n, MaxCPUs)
	}
	return nil
}

// CheckEnv returns why name=value cannot be in an environment.
func CheckEnv(name, value string) error {
	if !validEnvName(name) {
		return fmt.Errorf("variable name %q is not valid: use letters, digits and '_', not beginning with a digit", name)
	}
	if len(value) > maxText || strings.ContainsRune(value, 0) {
		return fmt.Errorf("the value of %s is longer than %d bytes or holds a zero byte", name, maxText)
	}
	return nil
}

func (t *table) hostPorts(key string) []HostPort {
	list := t.texts(key)
	if len(list) > maxHTTPAllow {
		t.fail(key, "%s has %d entries, more than %d", key, len(list), maxHTTPAllow)
		return nil
	}
	var out []HostPort
	for i, s := range list {
		hp, err := ParseHostPort(s)
		if err != nil {
			t.doc.fail(t.elementAt(key, i), "%s: %v", key, err)
			continue
		}
		out = append(out, hp)
	}
	return out
}

// Server is one external MCP server of a profile: a command that speaks on its
// stdin and stdout, or a URL that speaks streamable HTTP.
type Server struct {
	Name string
	// Command and Args are run with Env, and with the secrets that Secrets names
	// (variable to secret name). All are empty for an HTTP server.
	Command string
	Args    []string
	Env     map[string]string
	Secrets map[string]string
	// Read and Write are files and folders of the host, by absolute path, that the
	// server's jail shows beside what its command line names.
	Read, Write []string
	// URL and Headers are empty for a command.
	URL     string
	Headers map[string]Template
	// Egress is what the server may reach, exactly; nothing if it is empty, but
	// for what URL names. See Reach.
	Egress []HostPort
	// Tools are patterns of the tools that are offered, all if there are none.
	// `*` stands for any characters.
	Tools []string
	// Position is where the server is declared.
	Position Position
}

// Offers reports whether the profile lets the guest see the server's tool.
func (s Server) Offers(tool string) bool {
	if len(s.Tools) == 0 {
		return true
	}
	for _, pattern := range s.Tools {
		if glob(pattern, tool) {
			return true
		}
	}
	return false
}

// Reach lists what the server's process may connect to: its Egress, where its URL
// is, and for localhost, which is this machine whatever a resolver says (RFC 6761
// section 6.3), the loopback addresses.
func (s Server) Reach() []HostPort {
	reach := slices.Clone(s.Egress)
	if u, err := url.Parse(s.URL); err == nil && u.Host != "" {
		port := u.Port()
		switch {
		case port != "":
		case u.Scheme == "https":
			port = "443"
		default:
			port = "80"
		}
		if at, err := ParseHostPort(net.JoinHostPort(u.Hostname(), port)); err == nil {
			reach = append(reach, at)
		}
	}
	for _, at := range slices.Clone(reach) {
		if at.Host == "localhost" {
			reach = append(reach, HostPort{"127.0.0.1", at.Port}, HostPort{"::1", at.Port})
		}
	}
	return reach
}

// glob matches s against pattern, where `*` stands for any characters.
func glob(pattern, s string) bool {
	parts := strings.Split(pattern, "*")
	if len(parts) == 1 {
		return pattern == s
	}
	rest, ok := strings.CutPrefix(s, parts[0])
	if !ok {
		return false
	}
	last := len(parts) - 1
	for _, part := range parts[1:last] {
		_, after, found := strings.Cut(rest, part)
		if !found {
			return false
		}
		rest = after
	}
	return strings.HasSuffix(rest, parts[last])
}

// SecretNames lists the secrets that the server is given, sorted, each once.
func (s Server) SecretNames() []string {
	names := slices.Collect(maps.Values(s.Secrets))
	for t := range maps.Values(s.Headers) {
		names = append(names, t.Secrets()...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func (t *table) servers(key string) []Server {
	elements := t.subs(key)
	if len(elements) > maxServers {
		t.fail(key, "%s has %d entries, more than %d", key, len(elements), maxServers)
		return nil
	}
	seen := map[string]Position{}
	out := make([]Server, 0, len(elements))
	for _, e := range elements {
		s := e.server()
		if at, dup := seen[s.Name]; dup && s.Name != "" {
			e.fail("name", "server %q is declared twice, first at %s", s.Name, at)
		}
		seen[s.Name] = e.at("name")
		out = append(out, s)
	}
	return out
}

func (t *table) server() Server {
	s := Server{Position: t.doc.keyPosition(t.path)}
	name, ok := t.text("name")
	if !ok && !t.has("name") {
		t.doc.fail(s.Position, "the server has no name")
	}
	if err := CheckServerName(name); ok && err != nil {
		t.fail("name", "%v", err)
	}
	s.Name = name
	s.Command, _ = t.text("command")
	s.Args = t.texts("args")
	s.Env = t.textMap("env", CheckEnv)
	s.Secrets = t.textMap("secrets", func(variable, secret string) error {
		return errors.Join(CheckEnv(variable, ""), CheckSecretName(secret))
	})
	s.Read, s.Write = t.paths("read"), t.paths("write")
	s.URL = t.url("url")
	s.Headers = t.headers("headers")
	s.Egress = t.hostPorts("egress")
	s.Tools = t.globs("tools")
	t.exclusive(s)
	t.close("era", "timeout", "timeouts", "prefix", "cwd")
	return s
}

// exclusive checks that the server is a command or a URL, with the keys of that
// kind only.
func (t *table) exclusive(s Server) {
	switch {
	case t.has("command") && t.has("url"):
		t.fail("url", "server %q has both command and url: it must have one", s.Name)
	case t.has("url"):
		for _, key := range []string{"args", "env", "secrets", "read", "write"} {
			if t.has(key) {
				t.doc.fail(t.keyAt(key), "%s belongs to a server with a command; a server with a url takes headers", key)
			}
		}
	case t.has("command"):
		if s.Command == "" || strings.ContainsRune(s.Command, 0) {
			t.fail("command", "command must name a program")
		}
		if t.has("headers") {
			t.doc.fail(t.keyAt("headers"), "headers belongs to a server with a url; a server with a command takes env and secrets")
		}
		for variable := range s.Secrets {
			if _, both := s.Env[variable]; both {
				t.fail("secrets", "variable %s is set by both env and secrets", variable)
			}
		}
	default:
		t.doc.fail(s.Position, "server %q has neither command nor url: it must have one", s.Name)
	}
}

// paths are clean absolute paths below the root.
func (t *table) paths(key string) []string {
	list := t.texts(key)
	if len(list) > maxPaths {
		t.fail(key, "%s has %d entries, more than %d", key, len(list), maxPaths)
	}
	for i, p := range list {
		if !filepath.IsAbs(p) || filepath.Clean(p) != p || p == "/" || strings.ContainsRune(p, 0) {
			t.doc.fail(t.elementAt(key, i), "%s: %q is not valid: use an absolute path below / without .. or a slash at its end", key, p)
		}
	}
	return list
}

func (t *table) url(key string) string {
	s, ok := t.text(key)
	if !ok {
		return ""
	}
	u, err := url.Parse(s)
	switch {
	case err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https"):
		t.fail(key, "url %q is not valid: use http:// or https:// and a host", s)
	case u.User != nil:
		t.fail(key, "url must not hold a user or password: use headers with a ${secret}")
	case u.Fragment != "":
		t.fail(key, "url must not have a fragment")
	}
	return s
}

func (t *table) headers(key string) map[string]Template {
	texts := t.textMap(key, func(name, value string) error {
		if !validHeaderName(name) {
			return fmt.Errorf("header name %q is not valid", name)
		}
		if len(value) > maxText || strings.ContainsAny(value, "\r\n\x00") {
			return fmt.Errorf("the value of %s is longer than %d bytes or holds a line break", name, maxText)
		}
		_, err := ParseTemplate(value)
		return err
	})
	out := make(map[string]Template, len(texts))
	for name, text := range texts {
		template, err := ParseTemplate(text)
		if err != nil {
			continue // recorded by the check above
		}
		out[name] = template
	}
	return out
}

func (t *table) globs(key string) []string {
	list := t.texts(key)
	for i, s := range list {
		if s == "" || len(s) > 256 {
			t.doc.fail(t.elementAt(key, i), "%s: a pattern must have 1 to 256 bytes", key)
		}
	}
	if t.has(key) && len(list) == 0 {
		t.fail(key, "%s is empty: leave it out to offer all, or remove the server", key)
	}
	return list
}

// ProfileNames lists the profiles in the home, without the built-in one.
func ProfileNames(h Home) ([]string, error) {
	entries, err := os.ReadDir(h.Profiles())
	if err != nil {
		return nil, fmt.Errorf("listing profiles: %w", err)
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), ".toml"); ok && CheckProfileName(name) == nil {
			names = append(names, name)
		}
	}
	return names, nil
}
