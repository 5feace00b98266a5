package upstream

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/capsem/capsem/internal/toolproto"
)

func TestAFloodEndsTheLifeAtTheBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &life{u: &Upstream{}, greeted: true, tokens: floodBurst, filled: time.Now()}
		take := func() error {
			return l.take(t.Context(), &toolproto.Message{Notify: &toolproto.Notify{Method: "notifications/message"}})
		}
		for i := range floodBurst {
			if err := take(); err != nil {
				t.Fatalf("message %d: %v", i+1, err)
			}
		}
		var broken *protocolError
		if err := take(); !errors.As(err, &broken) {
			t.Errorf("message %d: %v", floodBurst+1, err)
		}
		<-time.After(time.Second) // of the bubble's clock
		for i := range floodRate - 1 {
			if err := take(); err != nil {
				t.Fatalf("message %d of the next second: %v", i+1, err)
			}
		}
		if err := take(); !errors.As(err, &broken) {
			t.Errorf("over the rate: %v", err)
		}
	})
}
