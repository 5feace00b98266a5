// Package capsem_test holds the shape of the repository as data: which package
// stands on which, what each program may link, which module has one user.
//
// The test parses the sources itself. One that asked `go list` would be answered
// from the test cache after an import had changed.
package capsem_test

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// module is the import path of this repository.
const module = "github.com/capsem/capsem"

// layers lists every package below internal/, lowest first. A package imports
// only packages of lower layers; those of one layer do not know each other.
// A new package gets a place here, chosen for what it is about. Moving one up so
// that an import passes is a change of design: say why in docs/adr.
var layers = [][]string{
	{ // what everything speaks of; no imports of ours
		"child", "config", "confine", "event", "frame", "jsonrpc", "msgpack", "relay/sysmon", "route", "vm",
	},
	{ // contracts between processes, and parts with one noun
		"api", "guestproto", "image/cpio", "image/debian", "image/kernel", "inspect", "relay/command", "relay/doctor",
		"relay/pid1", "relay/vsocknet", "toolproto", "vm/qemu/vhostvsock", "workspace",
	},
	{ // one side of one boundary each
		"aggregator", "builtin", "client", "egress", "endpoint", "gate", "guest", "hosttool", "image", "launch",
		"ledger", "policy", "relay", "relay/system", "upstream", "vm/fakevm", "vm/qemu", "vm/vmtest", "vm/vz",
	},
	{ // what puts the sides together
		"cli", "mcptools", "service", "session",
	},
	{
		"reference", "vm/vmtest/guest",
	},
}

// above are the folders outside internal/ that hold Go: programs and what drives
// them. They may import any layer, and nothing imports them.
var above = []string{".", "bench", "cmd", "tests"}

// data are the folders outside internal/ that hold files for people to edit and
// the few lines of Go that embed them. Any package may import them.
var data = []string{"images", "policy"}

// suites are the packages that tests of their own layer may import: the real
// gate, which no test imitates, the fake machine, the real guest that runs in
// it, and the suite that every backend passes.
var suites = []string{"gate", "relay", "vm/fakevm", "vm/vmtest"}

// seals lists, for each program, the packages below internal/ that may be in
// it. What is not listed it cannot do: the aggregator has no code that opens a
// ledger.
var seals = map[string][]string{
	"aggregator": {"aggregator", "child", "confine", "event", "frame", "jsonrpc", "msgpack", "toolproto"},
	"builtin":    {"builtin", "confine", "event", "frame", "jsonrpc", "msgpack", "toolproto"},
	"capsem": {
		"api", "cli", "client", "config", "event", "frame", "guestproto", "inspect", "jsonrpc", "msgpack",
		"policy", // checks a file of rules without a service
	},
	"capsem-mcp": {"api", "client", "config", "event", "frame", "guestproto", "inspect", "jsonrpc", "mcptools", "msgpack"},
	"guest-relay": {
		"event", "frame", "guestproto", "jsonrpc", "msgpack", "relay", "relay/command", "relay/doctor", "relay/pid1",
		"relay/sysmon", "relay/system", "relay/vsocknet",
	},
	"capsemd": {
		"api", "child", "client", "config", "confine", "egress", "endpoint", "event", "frame", "gate", "guest", "guestproto",
		"hosttool", "image", "image/cpio", "image/debian", "image/kernel", "inspect", "jsonrpc", "launch", "ledger", "msgpack",
		"policy", "route", "service", "session", "toolproto", "upstream", "vm", "vm/qemu", "vm/qemu/vhostvsock", "vm/vz",
		"workspace",
	},
}

// walls are the modules that only some folders may import, also in tests.
var walls = []struct {
	module  string
	folders []string
	reason  string
}{
	{"modernc.org/sqlite", []string{"internal/ledger", "bench"}, "only the ledger opens the evidence"}, // a benchmark compares it with the engine alone
	{"cel.dev/cel-go", []string{"internal/policy"}, "only policy knows what rules are written in"},
	{"github.com/google/cel-go", nil, "the module is cel.dev/cel-go now"},
	{"github.com/Code-Hex/vz", []string{"internal/vm/vz"}, "only one backend talks to Apple's framework"},
	{
		"github.com/modelcontextprotocol/go-sdk",
		[]string{"internal/mcptools", "tests", "bench"},
		"the forwarding path keeps bytes; the SDK is for the ends that we own and for peers in tests",
	},
	{"github.com/stretchr/testify", nil, "tests compare with go-cmp"},
}

