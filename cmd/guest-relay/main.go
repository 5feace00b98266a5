//go:build linux

// Command guest-relay is all of Capsem that runs in a guest, in one static
// binary. The name under which it is started says what it is: init, the first
// process; capsem-agent, which serves the host; capsem-mcp-server, which a guest's
// MCP client starts; capsem-doctor, which examines the guest.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path"
	"runtime/debug"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/relay/pid1"
)

func main() {
	// Before anything else: no descriptor that we were given may reach a command.
	unix.CloseOnExec(pid1.PowerFD)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	code := run(ctx, os.Args, os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is the program of the name in args[0].
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	log := slog.New(slog.NewJSONHandler(stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	var err error
	switch name := path.Base(args[0]); name {
	case "init":
		runInit()
	case "capsem-agent":
		err = runAgent(ctx, log)
	case "capsem-mcp-server":
		err = runMCP(ctx, stdin, stdout, log)
	case "capsem-doctor":
		return runDoctor(ctx, args[1:], stdout, stderr)
	default:
		err = fmt.Errorf("started as %q: it is a part of a guest and runs as init, capsem-agent, capsem-mcp-server or capsem-doctor", name)
	}
	if err != nil {
		fmt.Fprintln(stderr, "guest-relay:", err)
		return 1
	}
	return 0
}

// version is what the build knows of itself.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return info.Main.Version + " " + s.Value
		}
	}
	return info.Main.Version
}

// readWord reads a file of one word, "" if there is none.
func readWord(name string) string {
	b, err := os.ReadFile(name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// readEpoch reads the last epoch that an agent of this boot announced.
func readEpoch(name string) uint64 {
	n, err := strconv.ParseUint(readWord(name), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// errNotGuest keeps the agent from doing to a host what it does to a guest.
var errNotGuest = errors.New("only the first process of a guest starts the agent")
