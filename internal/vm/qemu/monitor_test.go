package qemu

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
)

// speak runs a monitor against a QEMU that answers each line that it gets with
// the next of answers, after the greeting.
func speak(t *testing.T, answers ...string) (m *monitor, events chan event) {
	t.Helper()
	ours, theirs := net.Pipe()
	events = make(chan event, 10)
	m = newMonitor(ours, func(e event) { events <- e })
	ran, served := make(chan error, 1), make(chan struct{})
	go func() { ran <- m.run() }()
	go func() {
		defer close(served)
		defer theirs.Close()
		fmt.Fprint(theirs, `{"QMP": {"version": {"qemu": {"micro": 1}}, "capabilities": []}}`+"\n")
		lines := bufio.NewScanner(theirs)
		for _, a := range answers {
			if !lines.Scan() {
				return
			}
			fmt.Fprint(theirs, a)
		}
	}()
	t.Cleanup(func() {
		ours.Close()
		<-served
		<-ran
	})
	return m, events
}

func TestTheMonitorNegotiatesAndReportsEvents(t *testing.T) {
	m, events := speak(t,
		`{"event": "RESUME", "data": {}}`+"\n"+`{"return": {}, "id": 1}`+"\n",
		`{"return": {"status": "running"}, "id": 2}`+"\n")
	if err := m.negotiate(t.Context()); err != nil {
		t.Fatal(err)
	}
	if e := <-events; e.Name != "RESUME" {
		t.Errorf("got event %+v", e)
	}
	got, err := m.execute(t.Context(), "query-status", nil)
	if err != nil || string(got) != `{"status": "running"}` {
		t.Errorf("got %s, %v", got, err)
	}
}

func TestARefusedCommandIsAnError(t *testing.T) {
	m, _ := speak(t, `{"error": {"class": "GenericError", "desc": "no such thing"}, "id": 1}`+"\n")
	if _, err := m.execute(t.Context(), "x", map[string]int{"y": 1}); err == nil || !strings.Contains(err.Error(), "no such thing") {
		t.Errorf("got %v", err)
	}
}

func TestAnswersToCommandsThatWereGivenUpAreSkipped(t *testing.T) {
	m, _ := speak(t, "", `{"return": 1, "id": 1}`+"\n"+`{"return": 2, "id": 2}`+"\n")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := m.execute(ctx, "slow", nil); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want that it was cancelled", err)
	}
	if got, err := m.execute(t.Context(), "next", nil); err != nil || string(got) != "2" {
		t.Errorf("got %s, %v; want 2", got, err)
	}
}

func TestAMonitorThatEndsFailsWhatWaits(t *testing.T) {
	m, _ := speak(t, "")
	if _, err := m.execute(t.Context(), "x", nil); !errors.Is(err, errMonitor) && !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("got %v", err)
	}
}

func TestAMonitorThatTalksNonsenseEnds(t *testing.T) {
	for name, line := range map[string]string{
		"no JSON":          "hello\n",
		"an endless line":  strings.Repeat("x", maxReply+1),
		"another's object": `{"event": 5}` + "\n",
	} {
		t.Run(name, func(t *testing.T) {
			m := newMonitor(struct {
				io.Reader
				io.WriteCloser
			}{strings.NewReader(line), nil}, func(event) {})
			if err := m.run(); err == nil {
				t.Error("no error")
			}
		})
	}
}
