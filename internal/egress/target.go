package egress

import (
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"

	"github.com/capsem/capsem/internal/config"
)

// target is where a request wants to go, read from its line alone.
type target struct {
	at config.HostPort
	// url is nil for CONNECT.
	url *url.URL
}

// readTarget reads a request's target, which must be in authority form for
// CONNECT and in absolute form else (RFC 9112 section 3.2), and compares it with
// Host: two that differ would leave it to the server which one is meant.
func readTarget(h *head) (t target, err error) {
	implied := ""
	if h.method == http.MethodConnect {
		if t.at, err = authority(h.target); err != nil {
			return target{}, err
		}
		_, implied, err = net.SplitHostPort(h.target)
	} else {
		t, implied, err = absolute(h.target)
	}
	if err != nil {
		return target{}, err
	}
	for _, host := range h.values("Host") {
		if !strings.Contains(host, ":") || strings.HasSuffix(host, "]") {
			host += ":" + implied
		}
		if at, err := authority(host); err != nil || at != t.at {
			return target{}, malformed("the request's target and its Host field name different servers")
		}
	}
	return t, nil
}

// authority reads host:port in its usual spelling.
func authority(s string) (config.HostPort, error) {
	host, port, err := net.SplitHostPort(s)
	if err != nil || port == "" || strings.Trim(port, "0123456789") != "" {
		return config.HostPort{}, malformed("the request's target is not host:port")
	}
	if a, err := netip.ParseAddr(host); err == nil && (a.Zone() != "" || a.Is4In6()) {
		return config.HostPort{}, malformed("the request's target is an address with a zone, or an IPv4 address in disguise")
	}
	at, err := config.ParseHostPort(s)
	if err != nil || numeric(at.Host) && !isAddress(at.Host) {
		return config.HostPort{}, malformed("the request's target is not a name or an address in its usual form, and a port from 1 to 65535")
	}
	return at, nil
}

func isAddress(host string) bool { _, err := netip.ParseAddr(host); return err == nil }

func absolute(s string) (t target, port string, err error) {
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return target{}, "", malformed("the request's target is no URL")
	case u.Scheme != "http" && u.Scheme != "https" || u.Opaque != "":
		return target{}, "", malformed("this is a proxy: the request's target must be a URL with http:// or https://, or host:port with CONNECT")
	case u.User != nil:
		return target{}, "", malformed("the request's target has a user name in it")
	}
	port = "80"
	if u.Scheme == "https" {
		port = "443"
	}
	host := u.Host
	if u.Port() == "" {
		host += ":" + port
	}
	if t.at, err = authority(host); err != nil {
		return target{}, "", err
	}
	if u.Path == "" {
		u.Path = "/"
	}
	// The server is told the name that was judged.
	u.Host = t.at.String()
	if rest, ok := strings.CutSuffix(u.Host, ":"+port); ok {
		u.Host = rest
	}
	t.url = u
	return t, port, nil
}
