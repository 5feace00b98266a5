package config

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// Template is a text in which `${name}` stands for a secret's value. A `$` that
// no brace follows is a `$`.
type Template struct {
	// literals surround secrets: there is one more of them.
	literals, secrets []string
}

// ParseTemplate reads a template and checks the names in it.
func ParseTemplate(s string) (Template, error) {
	var t Template
	for {
		before, after, found := strings.Cut(s, "${")
		t.literals = append(t.literals, before)
		if !found {
			return t, nil
		}
		name, rest, closed := strings.Cut(after, "}")
		if !closed {
			return Template{}, fmt.Errorf("%q has no closing brace", "${"+after)
		}
		if err := CheckSecretName(name); err != nil {
			return Template{}, err
		}
		t.secrets = append(t.secrets, name)
		s = rest
	}
}

// Secrets lists the names that the template refers to, in order.
func (t Template) Secrets() []string { return t.secrets }

// Expand puts the values of secrets in. The first error of get ends it.
func (t Template) Expand(get func(name string) (Secret, error)) (Secret, error) {
	var b strings.Builder
	for i, literal := range t.literals {
		b.WriteString(literal)
		if i == len(t.secrets) {
			break
		}
		s, err := get(t.secrets[i])
		if err != nil {
			return Secret{}, err
		}
		b.WriteString(s.Reveal())
	}
	return NewSecret(b.String()), nil
}

// String returns the template as it is written, with names and no values.
func (t Template) String() string {
	var b strings.Builder
	for i, literal := range t.literals {
		b.WriteString(literal)
		if i < len(t.secrets) {
			b.WriteString("${" + t.secrets[i] + "}")
		}
	}
	return b.String()
}

// HostPort is an exact address or host name, in lower case, and a port.
type HostPort struct {
	Host string
	Port int
}

// ParseHostPort reads "host:port" or "[v6]:port". Names are not resolved, and
// patterns are refused.
func ParseHostPort(s string) (HostPort, error) {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return HostPort{}, fmt.Errorf("%q is not valid: use host:port, like \"127.0.0.1:8080\"", s)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return HostPort{}, fmt.Errorf("%q has no port from 1 to 65535", s)
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		if addr.Zone() != "" {
			return HostPort{}, fmt.Errorf("%q has an address with a zone, which is not supported", s)
		}
		return HostPort{addr.Unmap().String(), int(n)}, nil
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if !matches(`^[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_]([a-z0-9_-]{0,62}))*$`, host) || len(host) > 253 {
		return HostPort{}, fmt.Errorf("%q has no valid host name or address (patterns are not supported)", s)
	}
	if matches(`(^|\.)(0x[0-9a-f]*|[0-9]+)$`, host) {
		// inet_aton(3) would read it as one.
		return HostPort{}, fmt.Errorf("%q has no valid address", s)
	}
	return HostPort{host, int(n)}, nil
}

// String returns host:port.
func (h HostPort) String() string { return net.JoinHostPort(h.Host, strconv.Itoa(h.Port)) }
