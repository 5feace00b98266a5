package session

import (
	"testing"
)

func TestACaptureKeepsTheBeginningAndIsNeverNil(t *testing.T) {
	c := capture{limit: 4}
	if c.bytes() == nil {
		t.Error("of a silent command it is nil, which JSON has as null")
	}
	for _, part := range []string{"abc", "def"} {
		if n, err := c.Write([]byte(part)); n != len(part) || err != nil {
			t.Fatalf("wrote %d, %v", n, err)
		}
	}
	if got := string(c.bytes()); got != "abcd" || !c.cut {
		t.Errorf("kept %q, cut %v", got, c.cut)
	}
}
