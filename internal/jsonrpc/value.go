package jsonrpc

import (
	"bytes"
	"encoding/json"
	"iter"
	"slices"
	"strings"
	"unicode/utf8"
)

// The functions of this file read values that [Parse] has accepted, or parts of
// them. On anything else they find nothing or stop early; they never panic.

// Member returns the value of an object's member, without white space around it.
// It reports false where there is none and where raw is no object.
func Member(raw json.RawMessage, name string) (json.RawMessage, bool) {
	at, ok := find(raw, name)
	if !ok {
		return nil, false
	}
	return raw[at.start:at.end:at.end], true
}

// Find returns the place in raw of a member of a member of an object, and so on
// along path, for an [Edit] to replace.
func Find(raw json.RawMessage, path ...string) (start, end int, ok bool) {
	at := span{0, len(raw)}
	for _, name := range path {
		next, ok := find(raw[at.start:at.end], name)
		if !ok {
			return 0, 0, false
		}
		at = span{at.start + next.start, at.start + next.end}
	}
	return at.start, at.end, true
}

// find returns where the value of an object's member stands.
func find(raw []byte, name string) (at span, ok bool) {
	eachMember(raw, func(key []byte, value span) bool {
		if !sameName(key, name) {
			return true
		}
		at, ok = value, true
		return false
	})
	return at, ok
}

// sameName reports whether what stands between a string's quotes means name.
func sameName(key []byte, name string) bool {
	if bytes.IndexByte(key, '\\') < 0 {
		return string(key) == name
	}
	return string(unescape(nil, key)) == name
}

// Members iterates over an object's members in their order. Names are unescaped.
func Members(raw json.RawMessage) iter.Seq2[string, json.RawMessage] {
	return func(yield func(string, json.RawMessage) bool) {
		eachMember(raw, func(key []byte, value span) bool {
			return yield(string(unescape(nil, key)), raw[value.start:value.end:value.end])
		})
	}
}

// Elements iterates over an array's elements in their order.
func Elements(raw json.RawMessage) iter.Seq[json.RawMessage] {
	return func(yield func(json.RawMessage) bool) {
		i := skipSpace(raw, 0)
		if i == len(raw) || raw[i] != '[' {
			return
		}
		for i = skipSpace(raw, i+1); i < len(raw) && raw[i] != ']'; {
			end := skip(raw, i)
			if end < 0 || !yield(raw[i:end:end]) {
				return
			}
			if i = skipSpace(raw, end); i < len(raw) && raw[i] == ',' {
				i = skipSpace(raw, i+1)
			} else {
				return
			}
		}
	}
}

// Lookalike returns the first member of an object that differs from one of names
// only in case, and reports whether there is one. [Parse] refuses params that have
// both spellings; where only the wrong one is there, a server that ignores case
// would still act on it, so whoever reads a member by its name asks this too.
func Lookalike(raw json.RawMessage, names ...string) (found string, ok bool) {
	eachMember(raw, func(key []byte, _ span) bool {
		decoded := unescape(nil, key)
		for _, name := range names {
			if string(decoded) != name && equalFold(decoded, name) {
				found, ok = string(decoded), true
				return false
			}
		}
		return true
	})
	return found, ok
}

// eachMember calls f with what stands between the quotes of each member's name and
// with its value's place, until f reports false.
func eachMember(raw []byte, f func(key []byte, value span) bool) {
	i := skipSpace(raw, 0)
	if i == len(raw) || raw[i] != '{' {
		return
	}
	for i = skipSpace(raw, i+1); i < len(raw) && raw[i] == '"'; {
		end := skip(raw, i)
		if end < 0 {
			return
		}
		key := raw[i+1 : end-1]
		if i = skipSpace(raw, end); i == len(raw) || raw[i] != ':' {
			return
		}
		i = skipSpace(raw, i+1)
		if end = skip(raw, i); end < 0 || !f(key, span{i, end}) {
			return
		}
		if i = skipSpace(raw, end); i == len(raw) || raw[i] != ',' {
			return
		}
		i = skipSpace(raw, i+1)
	}
}

// skipSpace returns the first index from i on that is no white space.
func skipSpace(b []byte, i int) int {
	for i < len(b) && isSpace(b[i]) {
		i++
	}
	return i
}

// skip returns the index after the value at b[i], -1 where it does not end. Inside
// containers it only pairs brackets and passes over strings.
func skip(b []byte, i int) int {
	if i >= len(b) {
		return -1
	}
	switch b[i] {
	case '"':
		return skipString(b, i)
	case '{', '[':
		return skipContainer(b, i)
	case ',', ':', '}', ']':
		return -1
	}
	for i < len(b) && !isSpace(b[i]) && b[i] != ',' && b[i] != '}' && b[i] != ']' {
		i++
	}
	return i
}

// skipContainer is skip for an array or object.
func skipContainer(b []byte, i int) int {
	for depth := 0; i < len(b); i++ {
		switch b[i] {
		case '"':
			if i = skipString(b, i) - 1; i < 0 {
				return -1
			}
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				return i + 1
			}
		}
	}
	return -1
}

