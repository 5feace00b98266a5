// Capsem-mcp is the MCP server on stdin and stdout through which an AI client
// uses virtual machines: see package mcptools.
package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/capsem/capsem/internal/client"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/mcptools"
)

// version is set by the build.
var version = "dev"

const usage = `usage: capsem-mcp [--version]

An MCP server for AI clients, on stdin and stdout: it makes virtual machines and
runs commands in them. It starts Capsem's service where none runs.
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	switch {
	case len(args) == 0:
	case len(args) == 1 && args[0] == "--version":
		fmt.Fprintln(stdout, "capsem-mcp", version)
		return 0
	case len(args) == 1 && (args[0] == "--help" || args[0] == "-h"):
		fmt.Fprint(stdout, usage)
		return 0
	default:
		fmt.Fprint(stderr, usage)
		return 2
	}
	log := slog.New(slog.NewJSONHandler(stderr, nil))
	o := mcptools.Options{Version: version, Log: log, Connect: connector(config.OSEnv(), log)}
	if err := mcptools.Serve(ctx, o, stdin, stdout); err != nil {
		log.Error("stopped", "error", err)
		return 1
	}
	return 0
}

// connector reaches the service by the socket for agents. What is wrong with the
// home is told to whoever calls a tool, not by a server that does not start.
func connector(env config.Env, log *slog.Logger) func(context.Context) (*client.Client, error) {
	var mu sync.Mutex
	var said string // the last news: calls would repeat it
	say := func(s string) {
		mu.Lock()
		defer mu.Unlock()
		if s != said {
			said = s
			log.Info("the service", "news", s)
		}
	}
	return func(ctx context.Context) (*client.Client, error) {
		home, err := config.OpenHome(env)
		if err != nil {
			return nil, err
		}
		socket, err := home.AgentSocket()
		if err != nil {
			return nil, err
		}
		capsemd, err := client.FindCapsemd()
		if err != nil {
			return nil, err
		}
		return client.Starter{
			Home: home, Executable: capsemd, Env: env.Daemon(), Version: version,
			Say: say,
		}.Ensure(ctx, socket)
	}
}
