package config

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Binary units of sizes, in bytes.
const (
	KiB int64 = 1 << 10
	MiB int64 = 1 << 20
	GiB int64 = 1 << 30
	TiB int64 = 1 << 40
)

// Size is a number of bytes, written with a binary unit: "512MiB".
type Size int64

// ParseSize reads a whole number followed by KiB, MiB, GiB or TiB.
func ParseSize(s string) (Size, error) {
	units := []struct {
		name  string
		bytes int64
	}{{"KiB", KiB}, {"MiB", MiB}, {"GiB", GiB}, {"TiB", TiB}}
	for _, u := range units {
		digits, ok := strings.CutSuffix(s, u.name)
		if !ok {
			continue
		}
		n, err := strconv.ParseUint(strings.TrimSpace(digits), 10, 63)
		if err != nil || n == 0 {
			break
		}
		if n > uint64(math.MaxInt64/u.bytes) {
			return 0, fmt.Errorf("size %q is too large", s)
		}
		return Size(int64(n) * u.bytes), nil
	}
	return 0, fmt.Errorf("size %q is not valid: use a whole number and KiB, MiB, GiB or TiB, like \"512MiB\"", s)
}

// String returns the size in the largest unit that divides it.
func (s Size) String() string {
	n := int64(s)
	switch {
	case n == 0:
		return "0"
	case n%TiB == 0:
		return fmt.Sprintf("%dTiB", n/TiB)
	case n%GiB == 0:
		return fmt.Sprintf("%dGiB", n/GiB)
	case n%MiB == 0:
		return fmt.Sprintf("%dMiB", n/MiB)
	case n%KiB == 0:
		return fmt.Sprintf("%dKiB", n/KiB)
	}
	return fmt.Sprintf("%dB", n)
}
