package mcptools

import (
	"context"
	"net/http"

	"github.com/capsem/capsem/internal/api"
)

type versionArguments struct{}

type versionResult struct {
	Version        string `json:"version" jsonschema:"the version of this MCP server"`
	ServiceVersion string `json:"serviceVersion" jsonschema:"the version of the service, which keeps the VMs"`
	API            int    `json:"api" jsonschema:"the version of the contract between capsem-mcp and the service"`
	ServicePID     int    `json:"servicePid" jsonschema:"the service's process"`
	Home           string `json:"home" jsonschema:"the folder in which Capsem keeps everything"`
}

func versionTool() tool {
	return define(spec{
		name:  "capsem_version",
		title: "Show Capsem's version",
		text:  `Show which version of Capsem runs and where it keeps its files. Use it to check that Capsem works, and in reports of faults.`,
		hints: reads,
	}, func(ctx context.Context, c *call, _ versionArguments) (versionResult, error) {
		var v api.ServiceInfo
		err := c.Do(ctx, http.MethodGet, "/v1/version", nil, &v)
		return versionResult{Version: c.version, ServiceVersion: v.Version, API: v.API, ServicePID: v.PID, Home: v.Home}, err
	})
}
