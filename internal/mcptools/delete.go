package mcptools

import (
	"context"
	"net/http"
	"net/url"

	"github.com/capsem/capsem/internal/api"
)

func deleteTool() tool {
	return define(spec{
		name:  "capsem_delete",
		title: "Delete a VM",
		text: `Remove a virtual machine and everything in it, also one that is running. This cannot be undone; the record of what it did is kept.
Use it on VMs that you made and no longer need. Returns the VM as it was, in state deleted.`,
		hints: hints{destructive: true, idempotent: true},
	}, func(ctx context.Context, c *call, in reference) (machine, error) {
		path, err := in.path("", url.Values{api.DeleteForce: {"true"}})
		if err != nil {
			return machine{}, err
		}
		var vm api.VM
		err = c.Do(ctx, http.MethodDelete, path, nil, &vm)
		return machineOf(vm), err
	})
}
