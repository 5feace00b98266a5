package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/config"
)

// capsem runs a command line in an empty home, and returns what it printed and
// its exit status. No service runs there.
func capsem(t *testing.T, home string, args ...string) (out, errs string, status int) {
	t.Helper()
	in, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	var stdout, stderr bytes.Buffer
	status = Main(t.Context(), args, Options{
		In: in, Out: &stdout, Err: &stderr, Version: "9.9",
		Env: func(name string) (string, bool) {
			if name == config.EnvHome {
				return home, true
			}
			return "", false
		},
	})
	return stdout.String(), stderr.String(), status
}

func TestACommandLineThatCannotBeUnderstoodSaysWhatWasMeantAndExitsWithTwo(t *testing.T) {
	tests := []struct{ line, want string }{
		{"delet box", `capsem has no command "delet": did you mean delete?`},
		{"frobnicate", `capsem has no command "frobnicate"; see capsem --help`},
		{"policy chek", `capsem policy has no command "chek": did you mean check?`},
		{"--json service stats", `capsem service has no command "stats": did you mean status?`},
		{"service --help stats", `capsem service has no command "stats": did you mean status?`},
		{"help delet", `capsem has no command "delet": did you mean delete?`},
		{"create box", "capsem create --name box"},
		{"exec box --timeout 1s -- true", "--timeout stands after the VM"},
		{"exec box", "usage: capsem exec"},
		{"exec --timout 1s box -- true", "unknown flag: --timout; see capsem exec --help"},
		{"completion tcsh", "bash, zsh and fish"},
	}
	for _, test := range tests {
		t.Run(test.line, func(t *testing.T) {
			out, errs, status := capsem(t, t.TempDir(), strings.Fields(test.line)...)
			if got := strings.ReplaceAll(out+errs, `\"`, `"`); !strings.Contains(got, test.want) || status != ExitUsage {
				t.Errorf("exit %d, wrote:\n%s", status, got)
			}
		})
	}
}

func TestHelpOfAFamilyOfCommandsIsGivenWithoutAWordAfterIt(t *testing.T) {
	for _, line := range []string{"policy", "policy --help", "help policy"} {
		out, errs, status := capsem(t, t.TempDir(), strings.Fields(line)...)
		if !strings.Contains(out, "Available Commands:\n  check") || errs != "" || status != ExitOK {
			t.Errorf("%s: exit %d, wrote:\n%s%s", line, status, out, errs)
		}
	}
}

func TestTheVersionIsAlsoAFlag(t *testing.T) {
	out, _, status := capsem(t, t.TempDir(), "--version")
	if out != "capsem 9.9\n" || status != ExitOK {
		t.Errorf("exit %d, wrote %q", status, out)
	}
}

func TestCompletionKnowsProfilesAndStartsNoService(t *testing.T) {
	home := t.TempDir()
	if err := os.MkdirAll(filepath.Join(home, "profiles"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(home, "profiles", "work.toml"), []byte("cpus = 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	complete := func(args ...string) []string {
		out, _, _ := capsem(t, home, append([]string{"__complete"}, args...)...)
		return strings.Fields(out)
	}
	if diff := cmp.Diff([]string{"work", ":4"}, complete("create", "--profile", "w")); diff != "" {
		t.Errorf("profiles: %s", diff)
	}
	if diff := cmp.Diff([]string{":4"}, complete("exec", "")); diff != "" {
		t.Errorf("VMs without a service: %s", diff)
	}
	if entries, err := os.ReadDir(filepath.Join(home, "run")); err == nil && len(entries) > 0 {
		t.Errorf("completing left %v in the run folder", entries)
	}
}

func TestATimelineIsInTheOrderOfTimeNewestLast(t *testing.T) {
	var out bytes.Buffer
	err := timelineText(&out, api.Timeline{Entries: []api.TimelineEntry{
		{Timestamp: "2026-01-02T03:04:04.108000Z", Subject: "counted"}, // its id is newer than its time
		{Timestamp: "2026-01-02T03:04:06.000000Z", Subject: "third"},
		{Timestamp: "2026-01-02T03:04:05.000000Z", Subject: "second"},
		{Timestamp: "2026-01-02T03:04:03.000000Z", Subject: "first"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, line := range strings.Split(strings.TrimSpace(out.String()), "\n")[1:] {
		got = append(got, strings.Fields(line)[1])
	}
	if diff := cmp.Diff([]string{"first", "counted", "second", "third"}, got); diff != "" {
		t.Error(diff)
	}
}
