package mcptools

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	// maxRecordedString is the longest string, in bytes, that is recorded as it
	// is among a call's arguments. A longer one is recorded by size and digest:
	// its bytes are in the request's body.
	maxRecordedString = 16 << 10
	// maxRecorded bounds the arguments as a whole. They travel in a header, in
	// base64, and a header is to stay under 64 KiB.
	maxRecorded = 40 << 10
	// maxHeaderText bounds what a client says of itself and of its call.
	maxHeaderText = 256
)

// digest stands for a value that is too large to be recorded.
type digest struct {
	Size   int    `json:"size"`
	SHA256 string `json:"sha256"`
}

func digestOf(b []byte) digest {
	sum := sha256.Sum256(b)
	return digest{Size: len(b), SHA256: hex.EncodeToString(sum[:])}
}

// recordedArguments is what the record says of a call's arguments: all of them,
// but for large ones, of which it has size and digest. Where many small ones are
// too much together, whole members are replaced, the largest first.
func recordedArguments(args any) (json.RawMessage, error) {
	raw, err := encode(args)
	if err != nil {
		return nil, err
	}
	if len(raw) <= maxRecordedString {
		return raw, nil
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(raw, &members); err != nil {
		return nil, fmt.Errorf("reading the arguments: %w", err)
	}
	for name, value := range members {
		if members[name], err = shorten(value); err != nil {
			return nil, err
		}
	}
	for {
		raw, err = encode(members)
		if err != nil || len(raw) <= maxRecorded {
			return raw, err
		}
		largest := ""
		for name, value := range members {
			if largest == "" || len(value) > len(members[largest]) || len(value) == len(members[largest]) && name < largest {
				largest = name
			}
		}
		if members[largest], err = encode(digestOf(members[largest])); err != nil {
			return nil, err
		}
	}
}

// shorten replaces the long strings in a value.
func shorten(raw json.RawMessage) (json.RawMessage, error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		return nil, fmt.Errorf("reading an argument: %w", err)
	}
	return encode(shortened(v))
}

func shortened(v any) any {
	switch v := v.(type) {
	case string:
		if len(v) > maxRecordedString {
			return digestOf([]byte(v))
		}
	case []any:
		for i := range v {
			v[i] = shortened(v[i])
		}
	case map[string]any:
		for name := range v {
			v[name] = shortened(v[name])
		}
	}
	return v
}

func encode(v any) (json.RawMessage, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, fmt.Errorf("encoding the arguments: %w", err)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// headerText makes a client's text fit for an HTTP header: what is not printable
// ASCII is escaped as in Go, and it is cut at maxHeaderText bytes.
func headerText(s string) string {
	for len(s) > maxHeaderText {
		_, n := utf8.DecodeLastRuneInString(s)
		s = s[:len(s)-n]
	}
	quoted := strconv.QuoteToASCII(s)
	s = strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`)
	return s[:min(len(s), maxHeaderText)]
}
