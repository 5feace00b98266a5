package guest

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/capsem/capsem/internal/guestproto"
)

// clean makes a guest's text fit for logs and terminals: valid UTF-8 without
// control characters, at most limit bytes, cut between runes.
func clean(s string, limit int) string {
	if len(s) > limit {
		s = s[:limit]
		for len(s) > 0 && !utf8.RuneStart(s[len(s)-1]) {
			s = s[:len(s)-1]
		}
		if r, _ := utf8.DecodeLastRuneInString(s); r == utf8.RuneError && len(s) > 0 {
			s = s[:len(s)-1] // the beginning of a rune that was cut
		}
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || !unicode.IsPrint(r) && r != ' ' {
			return '_'
		}
		return r
	}, strings.ToValidUTF8(s, "_"))
}

// reported turns the guest's report of a failure into an error.
func reported(e *guestproto.Error) *Error {
	return &Error{Code: clean(e.Code, maxWord), Message: clean(e.Message, maxText)}
}
