package egress

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
)

// Bounds of a request's head, in bytes and in fields.
const (
	maxHead   = 64 << 10
	maxFields = 128
)

// head is a request's line and fields as they came.
//
// It is read more strictly than RFC 9112 demands: whatever two readers could
// understand differently is refused, because one of them is the rules and the
// other is a server.
type head struct {
	method, target string
	// minor is that of HTTP/1.
	minor  int
	fields []field
}

// field is one header field, its name as it was written.
type field struct{ name, value string }

// headError is a head that is refused, with the status that says why.
type headError struct {
	status int
	text   string
}

func (e *headError) Error() string { return e.text }

func malformed(format string, args ...any) error {
	return &headError{http.StatusBadRequest, fmt.Sprintf(format, args...)}
}

// readHead reads to the empty line that ends a head, and no further. The error
// is io.EOF where nothing came at all.
func readHead(r *bufio.Reader) (head, error) {
	var h head
	size := 0
	for n := 0; ; n++ {
		line, err := r.ReadSlice('\n')
		if size += len(line); size > maxHead || errors.Is(err, bufio.ErrBufferFull) {
			return head{}, &headError{http.StatusRequestHeaderFieldsTooLarge, fmt.Sprintf("the request's head has more than %d bytes", maxHead)}
		}
		if errors.Is(err, io.EOF) && size > 0 {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return head{}, err
		}
		text, ok := bytes.CutSuffix(line, []byte("\r\n"))
		if !ok || bytes.ContainsAny(text, "\r\x00") {
			return head{}, malformed("a line of the request's head does not end in CR LF, or has a CR or NUL inside")
		}
		switch {
		case n == 0:
			err = h.readLine(string(text))
		case len(text) == 0:
			return h, h.check()
		case n > maxFields:
			err = &headError{http.StatusRequestHeaderFieldsTooLarge, fmt.Sprintf("the request has more than %d header fields", maxFields)}
		default:
			err = h.readField(string(text))
		}
		if err != nil {
			return head{}, err
		}
	}
}

// readLine reads "METHOD target HTTP/1.x".
func (h *head) readLine(line string) error {
	parts := strings.Split(line, " ")
	if len(parts) != 3 {
		return malformed("the request line is not a method, a target and a version with one space between")
	}
	h.method, h.target = parts[0], parts[1]
	if h.method == "" || len(h.method) > 32 || strings.Trim(h.method, "ABCDEFGHIJKLMNOPQRSTUVWXYZ-") != "" {
		return malformed("the method is not a word of 1 to 32 capital letters")
	}
	if h.target == "" || strings.ContainsFunc(h.target, notInTarget) {
		return malformed("the request's target is empty, or has a character that no URL has")
	}
	switch parts[2] {
	case "HTTP/1.1":
		h.minor = 1
	case "HTTP/1.0":
		h.minor = 0
	default:
		return &headError{http.StatusHTTPVersionNotSupported, "the request is neither HTTP/1.1 nor HTTP/1.0"}
	}
	return nil
}

// notInTarget reports characters that RFC 3986 has in no URL, and the one that
// begins a fragment, which is not sent.
func notInTarget(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune("#\"<>\\^`{|}", r) }

func (h *head) readField(line string) error {
	name, value, ok := strings.Cut(line, ":")
	if !ok || name == "" || strings.ContainsFunc(name, notInName) {
		// Also a space before the colon, and a line that continues the last.
		return malformed("a header field is not a name, a colon and a value")
	}
	value = strings.Trim(value, " \t")
	if strings.ContainsFunc(value, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
		return malformed("the header field %s has a control character in it", name)
	}
	h.fields = append(h.fields, field{name, value})
	return nil
}

// notInName reports characters that are not of a token (RFC 9110 section 5.6.2).
func notInName(r rune) bool {
	letter := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
	return !letter && (r > '~' || !strings.ContainsRune("!#$%&'*+-.^_`|~", r))
}

