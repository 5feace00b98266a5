package policy

import (
	"cel.dev/cel-go/common/operators"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"cel.dev/cel-go/interpreter"
)

// Most clauses compare a field with a word. CEL looks the field up by its name
// each time; the nodes of this file know its place. They stand in the plans of
// rules that run without a cost limit, whose cost nobody counts.

// shorten replaces reads of fields, and comparisons of a field with a word.
func (v *vocabulary) shorten(i interpreter.InterpretableV2) (interpreter.InterpretableV2, error) {
	switch node := i.(type) {
	case interpreter.InterpretableAttribute:
		name, ok := node.Attr().(interpreter.NamespacedAttribute)
		if !ok || len(name.Qualifiers()) > 0 || len(name.CandidateVariableNames()) != 1 {
			return i, nil
		}
		if s, ok := v.slots[name.CandidateVariableNames()[0]]; ok && !s.presence {
			return &slotRead{node, s.field}, nil
		}
	case interpreter.InterpretableCall:
		if node.Function() != operators.Equals || len(node.Args()) != 2 {
			return i, nil
		}
		for n, arg := range node.Args() {
			read, isRead := arg.(*slotRead)
			word, isConst := node.Args()[1-n].(interpreter.InterpretableConst)
			if !isRead || !isConst {
				continue
			}
			if s, ok := word.Value().(types.String); ok {
				return &slotEquals{node, read, s}, nil
			}
		}
	}
	return i, nil
}

// slotRead reads a field by its place. Inside a macro, where the scope is
// another, it leaves the work to the node that it replaced.
type slotRead struct {
	interpreter.InterpretableV2
	field int
}

// Exec reads the field. It is called by CEL.
func (s *slotRead) Exec(frame *interpreter.ExecutionFrame) ref.Val {
	if f, ok := frame.Scope().(*facts); ok {
		return f.value(s.field)
	}
	return s.InterpretableV2.Exec(frame)
}

// Eval reads the field. It is called by CEL.
func (s *slotRead) Eval(vars interpreter.Activation) ref.Val {
	return interpreter.EvalActivation(vars, s.Exec)
}

// slotEquals compares a field with a word.
type slotEquals struct {
	interpreter.InterpretableV2
	read *slotRead
	word types.String
}

// Exec compares the field. It is called by CEL.
func (s *slotEquals) Exec(frame *interpreter.ExecutionFrame) ref.Val {
	if v, ok := s.read.Exec(frame).(types.String); ok {
		return types.Bool(v == s.word)
	}
	return s.InterpretableV2.Exec(frame)
}

// Eval compares the field. It is called by CEL.
func (s *slotEquals) Eval(vars interpreter.Activation) ref.Val {
	return interpreter.EvalActivation(vars, s.Exec)
}
