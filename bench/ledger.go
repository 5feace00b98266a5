package main

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

func ledgerBenchmark() benchmark {
	return benchmark{
		name: "ledger",
		about: "tool calls a second of as many callers at a time, each with intent, outcome and two bodies of 1 KiB; the floor is the same inserts and " +
			"updates through the same connection in batches of as many calls, without digests and compression (BenchmarkToolCall of internal/ledger)",
		run: benchLedger,
	}
}

func benchLedger(ctx context.Context, l *lab) ([]row, error) {
	program := filepath.Join(l.dir, "ledger.test")
	build := exec.CommandContext(ctx, "go", "test", "-c", "-o", program, "github.com/capsem/capsem/internal/ledger")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("building the ledger's benchmarks: %w: %s", err, out)
	}
	var rows []row
	for _, callers := range []int{1, 10, 50, 200} {
		measure := func(side string) side {
			return func(ctx context.Context) (float64, error) {
				return l.callsPerSecond(ctx, program, fmt.Sprintf("%s/callers=%d", side, callers))
			}
		}
		all, err := alternate(ctx, l.rounds(7), measure("ours"), measure("floor"))
		if err != nil {
			return nil, err
		}
		rows = append(rows, compare(fmt.Sprintf("ledger, %d callers", callers), "calls/s", all[0], all[1], atLeast(0.6), ""))
	}
	return rows, nil
}

// callsPerSecond runs one of the package's benchmarks.
func (l *lab) callsPerSecond(ctx context.Context, program, name string) (float64, error) {
	cmd := exec.CommandContext(ctx, program, "-test.run=^$", "-test.bench=^BenchmarkToolCall$/^"+strings.ReplaceAll(name, "/", "$/^")+"$", "-test.benchtime=2000x")
	cmd.Dir = l.dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("running the ledger's benchmark: %w: %s", err, out)
	}
	fields := strings.Fields(string(out))
	for i, word := range fields {
		if word == "calls/s" && i > 0 {
			return strconv.ParseFloat(fields[i-1], 64)
		}
	}
	return 0, fmt.Errorf("the ledger's benchmark %s says no calls/s: %s", name, out)
}
