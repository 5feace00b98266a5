package mcptools

import (
	"context"
	"net/http"

	"github.com/capsem/capsem/internal/api"
)

type stopArguments struct {
	reference
	Force bool `json:"force,omitempty" jsonschema:"pull the plug at once, without letting the guest shut down"`
}

func stopTool() tool {
	return define(spec{
		name:  "capsem_stop",
		title: "Stop a VM",
		text: `Shut a virtual machine down and keep it. Commands that run in it are ended, and in images without a disk everything that was written is lost. Use it to free what a VM takes while its record and name stay. No tool starts it again, only a person with the command line does: to be rid of a VM use capsem_delete, which needs no stop before it.
The guest gets 10 seconds to shut down, then the plug is pulled. Returns the VM. Stopping one that does not run changes nothing.`,
		hints: hints{destructive: true, idempotent: true},
	}, func(ctx context.Context, c *call, in stopArguments) (machine, error) {
		path, err := in.path("/stop", nil)
		if err != nil {
			return machine{}, err
		}
		var vm api.VM
		err = c.Do(ctx, http.MethodPost, path, api.StopRequest{Force: in.Force}, &vm)
		return machineOf(vm), err
	})
}
