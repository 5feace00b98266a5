package config

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
)

// Accelerators are the ways to run guest code that a person can ask for.
const (
	AcceleratorAuto = "auto"
	AcceleratorKVM  = "kvm"
	AcceleratorTCG  = "tcg"
)

// Durabilities say what an acknowledged ledger row survives.
const (
	// DurabilityProcess survives the death of every process.
	DurabilityProcess = "process"
	// DurabilityPower survives the loss of power too.
	DurabilityPower = "power"
)

// OriginDefault is the origin of a value that nobody set.
const OriginDefault = "default"

// Value is a setting and where it comes from: OriginDefault, a place in a file
// (`/home/u/.capsem/config.toml:1:1`) or the name of a variable.
type Value[T any] struct {
	Value  T      `json:"value"`
	Origin string `json:"origin"`
}

// Settings are the settings of one machine.
type Settings struct {
	// Accelerator is one of the Accelerator constants.
	Accelerator Value[string] `json:"accelerator"`
	// Durability is one of the Durability constants.
	Durability Value[string] `json:"durability"`
	// LogLevel is the least level that is logged.
	LogLevel Value[slog.Level] `json:"log_level"`
}

// LoadSettings reads the settings file at path; a missing one gives the defaults.
// Variables of env override it.
func LoadSettings(path string, env Env) (Settings, error) {
	data, err := readFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Settings{}, err
	}
	doc, err := parse(path, data)
	if err != nil {
		return Settings{}, err
	}
	t := doc.table()
	accelerators := []string{AcceleratorAuto, AcceleratorKVM, AcceleratorTCG}
	s := Settings{
		Accelerator: t.setting("accelerator", AcceleratorAuto, accelerators),
		Durability:  t.setting("durability", DurabilityProcess, []string{DurabilityProcess, DurabilityPower}),
	}
	level := t.setting("log_level", "info", []string{"debug", "info", "warn", "error"})
	s.LogLevel.Origin = level.Origin
	if err := s.LogLevel.Value.UnmarshalText([]byte(level.Value)); err != nil {
		return Settings{}, fmt.Errorf("reading log_level of %s: %w", path, err)
	}
	t.close()
	if err := doc.err(); err != nil {
		return Settings{}, err
	}
	if a := env.Get(EnvAccelerator); a != "" {
		if !slices.Contains(accelerators, a) {
			return Settings{}, fmt.Errorf("%s is %q: use %s", EnvAccelerator, a, alternatives(accelerators))
		}
		s.Accelerator = Value[string]{a, EnvAccelerator}
	}
	return s, nil
}

// setting reads one word and where it was set.
func (t *table) setting(key, fallback string, words []string) Value[string] {
	v := Value[string]{t.choice(key, fallback, words), OriginDefault}
	if t.has(key) {
		v.Origin = t.keyAt(key).String()
	}
	return v
}
