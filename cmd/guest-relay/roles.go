//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/guestproto"
	"github.com/capsem/capsem/internal/relay"
	"github.com/capsem/capsem/internal/relay/command"
	"github.com/capsem/capsem/internal/relay/doctor"
	"github.com/capsem/capsem/internal/relay/pid1"
	"github.com/capsem/capsem/internal/relay/sysmon"
	"github.com/capsem/capsem/internal/relay/system"
	"github.com/capsem/capsem/internal/relay/vsocknet"
)

// Where things are in a guest.
const (
	self      = "/init"
	mcpServer = "/run/capsem-mcp-server"
	bootID    = "/proc/sys/kernel/random/boot_id"
	epochFile = system.Folder + "/epoch"
)

// closedPort is a port on which earlier Capsems had a service; it must refuse.
const closedPort = 5003

// dialTimeout is how long a program of the guest waits for the host to answer,
// and for the device while the guest is being resumed.
const dialTimeout = 20 * time.Second

// runInit is the first process. It does not return.
func runInit() {
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "init: this is the first process of a guest, and nothing else")
		os.Exit(1)
	}
	pid1.Run(pid1.Config{
		Program:  "/proc/self/exe",
		Args:     []string{"capsem-agent"},
		Hostname: "capsem",
		Links: [][2]string{
			{mcpServer, self},
			{"/run/capsem-doctor", self},
			{"/usr/bin/capsem-doctor", self},
		},
	})
}

// runAgent serves the host until the guest ends.
func runAgent(ctx context.Context, log *slog.Logger) error {
	if os.Getppid() != 1 {
		return errNotGuest
	}
	rest(log)
	if err := os.MkdirAll(system.Folder, 0o755); err != nil {
		return fmt.Errorf("making the agent's folder: %w", err)
	}
	groups, err := command.OpenCgroups(pid1.Commands)
	if err != nil {
		log.Warn("commands have no cgroups", "error", err)
	}
	var stages []guestproto.Timing
	for _, s := range pid1.ParseStages(os.Getenv(pid1.StagesEnv)) {
		stages = append(stages, guestproto.Timing{Stage: s.Name, NS: int64(s.At)})
	}
	terminate := make(chan os.Signal, 1)
	signal.Notify(terminate, unix.SIGTERM)
	stop := make(chan struct{})
	go func() { // lives as long as the agent
		<-terminate
		close(stop)
	}()
	return relay.Run(ctx, vsocknet.Network{}, relay.Options{
		Version: version(),
		BootID:  readWord(bootID),
		Epoch:   readEpoch(epochFile),
		OnEpoch: func(epoch uint64) {
			if err := os.WriteFile(epochFile, strconv.AppendUint(nil, epoch, 10), 0o644); err != nil {
				log.Warn("noting the epoch", "error", err)
			}
		},
		Stop:    stop,
		System:  &system.System{Power: os.NewFile(pid1.PowerFD, "power")},
		Cgroups: groups,
		Stages:  stages,
		Log:     log,
	})
}

// spareProcessors is for how many goroutines the runtime has a processor at least:
// one in a long system call keeps its own until the monitor sees it, and the
// others must not wait for that.
const spareProcessors = 4

// rest spares a guest whose processor is emulated most of what the runtime's
// monitor costs. Without it all works, slower.
func rest(log *slog.Logger) {
	if err := sysmon.Rest(); err != nil {
		log.Info("the runtime's monitor does not rest", "error", err)
		return
	}
	runtime.GOMAXPROCS(max(runtime.NumCPU(), spareProcessors))
}

// reopen opens a pipe once more, for the runtime's poller. The descriptor that we
// were given may be shared, and stays as it is; what is no pipe, or another
// user's, cannot be opened, and its reads block.
func reopen(stdin io.Reader) (*os.File, error) {
	f, ok := stdin.(*os.File)
	if !ok {
		return nil, os.ErrInvalid
	}
	info, err := f.Stat()
	if err == nil && info.Mode().Type() != os.ModeNamedPipe {
		err = os.ErrInvalid
	}
	if err != nil {
		return nil, err
	}
	return os.OpenFile("/proc/self/fd/"+strconv.Itoa(int(f.Fd())), os.O_RDONLY|unix.O_NONBLOCK, 0)
}

// runMCP is a guest's MCP server.
func runMCP(ctx context.Context, stdin io.Reader, stdout io.Writer, log *slog.Logger) error {
	// A read that blocks would keep the processor from every other goroutine
	// until the monitor sees it.
	if pipe, err := reopen(stdin); err == nil {
		defer pipe.Close()
		stdin = pipe
		rest(log)
	}
	return relay.MCP(ctx, stdin, stdout, relay.MCPOptions{
		Dial: func(ctx context.Context) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, dialTimeout)
			defer cancel()
			return vsocknet.Network{}.Dial(ctx, guestproto.PortMCP)
		},
		Process: relay.ProcessName(os.Getppid()),
		More: func() bool {
			known, err := system.ReadKnown()
			if err != nil {
				log.Warn("asking what the host takes", "error", err)
			}
			return known.More
		},
		Log: log,
	})
}

// runDoctor examines the guest.
func runDoctor(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	g := doctor.Guest{
		Dial:   vsocknet.Network{}.DialNow,
		Open:   []uint32{guestproto.PortControl, guestproto.PortMCP},
		Closed: closedPort,
		Server: mcpServer,
	}
	if _, err := os.Stat(pid1.Commands); err == nil {
		g.Cgroups = pid1.Commands
	}
	return doctor.Run(ctx, g.Checks(), args, stdout, stderr)
}
