package cli

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/client"
)

func (a *app) sql() *cobra.Command {
	var req api.SQLRequest
	var format string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   `sql VM "SELECT ..."`,
		Short: "Query a VM's ledger",
		Long: `Run one SELECT over a VM's ledger. Deleted VMs keep theirs, and are named by id
or by name; "service" is the service's own, with what concerns no VM. The tables
are described in docs/reference/ledger.md.`,
		Example: `  capsem sql box "SELECT timestamp, tool_name, status, decision FROM tool_calls ORDER BY id DESC LIMIT 10"`,
		Args:    exactly(2), ValidArgsFunction: a.oneVM,
		RunE: func(cmd *cobra.Command, args []string) error {
			if !slices.Contains([]string{"table", "json", "csv"}, format) {
				return usageError{fmt.Errorf("--format is table, json or csv, not %q", format)}
			}
			req.Query, req.TimeoutMS = args[1], timeout.Milliseconds()
			return a.with(cmd.Context(), func(c *client.Client) error {
				var result api.SQLResult
				if err := c.Do(cmd.Context(), http.MethodPost, vmPath(args[0])+"/sql", req, &result); err != nil {
					return err
				}
				if result.Truncated != "" {
					a.sayf("the result was cut at the limit of %s; --rows raises it", result.Truncated)
				}
				return a.show(result, func(w io.Writer) error { return sqlText(w, result, format) })
			})
		},
	}
	cmd.Flags().StringVar(&format, "format", "table", "table, json or csv")
	complete(cmd, "format", words("table", "json", "csv"))
	cmd.Flags().IntVar(&req.Rows, "rows", 0, "the most rows to print (default 10000)")
	cmd.Flags().DurationVar(&timeout, "timeout", 0, "the longest the query may take (default 10s)")
	return cmd
}

func sqlText(w io.Writer, r api.SQLResult, format string) error {
	switch format {
	case "json":
		enc := json.NewEncoder(w)
		enc.SetEscapeHTML(false)
		objects := make([]map[string]json.RawMessage, len(r.Rows))
		for i, row := range r.Rows {
			objects[i] = map[string]json.RawMessage{}
			for k, v := range row {
				objects[i][r.Columns[k]] = v
			}
		}
		return enc.Encode(objects)
	case "csv":
		cw := csv.NewWriter(w)
		if err := cw.Write(r.Columns); err != nil {
			return err
		}
		for _, row := range r.Rows {
			if err := cw.Write(cells(row)); err != nil {
				return err
			}
		}
		cw.Flush()
		return cw.Error()
	}
	var rows [][]string
	for _, row := range r.Rows {
		rows = append(rows, cells(row))
	}
	return table(w, r.Columns, rows)
}

func cells(row []json.RawMessage) []string {
	out := make([]string, len(row))
	for i, v := range row {
		var s string
		switch {
		case string(v) == "null":
		case json.Unmarshal(v, &s) == nil:
			out[i] = s
		default:
			out[i] = string(v)
		}
	}
	return out
}

func (a *app) timeline() *cobra.Command {
	var layers, since, trace string
	var limit int
	cmd := &cobra.Command{
		Use:   "timeline VM",
		Short: "Show what happened in a VM, newest last",
		Long: `Show what happened in a VM: tool calls, commands, requests, rules that matched,
and the VM's own events, newest last (with --json newest first). Deleted VMs
keep their ledgers, and are named by id or by name.`,
		Args: exactly(1), ValidArgsFunction: a.oneVM,
		RunE: func(cmd *cobra.Command, args []string) error {
			q := url.Values{"layers": {layers}, "since": {since}, "trace": {trace}, "limit": {strconv.Itoa(limit)}}
			return a.with(cmd.Context(), func(c *client.Client) error {
				var t api.Timeline
				if err := c.Do(cmd.Context(), http.MethodGet, vmPath(args[0])+"/timeline?"+q.Encode(), nil, &t); err != nil {
					return err
				}
				return a.show(t, func(w io.Writer) error { return timelineText(w, t) })
			})
		},
	}
	cmd.Flags().StringVar(&layers, "layers", "", "only these, as `tool,exec,net`")
	cmd.Flags().StringVar(&since, "since", "", "only what is newer: `10m`, or a time")
	cmd.Flags().StringVar(&trace, "trace", "", "only what has this trace `id`")
	cmd.Flags().IntVarP(&limit, "limit", "n", 50, "at most so many")
	return cmd
}

func timelineText(w io.Writer, t api.Timeline) error {
	// A page is keyed by event ids; a row that counts several messages has its
	// id from when they were counted, and belongs where the first of them was.
	entries := slices.Clone(t.Entries)
	slices.Reverse(entries)
	slices.SortStableFunc(entries, func(a, b api.TimelineEntry) int { return strings.Compare(a.Timestamp, b.Timestamp) })
	var rows [][]string
	for _, e := range entries {
		who := e.InitiatorKind
		if e.Process != "" {
			who += "/" + e.Process
		}
		took := ""
		if e.DurationUS > 0 {
			took = (time.Duration(e.DurationUS) * time.Microsecond).Round(10 * time.Microsecond).String()
		}
		what := strings.TrimSpace(e.Decision + " " + e.Rule)
		rows = append(rows, []string{clock(e.Timestamp), e.Layer, who, e.Subject, e.Status, what, took, e.Detail})
	}
	return table(w, []string{"TIME", "LAYER", "WHO", "WHAT", "STATUS", "DECISION", "TOOK", "DETAIL"}, rows)
}

// clock is the time of day of a timestamp.
func clock(ts string) string {
	t, err := time.Parse(time.RFC3339Nano, ts)
	if err != nil {
		return ts
	}
	return t.Local().Format("15:04:05.000")
}

func (a *app) logs() *cobra.Command {
	var source, grep string
	var tail int
	cmd := &cobra.Command{
		Use:   "logs VM",
		Short: "Show what a VM's console or host process printed",
		Args:  exactly(1), ValidArgsFunction: a.oneVM,
		RunE: func(cmd *cobra.Command, args []string) error {
			q := url.Values{"source": {source}, "grep": {grep}}
			if tail > 0 {
				q.Set("tail", strconv.Itoa(tail))
			}
			return a.with(cmd.Context(), func(c *client.Client) error {
				var l api.Logs
				if err := c.Do(cmd.Context(), http.MethodGet, vmPath(args[0])+"/logs?"+q.Encode(), nil, &l); err != nil {
					return err
				}
				return a.show(l, func(w io.Writer) error {
					_, err := io.WriteString(w, Escape(strings.ReplaceAll(l.Text, "\r\n", "\n"), true))
					return err
				})
			})
		},
	}
	cmd.Flags().StringVar(&source, "source", "serial", "serial (the guest's console) or process (the VM's host process)")
	complete(cmd, "source", words("serial", "process"))
	cmd.Flags().StringVar(&grep, "grep", "", "only lines that contain this `text`")
	cmd.Flags().IntVarP(&tail, "tail", "n", 0, "only the last so many `lines`")
	return cmd
}
