package mcptools

import (
	"context"
	"net/http"

	"github.com/google/jsonschema-go/jsonschema"

	"github.com/capsem/capsem/internal/api"
)

type execArguments struct {
	reference
	command
	Cwd            string            `json:"cwd,omitempty" jsonschema:"the absolute path of its working folder (default: the user's home)"`
	User           string            `json:"user,omitempty" jsonschema:"the user it runs as (default: root)"`
	Env            map[string]string `json:"env,omitempty" jsonschema:"environment variables, added to the VM's"`
	Stdin          string            `json:"stdin,omitempty" jsonschema:"what it reads from stdin (default: nothing)"`
	StdinEncoding  string            `json:"stdinEncoding,omitempty" jsonschema:"how stdin is given (default: utf8)"`
	TimeoutSeconds float64           `json:"timeoutSeconds,omitempty" jsonschema:"end the command after this many seconds (default: 0, never)"`
	Encoding       string            `json:"encoding,omitempty" jsonschema:"base64: return stdout and stderr in base64. Default utf8: each as text where all of it is UTF-8, else in base64"`
}

func execTool() tool {
	return define(spec{
		name:  "capsem_exec",
		title: "Run a command in a VM",
		text: `Run a command in a VM that is running, and wait for its end. Use it for each step of work in a VM that capsem_create made, or that capsem_list shows.
Returns exit code, stdout and stderr. A non-zero exit code is a normal result. Without timeoutSeconds (or with 0) it may run for ever; with it, the command and all it started are killed when the time is over, timedOut is true, and what it wrote until then is there. Cancelling the call kills it as well.
At most 1 MiB of each stream is returned; truncated says so, and stdoutBytes and stderrBytes are true sizes: redirect to a file and read that with capsem_read_file where more is needed. To leave something running, start it in the background with its output redirected.`,
		hints: hints{destructive: true, openWorld: true},
		refine: func(p map[string]*jsonschema.Schema) {
			refineCommand(p)
			oneOf(p["encoding"], encodingUTF8, encodingBase64)
			oneOf(p["stdinEncoding"], encodingUTF8, encodingBase64)
		},
	}, func(ctx context.Context, c *call, in execArguments) (outcome, error) {
		path, err := in.path("/exec", nil)
		if err != nil {
			return outcome{}, err
		}
		req, err := in.command.request(in.TimeoutSeconds, in.Env)
		if err != nil {
			return outcome{}, err
		}
		req.Cwd, req.User = in.Cwd, in.User
		if req.Stdin, err = decodeBytes("stdin", in.Stdin, in.StdinEncoding); err != nil {
			return outcome{}, err
		}
		var r api.ExecResult
		err = c.Do(ctx, http.MethodPost, path, req, &r)
		return outcomeOf(r, in.Encoding), err
	})
}
