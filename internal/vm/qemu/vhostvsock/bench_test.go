package vhostvsock

import (
	"fmt"
	"io"
	"testing"

	"golang.org/x/sync/errgroup"
)

// The benchmarks run the device against the driver of the tests, in one process:
// they show what the device costs, without QEMU and a guest's kernel.

func BenchmarkThroughput(b *testing.B) {
	for _, size := range []int{4 << 10, 64 << 10} {
		b.Run(fmt.Sprintf("ToGuest/%dKiB", size>>10), func(b *testing.B) {
			d, g := startGuest(b)
			c, s := open(b, d, g, 1)
			stream(b, c, s, size)
		})
		b.Run(fmt.Sprintf("FromGuest/%dKiB", size>>10), func(b *testing.B) {
			d, g := startGuest(b)
			c, s := open(b, d, g, 1)
			stream(b, s, c, size)
		})
	}
}

// stream writes b.N times size bytes to w and reads them from r.
func stream(b *testing.B, w io.Writer, r io.Reader, size int) {
	b.SetBytes(int64(size))
	b.ReportAllocs()
	var read errgroup.Group
	read.Go(func() error {
		_, err := io.CopyN(io.Discard, r, int64(b.N)*int64(size))
		return err
	})
	data := make([]byte, size)
	for range b.N {
		if _, err := w.Write(data); err != nil {
			b.Fatal(err)
		}
	}
	if err := read.Wait(); err != nil {
		b.Fatal(err)
	}
}

func BenchmarkRoundTrip(b *testing.B) {
	for _, conns := range []int{1, 8, 64} {
		b.Run(fmt.Sprintf("conns=%d", conns), func(b *testing.B) {
			d, g := startGuest(b)
			var all errgroup.Group
			for i := range conns {
				c, s := open(b, d, g, uint32(i))
				n := (b.N + conns - 1) / conns
				all.Go(func() error { return pingPong(s, n, false) })
				all.Go(func() error { return pingPong(c, n, true) })
			}
			b.ReportAllocs()
			b.ResetTimer()
			if err := all.Wait(); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// pingPong sends 64 bytes and waits for them n times, or the other way round.
func pingPong(c io.ReadWriter, n int, first bool) error {
	buf := make([]byte, 64)
	for i := range 2 * n {
		if (i%2 == 0) == first {
			if _, err := c.Write(buf); err != nil {
				return err
			}
		} else if _, err := io.ReadFull(c, buf); err != nil {
			return err
		}
	}
	return nil
}

func BenchmarkDial(b *testing.B) {
	d, g := startGuest(b)
	calls := g.listen(1)
	b.ReportAllocs()
	for b.Loop() {
		c, err := d.Dial(b.Context(), 1)
		if err != nil {
			b.Fatal(err)
		}
		(<-calls).Close()
		c.Close()
	}
}
