package ledger

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
)

// The bounds of a page of the timeline.
const (
	DefaultTimelineLimit = 100
	MaxTimelineLimit     = 10_000
)

// Entry is one row of the timeline, whichever table it is from.
type Entry struct {
	Layer         string `json:"layer"`
	ID            int64  `json:"id"`
	EventID       string `json:"event_id"`
	Timestamp     string `json:"timestamp"`
	TraceID       string `json:"trace_id,omitempty"`
	InitiatorKind string `json:"initiator_kind,omitempty"`
	InitiatorID   string `json:"initiator_id,omitempty"`
	Process       string `json:"process_name,omitempty"`
	// Subject says what it is about: a tool, a command, a URL, a rule.
	Subject  string `json:"subject"`
	Status   string `json:"status,omitempty"`
	Decision string `json:"decision,omitempty"`
	Rule     string `json:"rule_id,omitempty"`
	Detail   string `json:"detail,omitempty"`
	// DurationUS is in microseconds, 0 while it is not known.
	DurationUS int64 `json:"duration_us,omitempty"`
}

// TimelineOptions select a page of the timeline.
type TimelineOptions struct {
	// Layers are of Layers(); none are all.
	Layers []string
	// Since leaves out what was before it, to the millisecond.
	Since time.Time
	// Trace, unless empty, leaves out what is not of that cause.
	Trace string
	// Limit is DefaultTimelineLimit when 0, at most MaxTimelineLimit.
	Limit int
	// Before is the cursor of the page before this one, "" for the newest.
	Before string
}

// Page is one page of the timeline, newest first. Next is the cursor of the
// page after it, "" after the last.
type Page struct {
	Entries []Entry `json:"entries"`
	Next    string  `json:"next,omitempty"`
}

// layer is a table as the timeline shows it. Among rows of one event, a layer
// further down the list counts as newer.
type layer struct {
	name, table                                 string
	subject, status, decision, detail, duration string
}

func layers() []layer {
	return []layer{
		{"vm", "vm_events", "kind", "status", "decision", "coalesce(error_message, detail)", "duration_us"},
		{
			"mcp", "protocol_events", "coalesce(method, event_type) || coalesce(' ' || subject, '')", "status", "decision",
			"coalesce(error_message, detail, reason) || iif(count > 1, ' (' || count || ' times)', '')", "duration_us",
		},
		{"tool", "tool_calls", "tool_name", "status", "decision", "coalesce(error_message, reason)", "duration_us"},
		{"exec", "exec_events", "argv", "status", "decision", "coalesce(error_message, reason, signal, 'exit ' || exit_code)", "duration_us"},
		{"fs", "fs_events", "op || ' ' || path", "status", "decision", "coalesce(error_message, reason)", "duration_us"},
		{
			"net", "net_events", "method || ' ' || scheme || '://' || host || coalesce(':' || port, '') || coalesce(path, '')", "state",
			"decision", "coalesce(error_message, reason, 'status ' || status)", "duration_us",
		},
		{"security", "security_rule_events", "rule_id", "phase", "action", "reason", "NULL"},
	}
}

// Layers lists the layers that the timeline has.
func Layers() []string {
	var names []string
	for _, l := range layers() {
		names = append(names, l.name)
	}
	slices.Sort(names)
	return names
}

// sql is the layer's part of a page. Its cost is that of the rows it gives: it
// walks an index from the cursor, whatever the table holds. The parameters are
// the cursor's event id and row id, the oldest event id, [the trace,] and the limit.
func (l layer) sql(traced bool) string {
	trace := ""
	if traced {
		trace = " AND trace_id = ?"
	}
	return fmt.Sprintf(`SELECT id, event_id, timestamp, coalesce(trace_id, ''), coalesce(initiator_kind, ''), coalesce(initiator_id, ''),
	coalesce(process_name, ''), coalesce(%s, ''), coalesce(%s, ''), coalesce(%s, ''), coalesce(rule_id, ''), coalesce(%s, ''), coalesce(%s, 0)
FROM %s WHERE event_id <= ? AND (event_id < ? OR id < ?) AND event_id >= ?%s ORDER BY event_id DESC, id DESC LIMIT ?`,
		l.subject, l.status, l.decision, l.detail, l.duration, l.table, trace)
}

// cursor is the place of a row: event ids are UUIDv7, so they sort by time.
type cursor struct {
	event string
	layer int // index in layers()
	id    int64
}

