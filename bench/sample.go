package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"
)

// series are measurements of one thing, in the order in which they were made.
type series []float64

func (s series) median() float64 { return s.percentile(50) }

// percentile is the nearest rank.
func (s series) percentile(p float64) float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(s))
	rank := int(math.Ceil(p/100*float64(len(sorted)))) - 1
	return sorted[max(rank, 0)]
}

// side is one of the things that are measured in turn: it makes one measurement.
type side func(ctx context.Context) (float64, error)

// alternate measures the sides in turn, rounds times: A B A B. A first round
// warms up and does not count.
func alternate(ctx context.Context, rounds int, sides ...side) ([]series, error) {
	all := make([]series, len(sides))
	for round := -1; round < rounds; round++ {
		for i, measure := range sides {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			v, err := measure(ctx)
			if err != nil {
				return nil, fmt.Errorf("round %d: %w", round+1, err)
			}
			if round >= 0 {
				all[i] = append(all[i], v)
			}
		}
	}
	return all, nil
}

// repeat measures what f takes, count times, and returns the median in
// microseconds.
func repeat(count int, f func() error) (float64, error) {
	var s series
	for range count {
		began := time.Now()
		if err := f(); err != nil {
			return 0, err
		}
		s = append(s, micros(time.Since(began)))
	}
	return s.median(), nil
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
