package mcptools

import (
	"context"
	"net/http"

	"github.com/google/jsonschema-go/jsonschema"

	"github.com/capsem/capsem/internal/api"
)

type runArguments struct {
	command
	TimeoutSeconds float64 `json:"timeoutSeconds,omitempty" jsonschema:"end the command after this many seconds; the time of booting does not count"`
	resources
}

type runResult struct {
	outcome
	VMID   string `json:"vmId" jsonschema:"the id of the VM it ran in; the VM is gone, its ledger is kept"`
	VMName string `json:"vmName" jsonschema:"the name that VM had"`
}

func runTool() tool {
	return define(spec{
		name:  "capsem_run",
		title: "Run a command in a VM of its own",
		text: `Make a virtual machine, run one command in it, and remove the VM. Use it for a single command that needs nothing from before and leaves nothing behind; for more, use capsem_create and capsem_exec.
Returns exit code, stdout and stderr. A non-zero exit code is a normal result. After timeoutSeconds (60 if absent) the command and all it started are killed and timedOut is true; what it wrote until then is there.
At most 1 MiB of each stream is returned; truncated says so, and stdoutBytes and stderrBytes are true sizes. The command's stdin is empty.`,
		hints: hints{openWorld: true},
		refine: func(p map[string]*jsonschema.Schema) {
			refineCommand(p)
			fallback(p["timeoutSeconds"], "60")
			least := 0.001 // a run is never without an end
			p["timeoutSeconds"].Minimum = &least
			between(p["ramMb"], 1, maxRAMMb)
			between(p["cpuCount"], 1, maxCPUs)
		},
	}, func(ctx context.Context, c *call, in runArguments) (runResult, error) {
		exec, err := in.command.request(in.TimeoutSeconds, nil)
		if err != nil {
			return runResult{}, err
		}
		create := in.resources.request()
		create.Ephemeral = true
		var r api.RunResult
		err = c.Follow(ctx, http.MethodPost, "/v1/run", api.RunRequest{Create: create, Exec: exec}, c.step, &r)
		return runResult{outcome: outcomeOf(r.Exec, ""), VMID: r.VM.ID, VMName: r.VM.Name}, err
	})
}
