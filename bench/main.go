// Bench measures Capsem against floors and writes what it finds to
// bench/report.md and bench/latest.json: `go run ./bench [NAME…]`, or `just
// bench`.
//
// Machines differ and are noisy, so every bar is a ratio against a floor that is
// measured in the same run, in turn with what it is compared with: A B A B. What
// counts is the median of the rounds; the report has the spread of their ratios
// beside it, which says how much the machine's other work got in. A floor does
// the same work with nothing of Capsem in it: the same bytes through the same
// kinds of connections and as many processes, the same SQL, the same QEMU
// command. What each floor is stands with its benchmark, one file each, and in
// the report.
//
// A benchmark that is run by name replaces its rows in the report and leaves the
// others as they are.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// benchmark is one bar, or several that share what they need.
type benchmark struct {
	name string
	// about says for the report what is measured and what the floor is.
	about string
	run   func(ctx context.Context, l *lab) ([]row, error)
}

// benchmarks are all, in the order in which they run: those that boot come
// first, while no other machine is there.
func benchmarks() []benchmark {
	return []benchmark{
		bootBenchmark(), execBenchmark(), sshBenchmark(), mcpGuestBenchmark(), mcpHostBenchmark(), ledgerBenchmark(),
		policyBenchmark(), frameBenchmark(), vsockBenchmark(), memoryBenchmark(), historyBenchmark(),
	}
}

func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	if len(args) > 0 && strings.HasPrefix(args[0], rolePrefix) {
		return report(stderr, playRole(ctx, args, stdin, stdout))
	}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	programs := flags.String("bin", "bin", "the `folder` of the built programs")
	out := flags.String("out", "bench", "the `folder` of the report")
	scale := flags.Float64("scale", 1, "how many rounds, as a `factor`; what is under 1 is for trying a benchmark out")
	flags.Usage = func() {
		fmt.Fprintln(stderr, "usage: bench [flags] [NAME…]")
		flags.PrintDefaults()
		for _, b := range benchmarks() {
			fmt.Fprintf(stderr, "  %-10s %s\n", b.name, b.about)
		}
	}
	if err := flags.Parse(args); err != nil {
		return 2
	}
	chosen, err := choose(flags.Args())
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return 2
	}
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	return report(stderr, measure(ctx, chosen, *programs, *out, *scale, stdout, log))
}

func report(stderr io.Writer, err error) int {
	if err == nil {
		return 0
	}
	fmt.Fprintln(stderr, "bench:", err)
	return 1
}

func choose(names []string) ([]benchmark, error) {
	all := benchmarks()
	if len(names) == 0 {
		return all, nil
	}
	var known []string
	for _, b := range all {
		known = append(known, b.name)
	}
	for _, name := range names {
		if !slices.Contains(known, name) {
			return nil, fmt.Errorf("there is no benchmark %q; there are %s", name, strings.Join(known, ", "))
		}
	}
	return slices.DeleteFunc(all, func(b benchmark) bool { return !slices.Contains(names, b.name) }), nil
}

// measure runs benchmarks and writes the report after each, so that one which
// fails takes nothing with it.
func measure(ctx context.Context, chosen []benchmark, programs, out string, scale float64, stdout io.Writer, log *slog.Logger) (err error) {
	l, err := openLab(ctx, programs, scale, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close(context.WithoutCancel(ctx))) }()
	results, err := readResults(filepath.Join(out, resultsFile))
	if err != nil {
		return err
	}
	var failed error
	for _, b := range chosen {
		fmt.Fprintf(stdout, "%s: %s\n", b.name, b.about)
		began := describeLoad()
		rows, err := b.run(ctx, l)
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", b.name, err))
			fmt.Fprintf(stdout, "  failed: %v\n", err)
		}
		for i := range rows {
			rows[i].Bench, rows[i].Load, rows[i].At = b.name, began, time.Now().UTC().Truncate(time.Second)
			fmt.Fprintln(stdout, "  "+rows[i].line())
		}
		results.replace(b.name, rows)
		results.Machine = describeMachine(ctx, l)
		if err := results.write(out); err != nil {
			return errors.Join(failed, err)
		}
		if ctx.Err() != nil {
			return errors.Join(failed, ctx.Err())
		}
	}
	return failed
}
