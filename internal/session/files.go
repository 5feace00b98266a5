package session

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/guestproto"
)

// maxJudged is how large a file can be whose content rules see: it is held
// whole until it is judged. Larger ones are judged without it.
const maxJudged = 16 << 20

// serveReadFile sends a file of the guest.
func (s *Session) serveReadFile(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	path, err := guestPath(q)
	if err != nil {
		return err
	}
	offset, err := number(q, "offset")
	if err != nil {
		return err
	}
	limit, err := number(q, "limit")
	if err != nil {
		return err
	}
	info, err := s.guest.Stat(r.Context(), path)
	if err != nil {
		return err
	}
	ev := s.requester(r).Export(event.File{Path: path, Size: info.Size})
	body := &bytes.Buffer{}
	var failure error
	verdict, out := s.gate.Do(r.Context(), ev, func(ctx context.Context) event.Outcome {
		info, failure = s.guest.ReadFile(ctx, path, offset, limit, &bounded{body})
		return fileOutcome(ctx, int64(body.Len()), failure)
	})
	if verdict.Decision != event.Allow {
		return blocked(out)
	}
	if failure != nil {
		return failure
	}
	return sendFile(w, describe(path, info), body)
}

func sendFile(w http.ResponseWriter, info api.FileInfo, body *bytes.Buffer) error {
	raw, err := json.Marshal(info)
	if err != nil {
		return fmt.Errorf("encoding a file's description: %w", err)
	}
	w.Header().Set(api.HeaderFile, string(raw))
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.Itoa(body.Len()))
	status := http.StatusOK
	if int64(body.Len()) != info.Size {
		status = http.StatusPartialContent
	}
	w.WriteHeader(status)
	if _, err := body.WriteTo(w); err != nil {
		return nil //nolint:nilerr // the client is gone; the export is recorded
	}
	return nil
}

// maxFile is how large a file can be that is moved in one request: it is held
// until its digest is checked, so that nobody gets a part for the whole.
const maxFile = 64 << 20

// bounded writes at most maxFile bytes to a buffer.
type bounded struct{ buffer *bytes.Buffer }

func (b *bounded) Write(p []byte) (int, error) {
	if b.buffer.Len()+len(p) > maxFile {
		return 0, &api.Error{
			Code: api.CodeTooLarge, Message: fmt.Sprintf("the file has more than %d bytes", maxFile),
			Hint: "read it in parts, with offset and limit",
		}
	}
	return b.buffer.Write(p)
}

// serveWriteFile puts a file into the guest.
func (s *Session) serveWriteFile(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	path, err := guestPath(q)
	if err != nil {
		return err
	}
	f := guestproto.WriteFile{Path: []byte(path), Size: -1, Append: q.Get("append") == "true", Parents: q.Get("parents") == "true"}
	if mode := q.Get("mode"); mode != "" {
		bits, err := strconv.ParseUint(mode, 8, 32)
		if err != nil || bits == 0 || bits > 0o7777 {
			return &api.Error{Code: api.CodeInvalid, Message: fmt.Sprintf("mode=%s is not octal permission bits", mode), Hint: "for example 0644"}
		}
		f.Mode = uint32(bits)
	}
	content, err := io.ReadAll(io.LimitReader(r.Body, maxFile+1))
	if err != nil {
		return &api.Error{Code: api.CodeInvalid, Message: "reading the file: " + err.Error()}
	}
	if len(content) > maxFile {
		return &api.Error{Code: api.CodeTooLarge, Message: fmt.Sprintf("the file has more than %d bytes", maxFile), Hint: "write it in parts, with append"}
	}
	f.Size = int64(len(content))
	file := event.File{Path: path, Size: f.Size}
	if len(content) <= maxJudged {
		file.Content = content
	}
	var info guestproto.FileInfo
	var failure error
	verdict, out := s.gate.Do(r.Context(), s.requester(r).Import(file), func(ctx context.Context) event.Outcome {
		info, failure = s.guest.WriteFile(ctx, f, bytes.NewReader(content))
		out := fileOutcome(ctx, 0, failure)
		out.BytesSent = f.Size
		return out
	})
	if verdict.Decision != event.Allow {
		return blocked(out)
	}
	if failure != nil {
		return failure
	}
	api.WriteJSON(w, http.StatusOK, describe(path, info))
	return nil
}

func fileOutcome(ctx context.Context, received int64, err error) event.Outcome {
	out := event.Outcome{Status: event.Done, CarriedOut: true, BytesReceived: received}
	switch {
	case err != nil && ctx.Err() != nil:
		out.Status, out.Error = event.Cancelled, &event.Error{Message: err.Error()}
	case err != nil:
		out.Status, out.Error = event.Failed, &event.Error{Message: err.Error()}
	}
	return out
}

func describe(path string, info guestproto.FileInfo) api.FileInfo {
	return api.FileInfo{
		Path: path, Size: info.Size, Mode: fmt.Sprintf("%04o", info.Mode&0o7777),
		Mtime: time.Unix(0, info.MtimeNS).UTC().Format(time.RFC3339Nano), SHA256: hex.EncodeToString(info.SHA256),
	}
}

func guestPath(q url.Values) (string, error) {
	path := q.Get("path")
	if !strings.HasPrefix(path, "/") || strings.ContainsRune(path, 0) {
		return "", &api.Error{Code: api.CodeInvalid, Message: fmt.Sprintf("the path %q is not absolute", path)}
	}
	return path, nil
}

func number(q url.Values, name string) (int64, error) {
	text := q.Get(name)
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return 0, &api.Error{Code: api.CodeInvalid, Message: fmt.Sprintf("%s=%s is not a number of bytes", name, text)}
	}
	return n, nil
}
