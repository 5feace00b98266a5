package config

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// names are the names of the keys of one table.
func namesIn(keys []Key, table string) []string {
	var names []string
	for _, k := range keys {
		if k.Table == table {
			names = append(names, k.Name)
		}
	}
	slices.Sort(names)
	return names
}

func TestEveryKeyThatIsReadIsDescribed(t *testing.T) {
	doc, err := parse("p.toml", []byte("[[mcp.servers]]\nname = \"a\"\n[rules.r]\nmatch = \"true\"\n"))
	if err != nil {
		t.Fatal(err)
	}
	top := doc.table()
	top.profile(&Profile{})
	server := doc.table().sub("mcp").subs("servers")[0]
	server.server()
	rule := doc.table().sub("rules").sub("r")
	rule.rule("r")
	for table, read := range map[string]*table{"": top, "[[mcp.servers]]": server, "[rules.ID]": rule} {
		known := slices.DeleteFunc(slices.Clone(read.known), func(name string) bool {
			return table == "" && (name == "mcp" || name == "rules") // tables, which have entries of their own
		})
		slices.Sort(known)
		if diff := cmp.Diff(slices.Compact(known), namesIn(ProfileKeys(), table)); diff != "" {
			t.Errorf("keys of %q that are read (-) and described (+):\n%s", table, diff)
		}
	}
}

func TestTheExamplesOfKeysAreRead(t *testing.T) {
	var settings, top, command, remote, rule strings.Builder
	for _, k := range SettingsKeys() {
		fmt.Fprintf(&settings, "%s = %s\n", k.Name, k.Example)
	}
	for _, k := range ProfileKeys() {
		to := []*strings.Builder{&top}
		switch {
		case k.Table == "[rules.ID]":
			to = []*strings.Builder{&rule}
		case k.Table != "" && (k.Name == "url" || k.Name == "headers"):
			to = []*strings.Builder{&remote}
		case k.Table != "" && (k.Name == "tools" || k.Name == "egress"):
			to = []*strings.Builder{&command, &remote}
		case k.Table != "" && k.Name != "name":
			to = []*strings.Builder{&command}
		case k.Table != "":
			continue
		}
		for _, b := range to {
			fmt.Fprintf(b, "%s = %s\n", k.Name, k.Example)
		}
	}
	profile := top.String() + "[[mcp.servers]]\nname = \"a\"\n" + command.String() +
		"[[mcp.servers]]\nname = \"b\"\n" + remote.String() + "[rules.r]\n" + rule.String()
	if _, err := ParseProfile("p.toml", []byte(profile)); err != nil {
		t.Errorf("%v in\n%s", err, profile)
	}
	file := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(file, []byte(settings.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := LoadSettings(file, func(string) (string, bool) { return "", false })
	if err != nil {
		t.Fatal(err)
	}
	for name, origin := range map[string]string{"accelerator": got.Accelerator.Origin, "durability": got.Durability.Origin, "log_level": got.LogLevel.Origin} {
		if origin == OriginDefault {
			t.Errorf("%s is not described", name)
		}
	}
}
