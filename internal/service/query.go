package service

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/ledger"
)

// ServiceRef is the name by which the service's own ledger is asked.
const ServiceRef = "service"

// ledgerOf opens the ledger of a VM, live, stopped or deleted, to read.
func (s *Service) ledgerOf(ref string) (*ledger.Reader, error) {
	if ref == ServiceRef {
		return ledger.OpenReader(s.opts.Home.ServiceLedger())
	}
	m, err := s.registry.find(ref)
	if err == nil {
		return ledger.OpenReader(s.opts.Home.Ledger(m.id))
	}
	if v, ok := s.deletedVM(ref); ok {
		return ledger.OpenReader(s.opts.Home.SealedLedger(v.ID))
	}
	return nil, err
}

func (s *Service) serveSQL(w http.ResponseWriter, r *http.Request) (err error) {
	var req api.SQLRequest
	if err := api.ReadJSON(r, &req); err != nil {
		return err
	}
	reader, err := s.ledgerOf(r.PathValue("vm"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, reader.Close()) }()
	got, err := reader.Query(r.Context(), req.Query, ledger.Limits{Rows: req.Rows, Time: time.Duration(req.TimeoutMS) * time.Millisecond})
	if err != nil {
		return &api.Error{Code: api.CodeInvalid, Message: err.Error()}
	}
	result := api.SQLResult{Columns: got.Columns, Rows: [][]json.RawMessage{}, Truncated: got.Truncated}
	for _, row := range got.Rows {
		values := make([]json.RawMessage, len(row))
		for i, v := range row {
			if values[i], err = sqlValue(v); err != nil {
				return err
			}
		}
		result.Rows = append(result.Rows, values)
	}
	api.WriteJSON(w, http.StatusOK, result)
	return nil
}

// sqlValue is a value as JSON has it; bytes become an object with their base64.
func sqlValue(v any) (json.RawMessage, error) {
	if b, ok := v.([]byte); ok {
		v = map[string][]byte{"base64": b}
	}
	raw, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encoding a value: %w", err)
	}
	return raw, nil
}

func (s *Service) serveTimeline(w http.ResponseWriter, r *http.Request) (err error) {
	q := r.URL.Query()
	o := ledger.TimelineOptions{Trace: q.Get("trace"), Before: q.Get("before")}
	if layers := q.Get("layers"); layers != "" {
		o.Layers = strings.Split(layers, ",")
	}
	if o.Since, err = readSince(q.Get("since")); err != nil {
		return err
	}
	if limit := q.Get("limit"); limit != "" {
		if o.Limit, err = strconv.Atoi(limit); err != nil || o.Limit < 0 {
			return &api.Error{Code: api.CodeInvalid, Message: fmt.Sprintf("limit=%s is not a number", limit)}
		}
	}
	reader, err := s.ledgerOf(r.PathValue("vm"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, reader.Close()) }()
	page, err := reader.Timeline(r.Context(), o)
	if err != nil {
		return &api.Error{Code: api.CodeInvalid, Message: err.Error()}
	}
	timeline := api.Timeline{Entries: []api.TimelineEntry{}, Next: page.Next}
	for _, e := range page.Entries {
		timeline.Entries = append(timeline.Entries, api.TimelineEntry{
			Timestamp: e.Timestamp, Layer: e.Layer, EventID: e.EventID, TraceID: e.TraceID,
			InitiatorKind: e.InitiatorKind, InitiatorID: e.InitiatorID, Process: e.Process,
			Subject: e.Subject, Status: e.Status, Decision: e.Decision, Rule: e.Rule,
			Detail: e.Detail, DurationUS: e.DurationUS,
		})
	}
	api.WriteJSON(w, http.StatusOK, timeline)
	return nil
}

// readSince reads a time (RFC 3339) or how long ago it was ("10m").
func readSince(s string) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	if t, err := time.Parse(time.RFC3339, s); err == nil {
		return t, nil
	}
	ago, err := time.ParseDuration(s)
	if err != nil || ago < 0 {
		return time.Time{}, &api.Error{Code: api.CodeInvalid, Message: fmt.Sprintf("since=%s is neither a time nor how long ago", s), Hint: "for example 10m, or 2026-01-02T15:04:05Z"}
	}
	return time.Now().Add(-ago), nil
}
