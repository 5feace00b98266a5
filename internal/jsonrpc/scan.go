package jsonrpc

import (
	"encoding/binary"
	"math/bits"
	"unicode/utf8"
)

// span is a range of bytes.
type span struct{ start, end int }

// memberName is a member of a message that the specification knows.
type memberName int

const (
	memberVersion memberName = iota
	memberID
	memberMethod
	memberParams
	memberResult
	memberError
	memberCount
	memberOther = memberCount
)

// name returns the member's name.
func (m memberName) name() string {
	return [memberCount]string{"jsonrpc", "id", "method", "params", "result", "error"}[m]
}

// captured is where the scanner met a member of the message.
type captured struct {
	value  span
	set    bool
	faulty bool // named twice, or in two ways, or with a fault in its value
}

// role is the part that a value has in the message.
type role int

const (
	inner        role = iota // names must be unique
	paramsValue              // also when case is ignored
	messageValue             // likewise, and members are captured
)

// scanner reads one document. Syntax errors stop it. Other faults are noted and
// it goes on: a document that is no JSON is reported as such wherever else it is
// faulty, and an answer to a faulty message can carry its id.
type scanner struct {
	b []byte
	i int // the next byte

	syntax  Detail // why the scan stopped: NotJSON or NotUTF8
	fault   Detail // the first other fault, and where
	faultAt int
	faults  int

	root    span // the document without white space around it
	members [memberCount]captured
	names   names
}

// newScanner returns a scanner of b, which is at most MaxSize long.
func newScanner(b []byte) scanner {
	return scanner{b: b, syntax: NotJSON}
}

// note records a fault that is not one of syntax.
func (s *scanner) note(d Detail, at int) {
	if s.fault == "" {
		s.fault, s.faultAt = d, at
	}
	s.faults++
}

// document reads the whole input: one value with white space around it.
func (s *scanner) document() bool {
	s.space()
	s.root.start = s.i
	if !s.value(0, messageValue) {
		return false
	}
	s.root.end = s.i
	s.space()
	return s.i == len(s.b)
}

// space skips white space.
func (s *scanner) space() {
	for s.i < len(s.b) && isSpace(s.b[s.i]) {
		s.i++
	}
}

// isSpace reports whether c is white space of RFC 8259 §2.
func isSpace(c byte) bool {
	return c == ' ' || c == '\n' || c == '\r' || c == '\t'
}

// value reads one value inside depth open containers.
func (s *scanner) value(depth int, r role) bool {
	if s.i == len(s.b) {
		return false
	}
	switch c := s.b[s.i]; c {
	case '{', '[':
		if depth == MaxDepth {
			return s.tooDeep()
		}
		if c == '[' {
			return s.array(depth + 1)
		}
		return s.object(depth+1, r)
	case '"':
		_, ok := s.str()
		return ok
	case 't':
		return s.literal("true")
	case 'f':
		return s.literal("false")
	case 'n':
		return s.literal("null")
	default:
		return s.number()
	}
}

// tooDeep notes the fault and passes over the container unread: what is in it
// cannot make the message acceptable.
func (s *scanner) tooDeep() bool {
	s.note(TooDeep, s.i)
	end := skip(s.b, s.i)
	if end < 0 {
		s.i = len(s.b)
		return false
	}
	s.i = end
	return true
}

// array reads an array, at the opening bracket of which the scanner stands.
func (s *scanner) array(depth int) bool {
	s.i++
	s.space()
	if s.i < len(s.b) && s.b[s.i] == ']' {
		s.i++
		return true
	}
	for {
		s.space()
		if !s.value(depth, inner) {
			return false
		}
		s.space()
		if s.i == len(s.b) {
			return false
		}
		s.i++
		switch s.b[s.i-1] {
		case ',':
		case ']':
			return true
		default:
			s.i--
			return false
		}
	}
}

// object reads an object, at the opening brace of which the scanner stands.
func (s *scanner) object(depth int, r role) bool {
	s.i++
	s.space()
	if s.i < len(s.b) && s.b[s.i] == '}' {
		s.i++
		return true
	}
	set := s.names.open(r != inner)
	for {
		s.space()
		if !s.member(depth, r, &set) {
			return false
		}
		s.space()
		if s.i == len(s.b) {
			return false
		}
		s.i++
		switch s.b[s.i-1] {
		case ',':
		case '}':
			s.names.close(&set)
			return true
		default:
			s.i--
			return false
		}
	}
}

// member reads a name, a colon and a value.
func (s *scanner) member(depth int, r role, set *nameSet) bool {
	if s.i == len(s.b) || s.b[s.i] != '"' {
		return false
	}
	name := span{start: s.i + 1}
	escaped, ok := s.str()
	if !ok {
		return false
	}
	name.end = s.i - 1
	clash := s.names.add(s.b, set, name, escaped)
	if clash != "" {
		s.note(clash, name.start-1)
	}
	known := memberOther
	if r == messageValue {
		known = s.known(name, clash)
	}
	s.space()
	if s.i == len(s.b) || s.b[s.i] != ':' {
		return false
	}
	s.i++
	s.space()
	inside := inner
	if known == memberParams {
		inside = paramsValue
	}
	start, faults := s.i, s.faults
	if !s.value(depth, inside) {
		return false
	}
	if known != memberOther && clash == "" {
		c := &s.members[known]
		c.value, c.set = span{start, s.i}, true
		c.faulty = c.faulty || s.faults != faults
	}
	return true
}