// values returns the values of all fields of a name.
func (h *head) values(name string) []string {
	var all []string
	for _, f := range h.fields {
		if strings.EqualFold(f.name, name) {
			all = append(all, f.value)
		}
	}
	return all
}

// check refuses what says twice, or not clearly, where the request goes and
// where it ends (RFC 9112 sections 3.2 and 6.3).
func (h *head) check() error {
	lengths, codings, hosts := h.values("Content-Length"), h.values("Transfer-Encoding"), h.values("Host")
	switch {
	case len(hosts) > 1 || len(hosts) == 0 && h.minor == 1:
		return malformed("the request has %d Host fields, it must have one", len(hosts))
	case len(lengths) > 1:
		return malformed("the request has %d Content-Length fields", len(lengths))
	case len(lengths) == 1 && len(codings) > 0:
		return malformed("the request has both Content-Length and Transfer-Encoding")
	case len(codings) > 0 && (len(codings) > 1 || h.minor == 0 || !strings.EqualFold(codings[0], "chunked")):
		return malformed("the request's Transfer-Encoding is not chunked")
	case h.method == http.MethodConnect && (len(codings) > 0 || len(lengths) == 1 && lengths[0] != "0"):
		return malformed("a CONNECT request has no body")
	}
	if expect := h.values("Expect"); len(expect) > 1 || len(expect) == 1 && !strings.EqualFold(expect[0], "100-continue") {
		return &headError{http.StatusExpectationFailed, "the request expects something other than 100-continue"}
	}
	if length, chunked, err := h.framing(); err != nil || !chunked && length > MaxRequestBody {
		if err != nil {
			return err
		}
		return &headError{http.StatusRequestEntityTooLarge, fmt.Sprintf("the request's body has %d bytes, the limit is %d", length, MaxRequestBody)}
	}
	return nil
}

// framing says how long the body is: that many bytes, or chunks.
func (h *head) framing() (length int64, chunked bool, err error) {
	if len(h.values("Transfer-Encoding")) > 0 {
		return 0, true, nil
	}
	lengths := h.values("Content-Length")
	if len(lengths) == 0 {
		return 0, false, nil
	}
	if strings.Trim(lengths[0], "0123456789") != "" || len(lengths[0]) > 18 {
		return 0, false, malformed("the request's Content-Length is no number")
	}
	if length, err = strconv.ParseInt(lengths[0], 10, 64); err != nil {
		return 0, false, malformed("the request's Content-Length is no number")
	}
	return length, false, nil
}

// hopByHop are the fields that are between a client and its proxy (RFC 9110
// section 7.6.1), and those that say where a request goes and ends, which are
// written anew.
func hopByHop() []string {
	return []string{
		"Connection", "Content-Length", "Expect", "Host", "Http2-Settings", "Keep-Alive", "Proxy-Authenticate",
		"Proxy-Authorization", "Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
	}
}

// endToEnd returns the fields that go on to the server: neither those that are
// hop-by-hop, nor those that Connection names.
func (h *head) endToEnd() http.Header {
	drop := hopByHop()
	for _, list := range h.values("Connection") {
		for name := range strings.SplitSeq(list, ",") {
			drop = append(drop, textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name)))
		}
	}
	out := http.Header{}
	for _, f := range h.fields {
		if name := textproto.CanonicalMIMEHeaderKey(f.name); !slices.Contains(drop, name) {
			out[name] = append(out[name], f.value)
		}
	}
	return out
}

// encode writes the head as it is sent. What readHead has read, it reads from
// encode's result again.
func (h *head) encode() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s %s HTTP/1.%d\r\n", h.method, h.target, h.minor)
	for _, f := range h.fields {
		fmt.Fprintf(&b, "%s: %s\r\n", f.name, f.value)
	}
	b.WriteString("\r\n")
	return b.Bytes()
}
