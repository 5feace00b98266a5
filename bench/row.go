package main

import (
	"fmt"
	"math"
	"time"
)

// row is one line of the report.
type row struct {
	Bench string `json:"bench"`
	What  string `json:"what"`
	// Ours and Floor are medians, in Unit. A Floor of 0 says that there is none:
	// the bar is then on Ours itself.
	Ours  float64 `json:"ours"`
	Floor float64 `json:"floor,omitempty"`
	Unit  string  `json:"unit"`
	// Ratio is Ours over Floor; Low and High bound the ratios of the rounds.
	Ratio float64 `json:"ratio,omitempty"`
	Low   float64 `json:"low,omitempty"`
	High  float64 `json:"high,omitempty"`
	// Rounds is how often both were measured.
	Rounds int `json:"rounds"`
	// Bar is nil for what is reported and not judged.
	Bar *bar `json:"bar,omitempty"`
	// Note is what a reader should know.
	Note string `json:"note,omitempty"`
	// Load is the machine's load average when the benchmark began.
	Load string `json:"load"`
	// At is when the row was measured: a benchmark that is run by name leaves
	// the rows of others as an earlier run, and perhaps an earlier build, had them.
	At time.Time `json:"at"`
}

// bar is what must be reached: at most or at least Value.
type bar struct {
	AtLeast bool    `json:"at_least,omitempty"`
	Value   float64 `json:"value"`
}

func atMost(v float64) *bar  { return &bar{Value: v} }
func atLeast(v float64) *bar { return &bar{AtLeast: true, Value: v} }

// compare makes a row of rounds in which both sides were measured in turn.
func compare(what, unit string, ours, floor series, b *bar, note string) row {
	r := row{
		What: what, Unit: unit, Ours: ours.median(), Floor: floor.median(), Rounds: min(len(ours), len(floor)), Bar: b, Note: note,
	}
	r.Ratio, r.Low = r.Ours/r.Floor, math.Inf(1)
	for i := range r.Rounds {
		ratio := ours[i] / floor[i]
		r.Low, r.High = min(r.Low, ratio), max(r.High, ratio)
	}
	return r
}

// absolute makes a row that has no floor.
func absolute(what, unit string, ours series, b *bar, note string) row {
	return row{What: what, Unit: unit, Ours: ours.median(), Rounds: len(ours), Bar: b, Note: note}
}

// judged is what the bar is held against.
func (r row) judged() float64 {
	if r.Floor == 0 {
		return r.Ours
	}
	return r.Ratio
}

// met is "yes", "no", or "" for what is not judged.
func (r row) met() string {
	if r.Bar == nil {
		return ""
	}
	met := r.judged() <= r.Bar.Value
	if r.Bar.AtLeast {
		met = r.judged() >= r.Bar.Value
	}
	if met {
		return "yes"
	}
	return "**no**"
}

// wanted is the bar in words.
func (r row) wanted() string {
	if r.Bar == nil {
		return ""
	}
	sign, unit := "≤", "×"
	if r.Bar.AtLeast {
		sign = "≥"
	}
	if r.Floor == 0 {
		unit = r.Unit
	}
	return fmt.Sprintf("%s %g %s", sign, r.Bar.Value, unit)
}

func (r row) ratio() string {
	if r.Floor == 0 {
		return ""
	}
	return fmt.Sprintf("%.2f (%.2f–%.2f)", r.Ratio, r.Low, r.High)
}

func (r row) floor() string {
	if r.Floor == 0 {
		return ""
	}
	return amount(r.Floor, r.Unit)
}

// line is the row for a terminal.
func (r row) line() string {
	s := fmt.Sprintf("%-44s %12s", r.What, amount(r.Ours, r.Unit))
	if r.Floor != 0 {
		s += fmt.Sprintf("  floor %12s  ratio %s", r.floor(), r.ratio())
	}
	if r.Bar != nil {
		s += fmt.Sprintf("  bar %s: %s", r.wanted(), r.met())
	}
	if r.Note != "" {
		s += "  (" + r.Note + ")"
	}
	return s
}

// amount writes a figure with about four digits.
func amount(v float64, unit string) string {
	digits := 0
	for limit := 1000.0; digits < 3 && math.Abs(v) < limit; limit /= 10 {
		digits++
	}
	return fmt.Sprintf("%.*f %s", digits, v, unit)
}
