package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxSecretBytes bounds the value of a secret.
const maxSecretBytes = 64 << 10

// ErrNoSecret is matched by the error for a secret that the store does not have.
var ErrNoSecret = errors.New("no such secret")

// Secret is a value that must not be shown. Every way of printing, logging or
// encoding it gives `[redacted]`; Reveal gives the value.
type Secret struct {
	// value is behind a pointer so that a printer that walks into unexported
	// fields finds an address.
	value *string
}

// NewSecret wraps a value.
func NewSecret(value string) Secret { return Secret{&value} }

// Reveal returns the value, for the one place that uses it.
func (s Secret) Reveal() string {
	if s.value == nil {
		return ""
	}
	return *s.value
}

const redacted = "[redacted]"

// String says that there is a secret.
func (s Secret) String() string { return redacted }

// GoString says that there is a secret.
func (s Secret) GoString() string { return redacted }

// Format says that there is a secret, whatever the verb.
func (s Secret) Format(f fmt.State, _ rune) {
	// A failed write shows in the writer that the caller passed.
	_, _ = io.WriteString(f, redacted)
}

// LogValue says that there is a secret.
func (s Secret) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalText says that there is a secret. It also covers map keys, TOML and XML.
func (s Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// MarshalJSON says that there is a secret.
func (s Secret) MarshalJSON() ([]byte, error) { return []byte(`"` + redacted + `"`), nil }

// Store keeps secrets, one file of mode 0600 each.
type Store struct{ dir string }

// SecretStore is the store in the home.
func (h Home) SecretStore() Store { return Store{h.Secrets()} }

// Set keeps a value under name, replacing what was there.
func (s Store) Set(name string, value Secret) error {
	if err := CheckSecretName(name); err != nil {
		return err
	}
	v := value.Reveal()
	if v == "" {
		return fmt.Errorf("secret %s is empty", name)
	}
	if len(v) > maxSecretBytes || strings.ContainsRune(v, 0) {
		return fmt.Errorf("secret %s is longer than %d bytes or holds a zero byte", name, maxSecretBytes)
	}
	if err := replaceFile(filepath.Join(s.dir, name), []byte(v)); err != nil {
		return fmt.Errorf("storing secret %s: %w", name, err)
	}
	return nil
}

// Get returns the value under name. A missing one matches ErrNoSecret.
func (s Store) Get(name string) (Secret, error) {
	if err := CheckSecretName(name); err != nil {
		return Secret{}, err
	}
	f, err := os.OpenFile(filepath.Join(s.dir, name), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return Secret{}, fmt.Errorf("%w: %s (store it with `capsem secret set %s`)", ErrNoSecret, name, name)
	}
	if err != nil {
		return Secret{}, fmt.Errorf("reading secret %s: %w", name, err)
	}
	defer f.Close()
	if err := checkPrivate(f); err != nil {
		return Secret{}, fmt.Errorf("reading secret %s: %w", name, err)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxSecretBytes+1))
	if err != nil {
		return Secret{}, fmt.Errorf("reading secret %s: %w", name, err)
	}
	if len(data) > maxSecretBytes {
		return Secret{}, fmt.Errorf("reading secret %s: it is longer than %d bytes", name, maxSecretBytes)
	}
	return NewSecret(string(data)), nil
}

// checkPrivate refuses a file that someone else could have written or read.
func checkPrivate(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !info.Mode().IsRegular() || !ok || int(st.Uid) != os.Geteuid() || info.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("%s must be a regular file of yours with mode 0600", f.Name())
	}
	return nil
}

// List returns the names of the secrets, sorted.
func (s Store) List() ([]string, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("listing secrets: %w", err)
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		if CheckSecretName(e.Name()) == nil {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// Remove forgets the secret. A missing one matches ErrNoSecret.
func (s Store) Remove(name string) error {
	if err := CheckSecretName(name); err != nil {
		return err
	}
	err := os.Remove(filepath.Join(s.dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %s", ErrNoSecret, name)
	}
	if err != nil {
		return fmt.Errorf("removing secret %s: %w", name, err)
	}
	return nil
}