// maxFileLines is where a file is asked which noun it is missing.
const maxFileLines = 600

// longFiles are the files over maxFileLines, each with its reason.
var longFiles = map[string]string{}

// vagueFolders are names that say nothing about what is inside.
var vagueFolders = []string{"common", "helpers", "models", "pkg", "types", "util", "utils"}

// vagueTypes are endings of type names that say nothing about what it does.
var vagueTypes = []string{"Handler", "Helper", "Manager", "Processor"}

func TestPackagesImportOnlyLowerLayers(t *testing.T) {
	tree := load(t)
	for _, fault := range layerFaults(tree) {
		t.Error(fault)
	}
}

func TestProgramsLinkOnlyTheirSeal(t *testing.T) {
	tree := load(t)
	for _, fault := range sealFaults(tree) {
		t.Error(fault)
	}
}

func TestModulesHaveTheirWalls(t *testing.T) {
	tree := load(t)
	for _, fault := range wallFaults(tree) {
		t.Error(fault)
	}
}

func TestNamesSayWhatThingsAre(t *testing.T) {
	tree := load(t)
	for _, fault := range nameFaults(tree) {
		t.Error(fault)
	}
}

func TestFilesAreOfReadableLength(t *testing.T) {
	tree := load(t)
	for _, f := range tree {
		reason, listed := longFiles[f.path]
		switch {
		case f.lines > maxFileLines && !listed:
			t.Errorf("%s has %d lines, over %d: which noun is missing?", f.path, f.lines, maxFileLines)
		case f.lines <= maxFileLines && listed:
			t.Errorf("%s has %d lines and no longer needs its reason: %s", f.path, f.lines, reason)
		}
	}
}

// TestFaultsAreFound feeds the checks a small tree of everything that they are
// there to refuse: a check that finds nothing must be one that can find.
func TestFaultsAreFound(t *testing.T) {
	tests := []struct {
		name   string
		check  func([]source) []string
		files  map[string]string
		faults []string
	}{
		{
			name:  "an import within one layer",
			check: layerFaults,
			files: map[string]string{"internal/gate/a.go": ours("gate", "ledger")},
			faults: []string{
				"internal/gate/a.go: gate (layer 2) imports ledger (layer 2): imports point only to lower layers",
			},
		},
		{
			name:   "an import of a higher layer in a test",
			check:  layerFaults,
			files:  map[string]string{"internal/frame/a_test.go": ours("frame", "session")},
			faults: []string{"internal/frame/a_test.go: frame (layer 0) imports session (layer 3): imports point only to lower layers"},
		},
		{
			name:  "a suite of its own layer in a test",
			check: layerFaults,
			files: map[string]string{"internal/guest/a_test.go": ours("guest_test", "guest", "vm/fakevm", "relay")},
		},
		{
			name:   "a package without a layer",
			check:  layerFaults,
			files:  map[string]string{"internal/misc/a.go": ours("misc")},
			faults: []string{"internal/misc has no place in layers: decide what it stands on"},
		},
		{
			name:   "a folder that nobody expects",
			check:  layerFaults,
			files:  map[string]string{"lib/a.go": ours("lib", "frame")},
			faults: []string{"lib has no place in layers: decide what it stands on"},
		},
		{
			name:   "an import of a program",
			check:  layerFaults,
			files:  map[string]string{"internal/cli/a.go": "package cli\nimport _ \"" + module + "/cmd/capsem\"\n"},
			faults: []string{"internal/cli/a.go: imports " + module + "/cmd/capsem, which is outside internal/"},
		},
		{
			name:  "a package outside the seal, reached through another",
			check: sealFaults,
			files: map[string]string{
				"cmd/aggregator/main.go":         ours("main", "aggregator"),
				"internal/aggregator/a.go":       ours("aggregator", "toolproto"),
				"internal/toolproto/a.go":        ours("toolproto"),
				"internal/aggregator/b_linux.go": ours("aggregator", "ledger"),
				"internal/ledger/a.go":           ours("ledger"),
			},
			faults: []string{"cmd/aggregator links ledger, outside its seal, by way of aggregator"},
		},
		{
			name:   "a program without a seal",
			check:  sealFaults,
			files:  map[string]string{"cmd/extra/main.go": ours("main")},
			faults: []string{"cmd/extra has no seal: decide what it may link"},
		},
		{
			name:   "a module behind its wall",
			check:  wallFaults,
			files:  map[string]string{"internal/service/a.go": "package service\nimport _ \"modernc.org/sqlite\"\n"},
			faults: []string{"internal/service/a.go imports modernc.org/sqlite: only the ledger opens the evidence"},
		},
		{
			name:   "a vague folder and a vague type",
			check:  nameFaults,
			files:  map[string]string{"internal/util/a.go": "package util\ntype RetryManager struct{}\n"},
			faults: []string{"internal/util/a.go: util says nothing about what is inside", "internal/util/a.go: RetryManager says nothing about what it does"},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var tree []source
			for _, name := range slices.Sorted(maps.Keys(test.files)) {
				f, err := parse(name, []byte(test.files[name]))
				if err != nil {
					t.Fatal(err)
				}
				tree = append(tree, f)
			}
			if got := test.check(tree); !slices.Equal(got, test.faults) {
				t.Errorf("got faults %q, want %q", got, test.faults)
			}
		})
	}
}

