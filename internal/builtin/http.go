package builtin

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/capsem/capsem/internal/jsonrpc"
	"github.com/capsem/capsem/internal/toolproto"
)

// Bounds of the HTTP tools. An answer's body is in a result twice, and each of its
// bytes may take six when it is quoted: the largest one still fits into a message.
const (
	// DefaultBytes is how much of an answer's body is returned, MaxBytes how
	// much can be asked for.
	DefaultBytes = 256 << 10
	MaxBytes     = 1 << 20
	// MaxSeconds is the longest timeout that can be asked for.
	MaxSeconds = 300
	// maxHeaders is how many headers a request may have.
	maxHeaders = 64
)

// method is one of the HTTP tools.
type method struct {
	name, does, annotations string
	body                    bool
}

func httpTools() []tool {
	var tools []tool
	for _, m := range []method{
		{http.MethodGet, "Fetches a URL with HTTP GET and returns the body.", `"readOnlyHint":true`, false},
		{http.MethodPost, "Sends an HTTP POST request, for example JSON to an API, and returns the answer.", `"readOnlyHint":false,"destructiveHint":true,"idempotentHint":false`, true},
		{http.MethodPut, "Sends an HTTP PUT request, which replaces what is at the URL, and returns the answer.", `"readOnlyHint":false,"destructiveHint":true,"idempotentHint":true`, true},
		{http.MethodPatch, "Sends an HTTP PATCH request, which changes part of what is at the URL, and returns the answer.", `"readOnlyHint":false,"destructiveHint":true,"idempotentHint":false`, true},
		{http.MethodDelete, "Sends an HTTP DELETE request, which removes what is at the URL, and returns the answer.", `"readOnlyHint":false,"destructiveHint":true,"idempotentHint":true`, true},
		{http.MethodHead, "Fetches only the status and headers of a URL with HTTP HEAD.", `"readOnlyHint":true`, false},
	} {
		tools = append(tools, m.tool())
	}
	return tools
}

func (m method) tool() tool {
	title := "HTTP " + m.name
	t := tool{
		name: "http_" + strings.ToLower(m.name), title: title,
		description: m.does + " The request is made outside the sandbox and judged by its policy, as is every redirect. " +
			"A status other than 2xx is a normal result: look at structuredContent.status. " +
			"A body that is not UTF-8 text comes base64-encoded, as structuredContent.encoding says.",
		annotations: fmt.Sprintf(`{"title":%q,%s,"openWorldHint":true}`, title, m.annotations),
		parameters: []parameter{
			{"url", true, `{"type":"string","description":"Absolute http or https URL."}`},
			{"headers", false, `{"type":"object","additionalProperties":{"type":"string"},"description":"Request headers by name."}`},
		},
	}
	if m.body {
		t.parameters = append(t.parameters, parameter{
			"body", false,
			`{"type":"string","description":"Request body, sent as UTF-8. Set the content-type header to match."}`,
		})
	}
	t.parameters = append(t.parameters,
		parameter{"timeoutSeconds", false, fmt.Sprintf(`{"type":"integer","minimum":1,"maximum":%d,"description":"How long the request may take."}`, MaxSeconds)},
		parameter{"maxBytes", false, fmt.Sprintf(`{"type":"integer","minimum":1,"maximum":%d,"default":%d,"description":"How much of the body to return. The rest is cut, and truncated is true."}`, MaxBytes, DefaultBytes)},
	)
	t.run = func(ctx context.Context, do fetch, raw json.RawMessage) json.RawMessage {
		args, err := t.arguments(raw)
		if err != nil {
			return errorResult("%v", err)
		}
		req, err := m.request(args)
		if err != nil {
			return errorResult("%v", err)
		}
		result, err := do(ctx, req)
		switch {
		case err != nil:
			return errorResult("the request was not made: %v", err)
		case result.Blocked:
			return errorResult("the request was refused: %s", result.Error)
		case result.Error != "":
			return errorResult("the request failed: %s", result.Error)
		}
		return httpResult(result, req.MaxBytes)
	}
	return t
}

// request makes a request of a call's arguments.
func (m method) request(args map[string]json.RawMessage) (toolproto.HTTPRequest, error) {
	req := toolproto.HTTPRequest{Method: m.name, MaxBytes: DefaultBytes}
	var ok bool
	if req.URL, ok = jsonrpc.String(args["url"]); !ok || req.URL == "" {
		return req, errors.New(`the argument "url" must be a string that is not empty`)
	}
	if raw, set := args["body"]; set {
		body, ok := jsonrpc.String(raw)
		if !ok {
			return req, errors.New(`the argument "body" must be a string; write JSON as a string too`)
		}
		req.Body = []byte(body)
	}
	if raw, set := args["timeoutSeconds"]; set {
		seconds, err := integer("timeoutSeconds", raw, MaxSeconds)
		if err != nil {
			return req, err
		}
		req.TimeoutMS = 1000 * seconds
	}
	if raw, set := args["maxBytes"]; set {
		n, err := integer("maxBytes", raw, MaxBytes)
		if err != nil {
			return req, err
		}
		req.MaxBytes = n
	}
	var err error
	req.Headers, err = headers(args["headers"])
	return req, err
}

