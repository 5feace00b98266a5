package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/capsem/capsem/bench/guest/wire"
)

func vsockBenchmark() benchmark {
	return benchmark{
		name: "vsock",
		about: "the vsock device in our process; the floor is the virtio-serial port of the same QEMU at the same time, served in the guest by the same code " +
			"with the same system calls",
		run: benchVsock,
	}
}

// Amounts of one round.
const (
	vsockTrips = 500
	vsockBytes = 32 << 20
)

func benchVsock(ctx context.Context, l *lab) (rows []row, err error) {
	f, err := l.raw(ctx)
	if err != nil {
		return nil, err
	}
	conn, err := f.dial(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	for _, m := range []struct {
		what, unit string
		bar        *bar
		measure    func(net.Conn) (float64, error)
	}{
		{"vsock, round trip of 64 bytes, p50", "µs", atMost(1.3), func(c net.Conn) (float64, error) { return roundTrips(c, vsockTrips) }},
		{"vsock, host to guest", "MiB/s", atLeast(1), toGuest},
		{"vsock, guest to host", "MiB/s", atLeast(1), fromGuest},
	} {
		all, err := alternate(ctx, l.rounds(9),
			func(context.Context) (float64, error) { return m.measure(conn) },
			func(context.Context) (float64, error) { return m.measure(f.serial) },
		)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", m.what, err)
		}
		rows = append(rows, compare(m.what, m.unit, all[0], all[1], m.bar, ""))
	}
	return rows, nil
}

func toGuest(conn net.Conn) (float64, error) {
	block := make([]byte, wire.Block)
	if _, err := conn.Write(wire.Request{Op: wire.Discard, Count: vsockBytes}.Append(nil)); err != nil {
		return 0, err
	}
	return throughput(func() error {
		for range vsockBytes / len(block) {
			if _, err := conn.Write(block); err != nil {
				return err
			}
		}
		_, err := io.ReadFull(conn, block[:1])
		return err
	})
}

func fromGuest(conn net.Conn) (float64, error) {
	block := make([]byte, wire.Block)
	return throughput(func() error {
		if _, err := conn.Write(wire.Request{Op: wire.Zeros, Size: uint32(len(block)), Count: vsockBytes}.Append(nil)); err != nil {
			return err
		}
		for left := vsockBytes; left > 0; {
			n, err := conn.Read(block[:min(len(block), left)])
			if err != nil {
				return err
			}
			left -= n
		}
		return nil
	})
}

// throughput is in MiB a second.
func throughput(move func() error) (float64, error) {
	began := time.Now()
	err := move()
	return vsockBytes / (1 << 20) / time.Since(began).Seconds(), err
}
