package vmtest

import (
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
)

// Benchmark measures what a machine's connections cost: the round trip of 64
// bytes with 1, 8 and 64 connections, opening and closing one, and throughput
// each way. One machine serves all.
func Benchmark(b *testing.B, s Setup) {
	r := s.start(b)
	for _, conns := range []int{1, 8, 64} {
		b.Run(fmt.Sprintf("RoundTrip/conns=%d", conns), func(b *testing.B) { r.benchRoundTrip(b, conns) })
	}
	b.Run("Dial", r.benchDial)
	b.Run("ToGuest", r.benchTo)
	b.Run("FromGuest", r.benchFrom)
}

// benchRoundTrip makes b.N round trips over conns connections at once.
func (r *running) benchRoundTrip(b *testing.B, conns int) {
	times := make([][]time.Duration, conns)
	var all errgroup.Group
	for i := range conns {
		c := r.dial(b, portEcho)
		all.Go(func() error {
			buf := make([]byte, 64)
			for range (b.N + conns - 1) / conns {
				began := time.Now()
				if _, err := c.Write(buf); err != nil {
					return err
				}
				if _, err := io.ReadFull(c, buf); err != nil {
					return err
				}
				times[i] = append(times[i], time.Since(began))
			}
			return nil
		})
	}
	if err := all.Wait(); err != nil {
		b.Fatal(err)
	}
	reportPercentiles(b, slices.Concat(times...))
}

func reportPercentiles(b *testing.B, times []time.Duration) {
	slices.Sort(times)
	b.ReportMetric(float64(times[len(times)/2].Nanoseconds()), "p50-ns")
	b.ReportMetric(float64(times[len(times)*99/100].Nanoseconds()), "p99-ns")
}

func (r *running) benchDial(b *testing.B) {
	var times []time.Duration
	for b.Loop() {
		began := time.Now()
		c, err := r.machine.Dial(b.Context(), portEcho)
		if err != nil {
			b.Fatal(err)
		}
		if err := c.Close(); err != nil {
			b.Fatal(err)
		}
		times = append(times, time.Since(began))
	}
	reportPercentiles(b, times)
}

// benchBlock is what one operation of the throughput benchmarks moves, in bytes.
const benchBlock = 1 << 20

func (r *running) benchTo(b *testing.B) {
	c := r.dial(b, portDiscard)
	block := make([]byte, copySize)
	b.SetBytes(benchBlock)
	b.ResetTimer()
	for range b.N * (benchBlock / copySize) {
		if _, err := c.Write(block); err != nil {
			b.Fatal(err)
		}
	}
	if err := c.CloseWrite(); err != nil {
		b.Fatal(err)
	}
	if _, err := io.ReadFull(c, block[:1]); err != nil {
		b.Fatal(err)
	}
}

func (r *running) benchFrom(b *testing.B) {
	c := r.dial(b, portZeros)
	b.SetBytes(benchBlock)
	b.ResetTimer()
	want := int64(b.N) * benchBlock
	if _, err := fmt.Fprintln(c, want); err != nil {
		b.Fatal(err)
	}
	if n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, c, make([]byte, copySize)); n != want || err != nil {
		b.Fatalf("got %d bytes, %v; want %d", n, err, want)
	}
}