// ours is the source of a package that imports packages below internal/.
func ours(name string, imports ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "package %s\n", name)
	for _, p := range imports {
		fmt.Fprintf(&b, "import _ %q\n", module+"/internal/"+p)
	}
	return b.String()
}

func layerFaults(tree []source) []string {
	layerOf := make(map[string]int)
	for n, packages := range layers {
		for _, p := range packages {
			layerOf[p] = n
		}
	}
	var faults []string
	homeless := make(map[string]bool)
	for _, f := range tree {
		from, internal := strings.CutPrefix(f.folder(), "internal/")
		fromLayer, known := layerOf[from]
		placed := known || !internal && (slices.Contains(above, top(f.path)) || slices.Contains(data, f.folder()))
		if !placed && !homeless[f.folder()] {
			homeless[f.folder()] = true
			faults = append(faults, fmt.Sprintf("%s has no place in layers: decide what it stands on", f.folder()))
		}
		for _, imported := range f.imports {
			rest, ok := strings.CutPrefix(imported, module+"/")
			if !ok {
				continue
			}
			if slices.Contains(data, f.folder()) {
				faults = append(faults, fmt.Sprintf("%s: imports %s: data stands on nothing", f.path, imported))
				continue
			}
			to, ok := strings.CutPrefix(rest, "internal/")
			if !ok {
				if !slices.Contains(data, rest) && (top(rest) != top(f.path) || top(rest) == "cmd") {
					faults = append(faults, fmt.Sprintf("%s: imports %s, which is outside internal/", f.path, imported))
				}
				continue
			}
			// Programs, and what stands beside internal/, are above every layer.
			if !internal || !known || f.test && to == from || f.test && layerOf[to] == fromLayer && slices.Contains(suites, to) {
				continue
			}
			if toLayer, known := layerOf[to]; known && toLayer >= fromLayer {
				faults = append(faults, fmt.Sprintf("%s: %s (layer %d) imports %s (layer %d): imports point only to lower layers",
					f.path, from, fromLayer, to, toLayer))
			}
		}
	}
	return faults
}

// top is the first folder of a path, "." for a file at the root.
func top(name string) string {
	folder, _, below := strings.Cut(name, "/")
	if !below && strings.HasSuffix(name, ".go") {
		return "."
	}
	return folder
}

func sealFaults(tree []source) []string {
	imports := make(map[string][]string) // folder → folders below internal/, tests left out
	programs := make(map[string]bool)
	for _, f := range tree {
		if f.test {
			continue
		}
		if name, ok := strings.CutPrefix(f.folder(), "cmd/"); ok {
			programs[name] = true
		}
		for _, imported := range f.imports {
			if to, ok := strings.CutPrefix(imported, module+"/internal/"); ok {
				imports[f.folder()] = append(imports[f.folder()], to)
			}
		}
	}
	var faults []string
	for _, program := range slices.Sorted(maps.Keys(programs)) {
		seal, ok := seals[program]
		if !ok {
			faults = append(faults, fmt.Sprintf("cmd/%s has no seal: decide what it may link", program))
			continue
		}
		for p, via := range linked(imports, "cmd/"+program) {
			if !slices.Contains(seal, p) {
				faults = append(faults, fmt.Sprintf("cmd/%s links %s, outside its seal, by way of %s", program, p, via))
			}
		}
	}
	slices.Sort(faults)
	return faults
}

