package mcptools

import (
	"context"
	"net/http"

	"github.com/capsem/capsem/internal/api"
)

type listArguments struct{}

type listResult struct {
	VMs []machine `json:"vms" jsonschema:"all VMs"`
}

func listTool() tool {
	return define(spec{
		name:  "capsem_list",
		title: "List the VMs",
		text: `List all virtual machines with their state, newest last. Use it to find one that can be used, and what was left behind.
Returns vms, which may be empty. Deleted ones are not among them.`,
		hints: reads,
	}, func(ctx context.Context, c *call, _ listArguments) (listResult, error) {
		var list api.VMList
		err := c.Do(ctx, http.MethodGet, "/v1/vms", nil, &list)
		result := listResult{VMs: []machine{}}
		for _, vm := range list.VMs {
			result.VMs = append(result.VMs, machineOf(vm))
		}
		return result, err
	})
}
