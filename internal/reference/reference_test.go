package reference_test

import (
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/ledger"
	"github.com/capsem/capsem/internal/mcptools"
	"github.com/capsem/capsem/internal/reference"
)

var update = flag.Bool("update", false, "write the pages again")

// root is the root of the repository.
const root = "../.."

func pages(t *testing.T) map[string]string {
	t.Helper()
	all, err := reference.Pages()
	if err != nil {
		t.Fatal(err)
	}
	byName := make(map[string]string)
	for _, p := range all {
		byName[p.Name] = p.Text
	}
	return byName
}

func TestPagesSayWhatTheCodeSays(t *testing.T) {
	folder := filepath.Join(root, reference.Folder)
	fresh := pages(t)
	if *update {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			t.Fatal(err)
		}
		for name, text := range fresh {
			if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, text := range fresh {
		there, err := os.ReadFile(filepath.Join(folder, name))
		if err != nil {
			t.Errorf("%v; write the pages again with: just gen", err)
			continue
		}
		if diff := cmp.Diff(strings.Split(string(there), "\n"), strings.Split(text, "\n")); diff != "" {
			t.Errorf("%s/%s is stale; write the pages again with: just gen\n%s", reference.Folder, name, diff)
		}
	}
	files, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if _, ok := fresh[f.Name()]; !ok {
			t.Errorf("%s/%s is none of the pages: remove it", reference.Folder, f.Name())
		}
	}
}

// Bounds stand in one place, and on this page: an exported constant of the
// contracts that is missing here is one that nobody can look up.
func TestEveryBoundOfTheContractsIsOnThePage(t *testing.T) {
	wire := pages(t)["wire.md"]
	bound := regexp.MustCompile(`^(Max|Default[A-Z]|Window$)|(Timeout|After|Wait|Version|Page|Header)$`)
	for _, pkg := range []string{"api", "endpoint", "guestproto", "jsonrpc", "msgpack", "toolproto"} {
		for name, text := range declared(t, pkg) {
			if bound.MatchString(name) && text == "" && !strings.HasPrefix(name, "Code") && !strings.Contains(wire, "`"+pkg+"."+name+"`") {
				t.Errorf("%s.%s is not on wire.md", pkg, name)
			}
		}
	}
}

func TestTheTimelineToolNamesEveryLayer(t *testing.T) {
	for _, tool := range mcptools.Describe() {
		for _, p := range tool.Parameters {
			if tool.Name != "capsem_timeline" || p.Name != "layers" {
				continue
			}
			words := strings.FieldsFunc(p.Text, func(r rune) bool { return !unicode.IsLetter(r) })
			for _, layer := range ledger.Layers() {
				if !slices.Contains(words, layer) {
					t.Errorf("the layer %s is not in %q", layer, p.Text)
				}
			}
			return
		}
	}
	t.Error("the tool has no such parameter")
}

func TestEveryCodeOfTheAPIIsOnThePage(t *testing.T) {
	wire := pages(t)["wire.md"]
	values := 0
	for name, value := range declared(t, "api") {
		if strings.HasPrefix(name, "Code") && value != "" {
			values++
			if !strings.Contains(wire, "| `"+value+"` |") {
				t.Errorf("api.%s (%s) is not on wire.md", name, value)
			}
		}
	}
	if values == 0 {
		t.Error("no codes were found")
	}
}

// declared returns the exported constants of a package, each with its text where
// it is a string.
func declared(t *testing.T, pkg string) map[string]string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("..", pkg, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	found := make(map[string]string)
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range file.Decls {
			group, ok := decl.(*ast.GenDecl)
			if !ok || group.Tok != token.CONST {
				continue
			}
			for _, spec := range group.Specs {
				s := spec.(*ast.ValueSpec)
				for i, n := range s.Names {
					if !n.IsExported() {
						continue
					}
					found[n.Name] = ""
					if i < len(s.Values) {
						if lit, ok := s.Values[i].(*ast.BasicLit); ok && lit.Kind == token.STRING {
							found[n.Name] = strings.Trim(lit.Value, `"`)
						}
					}
				}
			}
		}
	}
	if len(found) == 0 {
		t.Fatalf("%s has no constants", pkg)
	}
	return found
}
