package config_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/capsem/capsem/internal/config"
)

func TestAHandoverArrivesWhole(t *testing.T) {
	var b bytes.Buffer
	given := config.Handover{Initiator: "person", Secrets: map[string]config.Secret{"a": config.NewSecret("s3cret\x00\"")}}
	if err := given.Write(&b); err != nil {
		t.Fatal(err)
	}
	got, err := config.ReadHandover(&b)
	if err != nil || got.Initiator != "person" || got.Secrets["a"].Reveal() != "s3cret\x00\"" {
		t.Errorf("got %v, %v", got, err)
	}
	if text := fmt.Sprintf("%v %+v %#v", got, got, got); strings.Contains(text, "s3cret") {
		t.Errorf("printed: %s", text)
	}
}

func TestABrokenHandoverIsRefusedWithoutShowingIt(t *testing.T) {
	for _, in := range []string{"", `{"secrets":{"a":"s3cret"`, `"s3cret"`, `{"secrets":{"a":["s3cret"]}}`} {
		if _, err := config.ReadHandover(strings.NewReader(in)); err == nil || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%q: %v", in, err)
		}
	}
}
