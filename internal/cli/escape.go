package cli

import (
	"fmt"
	"strings"
	"unicode"
)

// Escape makes text that a guest may have written safe to show on a terminal:
// control characters and those that reorder text (Unicode Bidi_Control) become
// escapes. With lines, line breaks and tabs stay.
func Escape(s string, lines bool) string {
	if strings.IndexFunc(s, func(r rune) bool { return hostile(r, lines) }) < 0 {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		switch {
		case !hostile(r, lines):
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case r == '\r':
			b.WriteString(`\r`)
		case r < 0x100:
			fmt.Fprintf(&b, `\x%02x`, r)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}

func hostile(r rune, lines bool) bool {
	if lines && (r == '\n' || r == '\t') {
		return false
	}
	return unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) || r == '\u2028' || r == '\u2029'
}
