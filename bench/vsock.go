package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/capsem/capsem/bench/guest/wire"
	"github.com/capsem/capsem/internal/vm"
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
		var busy [2]series
		watched := func(i int, c net.Conn) side {
			return func(context.Context) (float64, error) {
				before, began := f.cpuTimes(), time.Now()
				v, err := m.measure(c)
				busy[i] = append(busy[i], 100*float64(f.busiest(before))/float64(time.Since(began)))
				return v, err
			}
		}
		all, err := alternate(ctx, l.rounds(9), watched(0, conn), watched(1, f.serial))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", m.what, err)
		}
		note := fmt.Sprintf("the guest's processor is busy %.0f %% of the time, floor %.0f %%", busy[0].median(), busy[1].median())
		rows = append(rows, compare(m.what, m.unit, all[0], all[1], m.bar, note))
	}
	return rows, nil
}

// cpuTimes is how long each thread of the machine's QEMU has run. The busiest one
// is the guest's processor.
func (f *floorVM) cpuTimes() map[string]time.Duration {
	times := map[string]time.Duration{}
	inspector, ok := f.machine.(vm.Inspector)
	if !ok {
		return times
	}
	names, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", inspector.PID()))
	if err != nil {
		return times
	}
	for _, name := range names {
		// In nanoseconds: Documentation/scheduler/sched-stats.rst of the kernel.
		stat, err := os.ReadFile(name)
		if err != nil {
			continue // the thread has ended
		}
		ran, _, _ := strings.Cut(string(stat), " ")
		if ns, err := strconv.ParseInt(ran, 10, 64); err == nil {
			times[name] = time.Duration(ns)
		}
	}
	return times
}

// busiest is what the thread ran that ran most since before.
func (f *floorVM) busiest(before map[string]time.Duration) (most time.Duration) {
	for name, ran := range f.cpuTimes() {
		most = max(most, ran-before[name])
	}
	return most
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
