package capsem_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestDroppedResultsHaveTheirReason looks at each `_ = f()` outside tests. Whoever
// drops an error says why, on the line or in a comment above it, in the same
// paragraph.
func TestDroppedResultsHaveTheirReason(t *testing.T) {
	for _, f := range load(t) {
		if f.test {
			continue
		}
		data, err := os.ReadFile(filepath.FromSlash(f.path))
		if err != nil {
			t.Fatal(err)
		}
		for _, fault := range droppedWithoutReason(t, f.path, data) {
			t.Error(fault)
		}
	}
}

func TestDroppedResultsWithoutReasonAreFound(t *testing.T) {
	const src = `package p

func g() {
	_ = f() // it cannot fail here
	// Nobody reads what these say.
	_ = f()
	_, _ = h()

	_ = f()
	_ = v
	v, _ := h()
	if x {
		// Not this one.
		v++

		_ = f()
	}
}
`
	want := []string{"p.go:9: _ = f() without its reason", "p.go:16: _ = f() without its reason"}
	if got := droppedWithoutReason(t, "p.go", []byte(src)); !slices.Equal(got, want) {
		t.Errorf("got faults %q, want %q", got, want)
	}
}

// droppedWithoutReason returns a fault for each assignment of a call's results
// to nothing but blanks that has no comment.
func droppedWithoutReason(t *testing.T, name string, data []byte) []string {
	t.Helper()
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, name, data, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	commented := make(map[int]bool) // by line
	for _, group := range file.Comments {
		for line := fset.Position(group.Pos()).Line; line <= fset.Position(group.End()).Line; line++ {
			commented[line] = true
		}
	}
	lines := strings.Split(string(data), "\n")
	var faults []string
	ast.Inspect(file, func(n ast.Node) bool {
		assign, ok := n.(*ast.AssignStmt)
		if !ok || !dropsCall(assign) {
			return true
		}
		line := fset.Position(assign.Pos()).Line
		// A paragraph is what stands between empty lines or the start of a block.
		for above := line; above == line || lines[above-1] != "" && !strings.HasSuffix(lines[above-1], "{"); above-- {
			if commented[above] {
				return true
			}
		}
		faults = append(faults, fmt.Sprintf("%s:%d: %s without its reason", name, line, strings.TrimSpace(lines[line-1])))
		return true
	})
	return faults
}

func dropsCall(assign *ast.AssignStmt) bool {
	if _, ok := assign.Rhs[0].(*ast.CallExpr); !ok || len(assign.Rhs) != 1 {
		return false
	}
	return !slices.ContainsFunc(assign.Lhs, func(e ast.Expr) bool {
		name, ok := e.(*ast.Ident)
		return !ok || name.Name != "_"
	})
}
