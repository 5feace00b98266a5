package guestproto

import (
	"bufio"
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxMeta is the size of the metadata line, its end included, in bytes.
const MaxMeta = 4 << 10

// The fixed parts of the metadata line.
const (
	metaPrefix = "\x00CAPSEM_META:"
	metaMore   = ";more=1"
	metaEnd    = '\n'
)

// Errors of ReadMeta.
var (
	errMetaPrefix = errors.New("reading the metadata line: it does not begin as one")
	errMetaLength = fmt.Errorf("reading the metadata line: it is longer than %d bytes", MaxMeta)
)

// Meta is what a guest says once on a connection to port 5002, before its first
// frame.
type Meta struct {
	// Process is the program that speaks, sanitised: a claim.
	Process string
	// More says that the guest takes messages in several frames, and would send
	// such. It may say so only if the host's Boot offered it.
	More bool
}

// ReadMeta reads the metadata line, in however many pieces it arrives, and no byte
// more.
func ReadMeta(r *bufio.Reader) (Meta, error) {
	var line []byte
	for {
		c, err := r.ReadByte()
		if err != nil {
			return Meta{}, fmt.Errorf("reading the metadata line: %w", err)
		}
		n := len(line)
		if n < len(metaPrefix) && c != metaPrefix[n] {
			return Meta{}, errMetaPrefix
		}
		if n+1 > MaxMeta || n+1 == MaxMeta && c != metaEnd {
			return Meta{}, errMetaLength
		}
		if c == metaEnd {
			break
		}
		line = append(line, c)
	}
	name, more := strings.CutSuffix(string(line[len(metaPrefix):]), metaMore)
	return Meta{Process: SanitizeProcess(name), More: more}, nil
}

// AppendMeta appends the metadata line to dst. A semicolon in the name becomes '_',
// so that no name can be read as what More adds.
func AppendMeta(dst []byte, m Meta) []byte {
	name := strings.ReplaceAll(SanitizeProcess(m.Process), ";", "_")
	dst = append(append(dst, metaPrefix...), name...)
	if m.More {
		dst = append(dst, metaMore...)
	}
	return append(dst, metaEnd)
}

// SanitizeProcess returns a process name that is fit for a frame, a ledger and a
// terminal: white space, control and formatting characters (those that change the
// direction of text among them) and what is no UTF-8 become '_', and it is cut to
// MaxProcess bytes at the end of a character.
func SanitizeProcess(name string) string {
	clean := strings.Map(func(r rune) rune {
		if r == utf8.RuneError || unicode.In(r, unicode.Cc, unicode.Cf, unicode.Z) {
			return '_'
		}
		return r
	}, name)
	if len(clean) <= MaxProcess {
		return clean
	}
	end := MaxProcess
	for !utf8.RuneStart(clean[end]) {
		end--
	}
	return clean[:end]
}
