package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// The files of the report.
const (
	resultsFile = "latest.json"
	reportFile  = "report.md"
)

// results is everything that was measured last.
type results struct {
	Machine machine   `json:"machine"`
	At      time.Time `json:"at"`
	Rows    []row     `json:"rows"`
}

// readResults reads what an earlier run found, nothing if there was none.
func readResults(file string) (*results, error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return &results{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading earlier results: %w", err)
	}
	var r results
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, fmt.Errorf("reading earlier results %s: %w", file, err)
	}
	return &r, nil
}

// replace puts rows in the place of those that a benchmark had before. One that
// found nothing keeps what it had.
func (r *results) replace(bench string, rows []row) {
	if len(rows) == 0 {
		return
	}
	kept := slices.DeleteFunc(r.Rows, func(old row) bool { return old.Bench == bench })
	r.Rows = append(kept, rows...)
	order := map[string]int{}
	for i, b := range benchmarks() {
		order[b.name] = i
	}
	slices.SortStableFunc(r.Rows, func(a, b row) int { return order[a.Bench] - order[b.Bench] })
	r.At = time.Now().UTC().Truncate(time.Second)
}

func (r *results) write(dir string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding the results: %w", err)
	}
	err = os.WriteFile(filepath.Join(dir, resultsFile), append(b, '\n'), 0o644)
	if err := errors.Join(err, os.WriteFile(filepath.Join(dir, reportFile), []byte(r.markdown()), 0o644)); err != nil {
		return fmt.Errorf("writing the report: %w", err)
	}
	return nil
}

func (r *results) markdown() string {
	var b strings.Builder
	b.WriteString("# What Capsem costs\n\nWritten by `just bench`. Every bar is a ratio against a floor measured in the same run, in turn with ours; figures are medians, and behind a ratio stand the lowest and the highest of its rounds.\n\n")
	fmt.Fprintf(&b, "%s. Last run ended %s.\n\n", r.Machine, r.At.Format(time.RFC3339))
	b.WriteString("| what | ours | floor | ratio (spread) | bar | met | rounds | load | measured |\n|---|---:|---:|---:|---:|---|---:|---|---|\n")
	for _, row := range r.Rows {
		what := row.What
		if row.Note != "" {
			what += " — " + row.Note
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s | %d | %s | %s |\n", what, amount(row.Ours, row.Unit), row.floor(), row.ratio(),
			row.wanted(), row.met(), row.Rounds, row.Load, row.At.Format(time.DateTime))
	}
	b.WriteString("\n## What was compared\n\n")
	for _, bench := range benchmarks() {
		fmt.Fprintf(&b, "- **%s**: %s\n", bench.name, bench.about)
	}
	b.WriteString("\nThe load is the machine's average of the last minute when the benchmark began; one run alone has about 1.\n")
	return b.String()
}
