package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/capsem/capsem/bench/guest/wire"
)

func execBenchmark() benchmark {
	return benchmark{
		name: "exec",
		about: "`POST exec` of /bin/true, 500 calls one after another; the floor is a raw vsock round trip of 64 bytes, plus fork, exec and wait " +
			"of the same program timed inside a guest that has nothing else",
		run: benchExec,
	}
}

// execCalls is how many calls make one round.
const execCalls = 50

func benchExec(ctx context.Context, l *lab) (rows []row, err error) {
	floor, err := l.raw(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := l.exec(ctx, "/bin/true"); err != nil {
		return nil, err
	}
	conn, err := floor.dial(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	all, err := alternate(ctx, l.rounds(10),
		l.execRound,
		func(context.Context) (float64, error) { return roundTrips(conn, execCalls) },
		func(context.Context) (float64, error) { return spawns(conn, execCalls) },
	)
	if err != nil {
		return nil, err
	}
	floors := make(series, len(all[1]))
	for i := range floors {
		floors[i] = all[1][i] + all[2][i]
	}
	note := fmt.Sprintf("of the floor %s are the round trip, %s the process", amount(all[1].median(), "µs"), amount(all[2].median(), "µs"))
	return []row{compare("exec of /bin/true, p50", "µs", all[0], floors, atMost(1.5), note)}, nil
}

// execRound is the median of one round's calls.
func (l *lab) execRound(ctx context.Context) (float64, error) {
	return repeat(execCalls, func() error {
		_, err := l.exec(ctx, "/bin/true")
		return err
	})
}

// roundTrips is the median of count round trips of 64 bytes.
func roundTrips(conn net.Conn, count int) (float64, error) {
	message := make([]byte, 64)
	if _, err := conn.Write(wire.Request{Op: wire.Echo, Size: uint32(len(message)), Count: uint64(count)}.Append(nil)); err != nil {
		return 0, err
	}
	return repeat(count, func() error {
		if _, err := conn.Write(message); err != nil {
			return err
		}
		_, err := io.ReadFull(conn, message)
		return err
	})
}

// spawns is the median of count processes in the guest, by the guest's clock.
func spawns(conn net.Conn, count int) (float64, error) {
	if _, err := conn.Write(wire.Request{Op: wire.Spawn, Count: uint64(count)}.Append(nil)); err != nil {
		return 0, err
	}
	b := make([]byte, 8*count)
	if _, err := io.ReadFull(conn, b); err != nil {
		return 0, err
	}
	times, err := wire.ParseTimes(b)
	if err != nil {
		return 0, err
	}
	return inMicros(times).median(), nil
}

func inMicros(times []time.Duration) series {
	s := make(series, len(times))
	for i, t := range times {
		s[i] = micros(t)
	}
	return s
}

// upload puts a program into Capsem's machine.
func (l *lab) upload(ctx context.Context, program []byte, to string) error {
	m, err := l.machine(ctx)
	if err != nil {
		return err
	}
	path := "/v1/vms/" + m.ID + "/files?mode=755&path=" + to
	if _, err := l.service.Upload(ctx, path, bytes.NewReader(program), int64(len(program))); err != nil {
		return fmt.Errorf("uploading %s: %w", to, err)
	}
	return nil
}
