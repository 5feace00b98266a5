package session

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestWhatAServerAsksForOftenIsDoneNowAndThen: a server that says a thousand times
// a second that its tools have changed is asked for them once a second, by a
// bounded number of goroutines.
func TestWhatAServerAsksForOftenIsDoneNowAndThen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p pace
		var wg sync.WaitGroup
		started, done := 0, 0
		ask := func() {
			if p.ask() {
				started++
				wg.Go(func() { p.do(t.Context(), time.Second, func() { done++ }) })
			}
		}
		ask()
		synctest.Wait()
		if done != 1 {
			t.Errorf("the first is not done at once")
		}
		for range 5000 {
			<-time.After(time.Millisecond)
			ask()
		}
		wg.Wait()
		if done < 5 || done > 7 || started != done {
			t.Errorf("in five seconds done %d times by %d goroutines", done, started)
		}
	})
}

func TestWhatIsAskedForWhileItIsDoneIsDoneAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p pace
		var wg sync.WaitGroup
		done := 0
		p.ask()
		p.do(t.Context(), time.Second, func() {
			done++
			if !p.ask() {
				t.Error("a change after the beginning is not seen")
			}
			wg.Go(func() { p.do(t.Context(), time.Second, func() { done++ }) })
		})
		wg.Wait()
		if done != 2 {
			t.Errorf("done %d times", done)
		}
	})
}

func TestAPauseEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p pace
		p.ask()
		p.do(t.Context(), time.Hour, func() {})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		p.ask()
		began := time.Now()
		p.do(ctx, time.Hour, func() { t.Error("it was done") })
		if waited := time.Since(began); waited != 0 {
			t.Errorf("waited %v", waited)
		}
	})
}
