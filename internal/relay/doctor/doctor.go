// Package doctor looks at a guest from the inside and says what is not as it
// should be.
//
// It uses what the guest's programs use: the mounted file systems, the host's
// ports, the MCP server as a client would start it. A check that passes is a
// thing that works, not a thing that is there.
package doctor

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"time"
)

// checkTimeout bounds one check.
const checkTimeout = 20 * time.Second

// Check is one thing that should be so.
type Check struct {
	// Name is what -k selects by: lower-case words joined by underscores.
	Name string
	// Run returns what it found, and an error if that is not right.
	Run func(ctx context.Context) (detail string, err error)
}

// Result is what came of one check.
type Result struct {
	Name       string `json:"name"`
	OK         bool   `json:"ok"`
	Detail     string `json:"detail"`
	DurationMS int64  `json:"duration_ms"`
}

// Report is all of them.
type Report struct {
	OK      bool     `json:"ok"`
	Results []Result `json:"results"`
}

// Run is the program: it runs the checks that -k selects and prints what they
// found. It returns 0 if all is well, 1 if a check failed, 2 for a command line
// that it cannot read or that selects nothing.
func Run(ctx context.Context, checks []Check, args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("capsem-doctor", flag.ContinueOnError)
	flags.SetOutput(stderr)
	expr := flags.String("k", "", "run only the checks whose name matches `EXPR`: words, and, or, not, ( )")
	asJSON := flags.Bool("json", false, "print the report as JSON")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	filter, err := ParseFilter(*expr)
	if err == nil && flags.NArg() > 0 {
		err = fmt.Errorf("%q is no option", flags.Arg(0))
	}
	if err != nil {
		fmt.Fprintln(stderr, "capsem-doctor:", err)
		return 2
	}
	report := Report{OK: true, Results: []Result{}}
	for _, c := range checks {
		if !filter(c.Name) {
			continue
		}
		r := examine(ctx, c)
		report.OK = report.OK && r.OK
		report.Results = append(report.Results, r)
		if !*asJSON {
			printResult(stdout, r)
		}
	}
	if len(report.Results) == 0 {
		fmt.Fprintf(stderr, "capsem-doctor: no check matches %q\n", *expr)
		return 2
	}
	if *asJSON {
		if err := json.NewEncoder(stdout).Encode(report); err != nil {
			fmt.Fprintln(stderr, "capsem-doctor: writing the report:", err)
			return 1
		}
	}
	if !report.OK {
		return 1
	}
	return 0
}

func examine(ctx context.Context, c Check) Result {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	start := time.Now()
	detail, err := c.Run(ctx)
	r := Result{Name: c.Name, OK: err == nil, Detail: detail, DurationMS: time.Since(start).Milliseconds()}
	if err != nil {
		r.Detail = err.Error()
	}
	return r
}

func printResult(w io.Writer, r Result) {
	mark := "ok  "
	if !r.OK {
		mark = "FAIL"
	}
	fmt.Fprintf(w, "%s %-18s %s\n", mark, r.Name, r.Detail)
}
