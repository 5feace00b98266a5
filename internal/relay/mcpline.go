//go:build linux

package relay

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"unicode/utf8"
)

// Bounds of what is remembered of a message while it is looked at.
const (
	// maxID is the longest id that is kept, in bytes; of a longer one only that
	// there is one is known.
	maxID = 64 << 10
	// maxName is the longest name of a member, or of a method, that is kept.
	maxName = 256
)

// members is what the relay has to know of a JSON-RPC message: which of the
// members that decide its kind it has. It is filled piece by piece, in constant
// memory, so that it can be had of a message that is too long to be kept.
type members struct {
	// ID is the id's bytes as they stand, nil when there is none or when it is
	// longer than maxID.
	ID []byte
	// Method is the method's name, "" when it is not a string.
	Method string
	// HasID, HasMethod and HasAnswer (result or error) say what is there.
	HasID, HasMethod, HasAnswer bool
	// Object says that the message begins as an object does.
	Object bool

	depth     int
	str, esc  bool // inside a string, after its backslash
	started   bool
	expectKey bool
	inKey     bool
	inValue   bool
	key       []byte
	value     []byte
	keep      int // how many bytes of the value are wanted
}

// scan takes in the next piece of the message. It does not check that the
// message is valid JSON: of one that is not, it knows what it could guess.
func (m *members) scan(p []byte) {
	for _, b := range p {
		if m.str {
			m.scanString(b)
			continue
		}
		m.scanToken(b)
	}
}

func (m *members) scanString(b byte) {
	switch {
	case m.esc:
		m.esc = false
	case b == '\\':
		m.esc = true
	case b == '"':
		m.str = false
		if m.inKey {
			m.inKey = false
			return
		}
	}
	if m.inKey {
		if len(m.key) <= maxName {
			m.key = append(m.key, b)
		}
		return
	}
	m.store(b)
}

func (m *members) scanToken(b byte) {
	switch b {
	case ' ', '\t', '\r', '\n':
		return
	case '"':
		m.str = true
		if m.depth == 1 && m.expectKey {
			m.inKey, m.expectKey = true, false
			m.key = m.key[:0]
			return
		}
	case '{', '[':
		m.depth++
		if !m.started {
			m.Object = b == '{'
			m.expectKey = m.Object
		}
	case '}', ']':
		if m.depth == 1 {
			m.endValue()
		}
		m.depth--
	case ',':
		if m.depth == 1 {
			m.endValue()
			m.expectKey = m.Object
			return
		}
	case ':':
		if m.depth == 1 && !m.inValue {
			m.beginValue()
			return
		}
	}
	m.started = true
	m.store(b)
}

// store keeps a byte of the value that is being read, one more than is wanted,
// so that a cut is seen.
func (m *members) store(b byte) {
	if m.inValue && len(m.value) <= m.keep {
		m.value = append(m.value, b)
	}
}

func (m *members) beginValue() {
	m.inValue, m.value, m.keep = true, m.value[:0], 0
	switch m.name() {
	case "id":
		m.keep = maxID
	case "method":
		m.keep = maxName
	}
}

func (m *members) endValue() {
	if !m.inValue {
		return
	}
	m.inValue = false
	switch m.name() {
	case "id":
		if !m.HasID && len(m.value) <= maxID && json.Valid(m.value) {
			m.ID = bytes.Clone(m.value)
		}
		m.HasID = true
	case "method":
		m.HasMethod = true
		if len(m.value) > maxName || json.Unmarshal(m.value, &m.Method) != nil {
			m.Method = ""
		}
	case "result", "error":
		m.HasAnswer = true
	}
}

// name is the key that was read last. A key may be written with escapes and
// still mean "id".
func (m *members) name() string {
	if !bytes.ContainsRune(m.key, '\\') {
		return string(m.key)
	}
	var s string
	if json.Unmarshal([]byte(`"`+string(m.key)+`"`), &s) != nil {
		return ""
	}
	return s
}

// kind is what a line is, for the frame that it travels in.
type kind int

const (
	// request is also what nobody can read: the host answers it with an error,
	// where a notification would be dropped without a word.
	request kind = iota
	notification
	// answer is a client's answer to a request that the host made.
	answer
)

// classify looks at one whole message.
func classify(line []byte) (kind, members) {
	var m members
	m.scan(line)
	switch {
	case !m.Object || !utf8.Valid(line) || !json.Valid(line):
		return request, m
	case m.HasID && m.HasAnswer && !m.HasMethod:
		return answer, m
	case m.HasID:
		return request, m
	}
	return notification, m
}

// line is one line of a client's output.
type line struct {
	// text is the line without its end; nil if it was too long.
	text []byte
	// size is its length in bytes, and members what was seen of it, where it
	// was too long.
	size    int64
	members members
}

// lineReader reads lines of bounded length.
type lineReader struct {
	src *bufio.Reader
	max int
}

func newLineReader(r io.Reader, limit int) *lineReader {
	return &lineReader{src: bufio.NewReaderSize(r, 64<<10), max: limit}
}

// next returns the next line that is not blank, or io.EOF. A last line without
// an end counts. A line that is too long is read to its end without being kept.
func (r *lineReader) next() (line, error) {
	for {
		l, err := r.read()
		l.text = bytes.TrimSpace(l.text)
		if len(l.text) > 0 || l.size > 0 {
			return l, nil // an error comes again with the next read
		}
		if err != nil {
			return line{}, err
		}
	}
}

func (r *lineReader) read() (l line, err error) {
	for {
		piece, err := r.src.ReadSlice('\n')
		switch {
		case l.size > 0:
			l.members.scan(piece)
			l.size += int64(len(bytes.TrimRight(piece, "\r\n")))
		case len(l.text)+len(bytes.TrimRight(piece, "\r\n")) > r.max:
			l.members.scan(l.text)
			l.members.scan(piece)
			l.size = int64(len(l.text) + len(bytes.TrimRight(piece, "\r\n")))
			l.text = nil
		default:
			l.text = append(l.text, piece...)
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return l, err
		}
	}
}
