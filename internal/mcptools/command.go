package mcptools

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/jsonschema-go/jsonschema"

	"github.com/capsem/capsem/internal/api"
)

const (
	// maxOutput is how much of each stream of a command a tool returns, in bytes.
	// What a model can read is less; what it needs whole belongs in a file.
	maxOutput = 1 << 20
	// maxTimeout bounds timeoutSeconds.
	maxTimeout = 7 * 24 * time.Hour
)

// command is what is to be run, in one of two ways.
type command struct {
	Command string   `json:"command,omitempty" jsonschema:"a shell command line, run by sh -c. Give this or argv"`
	Argv    []string `json:"argv,omitempty" jsonschema:"the program and its arguments, run as they are, without a shell. Give this or command"`
}

// refineCommand is what the schema of a command's parameters says beside types.
func refineCommand(p map[string]*jsonschema.Schema) {
	least := 1
	p["argv"].MinItems = &least
	between(p["timeoutSeconds"], 0, maxTimeout.Seconds())
}

// request is the command as the service takes it.
func (c command) request(timeoutSeconds float64, env map[string]string) (api.ExecRequest, error) {
	req := api.ExecRequest{MaxOutput: maxOutput, TimeoutMS: int64(timeoutSeconds * 1000)}
	if timeoutSeconds > 0 {
		req.TimeoutMS = max(req.TimeoutMS, 1) // 0 would be forever
	}
	argv := c.Argv
	switch {
	case (c.Command == "") == (len(c.Argv) == 0):
		return req, invalid("give either command (a shell command line) or argv (a program and its arguments)")
	case c.Command != "":
		argv = []string{"sh", "-c", c.Command}
	}
	for _, arg := range argv {
		if strings.Contains(arg, "\x00") {
			return req, invalid("an argument of a command cannot hold a NUL character")
		}
		req.Argv = append(req.Argv, []byte(arg))
	}
	for _, name := range slices.Sorted(maps.Keys(env)) {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.Contains(env[name], "\x00") {
			return req, invalid("env: %q is not a variable", name)
		}
		req.Env = append(req.Env, []byte(name+"="+env[name]))
	}
	return req, nil
}
