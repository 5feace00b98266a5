package config

import (
	"encoding/json"
	"fmt"
	"io"
)

// maxHandover bounds what WriteHandover writes, in bytes.
const maxHandover = 4 << 20

// WriteHandover writes secrets, by name, for the process that will use them. w
// is a pipe to that process alone: this is the one encoding in which secrets
// are readable.
func WriteHandover(w io.Writer, secrets map[string]Secret) error {
	plain := make(map[string]string, len(secrets))
	for name, s := range secrets {
		plain[name] = s.Reveal()
	}
	b, err := json.Marshal(plain)
	if err != nil {
		return fmt.Errorf("encoding secrets: %w", err)
	}
	if len(b) > maxHandover {
		return fmt.Errorf("handing over secrets: they have %d bytes, the limit is %d", len(b), maxHandover)
	}
	if _, err := w.Write(b); err != nil {
		return fmt.Errorf("handing over secrets: %w", err)
	}
	return nil
}

// ReadHandover reads what WriteHandover wrote, to the end of r.
func ReadHandover(r io.Reader) (map[string]Secret, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxHandover+1))
	if err != nil {
		return nil, fmt.Errorf("taking over secrets: %w", err)
	}
	var plain map[string]string
	if err := json.Unmarshal(b, &plain); err != nil {
		// The decoder's message may quote its input.
		return nil, fmt.Errorf("taking over secrets: %d bytes are no JSON object of strings", len(b))
	}
	secrets := make(map[string]Secret, len(plain))
	for name, value := range plain {
		secrets[name] = NewSecret(value)
	}
	return secrets, nil
}