// newest is a cursor before all rows.
func newest() cursor { return cursor{event: "\U0010FFFF", layer: math.MaxInt, id: math.MaxInt64} }

func (c cursor) String() string {
	return fmt.Sprintf("%s/%s/%d", c.event, layers()[c.layer].name, c.id)
}

func parseCursor(s string) (cursor, error) {
	if s == "" {
		return newest(), nil
	}
	parts := strings.Split(s, "/")
	if len(parts) == 3 && parts[0] != "" {
		i := slices.IndexFunc(layers(), func(l layer) bool { return l.name == parts[1] })
		id, err := strconv.ParseInt(parts[2], 10, 64)
		if i >= 0 && err == nil {
			return cursor{parts[0], i, id}, nil
		}
	}
	return cursor{}, fmt.Errorf("%q is no cursor of a timeline", s)
}

// idFor is the row id under which rows of layer i that belong to the cursor's
// own event come after it.
func (c cursor) idFor(i int) int64 {
	switch {
	case i < c.layer:
		return math.MaxInt64
	case i > c.layer:
		return 0 // ids begin at 1
	default:
		return c.id
	}
}

// Timeline gives a page of what happened, newest first.
func (r *Reader) Timeline(ctx context.Context, options TimelineOptions) (*Page, error) {
	page, err := r.timeline(ctx, options)
	if err != nil {
		return nil, fmt.Errorf("reading the timeline of ledger %s: %w", r.path, err)
	}
	return page, nil
}

func (r *Reader) timeline(ctx context.Context, options TimelineOptions) (*Page, error) {
	at, err := parseCursor(options.Before)
	if err != nil {
		return nil, err
	}
	wanted, err := wantedLayers(options.Layers)
	if err != nil {
		return nil, err
	}
	limit := options.Limit
	if limit <= 0 {
		limit = DefaultTimelineLimit
	}
	limit = min(limit, MaxTimelineLimit)
	ctx, cancel := context.WithTimeout(ctx, DefaultQueryTime)
	defer cancel()
	var all []ranked
	for i, l := range layers() {
		if !wanted[l.name] {
			continue
		}
		args := []any{at.event, at.event, at.idFor(i), oldestID(options.Since)}
		if options.Trace != "" {
			args = append(args, options.Trace)
		}
		entries, err := r.entries(ctx, l.name, l.sql(options.Trace != ""), append(args, limit+1))
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			all = append(all, ranked{e, i})
		}
	}
	return newPage(all, limit), nil
}

type ranked struct {
	Entry
	rank int
}

func newPage(all []ranked, limit int) *Page {
	slices.SortFunc(all, func(a, b ranked) int {
		return cmp.Or(cmp.Compare(b.EventID, a.EventID), cmp.Compare(b.rank, a.rank), cmp.Compare(b.ID, a.ID))
	})
	page := &Page{Entries: []Entry{}}
	if len(all) > limit {
		all = all[:limit]
		last := all[limit-1]
		page.Next = cursor{last.EventID, last.rank, last.ID}.String()
	}
	for _, e := range all {
		page.Entries = append(page.Entries, e.Entry)
	}
	return page
}

func wantedLayers(names []string) (map[string]bool, error) {
	known := Layers()
	if len(names) == 0 {
		names = known
	}
	wanted := map[string]bool{}
	for _, name := range names {
		if !slices.Contains(known, name) {
			return nil, fmt.Errorf("there is no layer %q: it is one of %s", name, strings.Join(known, ", "))
		}
		wanted[name] = true
	}
	return wanted, nil
}

// oldestID is the smallest UUIDv7 of a time (RFC 9562, section 5.7: the first
// 48 bits are milliseconds).
func oldestID(since time.Time) string {
	if since.IsZero() || since.UnixMilli() <= 0 {
		return ""
	}
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(since.UnixMilli())<<16)
	var id uuid.UUID
	copy(id[:], b[:6])
	return id.String()
}

func (r *Reader) entries(ctx context.Context, layer, query string, args []any) (entries []Entry, err error) {
	rows, err := r.db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		e := Entry{Layer: layer}
		if err := rows.Scan(&e.ID, &e.EventID, &e.Timestamp, &e.TraceID, &e.InitiatorKind, &e.InitiatorID, &e.Process,
			&e.Subject, &e.Status, &e.Decision, &e.Rule, &e.Detail, &e.DurationUS); err != nil {
			return nil, err
		}
		entries = append(entries, e)
	}
	return entries, rows.Err()
}
