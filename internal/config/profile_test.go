package config

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const wholeProfile = `# a comment
image   = "tiny"
cpus    = 2
memory  = "1GiB"
default = "block"
env     = { LANG = "C.UTF-8" }

http_allow = ["127.0.0.1:8080", "[::1]:80", "Intra.Example.:443"]
record_blocked = "full"

[[mcp.servers]]
name    = "github"
command = "npx"
args    = ["-y", "server-github"]
env     = { DEBUG = "1" }
secrets = { GITHUB_TOKEN = "github-token" }
tools   = ["search_*", "get_*"]

[[mcp.servers]]
name = "web"
url  = "https://example.com/mcp"
headers = { Authorization = "Bearer ${github-token}" }

[rules.no_evil]
match  = 'mcp.request.arguments.text.contains("evil-marker")'
unless = '''
tool.name == "a"
&& true'''
action = "block"
reason = "No evil."
`

func TestWholeProfile(t *testing.T) {
	got, err := ParseProfile("/p/work.toml", []byte(wholeProfile))
	if err != nil {
		t.Fatal(err)
	}
	bearer, err := ParseTemplate("Bearer ${github-token}")
	if err != nil {
		t.Fatal(err)
	}
	at := func(line, column int) Position { return Position{"/p/work.toml", line, column} }
	want := Profile{
		Name: "work", File: "/p/work.toml", Image: "tiny", CPUs: 2, Memory: Size(GiB),
		Env: map[string]string{"LANG": "C.UTF-8"}, Default: DefaultBlock, DefaultPosition: at(5, 11), RecordBlocked: RecordFull, Isolation: IsolationStrict,
		HTTPAllow: []HostPort{{"127.0.0.1", 8080}, {"::1", 80}, {"intra.example", 443}},
		Servers: []Server{
			{
				Name: "github", Command: "npx", Args: []string{"-y", "server-github"},
				Env: map[string]string{"DEBUG": "1"}, Secrets: map[string]string{"GITHUB_TOKEN": "github-token"},
				Headers: map[string]Template{}, Tools: []string{"search_*", "get_*"}, Position: at(11, 7),
			},
			{
				Name: "web", URL: "https://example.com/mcp", Headers: map[string]Template{"Authorization": bearer},
				Position: at(19, 7),
			},
		},
		Rules: []Rule{{
			ID: "no_evil", Match: Expression{`mcp.request.arguments.text.contains("evil-marker")`, at(25, 11)},
			Unless: Expression{"tool.name == \"a\"\n&& true", at(27, 1)}, Action: ActionBlock, Reason: "No evil.", Position: at(24, 8),
		}},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(Template{})); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"github-token"}, got.Servers[1].SecretNames()); diff != "" {
		t.Error(diff)
	}
}

func TestServerOffersWhatItsPatternsMatch(t *testing.T) {
	s := Server{Tools: []string{"search_*", "*_read", "a*b*c", "exact"}}
	for tool, want := range map[string]bool{
		"search_x": true, "search_": true, "search": false, "x_read": true, "abc": true, "aXbXc": true, "ac": false,
		"exact": true, "exactly": false, "acb": false, "": false,
	} {
		if got := s.Offers(tool); got != want {
			t.Errorf("%q: got %t, want %t", tool, got, want)
		}
	}
	if !(Server{}).Offers("anything") {
		t.Error("a server without patterns does not offer all")
	}
}

