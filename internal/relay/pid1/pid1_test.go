//go:build linux

package pid1

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// The tests of this package start no processes but through supervise: it reaps
// whatever ends.

// supervised runs an agent that is a shell script.
func supervised(t *testing.T, script string, stop <-chan os.Signal) (*guest, time.Duration) {
	t.Helper()
	g := &guest{config: Config{Program: "/bin/sh", Args: []string{"sh", "-c", script}}, log: newLog()}
	t.Cleanup(func() {
		if err := g.agentEnd.Close(); err != nil {
			t.Error(err)
		}
		if err := g.power.Close(); err != nil {
			t.Error(err)
		}
	})
	return g, g.supervise(t.Context(), stop)
}

func TestTheAgentAsksForPowerOffWithItsGrace(t *testing.T) {
	g, grace := supervised(t, "echo 1500 >&3", nil)
	if grace != 1500*time.Millisecond {
		t.Errorf("grace %v", grace)
	}
	g.awaitChildless(10 * time.Second)
}

func TestAnAgentThatEndsIsStartedAgain(t *testing.T) {
	mark := filepath.Join(t.TempDir(), "mark")
	// The third agent is content.
	g, grace := supervised(t, `echo x >> `+mark+`; [ $(wc -l < `+mark+`) = 3 ] && echo 7 >&3; exit 9`, nil)
	if grace != 7*time.Millisecond {
		t.Errorf("grace %v", grace)
	}
	g.awaitChildless(10 * time.Second)
	if log := strings.Join(g.log.early, ""); strings.Count(log, "ended with status 9") < 2 {
		t.Errorf("the log does not tell of it:\n%s", log)
	}
}

func TestASignalAsksForPowerOff(t *testing.T) {
	stop := make(chan os.Signal, 1)
	stop <- os.Interrupt
	g, grace := supervised(t, "exit 0", stop)
	if grace != defaultGrace {
		t.Errorf("grace %v", grace)
	}
	g.awaitChildless(10 * time.Second)
}

func TestTheAgentIsToldTheStagesOfTheBoot(t *testing.T) {
	got := filepath.Join(t.TempDir(), "stages")
	g := &guest{config: Config{Program: "/bin/sh", Args: []string{"sh", "-c", `printf %s "$` + StagesEnv + `" > ` + got + `; echo 0 >&3`}}, log: newLog()}
	g.log.stages = []Stage{{"init", 1234 * time.Millisecond}, {"more", 2 * time.Second}}
	g.supervise(t.Context(), nil)
	g.awaitChildless(10 * time.Second)
	b, err := os.ReadFile(got)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(g.log.stages, ParseStages(string(b))); diff != "" {
		t.Error(diff)
	}
}

func TestAwaitChildlessGivesUpAtItsLimit(t *testing.T) {
	g := &guest{config: Config{Program: "/bin/sh", Args: []string{"sh", "-c", "exec sleep 1000"}}, log: newLog()}
	if err := g.startAgent(); err != nil {
		t.Fatal(err)
	}
	g.awaitChildless(10 * time.Millisecond)
	if g.agent == 0 {
		t.Fatal("the agent has ended")
	}
	p, err := os.FindProcess(g.agent)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	for g.agent != 0 {
		g.reap()
	}
}

func TestGraceIsReadWithinBounds(t *testing.T) {
	for s, want := range map[string]time.Duration{
		"0": 0, "250": 250 * time.Millisecond, " 3 ": 3 * time.Millisecond, "-1": 0, "": 0, "x": 0,
		"99999999999": maxGrace, "99999999999999999999999": 0,
	} {
		if got := parseGrace(s); got != want {
			t.Errorf("%q: %v, want %v", s, got, want)
		}
	}
}

func FuzzParseStages(f *testing.F) {
	f.Add("init=1,modules=22")
	f.Add("=,=1,a=b,c=-9223372036854775808")
	f.Fuzz(func(t *testing.T, s string) {
		stages := ParseStages(s)
		if diff := cmp.Diff(stages, ParseStages(FormatStages(stages))); diff != "" {
			t.Error(diff)
		}
	})
}

func TestMountPathsAreUnescaped(t *testing.T) {
	for in, want := range map[string]string{"/a": "/a", `/a\040b\011c\012d\134e`: "/a b\tc\nd\\e"} {
		if got := unescape(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func TestLinkReplacesWhatIsThere(t *testing.T) {
	path := filepath.Join(t.TempDir(), "link")
	for _, target := range []string{"/one", "/two"} {
		if err := link(path, target); err != nil {
			t.Fatal(err)
		}
		if got, err := os.Readlink(path); err != nil || got != target {
			t.Errorf("got %q, %v", got, err)
		}
	}
}

func TestTheLogHasWhatCameBeforeItCouldBeOpened(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	l := newLog()
	l.step("early", nil)
	l.open(path)
	l.step("late", os.ErrPermission)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	if len(lines) != 2 || !strings.HasSuffix(lines[0], " early: ok") || !strings.HasSuffix(lines[1], " late: permission denied") {
		t.Errorf("got %q", lines)
	}
}

func TestModulesThatFailDoNotStopTheOthers(t *testing.T) {
	dir := t.TempDir()
	list := filepath.Join(dir, "modules")
	if err := os.WriteFile(list, []byte("/no/such/first.ko\n\n/no/such/second.ko\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	l := newLog()
	err := loadModules(list, l)
	if err == nil || !strings.Contains(err.Error(), "first.ko") || !strings.Contains(err.Error(), "second.ko") {
		t.Errorf("got %v", err)
	}
	if err := loadModules(filepath.Join(dir, "absent"), l); err != nil {
		t.Errorf("a kernel without modules: %v", err)
	}
}
