package config

import (
	"encoding/json"
	"fmt"
	"io"
)

// maxHandover bounds what Handover.Write writes, in bytes.
const maxHandover = 4 << 20

// Handover is what the service tells a VM's process, and it alone, when it
// starts it.
type Handover struct {
	// Initiator is who started the VM, in the form of inspect.FormatInitiator.
	Initiator string
	// Secrets are those that the profile's servers refer to, by name.
	Secrets map[string]Secret
}

// handover is its encoding, the one in which secrets are readable.
type handover struct {
	Initiator string            `json:"initiator"`
	Secrets   map[string]string `json:"secrets"`
}

// Write writes the handover to a pipe to the process that will use it.
func (h Handover) Write(w io.Writer) error {
	plain := handover{Initiator: h.Initiator, Secrets: make(map[string]string, len(h.Secrets))}
	for name, s := range h.Secrets {
		plain.Secrets[name] = s.Reveal()
	}
	b, err := json.Marshal(plain)
	if err != nil {
		return fmt.Errorf("encoding the handover: %w", err)
	}
	if len(b) > maxHandover {
		return fmt.Errorf("handing over secrets: they have %d bytes, the limit is %d", len(b), maxHandover)
	}
	if _, err := w.Write(b); err != nil {
		return fmt.Errorf("handing over secrets: %w", err)
	}
	return nil
}

// ReadHandover reads what Handover.Write wrote, to the end of r.
func ReadHandover(r io.Reader) (Handover, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxHandover+1))
	if err != nil {
		return Handover{}, fmt.Errorf("reading the handover: %w", err)
	}
	var plain handover
	if err := json.Unmarshal(b, &plain); err != nil {
		// The decoder's message may quote its input.
		return Handover{}, fmt.Errorf("reading the handover: %d bytes are not of its form", len(b))
	}
	h := Handover{Initiator: plain.Initiator, Secrets: make(map[string]Secret, len(plain.Secrets))}
	for name, value := range plain.Secrets {
		h.Secrets[name] = NewSecret(value)
	}
	return h, nil
}
