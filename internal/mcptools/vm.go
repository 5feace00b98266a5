package mcptools

import (
	"net/url"
	"regexp"

	"github.com/capsem/capsem/internal/api"
)

// reference names the VM that a tool is about.
type reference struct {
	ID string `json:"id" jsonschema:"the VM's name or id"`
}

// path is where the service has the VM, and what is below it.
func (r reference) path(below string, query url.Values) (string, error) {
	// Nothing else can be a name or an id, and some would be other paths.
	if !regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9-]{0,62}$`).MatchString(r.ID) {
		return "", invalid("id is %q: it must be a VM's name or id, as capsem_list shows them", r.ID)
	}
	p := "/v1/vms/" + r.ID + below
	if len(query) > 0 {
		p += "?" + query.Encode()
	}
	return p, nil
}

// resources are what a new VM is made of.
type resources struct {
	Profile  string            `json:"profile,omitempty" jsonschema:"the profile it is made from: its image, rules and MCP servers (default: the one called default)"`
	Env      map[string]string `json:"env,omitempty" jsonschema:"environment variables of every command in it"`
	RAMMb    int64             `json:"ramMb,omitempty" jsonschema:"memory in MiB (default: the profile's)"`
	CPUCount int               `json:"cpuCount,omitempty" jsonschema:"processors (default: the profile's)"`
}

// maxRAMMb and maxCPUs are what a parameter can hold; what a VM can have the
// service knows.
const (
	maxRAMMb = 1 << 24
	maxCPUs  = 1 << 10
)

func (r resources) request() api.CreateRequest {
	return api.CreateRequest{Profile: r.Profile, Env: r.Env, MemoryBytes: r.RAMMb * mebibyte, CPUs: r.CPUCount}
}
