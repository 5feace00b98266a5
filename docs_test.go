package capsem_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// maxReadmeLines keeps the README something that is read.
const maxReadmeLines = 150

var (
	markdownLink = regexp.MustCompile(`\[([^\]]*)\]\(([^)\s]+)\)`)
	recipeUse    = regexp.MustCompile("(?:^|[`(> ])(?:\\./justw|just) ([a-z][a-z0-9-]*)")
	recipeStart  = regexp.MustCompile(`(?m)^([a-z][a-z0-9-]*)(?: [^:\n]*)?:(?:[^=]|$)`)
	codeFence    = regexp.MustCompile("(?ms)^```.*?^```")
)

func TestDocsLinkToWhatIsThere(t *testing.T) {
	for name, text := range pages(t) {
		for _, link := range markdownLink.FindAllStringSubmatch(codeFence.ReplaceAllString(text, ""), -1) {
			label, target := link[1], link[2]
			if strings.Contains(target, "://") || strings.HasPrefix(target, "#") {
				continue
			}
			file, _, _ := strings.Cut(target, "#")
			file = path.Join(path.Dir(name), file)
			if _, err := os.Stat(filepath.FromSlash(file)); err != nil {
				t.Errorf("%s links to %s, which is not there", name, target)
				continue
			}
			if err := declares(file, label); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

func TestDocsNameRecipesThatExist(t *testing.T) {
	data, err := os.ReadFile("justfile")
	if err != nil {
		t.Fatal(err)
	}
	var recipes []string
	for _, m := range recipeStart.FindAllStringSubmatch(string(data), -1) {
		recipes = append(recipes, m[1])
	}
	for name, text := range pages(t) {
		for _, use := range recipeUse.FindAllStringSubmatch(text, -1) {
			if !slices.Contains(recipes, use[1]) {
				t.Errorf("%s names the recipe %q; there are %q", name, use[1], recipes)
			}
		}
	}
}

func TestDocsReadmeIsShortAndStartsWithTwoCommands(t *testing.T) {
	data, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	if lines := strings.Count(string(data), "\n"); lines > maxReadmeLines {
		t.Errorf("README.md has %d lines, over %d", lines, maxReadmeLines)
	}
	_, start, found := strings.Cut(string(data), "## Quick start\n")
	start, _, _ = strings.Cut(start, "\n## ")
	if !found || !strings.Contains(start, "\n./justw demo ") || !strings.Contains(start, "\n./justw test ") {
		t.Errorf("the README's quick start is not ./justw demo and ./justw test:\n%s", start)
	}
}

func TestDocsChangelogFragmentsHaveTheirForm(t *testing.T) {
	form := regexp.MustCompile(`^(Added|Changed|Deprecated|Removed|Fixed|Security): [^\n]+[^.\n]\n\n[^\n]`)
	fragments, err := filepath.Glob("changelog/unreleased/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range fragments {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if !form.Match(data) {
			t.Errorf("%s does not begin with a line `Added: What is new` (or Changed, Deprecated, Removed, Fixed, Security), an empty line and a text", name)
		}
	}
}

// pages reads every Markdown file of the repository, by its path.
func pages(t *testing.T) map[string]string {
	t.Helper()
	found := make(map[string]string)
	err := fs.WalkDir(os.DirFS("."), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			return descend(name)
		}
		if path.Ext(name) != ".md" {
			return nil
		}
		data, err := os.ReadFile(filepath.FromSlash(name))
		found[name] = string(data)
		return err
	})
	if err != nil {
		t.Fatalf("reading the documents: %v", err)
	}
	return found
}

// declares checks a link to a Go file whose label is a name in code, as
// `gate.Gate.Do`: the file must declare it. Other links pass.
func declares(file, label string) error {
	label, isCode := strings.CutPrefix(label, "`")
	label, isCode2 := strings.CutSuffix(label, "`")
	if path.Ext(file) != ".go" || !isCode || !isCode2 || strings.ContainsAny(label, "/ ") || strings.HasSuffix(label, ".go") {
		return nil
	}
	syntax, err := parser.ParseFile(token.NewFileSet(), filepath.FromSlash(file), nil, parser.SkipObjectResolution)
	if err != nil {
		return fmt.Errorf("reading what %s declares: %w", file, err)
	}
	pkg, name, _ := strings.Cut(label, ".")
	if pkg != syntax.Name.Name {
		return fmt.Errorf("%s is of package %s, not of %s", file, syntax.Name.Name, pkg)
	}
	if names := declared(syntax); !slices.Contains(names, name) {
		return fmt.Errorf("%s does not declare %s", file, name)
	}
	return nil
}

// declared lists the names declared at top level, methods as Type.Method.
func declared(file *ast.File) []string {
	var names []string
	for _, decl := range file.Decls {
		switch d := decl.(type) {
		case *ast.FuncDecl:
			name := d.Name.Name
			if d.Recv != nil {
				name = receiver(d.Recv.List[0].Type) + "." + name
			}
			names = append(names, name)
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch s := spec.(type) {
				case *ast.TypeSpec:
					names = append(names, s.Name.Name)
				case *ast.ValueSpec:
					for _, n := range s.Names {
						names = append(names, n.Name)
					}
				}
			}
		}
	}
	return names
}

// receiver is the name of a method's type, without pointer and parameters.
func receiver(expr ast.Expr) string {
	switch e := expr.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}
