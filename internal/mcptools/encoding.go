package mcptools

import (
	"encoding/base64"
	"unicode/utf8"
)

// The two ways in which bytes travel in a string.
const (
	encodingUTF8   = "utf8"
	encodingBase64 = "base64"
)

// encodeBytes is b as a string, and how: as it is where all of it is UTF-8 and
// nothing else was asked for, else in base64. Nothing of b is ever replaced.
func encodeBytes(b []byte, want string) (value, encoding string) {
	if want != encodingBase64 && utf8.Valid(b) {
		return string(b), encodingUTF8
	}
	return base64.StdEncoding.EncodeToString(b), encodingBase64
}

// decodeBytes is the inverse; an absent encoding is UTF-8.
func decodeBytes(what, value, encoding string) ([]byte, error) {
	if encoding != encodingBase64 {
		return []byte(value), nil
	}
	b, err := base64.StdEncoding.DecodeString(value)
	if err != nil {
		return nil, invalid("%s is not base64 (RFC 4648, with padding): %v", what, err)
	}
	return b, nil
}

// wholeRunes is b without the beginning of a character at its end, where b was
// cut out of a longer text. What is no text stays as it is.
func wholeRunes(b []byte) []byte {
	for back := 1; back < utf8.UTFMax && back <= len(b); back++ {
		tail := b[len(b)-back:]
		if !utf8.RuneStart(tail[0]) {
			continue
		}
		if !utf8.FullRune(tail) && utf8.Valid(b[:len(b)-back]) {
			return b[:len(b)-back]
		}
		break
	}
	return b
}
