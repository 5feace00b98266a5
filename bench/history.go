package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/capsem/capsem/internal/config"
)

func historyBenchmark() benchmark {
	return benchmark{
		name: "history",
		about: "list, timeline, exec and create where the machine's ledger has 1,000,000 rows more and 100 stopped machines stand beside it; the floor is the same " +
			"in a home whose machine has had 1,000 calls. The list also answers with 100 machines more, so it has no bar",
		run: benchHistory,
	}
}

// What a long life leaves behind. A call is five rows.
const (
	oldCalls    = 200_000
	oldMachines = 100
	oldBatch    = 1_000
)

func benchHistory(ctx context.Context, l *lab) (rows []row, err error) {
	fresh, err := openLab(ctx, l.programs, l.scale, l.log)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, fresh.close(context.WithoutCancel(ctx))) }()
	old, err := openLab(ctx, l.programs, l.scale, l.log)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, old.close(context.WithoutCancel(ctx))) }()
	// A page of the timeline is full in both.
	if err := fresh.age(ctx, 0, oldBatch); err != nil {
		return nil, fmt.Errorf("making a short history: %w", err)
	}
	if err := old.age(ctx, oldMachines, int(oldCalls*min(l.scale, 1))); err != nil {
		return nil, fmt.Errorf("making a history: %w", err)
	}
	for _, m := range []struct {
		what, unit string
		rounds     int
		bar        *bar
		measure    func(*lab) side
	}{
		{"list", "µs", 9, nil, func(l *lab) side { return l.getting("/v1/vms") }},
		{"timeline, the last 100", "µs", 9, atMost(1.2), func(l *lab) side { return l.getting("/v1/vms/box/timeline?limit=100") }},
		{"exec of /bin/true, p50", "µs", 9, atMost(1.2), func(l *lab) side { return l.execRound }},
		{"create", "ms", 5, atMost(1.2), func(l *lab) side {
			return func(ctx context.Context) (float64, error) {
				took, _, err := l.create(ctx)
				return took, err
			}
		}},
	} {
		all, err := alternate(ctx, l.rounds(m.rounds), m.measure(old), m.measure(fresh))
		if err != nil {
			return rows, fmt.Errorf("%s: %w", m.what, err)
		}
		rows = append(rows, compare("with a history, "+m.what, m.unit, all[0], all[1], m.bar, ""))
	}
	return rows, nil
}

// getting asks the service for something, 20 times.
func (l *lab) getting(path string) side {
	return func(ctx context.Context) (float64, error) {
		if _, err := l.machine(ctx); err != nil {
			return 0, err
		}
		return repeat(20, func() error { return l.service.Do(ctx, http.MethodGet, path, nil, nil) })
	}
}

// age gives a home a long life: stopped machines, and one whose ledger is full.
func (l *lab) age(ctx context.Context, machines, calls int) error {
	img, err := l.openImage()
	if err != nil {
		return err
	}
	if err := img.Close(); err != nil {
		return err
	}
	for i := range machines {
		record := config.VMRecord{
			ID: config.NewID(), Name: fmt.Sprintf("old-%d", i), State: config.Stopped, CreatedAt: time.Now().UTC(), Profile: profileName,
			Incarnation: 1, Spec: config.VMSpec{Image: imageName, ImageDigest: img.Ref.Digest, CPUs: cpus, MemoryBytes: memoryBytes, Accelerator: l.accelerator},
		}
		if err := l.remember(record); err != nil {
			return err
		}
	}
	m, err := l.machine(ctx)
	if err != nil {
		return err
	}
	if err := l.capsem(ctx, "stop", "box"); err != nil {
		return err
	}
	if err := fill(ctx, l.home.Ledger(m.ID), calls); err != nil {
		return err
	}
	return l.capsem(ctx, "start", "box")
}

// fill writes calls into a ledger that nobody has open.
func fill(ctx context.Context, path string, calls int) (err error) {
	r, err := openRaw(ctx, path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	for done := 0; done < calls; done += oldBatch {
		if err := r.begin(ctx); err != nil {
			return err
		}
		for i := range oldBatch {
			c := &rawCall{arguments: fmt.Appendf(nil, `{"n":%d}`, done+i), response: fmt.Appendf(nil, `{"content":[{"type":"text","text":"%d"}]}`, done+i)}
			if err := r.intent(ctx, c); err != nil {
				return err
			}
			if err := r.outcome(ctx, c); err != nil {
				return err
			}
		}
		if err := r.commit(ctx); err != nil {
			return err
		}
	}
	return nil
}