// skipString is skip for a string.
func skipString(b []byte, i int) int {
	for i++; i < len(b); {
		n := bytes.IndexByte(b[i:], '"')
		if n < 0 {
			return -1
		}
		quote, slashes := i+n, 0
		for quote-slashes > i && b[quote-slashes-1] == '\\' {
			slashes++
		}
		if slashes%2 == 0 {
			return quote + 1
		}
		i = quote + 1
	}
	return -1
}

// String returns the text of a JSON string. It reports false where raw is none.
func String(raw json.RawMessage) (string, bool) {
	if len(raw) < 2 || raw[0] != '"' || skipString(raw, 0) != len(raw) {
		return "", false
	}
	content := raw[1 : len(raw)-1]
	if bytes.IndexByte(content, '\\') < 0 {
		return string(content), true
	}
	return string(unescape(nil, content)), true
}

// Quote returns s as a JSON string. What is no UTF-8 in it becomes U+FFFD.
func Quote(s string) json.RawMessage {
	return AppendQuote(make([]byte, 0, len(s)+2), s)
}

// AppendQuote is [Quote] with the result appended to dst.
func AppendQuote(dst []byte, s string) []byte {
	const digits = "0123456789abcdef"
	dst = append(dst, '"')
	for i := 0; i < len(s); {
		c := s[i]
		switch {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', c)
		case c == '\n':
			dst = append(dst, '\\', 'n')
		case c == '\r':
			dst = append(dst, '\\', 'r')
		case c == '\t':
			dst = append(dst, '\\', 't')
		case c < ' ':
			dst = append(dst, '\\', 'u', '0', '0', digits[c>>4], digits[c&15])
		case c < utf8.RuneSelf:
			dst = append(dst, c)
		default:
			r, size := utf8.DecodeRuneInString(s[i:])
			dst = utf8.AppendRune(dst, r)
			i += size
			continue
		}
		i++
	}
	return append(dst, '"')
}

// Text returns all strings in a value, the names of members and the values, each
// unescaped and on a line of its own, in their order. It is never longer than raw.
func Text(raw json.RawMessage) string {
	var out strings.Builder
	out.Grow(len(raw))
	var scratch []byte
	for i := 0; ; {
		n := bytes.IndexByte(raw[i:], '"')
		if n < 0 {
			break
		}
		end := skipString(raw, i+n)
		if end < 0 {
			break
		}
		content := raw[i+n+1 : end-1]
		if i > 0 {
			out.WriteByte('\n')
		}
		if bytes.IndexByte(content, '\\') < 0 {
			out.Write(content)
		} else {
			scratch = unescape(slices.Grow(scratch[:0], len(content)), content)
			out.Write(scratch)
		}
		i = end
	}
	return out.String()
}

// unescape appends the meaning of what stands between a string's quotes to dst. It
// appends no more bytes than a valid content has. Half of a surrogate pair, or an
// escape that is none, becomes U+FFFD.
func unescape(dst, content []byte) []byte {
	for {
		n := bytes.IndexByte(content, '\\')
		if n < 0 {
			return append(dst, content...)
		}
		dst = append(dst, content[:n]...)
		r, size := escaped(content[n:])
		dst = utf8.AppendRune(dst, r)
		content = content[n+size:]
	}
}

// escaped returns the character that the escape at the start of b means, and the
// escape's size.
func escaped(b []byte) (rune, int) {
	if len(b) < 2 {
		return utf8.RuneError, len(b)
	}
	switch b[1] {
	case '"', '\\', '/':
		return rune(b[1]), 2
	case 'b':
		return '\b', 2
	case 'f':
		return '\f', 2
	case 'n':
		return '\n', 2
	case 'r':
		return '\r', 2
	case 't':
		return '\t', 2
	case 'u':
	default:
		return utf8.RuneError, 2
	}
	r, ok := hex4(b, 2)
	if !ok {
		return utf8.RuneError, 2
	}
	if r < surrogateHigh || r >= surrogateEnd {
		return r, 6
	}
	if low, ok := lowHalf(b, 6); ok && r < surrogateLow {
		return (r-surrogateHigh)<<10 + (low - surrogateLow) + 0x10000, 12
	}
	return utf8.RuneError, 6
}

// Line returns a message that fits on one line, as the stdio transport of the
// Model Context Protocol wants it: line breaks between tokens become spaces. The
// length and every other byte stay. A message without them is returned as it is,
// any other is copied.
func Line(raw []byte) []byte {
	if bytes.IndexByte(raw, '\n') < 0 && bytes.IndexByte(raw, '\r') < 0 {
		return raw
	}
	line := bytes.Clone(raw)
	for i, c := range line {
		if c == '\n' || c == '\r' { // inside strings they are escaped (RFC 8259 §7)
			line[i] = ' '
		}
	}
	return line
}