func TestMistakesInProfilesAreToldWithPlaceAndRemedy(t *testing.T) {
	const server = "[[mcp.servers]]\nname = \"s\"\ncommand = \"c\"\n"
	tests := []struct{ name, toml, want string }{
		{"syntax", "image = \n", "p.toml:1:9"},
		{"duplicate key", "cpus = 1\ncpus = 2\n", "p.toml:2:"},
		{"unknown key", "cpus = 1\nmemroy = \"1GiB\"\n", `p.toml:2:1: unknown key "memroy" (did you mean "memory"?)`},
		{"unknown key, none near", "zebra = 1\n", `p.toml:1:1: unknown key "zebra"`},
		{"case", "CPUs = 2\n", `p.toml:1:1: unknown key "CPUs"`},
		{"later key", "disk = \"8GiB\"\n", "p.toml:1:1: disk is not supported by this version"},
		{"later key of a server", server + "era = \"a\"\n", "p.toml:4:1: era is not supported by this version"},
		{"egress without a port", server + "egress = [\"a.example.com\"]\n", "p.toml:4:11: egress: "},
		{"egress with a pattern", server + "egress = [\"*.example.com:443\"]\n", "patterns are not supported"},
		{"egress with port 0", server + "egress = [\"a.example.com:0\"]\n", "no port from 1 to 65535"},
		{"egress with a zone", server + "egress = [\"[fe80::1%eth0]:80\"]\n", "zone"},
		{"egress in short spelling", server + "egress = [\"127.1:80\"]\n", "no valid address"},
		{"egress in hexadecimal", server + "egress = [\"0x7f.0x1:80\"]\n", "no valid address"},
		{"later key of a rule", "[rules.a]\nmatch='true'\naction='block'\nseverity='high'\n", "p.toml:4:1: severity is not supported by this version"},
		{"later action", "[rules.a]\nmatch='true'\naction='ask'\n", `p.toml:3:8: action = "ask" is not supported by this version: use "allow" or "block"`},
		{"later default", "default = \"ask\"\n", "not supported by this version"},
		{"unknown action", "[rules.a]\nmatch='true'\naction='blok'\n", `did you mean "block"`},
		{"no action", "[rules.a]\nmatch='true'\n", "p.toml:1:8: rule a has no action"},
		{"no match", "[rules.a]\naction='block'\n", "p.toml:1:8: rule a has no match"},
		{"empty match", "[rules.a]\nmatch=' '\naction='block'\n", "p.toml:2:7: match is empty"},
		{"rule is no table", "rules = { a = 1 }\n", "a must be a table"},
		{"unknown key of a rule", "[rules.a]\nmach='true'\nmatch='true'\naction='block'\n", `p.toml:2:1: unknown key "mach" (did you mean "match"?)`},
		{"rule id", "[rules.\"a b\"]\nmatch='true'\naction='block'\n", "p.toml:1:8: rule id"},
		{"dotted rule", "rules.a.match='true'\nrules.a.actoin='block'\n", `p.toml:2:9: unknown key "actoin" (did you mean "action"?)`},
		{"wrong type", "cpus = \"2\"\n", "p.toml:1:8: cpus must be a whole number, not a string"},
		{"fraction", "cpus = 1.5\n", "cpus must be a whole number"},
		{"no cpu", "cpus = 0\n", "it must be from 1 to 64"},
		{"too many cpus", "cpus = 65\n", "it must be from 1 to 64"},
		{"memory unit", "memory = \"1GB\"\n", "KiB, MiB, GiB"},
		{"too little memory", "memory = \"127MiB\"\n", "it must be from 128MiB"},
		{"odd memory", "memory = \"262145KiB\"\n", "multiple of 1MiB"},
		{"image", "image = \"../x\"\n", "p.toml:1:9: image"},
		{"image digest", "image = \"a@sha256:12\"\n", "64 hexadecimal digits"},
		{"env name", "env = { \"A B\" = \"1\" }\n", "variable name"},
		{"env value", "env = { A = 1 }\n", "p.toml:1:13: A must be a string"},
		{"http_allow without port", "http_allow = [\"127.0.0.1\"]\n", "use host:port"},
		{"http_allow pattern", "http_allow = [\"a:1\", \"*.example.com:80\"]\n", "p.toml:1:22: http_allow"},
		{"http_allow port 0", "http_allow = [\"a:0\"]\n", "no port"},
		{"http_allow bad address", "http_allow = [\"127.0.0:1\"]\n", "no valid address"},
		{"http_allow number", "http_allow = [1]\n", "must hold strings"},
		{"record_blocked", "record_blocked = \"ful\"\n", `did you mean "full"`},
		{"server without name", "[[mcp.servers]]\ncommand=\"c\"\n", "p.toml:1:7: the server has no name"},
		{"server name", "[[mcp.servers]]\nname=\"A\"\ncommand=\"c\"\n", "p.toml:2:6: server name"},
		{"reserved name", "[[mcp.servers]]\nname=\"builtin\"\ncommand=\"c\"\n", "reserved"},
		{"two servers of a name", server + server, "p.toml:5:8: server \"s\" is declared twice, first at p.toml:2:8"},
		{"neither", "[[mcp.servers]]\nname=\"s\"\n", "neither command nor url"},
		{"both", server + "url=\"http://a\"\n", "both command and url"},
		{"empty command", "[[mcp.servers]]\nname=\"s\"\ncommand=\"\"\n", "must name a program"},
		{"headers of a command", server + "headers={A=\"b\"}\n", "p.toml:4:1: headers belongs"},
		{"args of a url", "[[mcp.servers]]\nname=\"s\"\nurl=\"http://a\"\nargs=[]\n", "p.toml:4:1: args belongs"},
		{"url", "[[mcp.servers]]\nname=\"s\"\nurl=\"ftp://a\"\n", "http:// or https://"},
		{"url with password", "[[mcp.servers]]\nname=\"s\"\nurl=\"http://u:p@a\"\n", "${secret}"},
		{"template", "[[mcp.servers]]\nname=\"s\"\nurl=\"http://a\"\nheaders={A=\"${b\"}\n", "no closing brace"},
		{"template name", "[[mcp.servers]]\nname=\"s\"\nurl=\"http://a\"\nheaders={A=\"${../b}\"}\n", "secret name"},
		{"header value", "[[mcp.servers]]\nname=\"s\"\nurl=\"http://a\"\nheaders={A=\"b\\r\\nC: d\"}\n", "line break"},
		{"secret name", server + "secrets={A=\"B\"}\n", "secret name"},
		{"set twice", server + "env={A=\"1\"}\nsecrets={A=\"b\"}\n", "both env and secrets"},
		{"no tools", server + "tools=[]\n", "tools is empty"},
		{"servers is no list", "[mcp]\nservers = 1\n", "p.toml:2:11: servers must be a list of tables"},
		{"unknown key of mcp", "[mcp]\nserver = 1\n", `did you mean "servers"`},
		{"too large", strings.Repeat("#", maxFileBytes) + "#", "larger than"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			if err := os.WriteFile("p.toml", []byte(tt.toml), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := LoadProfileFile("p.toml")
			wantError(t, err, tt.want)
		})
	}
}

