package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// connectTimeout bounds one attempt to connect.
const connectTimeout = 10 * time.Second

// dialer connects to addresses that it has checked.
type dialer struct {
	// allowed reports whether an address that is not on the public internet may
	// be reached all the same, as the one that host stands for.
	allowed func(host string, a netip.Addr, port string) bool
	// key is the profile's key that would allow it, for people.
	key     string
	resolve func(ctx context.Context, host string) ([]netip.Addr, error)
}

// system is the resolver where none is given.
func system(ctx context.Context, host string) ([]netip.Addr, error) {
	return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
}

// dial resolves, checks every address, and connects to the first that answers.
// One address that is refused refuses the name: a public name that also points
// inside is either broken or hostile.
func (d *dialer) dial(ctx context.Context, network, address string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("reading the address %s: %w", address, err)
	}
	addrs, err := d.addresses(ctx, host)
	if err != nil {
		return nil, err
	}
	for _, a := range addrs {
		if why := private(a); why != "" && !d.allowed(host, a, port) {
			return nil, &BlockedError{Message: fmt.Sprintf(
				"%s is %s, %s; such addresses are reachable only when the profile's %s names %q",
				host, a.Unmap(), why, d.key, net.JoinHostPort(a.Unmap().String(), port))}
		}
	}
	var failures error
	for _, a := range addrs {
		conn, err := (&net.Dialer{Timeout: connectTimeout}).DialContext(ctx, network, net.JoinHostPort(a.String(), port))
		if err == nil {
			return conn, nil
		}
		failures = errors.Join(failures, err)
	}
	return nil, failures
}

func (d *dialer) addresses(ctx context.Context, host string) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(host); err == nil {
		return []netip.Addr{a}, nil
	}
	if numeric(host) {
		return nil, &BlockedError{Message: fmt.Sprintf("%q is neither a name nor an address in its usual form", host)}
	}
	addrs, err := d.resolve(ctx, host)
	if err != nil {
		return nil, fmt.Errorf("resolving %s: %w", host, withoutOwn(err))
	}
	if len(addrs) == 0 {
		return nil, fmt.Errorf("resolving %s: no address", host)
	}
	return addrs, nil
}

// numeric reports whether a host that is no address could still be read as one
// by some resolver: 2130706433, 0x7f.1, 0177.0.0.1 (inet_aton(3)).
func numeric(host string) bool {
	last := strings.TrimSuffix(host, ".")
	last = last[strings.LastIndexByte(last, '.')+1:]
	if last == "" {
		return true
	}
	if rest, hex := strings.CutPrefix(strings.ToLower(last), "0x"); hex {
		return strings.Trim(rest, "0123456789abcdef") == ""
	}
	return strings.Trim(last, "0123456789") == ""
}

// either allows what a list names, by address or by name.
func either(allow []string) func(host string, a netip.Addr, port string) bool {
	return func(host string, a netip.Addr, port string) bool {
		literal := net.JoinHostPort(a.Unmap().String(), port)
		named := net.JoinHostPort(host, port)
		return slices.ContainsFunc(allow, func(entry string) bool {
			return entry == literal || strings.EqualFold(entry, named)
		})
	}
}

// reserved are the blocks that are not on the public internet and that netip
// has no word for (the IANA special-purpose address registries, RFC 6890).
var reserved = []struct {
	prefix netip.Prefix
	name   string
}{
	{netip.MustParsePrefix("0.0.0.0/8"), "this network"},
	{netip.MustParsePrefix("100.64.0.0/10"), "shared address space"},
	{netip.MustParsePrefix("192.0.0.0/24"), "reserved for protocols"},
	{netip.MustParsePrefix("192.0.2.0/24"), "for documentation"},
	{netip.MustParsePrefix("192.88.99.0/24"), "a relay"},
	{netip.MustParsePrefix("198.18.0.0/15"), "for benchmarks"},
	{netip.MustParsePrefix("198.51.100.0/24"), "for documentation"},
	{netip.MustParsePrefix("203.0.113.0/24"), "for documentation"},
	{netip.MustParsePrefix("240.0.0.0/4"), "reserved"},
	{netip.MustParsePrefix("::/96"), "an IPv4 address in disguise"},
	{netip.MustParsePrefix("64:ff9b::/96"), "an IPv4 address in disguise"},
	{netip.MustParsePrefix("64:ff9b:1::/48"), "an IPv4 address in disguise"},
	{netip.MustParsePrefix("100::/64"), "a discard address"},
	{netip.MustParsePrefix("2001::/23"), "reserved for protocols"},
	{netip.MustParsePrefix("2001:db8::/32"), "for documentation"},
	{netip.MustParsePrefix("2002::/16"), "an IPv4 address in disguise"},
	{netip.MustParsePrefix("3fff::/20"), "for documentation"},
	{netip.MustParsePrefix("fec0::/10"), "a site-local address"},
}

// private says why an address is not on the public internet, "" when it is.
func private(a netip.Addr) string {
	a = a.Unmap().WithZone("")
	switch {
	case a.IsUnspecified():
		return "the unspecified address"
	case a.IsLoopback():
		return "a loopback address"
	case a.IsPrivate():
		return "a private address"
	case a.IsLinkLocalUnicast():
		return "a link-local address (cloud metadata lives there)"
	case a.IsMulticast():
		return "a multicast address"
	}
	for _, r := range reserved {
		if r.prefix.Contains(a) {
			return r.name
		}
	}
	return ""
}
