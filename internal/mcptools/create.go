package mcptools

import (
	"context"
	"net/http"

	"github.com/google/jsonschema-go/jsonschema"

	"github.com/capsem/capsem/internal/api"
)

type createArguments struct {
	Name  string `json:"name,omitempty" jsonschema:"a name for it: a-z, 0-9 and -, at most 63 (default: one is made up)"`
	Image string `json:"image,omitempty" jsonschema:"the image to boot (default: the profile's)"`
	resources
}

func createTool() tool {
	return define(spec{
		name:  "capsem_create",
		title: "Create a VM",
		text: `Make a virtual machine that stays, and boot it. Use it when several commands or files need one place; for a single command capsem_run is simpler.
Returns the VM when a command in it would succeed, which takes seconds. Use its name or id with the other tools, and capsem_delete when it is no longer needed.
Read "notes": in some images what is written is lost when the VM stops. A name that is taken is an error.`,
		refine: func(p map[string]*jsonschema.Schema) {
			between(p["ramMb"], 1, maxRAMMb)
			between(p["cpuCount"], 1, maxCPUs)
		},
	}, func(ctx context.Context, c *call, in createArguments) (machine, error) {
		req := in.request()
		req.Name, req.Image = in.Name, in.Image
		var vm api.VM
		err := c.Follow(ctx, http.MethodPost, "/v1/vms", req, c.step, &vm)
		return machineOf(vm), err
	})
}
