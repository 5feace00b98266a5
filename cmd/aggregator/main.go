// Capsem-aggregator holds one external MCP server. The supervisor starts it, in a jail,
// and speaks toolproto with it on stdin and stdout; stderr is a log.
package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/capsem/capsem/internal/aggregator"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, stdin *os.File, stdout, stderr io.Writer) int {
	if len(args) > 0 {
		fmt.Fprintln(stderr, "usage: capsem-aggregator (it takes no arguments, and speaks with its supervisor on stdin and stdout)")
		return 2
	}
	// Without this, a read could not be interrupted by a signal.
	if err := syscall.SetNonblock(int(stdin.Fd()), true); err != nil {
		fmt.Fprintf(stderr, "capsem-aggregator: preparing stdin: %v\n", err)
		return 1
	}
	in := os.NewFile(stdin.Fd(), "stdin")
	log := slog.New(slog.NewJSONHandler(stderr, nil))
	if err := aggregator.Run(ctx, in, stdout, log); err != nil {
		log.Error("stopped", "error", err)
		return 1
	}
	return 0
}
