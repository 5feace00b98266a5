// Package wire is what the benchmarks' own guest and its host agree on. It is
// the least that a connection can carry: requests of a fixed size, answered with
// bytes, so that what it costs is a floor.
package wire

import (
	"encoding/binary"
	"fmt"
	"io"
	"time"
)

// The vsock ports.
const (
	// PortFirst is the host's: the one connection of package first.
	PortFirst = 9000
	// PortRaw is the guest's, and answers requests. So does the serial port.
	PortRaw = 9001
	// PortLines is the host's: it answers each line with one of the same size.
	PortLines = 9002
	// PortSSH is the guest's: each connection is a `sshd -i`.
	PortSSH = 22
)

// Op is what a request asks for.
type Op byte

// The operations. Size and Count are those of the request.
const (
	// Echo sends Count messages of Size bytes back.
	Echo Op = 'e'
	// Discard takes Count bytes and answers with one.
	Discard Op = 'd'
	// Zeros sends Count bytes, at most Size at a time.
	Zeros Op = 'z'
	// Spawn forks and executes /bin/true Count times, and answers with the
	// nanoseconds that each took, eight bytes big-endian.
	Spawn Op = 's'
	// Run takes Size bytes, the words of a command with a zero byte after each,
	// and answers with what it writes to stdout: a length of four bytes, and the
	// bytes.
	Run Op = 'r'
)

// RequestSize is the size of a request in bytes.
const RequestSize = 13

// Block is how much is written at a time where throughput is measured.
const Block = 64 << 10

// Request begins every exchange.
type Request struct {
	Op    Op
	Size  uint32
	Count uint64
}

// Append appends the request's bytes to b.
func (r Request) Append(b []byte) []byte {
	b = append(b, byte(r.Op))
	b = binary.BigEndian.AppendUint32(b, r.Size)
	return binary.BigEndian.AppendUint64(b, r.Count)
}

// Read reads a request. The error is io.EOF where the other side has no more.
func Read(r io.Reader) (Request, error) {
	var b [RequestSize]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return Request{}, err
	}
	return Request{Op(b[0]), binary.BigEndian.Uint32(b[1:]), binary.BigEndian.Uint64(b[5:])}, nil
}

// AppendTimes appends durations as Spawn answers them.
func AppendTimes(b []byte, times []time.Duration) []byte {
	for _, t := range times {
		b = binary.BigEndian.AppendUint64(b, uint64(t))
	}
	return b
}

// ParseTimes is the inverse of AppendTimes.
func ParseTimes(b []byte) ([]time.Duration, error) {
	if len(b)%8 != 0 {
		return nil, fmt.Errorf("%d bytes are no list of times", len(b))
	}
	var times []time.Duration
	for ; len(b) > 0; b = b[8:] {
		times = append(times, time.Duration(binary.BigEndian.Uint64(b)))
	}
	return times, nil
}