func integer(name string, raw json.RawMessage, limit int64) (int64, error) {
	n, err := strconv.ParseInt(string(raw), 10, 64)
	if err != nil || n < 1 || n > limit {
		return 0, fmt.Errorf("the argument %q must be a whole number from 1 to %d", name, limit)
	}
	return n, nil
}

// headers takes the headers argument, nil for none.
func headers(raw json.RawMessage) ([]toolproto.Header, error) {
	if raw == nil {
		return nil, nil
	}
	if raw[0] != '{' {
		return nil, errors.New(`the argument "headers" must be an object of strings`)
	}
	var headers []toolproto.Header
	for name, raw := range jsonrpc.Members(raw) {
		value, ok := jsonrpc.String(raw)
		switch {
		case !ok:
			return nil, fmt.Errorf("the header %q must be a string", name)
		case !token(name):
			return nil, fmt.Errorf("%q is no header name", name)
		case strings.ContainsAny(value, "\r\n\x00"):
			return nil, fmt.Errorf("the header %q has a line break in its value", name)
		case len(headers) == maxHeaders:
			return nil, fmt.Errorf("there are more than %d headers", maxHeaders)
		}
		headers = append(headers, toolproto.Header{Name: name, Value: []byte(value)})
	}
	return headers, nil
}

// token reports whether s is a token, as header names are (RFC 9110 §5.6.2).
func token(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		alnum := r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z'
		return !alnum && !strings.ContainsRune("!#$%&'*+-.^_`|~", r)
	})
}

// httpResult is the result of a request that was answered.
func httpResult(r toolproto.HTTPResult, limit int64) json.RawMessage {
	body, truncated := r.Body, r.Truncated
	if int64(len(body)) > limit {
		body, truncated = body[:limit], true
	}
	encoding := "utf-8"
	text := string(body)
	if truncated {
		text = string(wholeRunes(body))
	}
	if !utf8.ValidString(text) {
		encoding, text = "base64", base64.StdEncoding.EncodeToString(body)
	}
	status := fmt.Sprintf("HTTP %d %s", r.Status, http.StatusText(r.Status))
	var texts []string
	if text != "" {
		texts = append(texts, text)
	}
	if r.Status/100 != 2 || truncated || encoding != "utf-8" || text == "" {
		if truncated {
			status += fmt.Sprintf("; the body is cut after %d bytes", len(body))
		}
		texts = append(texts, strings.TrimSpace(status))
	}
	out := fmt.Appendf(content(texts), `,"structuredContent":{"status":%d,"url":%s,"headers":%s,"body":`,
		r.Status, jsonrpc.Quote(strings.ToValidUTF8(r.URL, "\uFFFD")), headerObject(r.Headers))
	out = jsonrpc.AppendQuote(out, text)
	return fmt.Appendf(out, `,"encoding":%q,"truncated":%t}}`, encoding, truncated)
}

// wholeRunes cuts off a rune that a limit has split.
func wholeRunes(b []byte) []byte {
	for i := 1; i < utf8.UTFMax && i <= len(b); i++ {
		if c := b[len(b)-i]; utf8.RuneStart(c) {
			if !utf8.FullRune(b[len(b)-i:]) {
				return b[:len(b)-i]
			}
			break
		}
	}
	return b
}

// headerObject is the headers as one object with lower-case names; values of the
// same name are joined by ", ".
func headerObject(headers []toolproto.Header) []byte {
	values := make(map[string][]byte)
	var names []string
	for _, h := range headers {
		name := strings.ToLower(strings.ToValidUTF8(h.Name, "\uFFFD"))
		if old, ok := values[name]; ok {
			values[name] = slices.Concat(old, []byte(", "), h.Value)
			continue
		}
		names = append(names, name)
		values[name] = h.Value
	}
	slices.Sort(names)
	out := []byte{'{'}
	for i, name := range names {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(jsonrpc.AppendQuote(out, name), ':')
		out = jsonrpc.AppendQuote(out, string(bytes.ToValidUTF8(values[name], []byte("\uFFFD"))))
	}
	return append(out, '}')
}
