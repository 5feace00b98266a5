package mcptools

import (
	"context"
	"net/http"

	"github.com/capsem/capsem/internal/api"
)

func infoTool() tool {
	return define(spec{
		name:  "capsem_info",
		title: "Show a VM",
		text: `Show one virtual machine: its state and why it is in it, its resources, and the MCP servers of a running one.
Use it when a VM does not do what is expected. Deleted VMs can be shown as well, by id.`,
		hints: reads,
	}, func(ctx context.Context, c *call, in reference) (machine, error) {
		path, err := in.path("", nil)
		if err != nil {
			return machine{}, err
		}
		var vm api.VM
		err = c.Do(ctx, http.MethodGet, path, nil, &vm)
		return machineOf(vm), err
	})
}
