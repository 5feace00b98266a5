package session

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/config"
)

func TestAServersJailShowsWhatItsCommandLineNames(t *testing.T) {
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	at := func(rel string) string { return filepath.Join(root, rel) }
	for _, file := range []string{
		"node/bin/node", "node/lib/node_modules/npm/bin/npx-cli.js", "app/package.json", "app/dist/index.js",
		"deps/node_modules/peer/dist/index.js", "venv/pyvenv.cfg", "venv/bin/python", "alone/server.py", "alone/secret",
		"open/package.json", "open/lone/server.js", "home/package.json", "home/tool.js", "home/.capsem/vms/a/session.db",
	} {
		if err := os.MkdirAll(filepath.Dir(at(file)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at(file), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(at("open"), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../lib/node_modules/npm/bin/npx-cli.js", at("node/bin/npx")); err != nil {
		t.Fatal(err)
	}
	node := at("node")
	for _, test := range []struct {
		name    string
		command string
		args    []string
		want    []string
	}{
		{"the installation of a program from PATH", "node", nil, []string{node}},
		{"both sides of a link", "npx", []string{"-y", "peer"}, []string{node, at("node/lib/node_modules")}},
		{"a package", "node", []string{at("app/dist/index.js")}, []string{at("app"), node}},
		{"a package with those beside it", "node", []string{at("deps/node_modules/peer/dist/index.js")}, []string{at("deps/node_modules"), node}},
		{"a virtual environment", at("venv/bin/python"), []string{at("alone/server.py")}, []string{at("alone/server.py"), at("venv")}},
		{"a folder", "node", []string{at("alone")}, []string{at("alone"), node}},
		{"no package that anybody could have made", "node", []string{at("open/lone/server.js")}, []string{node, at("open/lone/server.js")}},
		{"no home for a package in it", "node", []string{at("home/tool.js")}, []string{at("home/tool.js"), node}},
		{"no home", "node", []string{at("home")}, []string{node}},
		{"nothing that holds a home", "node", []string{root, "/"}, []string{node}},
		{"no ledger", "node", []string{at("home/.capsem/vms"), at("home/.capsem/vms/a/session.db")}, []string{node}},
		{"no relative path", "node", []string{"app/dist/index.js", "--file=" + at("alone/secret")}, []string{node}},
		{"nothing for a program that is not there", "missing", nil, nil},
	} {
		got := visible(config.Server{Command: test.command, Args: test.args}, []string{"PATH=" + at("node/bin")}, at("home"), at("home/.capsem"))
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, diff)
		}
	}
}
