package egress

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
)

// canonical returns a URL that a server takes for the same, spelled in the one
// way that rules can name: a rule on a host or a path would be evaded by another
// spelling of it. Upper case, a final dot, IPv6 for an IPv4 address, the port's
// leading zeros, escapes that need not be and dot segments are gone (RFC 3986
// §6.2.2). What is judged is what is sent.
func canonical(u *url.URL) (*url.URL, error) {
	if err := checkURL(u); err != nil {
		return nil, err
	}
	host, err := canonicalHost(u.Hostname())
	if err != nil {
		return nil, err
	}
	if text := u.Port(); text != "" {
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil || n == 0 {
			return nil, fmt.Errorf("the URL's port is %s; it must be from 1 to 65535", text)
		}
		host = net.JoinHostPort(host, strconv.FormatUint(n, 10))
	} else if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	plain := *u
	plain.Host, plain.Fragment, plain.RawFragment = host, "", ""
	plain.RawPath = plainEscapes(u.EscapedPath())
	if plain.Path, err = url.PathUnescape(plain.RawPath); err != nil {
		return nil, fmt.Errorf("reading the URL's path: %w", err)
	}
	next := plain.ResolveReference(&plain) // removes dot segments
	if next.Path == "" {
		next.Path = "/"
	}
	return next, nil
}

func canonicalHost(host string) (string, error) {
	if a, err := netip.ParseAddr(host); err == nil {
		return a.Unmap().String(), nil
	}
	for _, c := range []byte(host) {
		if c >= 0x80 {
			return "", fmt.Errorf("the host %q has letters that are not ASCII: write the name in its xn-- form", host)
		}
	}
	host = strings.TrimSuffix(strings.ToLower(host), ".")
	if host == "" {
		return "", errors.New("the URL names no host")
	}
	return host, nil
}

// plainEscapes decodes the escapes of a path that stand for unreserved characters
// (RFC 3986 §2.3), and writes the others in upper case. The path is well formed.
func plainEscapes(path string) string {
	if !strings.Contains(path, "%") {
		return path
	}
	var b strings.Builder
	for i := 0; i < len(path); i++ {
		if path[i] != '%' || i+2 >= len(path) {
			b.WriteByte(path[i])
			continue
		}
		escape := path[i : i+3]
		i += 2
		if n, err := strconv.ParseUint(escape[1:], 16, 8); err == nil && unreserved(byte(n)) {
			b.WriteByte(byte(n))
		} else {
			b.WriteString(strings.ToUpper(escape))
		}
	}
	return b.String()
}

func unreserved(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("-._~", c) >= 0
}

// withoutOwn leaves the addresses of this host, and of its resolver, out of an
// error: whoever asked for the request is told what failed, not where we are.
func withoutOwn(err error) error {
	var dns *net.DNSError
	if errors.As(err, &dns) {
		return errors.New(dns.Err)
	}
	var op *net.OpError
	if errors.As(err, &op) {
		return fmt.Errorf("%s: %w", op.Op, op.Err)
	}
	return err
}
