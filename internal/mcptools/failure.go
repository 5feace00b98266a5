package mcptools

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/client"
)

// failure is an error as a model is told it: what happened, which rule, and what
// to do next, a line each.
func failure(err error) error {
	if errors.Is(err, context.Canceled) {
		return errors.New("the call was cancelled")
	}
	var e *api.Error
	if !errors.As(err, &e) {
		e = &api.Error{Code: api.CodeFailed, Message: err.Error()}
		if errors.Is(err, client.ErrNotRunning) {
			e.Code = api.CodeUnavailable
		}
	}
	lines := []string{e.Message}
	if e.Rule != "" {
		lines = append(lines, "Rule: "+e.Rule)
	}
	if e.VM != "" {
		lines = append(lines, "VM: "+e.VM)
	}
	switch {
	case strings.Contains(e.Hint, "capsem "): // a command line, which a model has not
		lines = append(lines, "Hint for the person: "+e.Hint)
	case e.Hint != "":
		lines = append(lines, "Hint: "+e.Hint)
	}
	if next := nextStep(e.Code); next != "" {
		lines = append(lines, "Next: "+next)
	}
	return errors.New(strings.Join(lines, "\n"))
}

// nextStep is what a model can do about a kind of failure.
func nextStep(c api.Code) string {
	switch c {
	case api.CodeNotFound:
		return "capsem_list shows the VMs that there are; a command such as ls shows the files in one."
	case api.CodeExists:
		return "use the VM that has the name, or choose another name."
	case api.CodeState:
		return "capsem_info shows the VM's state and why; a VM that does not run takes no commands, and capsem_create makes another."
	case api.CodeBlocked:
		return "the operator's rules forbid this, and repeating it changes nothing. Tell the person which rule it was, or do without."
	case api.CodeTooLarge:
		return "ask for less at once: a part of the file, fewer lines, or output redirected to a file."
	case api.CodeBusy:
		return "try again when other calls are finished."
	case api.CodeUnavailable, api.CodeUnreachable:
		return "capsem_info and capsem_vm_logs show how the VM is; if it is lost, delete it and create another."
	case api.CodeTimeout:
		return "capsem_vm_logs shows how far it came."
	case api.CodeReplaced:
		return "the VM was started anew: what ran in it is gone. Do it again."
	case api.CodeInvalid, api.CodeFailed:
		return ""
	}
	return ""
}

// invalid is an error about arguments.
func invalid(format string, args ...any) error {
	return &api.Error{Code: api.CodeInvalid, Message: fmt.Sprintf(format, args...)}
}
