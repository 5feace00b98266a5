package policy

import (
	"fmt"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"cel.dev/cel-go/interpreter"

	"github.com/capsem/capsem/internal/event"
)

// facts are the values of one event's fields, converted when a rule first reads
// them. They implement CEL's Activation for one judgement, on one goroutine.
type facts struct {
	vocabulary *vocabulary
	ev         *event.Event
	out        *event.Outcome
	// frame is CEL's state of evaluation, used by one rule after another.
	frame *interpreter.ExecutionFrame
	// values holds what was read so far, by the field's place. A field that the
	// event lacks has the vocabulary's shared error.
	values []ref.Val
}

// newFacts begins a judgement. The caller closes the facts, and need not if it
// panics.
func newFacts(v *vocabulary, ev *event.Event, out *event.Outcome) (*facts, error) {
	f := &facts{vocabulary: v, ev: ev, out: out, values: make([]ref.Val, len(v.fields))}
	var err error
	if f.frame, err = interpreter.NewExecutionFrame(f); err != nil {
		return nil, fmt.Errorf("preparing the evaluation: %w", err)
	}
	return f, nil
}

func (f *facts) close() { f.frame.Close() }

// ResolveName returns a field's value, or whether it is there for a name that
// `has()` made. It is called by CEL.
func (f *facts) ResolveName(name string) (any, bool) {
	slot, ok := f.vocabulary.slots[name]
	if !ok {
		return nil, false
	}
	v := f.value(slot.field)
	if slot.presence {
		return types.Bool(v != f.vocabulary.absent[slot.field]), true
	}
	return v, true
}

// Parent says that there is no scope around this one. It is called by CEL.
func (f *facts) Parent() cel.Activation { return nil }

func (f *facts) value(i int) ref.Val {
	if v := f.values[i]; v != nil {
		return v
	}
	v := f.vocabulary.fields[i].read(f)
	if v == nil {
		v = f.vocabulary.absent[i]
	}
	f.values[i] = v
	return v
}

// absentError says that an event lacks a field.
type absentError struct{ field string }

func (e *absentError) Error() string { return fmt.Sprintf("the event has no %s", e.field) }

// absentValue makes the error value of a field. It has a node already, so that
// CEL does not write one into it: the value is shared by all judgements.
func absentValue(name string) ref.Val {
	const anyNode = 1
	return types.NewErrWithNodeID(anyNode, "%w", &absentError{name})
}
