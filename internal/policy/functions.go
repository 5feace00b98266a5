package policy

import (
	"fmt"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common"
	"cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"cel.dev/cel-go/interpreter"
	"cel.dev/cel-go/parser"
)

// maxMatched bounds the text that a regular expression sees. RE2 is linear in it,
// but slow, and nothing interrupts it.
const maxMatched = 64 << 10

// functions are what rules can call beside CEL's own: `icontains` and `imatches`
// take no notice of case, and `matches` is bounded.
type functions struct{}

// The names that the two matches have once their macros are expanded. CEL's own
// `matches` is out of reach of rules.
const (
	matchesCall  = "@matches"
	imatchesCall = "@imatches"
)

// flagsOf says how a pattern of a call is compiled.
func flagsOf(call string) string {
	if call == imatchesCall {
		return "(?i)"
	}
	return ""
}

// LibraryName names the library in CEL.
func (functions) LibraryName() string { return "capsem.functions" }

// CompileOptions declares the functions.
func (functions) CompileOptions() []cel.EnvOption {
	str := cel.StringType
	return []cel.EnvOption{
		cel.Function("icontains", cel.MemberOverload("string_icontains_string", []*cel.Type{str, str}, cel.BoolType,
			cel.BinaryBinding(func(s, part ref.Val) ref.Val {
				return types.Bool(strings.Contains(fold(string(s.(types.String))), fold(string(part.(types.String)))))
			}))),
		matchFunction(matchesCall), matchFunction(imatchesCall),
		cel.Macros(
			cel.ReceiverMacro("matches", 1, expandMatch(matchesCall)), cel.GlobalMacro("matches", 2, expandMatch(matchesCall)),
			cel.ReceiverMacro("imatches", 1, expandMatch(imatchesCall)),
		),
	}
}

// ProgramOptions compiles constant patterns once. A rule with another pattern is
// refused before (syntax.go).
func (functions) ProgramOptions() []cel.ProgramOption {
	return []cel.ProgramOption{cel.OptimizeRegex(constantPattern(matchesCall), constantPattern(imatchesCall))}
}

func matchFunction(name string) cel.EnvOption {
	return cel.Function(name, cel.Overload(name, []*cel.Type{cel.StringType, cel.StringType}, cel.BoolType,
		cel.BinaryBinding(func(s, pattern ref.Val) ref.Val {
			re, err := regexp.Compile(flagsOf(name) + string(pattern.(types.String)))
			if err != nil {
				return types.WrapErr(err)
			}
			return match(re, s)
		})))
}

func expandMatch(name string) cel.MacroFactory {
	return func(h parser.ExprHelper, target ast.Expr, args []ast.Expr) (ast.Expr, *common.Error) {
		if target != nil {
			args = append([]ast.Expr{target}, args...)
		}
		return h.NewCall(name, args...), nil
	}
}

func constantPattern(name string) *interpreter.RegexOptimization {
	return &interpreter.RegexOptimization{
		Function: name, RegexIndex: 1,
		Factory: func(call interpreter.InterpretableCall, pattern string) (interpreter.InterpretableCall, error) {
			re, err := regexp.Compile(flagsOf(name) + pattern)
			if err != nil {
				return nil, fmt.Errorf("compiling a pattern: %w", err)
			}
			return interpreter.NewCall(call.ID(), call.Function(), call.OverloadID(), call.Args(), func(args ...ref.Val) ref.Val {
				return match(re, args[0])
			}), nil
		},
	}
}

func match(re *regexp.Regexp, text ref.Val) ref.Val {
	s, ok := text.(types.String)
	if !ok {
		return types.NewErr("no such overload: matches() of what is no string")
	}
	if len(s) > maxMatched {
		return types.NewErr("%w", errTooLong)
	}
	return types.Bool(re.MatchString(string(s)))
}

// fold maps each character to the least of those that differ from it by case
// only, so that texts that are equal under Unicode's simple folding become equal
// ("K" of Kelvin is "k").
func fold(s string) string {
	for i := range len(s) {
		if c := s[i]; c >= utf8.RuneSelf || ('a' <= c && c <= 'z') {
			return s[:i] + strings.Map(foldRune, s[i:])
		}
	}
	return s
}

func foldRune(r rune) rune {
	if 'a' <= r && r <= 'z' {
		return r - 'a' + 'A'
	}
	if r < utf8.RuneSelf {
		return r
	}
	least := r
	for next := unicode.SimpleFold(r); next != r; next = unicode.SimpleFold(next) {
		least = min(least, next)
	}
	return least
}
