package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/capsem/capsem/internal/frame"
)

func frameBenchmark() benchmark {
	return benchmark{
		name:  "frame",
		about: "frames written to a pipe and read from it; the floor is the same bytes, header and all, copied through the same kind of pipe",
		run:   benchFrame,
	}
}

func benchFrame(ctx context.Context, l *lab) ([]row, error) {
	var rows []row
	for _, c := range []struct {
		what        string
		size, count int
	}{{"1 KiB", 1 << 10, 50_000}, {"1 MiB", 1 << 20, 500}} {
		body := make([]byte, c.size)
		all, err := alternate(ctx, l.rounds(9),
			func(context.Context) (float64, error) { return throughPipe(c.count, framed(body)) },
			func(context.Context) (float64, error) { return throughPipe(c.count, copied(c.size+frame.HeaderSize)) },
		)
		if err != nil {
			return nil, err
		}
		rows = append(rows, compare("frame codec, "+c.what, "µs", all[0], all[1], atMost(1.3), ""))
	}
	return rows, nil
}

// codec makes the two ends of a pipe: what sends one message, what receives one.
type codec func(r io.Reader, w io.Writer) (send, receive func() error)

func framed(body []byte) codec {
	return func(r io.Reader, w io.Writer) (send, receive func() error) {
		out, in := frame.NewWriter(w, len(body)), frame.NewReader(r, len(body))
		return func() error { return out.WriteFrame(body) }, func() error {
			b, err := in.Next()
			if err == nil && len(b) != len(body) {
				err = fmt.Errorf("a frame of %d bytes", len(b))
			}
			return err
		}
	}
}

func copied(size int) codec {
	return func(r io.Reader, w io.Writer) (send, receive func() error) {
		out, in := make([]byte, size), make([]byte, size)
		return func() error { _, err := w.Write(out); return err }, func() error { _, err := io.ReadFull(r, in); return err }
	}
}

// throughPipe sends count messages while they are received, and returns the wall
// time of one in microseconds.
func throughPipe(count int, c codec) (took float64, err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return 0, fmt.Errorf("making a pipe: %w", err)
	}
	defer func() { err = errors.Join(err, r.Close(), w.Close()) }()
	send, receive := c(r, w)
	sent := make(chan error, 1)
	began := time.Now()
	go func() {
		for range count {
			if err := send(); err != nil {
				sent <- err
				return
			}
		}
		sent <- nil
	}()
	for range count {
		if err := receive(); err != nil {
			return 0, err
		}
	}
	took = micros(time.Since(began)) / float64(count)
	return took, <-sent
}
