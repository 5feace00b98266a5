package ledger

import (
	"bytes"
	"cmp"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"unicode/utf16"
	"unicode/utf8"
)

// MinSecret is the length in bytes of the shortest secret that can be told from
// ordinary text.
const MinSecret = 4

// redacted stands where a secret was.
const redacted = "[redacted]"

// Redactor removes secrets from what is recorded. It finds a secret also where
// JSON escapes or percent-encoding disguise any of its characters. It does not
// find one that was encoded as a whole (base64, encryption). A nil Redactor
// removes nothing. It is safe for concurrent use.
type Redactor struct {
	secrets atomic.Pointer[[]string]
}

// NewRedactor returns a redactor of these secrets; see Set.
func NewRedactor(secrets ...string) (*Redactor, error) {
	r := &Redactor{}
	return r, r.Set(secrets)
}

// Set replaces the secrets. One that is shorter than MinSecret is an error, and
// the old ones stay.
func (r *Redactor) Set(secrets []string) error {
	for i, s := range secrets {
		if len(s) < MinSecret {
			return fmt.Errorf("secret %d of %d is shorter than %d bytes: it cannot be told from ordinary text", i+1, len(secrets), MinSecret)
		}
	}
	sorted := slices.Clone(secrets)
	// Longest first: a secret may contain another one.
	slices.SortFunc(sorted, func(a, b string) int { return cmp.Compare(len(b), len(a)) })
	r.secrets.Store(&sorted)
	return nil
}

// String keeps the secrets out of whatever prints a Redactor.
func (r *Redactor) String() string { return redacted }

// GoString is String for %#v.
func (r *Redactor) GoString() string { return redacted }

// LogValue keeps the secrets out of logs.
func (r *Redactor) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalJSON keeps the secrets out of JSON.
func (r *Redactor) MarshalJSON() ([]byte, error) { return []byte(`"` + redacted + `"`), nil }

func (r *Redactor) list() []string {
	if r == nil {
		return nil
	}
	if p := r.secrets.Load(); p != nil {
		return *p
	}
	return nil
}

// Text is s without secrets, for what is kept elsewhere than in a ledger.
func (r *Redactor) Text(s string) string { return r.text(s) }

// text is s without secrets.
func (r *Redactor) text(s string) string {
	for _, secret := range r.list() {
		if len(s) >= len(secret) && mayHold(s, secret) {
			s = string(remove([]byte(s), secret))
		}
	}
	return s
}

// bytes is b without secrets: b itself where there are none.
func (r *Redactor) bytes(b []byte) []byte {
	for _, secret := range r.list() {
		b = remove(b, secret)
	}
	return b
}

// mayHold is a quick no: neither the secret nor anything that could disguise it.
func mayHold(s, secret string) bool {
	return strings.Contains(s, secret) || strings.ContainsAny(s, `\%`)
}

// remove replaces every occurrence of secret, in any mix of escapes. The result
// is b itself where there is none.
func remove(b []byte, secret string) []byte {
	if !bytes.Contains(b, []byte(secret)) && !bytes.ContainsAny(b, `\%`) {
		return b
	}
	var out []byte
	from := 0
	for i := 0; i < len(b); {
		if b[i] != secret[0] && b[i] != '\\' && b[i] != '%' {
			i++
			continue
		}
		end, found := matchAt(b, i, secret)
		if !found {
			i++
			continue
		}
		out = append(append(out, b[from:i]...), redacted...)
		i, from = end, end
	}
	if from == 0 {
		return b
	}
	return append(out, b[from:]...)
}

// matchAt reports whether secret stands at b[i:], and where it ends.
func matchAt(b []byte, i int, secret string) (end int, found bool) {
	if len(b)-i >= len(secret) && string(b[i:i+len(secret)]) == secret {
		return i + len(secret), true
	}
	for secret != "" {
		if i >= len(b) {
			return 0, false
		}
		var buf [utf8.UTFMax]byte
		if plain, size := unescape(b[i:], buf[:0]); size > 0 && strings.HasPrefix(secret, string(plain)) {
			secret, i = secret[len(plain):], i+size
			continue
		}
		if b[i] != secret[0] {
			return 0, false
		}
		secret, i = secret[1:], i+1
	}
	return i, true
}

// unescape decodes the JSON escape or percent-encoded byte at the start of b,
// and says how long it is: 0 where there is none.
func unescape(b, buf []byte) (plain []byte, size int) {
	if len(b) >= 3 && b[0] == '%' {
		if n, ok := hexValue(b[1:3]); ok {
			return append(buf, byte(n)), 3
		}
	}
	if len(b) < 2 || b[0] != '\\' {
		return nil, 0
	}
	if b[1] == 'u' {
		return unescapeRune(b, buf)
	}
	const names, values = `"\/bfnrt`, "\"\\/\b\f\n\r\t"
	if i := strings.IndexByte(names, b[1]); i >= 0 {
		return append(buf, values[i]), 2
	}
	return nil, 0
}

// unescapeRune decodes \uXXXX, or two of them that are a surrogate pair.
func unescapeRune(b, buf []byte) (plain []byte, size int) {
	if len(b) < 6 {
		return nil, 0
	}
	n, ok := hexValue(b[2:6])
	if !ok {
		return nil, 0
	}
	r := rune(n)
	if utf16.IsSurrogate(r) && len(b) >= 12 && b[6] == '\\' && b[7] == 'u' {
		if low, ok := hexValue(b[8:12]); ok {
			return utf8.AppendRune(buf, utf16.DecodeRune(r, rune(low))), 12
		}
	}
	return utf8.AppendRune(buf, r), 6
}

func hexValue(digits []byte) (n int, ok bool) {
	for _, d := range digits {
		switch {
		case '0' <= d && d <= '9':
			n = n<<4 | int(d-'0')
		case 'a' <= d && d <= 'f':
			n = n<<4 | int(d-'a'+10)
		case 'A' <= d && d <= 'F':
			n = n<<4 | int(d-'A'+10)
		default:
			return 0, false
		}
	}
	return n, true
}
