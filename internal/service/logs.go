package service

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"strconv"
	"strings"

	"github.com/capsem/capsem/internal/api"
)

// maxLog is how much of the end of a log is read, in bytes.
const maxLog = 1 << 20

// serveLogs answers the end of one of a VM's logs. They are files that stay
// readable when the VM does not run.
func (s *Service) serveLogs(w http.ResponseWriter, r *http.Request) error {
	m, err := s.registry.find(r.PathValue("vm"))
	if err != nil {
		return err
	}
	q := r.URL.Query()
	logs := api.Logs{Source: first(q.Get("source"), "serial")}
	var path string
	switch logs.Source {
	case "serial":
		path = s.opts.Home.SerialLog(m.id)
	case "process":
		path = s.opts.Home.ProcessLog(m.id)
	default:
		return &api.Error{Code: api.CodeInvalid, Message: fmt.Sprintf("there is no log %q", logs.Source), Hint: "the logs are serial and process"}
	}
	tail := 0
	if t := q.Get("tail"); t != "" {
		if tail, err = strconv.Atoi(t); err != nil || tail < 0 {
			return &api.Error{Code: api.CodeInvalid, Message: fmt.Sprintf("tail=%s is not a number of lines", t)}
		}
	}
	if logs.Text, logs.Truncated, err = readTail(path); err != nil {
		return err
	}
	logs.Text = pick(logs.Text, q.Get("grep"), tail, &logs.Truncated)
	api.WriteJSON(w, http.StatusOK, logs)
	return nil
}

// readTail reads the end of a file, from the start of a line.
func readTail(path string) (text string, cut bool, err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("opening a log: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return "", false, fmt.Errorf("reading a log: %w", err)
	}
	if info.Size() > maxLog {
		cut = true
		if _, err := f.Seek(-maxLog, io.SeekEnd); err != nil {
			return "", false, fmt.Errorf("reading a log: %w", err)
		}
	}
	b, err := io.ReadAll(io.LimitReader(f, maxLog))
	if err != nil {
		return "", false, fmt.Errorf("reading a log: %w", err)
	}
	text = strings.ToValidUTF8(string(b), "\uFFFD")
	if cut {
		_, text, _ = strings.Cut(text, "\n")
	}
	return text, cut, nil
}

// pick keeps the lines that hold grep, and of those the last tail, if not 0.
func pick(text, grep string, tail int, cut *bool) string {
	lines := strings.SplitAfter(text, "\n")
	kept := lines[:0]
	for _, line := range lines {
		if line != "" && strings.Contains(line, grep) {
			kept = append(kept, line)
		}
	}
	if tail > 0 && len(kept) > tail {
		kept, *cut = kept[len(kept)-tail:], true
	}
	return strings.Join(kept, "")
}
