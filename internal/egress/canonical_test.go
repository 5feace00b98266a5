package egress

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"testing"
)

func TestAnotherSpellingOfAURLIsNoOtherURL(t *testing.T) {
	for in, want := range map[string]string{
		"http://Example.COM":                     "http://example.com/",
		"http://example.com./":                   "http://example.com/",
		"http://example.com:080/":                "http://example.com:80/",
		"http://[::ffff:127.0.0.1]:8080/":        "http://127.0.0.1:8080/",
		"http://[::FFFF:7f00:1]/":                "http://127.0.0.1/",
		"http://[2001:DB8:0::1]/":                "http://[2001:db8::1]/",
		"http://h/%61dmin":                       "http://h/admin",
		"http://h/./admin":                       "http://h/admin",
		"http://h/x/../admin":                    "http://h/admin",
		"http://h/x/%2E%2e/admin":                "http://h/admin",
		"http://h/x/.%2e/%2e/%61dmin":            "http://h/admin",
		"http://h/../../admin":                   "http://h/admin",
		"http://h/a%2fb%2F%20%c3%a9?q=%61&..":    "http://h/a%2Fb%2F%20%C3%A9?q=%61&..",
		"http://h/a//b/":                         "http://h/a//b/",
		"http://h/a#fragment":                    "http://h/a",
		"http://h?q":                             "http://h/?q",
		"https://xn--bcher-kva.example/~u/%7Eu/": "https://xn--bcher-kva.example/~u/~u/",
	} {
		u, err := url.Parse(in)
		if err != nil {
			t.Fatal(err)
		}
		got, err := canonical(u)
		if err != nil || got.String() != want {
			t.Errorf("%s: got %v, %v; want %s", in, got, err, want)
		}
		if err == nil {
			if again, err := canonical(got); err != nil || again.String() != want {
				t.Errorf("%s: a second time gives %v, %v", want, again, err)
			}
		}
	}
	for in, want := range map[string]string{
		"http://①②⑦.⓪.⓪.①/":          "xn--",
		"http://evil。com/":           "xn--",
		"http://%EF%BD%85vil.com/":   "xn--",
		"http://h:0/":                "port",
		"http://h:65536/":            "port",
		"http://./":                  "no host",
		"http://user@h/":             "user name",
		"file:///etc/passwd":         "scheme",
		"http://127.0.0.1:1@evil.x/": "user name",
	} {
		u, err := url.Parse(in)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := canonical(u); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, %v", in, got, err)
		}
	}
}

func TestErrorsDoNotSayWhereWeAre(t *testing.T) {
	own := &net.TCPAddr{IP: netip.MustParseAddr("10.1.2.3").AsSlice(), Port: 50000}
	for _, err := range []error{
		&net.DNSError{Err: "no such host", Name: "x.example", Server: "10.9.9.9:53"},
		fmt.Errorf("reading: %w", &net.OpError{Op: "read", Net: "tcp", Source: own, Addr: own, Err: os.ErrDeadlineExceeded}),
	} {
		got := withoutOwn(err)
		if strings.Contains(got.Error(), "10.") {
			t.Errorf("%v", got)
		}
		if errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(got, os.ErrDeadlineExceeded) {
			t.Errorf("%v is not known as a timeout any more", got)
		}
	}
}