// known returns which of the specification's members a member of the message is.
// One that is so only when case is ignored is noted as a fault, and makes the real
// one doubtful; so does a second one.
func (s *scanner) known(name span, clash Detail) memberName {
	var scratch [16]byte
	content := s.b[name.start:name.end]
	if len(content) > 6*len("jsonrpc") { // each character as an escape
		return memberOther
	}
	decoded := unescape(scratch[:0], content)
	for m := range memberCount {
		if string(decoded) == m.name() {
			s.members[m].faulty = s.members[m].faulty || clash != ""
			return m
		}
		if equalFold(decoded, m.name()) {
			s.members[m].faulty = true
			if clash == "" {
				s.note(CaseVariant, name.start-1)
			}
			return memberOther
		}
	}
	return memberOther
}

// literal reads true, false or null.
func (s *scanner) literal(word string) bool {
	if len(s.b)-s.i < len(word) || string(s.b[s.i:s.i+len(word)]) != word {
		return false
	}
	s.i += len(word)
	return true
}

// number reads a number of RFC 8259 §6.
func (s *scanner) number() bool {
	if s.b[s.i] == '-' {
		s.i++
	}
	switch n := s.digits(); {
	case n == 0:
		return false
	case n > 1 && s.b[s.i-n] == '0':
		s.i -= n - 1
		return false
	}
	if s.i < len(s.b) && s.b[s.i] == '.' {
		s.i++
		if s.digits() == 0 {
			return false
		}
	}
	if s.i < len(s.b) && s.b[s.i]|0x20 == 'e' {
		s.i++
		if s.i < len(s.b) && (s.b[s.i] == '+' || s.b[s.i] == '-') {
			s.i++
		}
		return s.digits() > 0
	}
	return true
}

// digits skips digits and returns how many.
func (s *scanner) digits() int {
	start := s.i
	for s.i < len(s.b) && '0' <= s.b[s.i] && s.b[s.i] <= '9' {
		s.i++
	}
	return s.i - start
}

// str reads a string, at the opening quote of which the scanner stands, and
// reports whether it has escapes.
func (s *scanner) str() (escaped, ok bool) {
	s.i++
	for {
		s.i = plain(s.b, s.i)
		if s.i == len(s.b) {
			return escaped, false
		}
		switch c := s.b[s.i]; {
		case c == '"':
			s.i++
			return escaped, true
		case c == '\\':
			escaped = true
			if !s.escape() {
				return escaped, false
			}
		case c < ' ':
			return escaped, false
		default:
			r, size := utf8.DecodeRune(s.b[s.i:])
			if r == utf8.RuneError && size == 1 {
				s.syntax = NotUTF8
				return escaped, false
			}
			s.i += size
		}
	}
}

// escape reads one escape (RFC 8259 §7), or the two of a surrogate pair.
func (s *scanner) escape() bool {
	if s.i+1 == len(s.b) {
		return false
	}
	switch s.b[s.i+1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		s.i += 2
		return true
	case 'u':
	default:
		return false
	}
	r, ok := hex4(s.b, s.i+2)
	if !ok {
		return false
	}
	if r >= surrogateLow && r < surrogateEnd {
		s.note(LoneSurrogate, s.i)
	}
	if r >= surrogateHigh && r < surrogateLow {
		if low, ok := lowHalf(s.b, s.i+6); ok && low >= 0 {
			s.i += 12
			return true
		}
		s.note(LoneSurrogate, s.i)
	}
	s.i += 6
	return true
}

// The ranges of UTF-16 surrogates: high halves, then low ones.
const (
	surrogateHigh, surrogateLow, surrogateEnd = 0xd800, 0xdc00, 0xe000
)

// lowHalf returns the low half of a surrogate pair that is escaped at b[i:].
func lowHalf(b []byte, i int) (rune, bool) {
	if len(b)-i < 6 || b[i] != '\\' || b[i+1] != 'u' {
		return 0, false
	}
	r, ok := hex4(b, i+2)
	return r, ok && r >= surrogateLow && r < surrogateEnd
}

// hex4 returns the number that four hexadecimal digits at b[i:] write.
func hex4(b []byte, i int) (rune, bool) {
	if len(b)-i < 4 {
		return 0, false
	}
	var r rune
	for _, c := range b[i : i+4] {
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c|0x20 && c|0x20 <= 'f':
			c = c | 0x20 - 'a' + 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}

// plain returns the first index from i on of a byte that is a quote, a backslash,
// a control character or not ASCII; len(b) where there is none. It looks at eight
// bytes at a time: in each of the four terms the lowest bit that is set belongs to
// a byte of that kind, so the lowest of all does.
func plain(b []byte, i int) int {
	const (
		ones  = 0x0101010101010101
		highs = 0x8080808080808080
	)
	for len(b)-i >= 8 {
		w := binary.LittleEndian.Uint64(b[i:])
		quote, backslash := w^('"'*ones), w^('\\'*ones)
		found := (w | (w-' '*ones)&^w | (quote-ones)&^quote | (backslash-ones)&^backslash) & highs
		if found != 0 {
			return i + bits.TrailingZeros64(found)/8
		}
		i += 8
	}
	for i < len(b) && b[i] >= ' ' && b[i] < utf8.RuneSelf && b[i] != '"' && b[i] != '\\' {
		i++
	}
	return i
}
