package ledger

import (
	"errors"
	"strings"
)

// oneStatement gives the single statement in query, without what ends it. It is
// for the sake of a clear answer: that a statement only reads is seen to by
// SQLite itself (see readOnly).
func oneStatement(query string) (string, error) {
	if strings.ContainsRune(query, 0) {
		return "", errors.New("the query holds a NUL character")
	}
	end := statementEnd(query)
	statement := query[:end]
	if blank(statement) {
		return "", errors.New("the query is empty")
	}
	for rest := query[end:]; rest != ""; {
		rest = rest[1:] // the semicolon
		end := statementEnd(rest)
		if !blank(rest[:end]) {
			return "", errors.New("the query holds more than one statement: send one at a time")
		}
		rest = rest[end:]
	}
	return statement, nil
}

// statementEnd is the place of the first semicolon that is not inside a quote
// or a comment, len(s) without one.
func statementEnd(s string) int {
	for i := 0; i < len(s); {
		if s[i] == ';' {
			return i
		}
		i += tokenLen(s[i:])
	}
	return len(s)
}

// blank reports whether s is nothing but white space and comments.
func blank(s string) bool {
	for i := 0; i < len(s); {
		n := tokenLen(s[i:])
		if !isComment(s[i:]) && !strings.ContainsRune(" \t\n\f\r", rune(s[i])) {
			return false
		}
		i += n
	}
	return true
}

func isComment(s string) bool { return strings.HasPrefix(s, "--") || strings.HasPrefix(s, "/*") }

// tokenLen is the length of the quoted text or comment that s begins with, 1
// for any other byte. One that does not end goes to the end of s, as in
// SQLite's own tokenizer (https://sqlite.org/src/file/src/tokenize.c).
func tokenLen(s string) int {
	switch {
	case strings.HasPrefix(s, "--"):
		return until(s, 2, "\n")
	case strings.HasPrefix(s, "/*"):
		return until(s, 2, "*/")
	case s[0] == '[':
		return until(s, 1, "]")
	case s[0] == '\'' || s[0] == '"' || s[0] == '`':
		return until(s, 1, s[:1]) // a doubled quote is two texts in a row
	}
	return 1
}

func until(s string, from int, end string) int {
	if i := strings.Index(s[from:], end); i >= 0 {
		return from + i + len(end)
	}
	return len(s)
}