// linked returns every package below internal/ that the program in folder
// start links, each with the package through which it came.
func linked(imports map[string][]string, start string) map[string]string {
	found := make(map[string]string)
	queue := []string{start}
	for len(queue) > 0 {
		from := queue[0]
		queue = queue[1:]
		for _, to := range imports[from] {
			if _, seen := found[to]; !seen {
				found[to] = strings.TrimPrefix(from, "internal/")
				queue = append(queue, "internal/"+to)
			}
		}
	}
	return found
}

func wallFaults(tree []source) []string {
	var faults []string
	for _, f := range tree {
		for _, wall := range walls {
			if slices.ContainsFunc(wall.folders, func(folder string) bool { return within(f.path, folder) }) {
				continue
			}
			for _, imported := range f.imports {
				if within(imported, wall.module) {
					faults = append(faults, fmt.Sprintf("%s imports %s: %s", f.path, imported, wall.reason))
				}
			}
		}
	}
	return faults
}

// within reports whether name is folder or lies below it. Versions count as
// below: github.com/Code-Hex/vz/v3.
func within(name, folder string) bool {
	return name == folder || strings.HasPrefix(name, folder+"/")
}

func nameFaults(tree []source) []string {
	var faults []string
	for _, f := range tree {
		for _, part := range append(strings.Split(f.folder(), "/"), strings.TrimSuffix(f.pkg, "_test")) {
			if slices.Contains(vagueFolders, part) {
				faults = append(faults, fmt.Sprintf("%s: %s says nothing about what is inside", f.path, part))
				break
			}
		}
		for _, name := range f.types {
			if slices.ContainsFunc(vagueTypes, func(end string) bool { return strings.HasSuffix(name, end) }) {
				faults = append(faults, fmt.Sprintf("%s: %s says nothing about what it does", f.path, name))
			}
		}
	}
	return faults
}

// source is what the checks need to know of one Go file.
type source struct {
	path    string // slash-separated, from the root of the repository
	pkg     string // the package clause
	test    bool   // a _test.go file
	lines   int
	imports []string
	types   []string // names of the types declared at top level
}

func (s source) folder() string { return path.Dir(s.path) }

// load parses every Go file of the repository, whatever its build constraints:
// what holds on Linux must hold on macOS.
func load(t *testing.T) []source {
	t.Helper()
	var tree []source
	root := os.DirFS(".")
	err := fs.WalkDir(root, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			return descend(name)
		}
		if filepath.Ext(name) != ".go" {
			return nil
		}
		data, err := fs.ReadFile(root, name)
		if errors.Is(err, fs.ErrNotExist) { // an editor's temporary file
			return nil
		}
		if err != nil {
			return err
		}
		f, err := parse(name, data)
		if err != nil {
			return err
		}
		tree = append(tree, f)
		return nil
	})
	if err != nil {
		t.Fatalf("reading the sources: %v", err)
	}
	if len(tree) == 0 {
		t.Fatal("there are no sources here")
	}
	return tree
}

// descend skips the folders in which no Go of ours lies, as the go command
// does: testdata, hidden folders, other modules.
func descend(name string) error {
	base := path.Base(name)
	if name != "." && (base[0] == '.' || base[0] == '_' || base == "testdata" || base == "node_modules" || name == "bin" || name == "tools") {
		return fs.SkipDir
	}
	return nil
}

func parse(name string, data []byte) (source, error) {
	file, err := parser.ParseFile(token.NewFileSet(), name, data, parser.SkipObjectResolution)
	if err != nil {
		return source{}, fmt.Errorf("parsing %s: %w", name, err)
	}
	f := source{
		path:  name,
		pkg:   file.Name.Name,
		test:  strings.HasSuffix(name, "_test.go"),
		lines: strings.Count(string(data), "\n"),
	}
	for _, spec := range file.Imports {
		imported, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return source{}, fmt.Errorf("parsing %s: import %s: %w", name, spec.Path.Value, err)
		}
		f.imports = append(f.imports, imported)
	}
	for _, decl := range file.Decls {
		group, ok := decl.(*ast.GenDecl)
		if !ok || group.Tok != token.TYPE {
			continue
		}
		for _, spec := range group.Specs {
			if t, ok := spec.(*ast.TypeSpec); ok {
				f.types = append(f.types, t.Name.Name)
			}
		}
	}
	return f, nil
}
