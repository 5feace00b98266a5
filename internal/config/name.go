package config

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"regexp"
)

// Names that people choose, and ids that we do.
//
// An id is `vm-` and 12 lower-case hexadecimal digits: 48 random bits, short
// enough for a socket path. It fits the pattern of a name, so a name of that form
// is refused; then a word on a command line is one or the other, never both.
const (
	idPrefix = "vm-"
	idBytes  = 6
)

// BuiltinServer is the server name that is ours.
const BuiltinServer = "builtin"

const (
	nameRule   = "1 to 63 of a-z, 0-9 and '-', beginning with a letter or digit"
	serverRule = "1 to 32 of a-z, 0-9 and '-', beginning with a letter or digit"
	secretRule = "1 to 64 of a-z, 0-9, '-', '_' and '.', beginning with a letter or digit"
	ruleIDRule = "1 to 64 letters, digits, '-' and '_', beginning with a letter or digit"
)

// patterns are compiled on use and not kept in package variables: they are read
// a handful of times when a file is loaded.
func matches(pattern, s string) bool { return regexp.MustCompile(pattern).MatchString(s) }

// NewID returns an id that was not returned before, but for a chance of 1 in
// 2^48 for each id there is; whoever creates a VM's folder finds out, because the
// folder exists.
func NewID() string {
	var b [idBytes]byte
	// rand.Read never fails: crypto/rand ends the program instead.
	_, _ = rand.Read(b[:])
	return idPrefix + hex.EncodeToString(b[:])
}

// IsID reports whether s has the form of an id.
func IsID(s string) bool { return matches(`^vm-[0-9a-f]{12}$`, s) }

// CheckName returns why s cannot be the name of a VM, nil if it can.
func CheckName(s string) error {
	if !matches(`^[a-z0-9][a-z0-9-]{0,62}$`, s) {
		return fmt.Errorf("VM name %q is not valid: use %s", s, nameRule)
	}
	if IsID(s) {
		return fmt.Errorf("VM name %q has the form of an id: choose another", s)
	}
	return nil
}

// CheckProfileName returns why s cannot be the name of a profile.
func CheckProfileName(s string) error {
	if !matches(`^[a-z0-9][a-z0-9-]{0,62}$`, s) {
		return fmt.Errorf("profile name %q is not valid: use %s", s, nameRule)
	}
	return nil
}

// CheckServerName returns why s cannot be the name of an MCP server in a profile.
func CheckServerName(s string) error {
	if !matches(`^[a-z0-9][a-z0-9-]{0,31}$`, s) {
		return fmt.Errorf("server name %q is not valid: use %s", s, serverRule)
	}
	if s == BuiltinServer {
		return fmt.Errorf("server name %q is reserved for Capsem's own tools", s)
	}
	return nil
}

// CheckSecretName returns why s cannot be the name of a secret.
func CheckSecretName(s string) error {
	if !matches(`^[a-z0-9][a-z0-9._-]{0,63}$`, s) {
		return fmt.Errorf("secret name %q is not valid: use %s", s, secretRule)
	}
	return nil
}

func validRuleID(s string) bool { return matches(`^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$`, s) }

func validImage(s string) bool {
	return matches(`^[a-z0-9][a-z0-9._-]{0,62}(@sha256:[0-9a-f]{64})?$`, s)
}

func validEnvName(s string) bool { return matches(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`, s) }

func validHeaderName(s string) bool { return matches("^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}$", s) }