func TestAllMistakesOfAFileAreToldInOrder(t *testing.T) {
	_, err := ParseProfile("p", []byte("zebra = 1\ncpus = 0\n[rules.a]\nmatch = 'x'\n"))
	var all Errors
	if !errors.As(err, &all) {
		t.Fatalf("got %v, want Errors", err)
	}
	lines := []int{}
	for _, e := range all {
		lines = append(lines, e.Line)
	}
	if !slices.Equal(lines, []int{1, 2, 3}) {
		t.Errorf("got mistakes on lines %v, want 1, 2, 3", lines)
	}
}

func TestMissingDefaultProfileIsBuiltIn(t *testing.T) {
	h := openHome(t)
	got, err := LoadProfile(h, DefaultProfile)
	want := Profile{Name: "default", CPUs: 1, Memory: Size(512 * MiB), Default: DefaultAllow, RecordBlocked: RecordDigest, Isolation: IsolationStrict}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Error(diff, err)
	}
	_, err = LoadProfile(h, "work")
	wantError(t, err, "loading profile work", "no such file")
	_, err = LoadProfile(h, "../work")
	wantError(t, err, "not valid")
	if err := os.WriteFile(h.Profile(DefaultProfile), []byte("cpus = 3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err = LoadProfile(h, DefaultProfile)
	if err != nil || got.CPUs != 3 || got.Memory != Size(512*MiB) {
		t.Errorf("got %+v, %v, want 3 cpus and the default memory", got, err)
	}
	names, err := ProfileNames(h)
	if diff := cmp.Diff([]string{"default"}, names); diff != "" || err != nil {
		t.Error(diff, err)
	}
}

func TestCorpFilesThatExistAreLoadedInOrder(t *testing.T) {
	dir := t.TempDir()
	first, second := dir+"/a.toml", dir+"/b.toml"
	for _, f := range []string{first, second} {
		if err := os.WriteFile(f, []byte("[rules.r]\nmatch='true'\naction='block'\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	corps, err := LoadCorp([]string{first, dir + "/none", second})
	if err != nil || len(corps) != 2 || corps[0].File != first || corps[1].Rules[0].ID != "r" {
		t.Errorf("got %+v, %v", corps, err)
	}
	if err := os.WriteFile(second, []byte("default = \"block\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = LoadCorp([]string{first, second})
	wantError(t, err, second+":1:1: default is not supported by this version")
}

func TestTemplates(t *testing.T) {
	get := func(name string) (Secret, error) {
		if name == "none" {
			return Secret{}, ErrNoSecret
		}
		return NewSecret("<" + name + ">"), nil
	}
	for text, want := range map[string]string{
		"": "", "plain $5": "plain $5", "${a}": "<a>", "x${a}y${b}": "x<a>y<b>", "$${a}": "$<a>",
	} {
		template, err := ParseTemplate(text)
		if err != nil {
			t.Fatal(err)
		}
		got, err := template.Expand(get)
		if err != nil || got.Reveal() != want {
			t.Errorf("%q: got %q, %v, want %q", text, got.Reveal(), err, want)
		}
		if template.String() != text {
			t.Errorf("%q is written back as %q", text, template)
		}
	}
	template, err := ParseTemplate("${none}")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := template.Expand(get); !errors.Is(err, ErrNoSecret) {
		t.Errorf("got %v, want ErrNoSecret", err)
	}
}

func TestNearest(t *testing.T) {
	for name, want := range map[string]string{"memroy": "memory", "cpu": "cpus", "cups": "cpus", "zebra": "", "": ""} {
		if got := Nearest(name, []string{"memory", "cpus", "image"}); got != want {
			t.Errorf("%q: got %q, want %q", name, got, want)
		}
	}
}

// FuzzProfile checks that every input gives a valid profile or an error with a
// position inside the file.
func FuzzProfile(f *testing.F) {
	f.Add(wholeProfile)
	f.Add("[[mcp.servers]]\n[[mcp.servers.tools]]\n[mcp.servers.env]\nA='b'\n")
	f.Add("a.b.c = [[1, 2], [{x = 1}, {y = '''\nz'''}]]\n[[a.q]]\n[a.q.r]\n")
	f.Add("rules = { a = { match = \"\"\"\r\ntrue\"\"\", action = 'block' } }")
	f.Fuzz(func(t *testing.T, text string) {
		p, err := ParseProfile("p.toml", []byte(text))
		if err == nil {
			if CheckMemory(p.Memory) != nil || CheckCPUs(p.CPUs) != nil || p.Default == "" || p.RecordBlocked == "" {
				t.Fatalf("an invalid profile was accepted: %+v", p)
			}
			return
		}
		lines := strings.Count(text, "\n") + 1
		var all Errors
		var one *Error
		switch {
		case errors.As(err, &all):
			for _, e := range all {
				if e.Line < 0 || e.Line > lines || e.Message == "" {
					t.Fatalf("error %v lies outside of the file", e)
				}
			}
		case errors.As(err, &one):
			if one.Line < 0 || one.Line > lines+1 || one.Message == "" {
				t.Fatalf("error %v lies outside of the file", one)
			}
		default:
			t.Fatalf("error %v has no position", err)
		}
	})
}

func TestAServerReachesItsURLAndWhatEgressLists(t *testing.T) {
	for _, c := range []struct{ toml, want string }{
		{`command = "c"`, ""},
		{`command = "c"
egress = []`, ""},
		{`command = "c"
egress = ["API.example.com.:443", "[::ffff:10.0.0.1]:80"]`, "api.example.com:443 10.0.0.1:80"},
		{`command = "c"
egress = ["localhost:3000"]`, "localhost:3000 127.0.0.1:3000 [::1]:3000"},
		{`url = "https://mcp.example.com/mcp"`, "mcp.example.com:443"},
		{`url = "http://127.0.0.1:3000/mcp"
egress = ["auth.example.com:443"]`, "auth.example.com:443 127.0.0.1:3000"},
		{`url = "http://[::1]/mcp"`, "[::1]:80"},
	} {
		p, err := ParseProfile("p.toml", []byte("[[mcp.servers]]\nname = \"s\"\n"+c.toml+"\n"))
		if err != nil {
			t.Errorf("%s: %v", c.toml, err)
			continue
		}
		var got []string
		for _, at := range p.Servers[0].Reach() {
			got = append(got, at.String())
		}
		if diff := cmp.Diff(c.want, strings.Join(got, " ")); diff != "" {
			t.Errorf("%s: %s", c.toml, diff)
		}
	}
}

func TestProfilesAreListedAlsoWhereTheHomeReadsLikeAPattern(t *testing.T) {
	h, err := OpenHome(environment(map[string]string{EnvHome: t.TempDir() + "/a[b] c*"}))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(h.Profile("work"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if names, err := ProfileNames(h); err != nil || !slices.Equal(names, []string{"work"}) {
		t.Errorf("got %q, %v", names, err)
	}
}
