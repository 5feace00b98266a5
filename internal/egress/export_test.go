package egress

import (
	"bufio"
	"bytes"
	"time"
)

// Tight returns a proxy with bounds that a test can reach.
func Tight(o ProxyOptions, conns int, head, idle time.Duration, most int64) *Proxy {
	l := defaultLimits()
	l.conns, l.head, l.body, l.idle, l.bytes, l.penance = conns, head, head, idle, most, 0
	return newProxy(o, l)
}

// ReadHead reads a head and writes it again.
func ReadHead(b []byte) ([]byte, error) {
	h, err := readHead(bufio.NewReaderSize(bytes.NewReader(b), maxHead))
	if err != nil {
		return nil, err
	}
	return h.encode(), nil
}
