package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// environment is an Env over a map.
func environment(vars map[string]string) Env {
	return func(name string) (string, bool) { v, ok := vars[name]; return v, ok }
}

func openHome(t *testing.T) Home {
	t.Helper()
	h, err := OpenHome(environment(map[string]string{EnvHome: filepath.Join(t.TempDir(), "home")}))
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func wantError(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("got no error, want one with %q", parts)
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("got error %q, want %q in it", err, part)
		}
	}
}

func TestHomeIsCreatedClosedToOthers(t *testing.T) {
	h := openHome(t)
	for _, dir := range []string{h.Root(), h.Profiles(), h.Images(), h.Secrets(), h.VMs(), h.Ledgers(), filepath.Dir(h.AccelCache())} {
		info, err := os.Stat(dir)
		if err != nil {
			t.Fatal(err)
		}
		if got := info.Mode().Perm(); got != 0o700 {
			t.Errorf("%s has mode %o, want 700", dir, got)
		}
	}
}

func TestExistingHomeIsClosedToOthers(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenHome(environment(map[string]string{EnvHome: dir})); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	if got := info.Mode().Perm(); got != 0o700 {
		t.Errorf("mode is %o, want 700", got)
	}
}

func TestHomeDefaultsToAFolderOfTheUser(t *testing.T) {
	user := t.TempDir()
	h, err := OpenHome(environment(map[string]string{"HOME": user}))
	if err != nil {
		t.Fatal(err)
	}
	if want := filepath.Join(user, ".capsem"); h.Root() != want {
		t.Errorf("got %s, want %s", h.Root(), want)
	}
}

func TestHomeIsRefused(t *testing.T) {
	user := t.TempDir()
	file := filepath.Join(user, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		vars map[string]string
		want string
	}{
		{"relative", map[string]string{EnvHome: "capsem"}, "must be an absolute path"},
		{"root", map[string]string{EnvHome: "/"}, "is /"},
		{"root in disguise", map[string]string{EnvHome: "/tmp/.."}, "is /"},
		{"the user's own", map[string]string{EnvHome: user, "HOME": user}, "your own home folder"},
		{"nowhere", nil, "neither CAPSEM_HOME nor HOME"},
		{"not a folder", map[string]string{EnvHome: file}, "creating the home folder"},
		{"not writable", map[string]string{EnvHome: "/proc/capsem"}, "set CAPSEM_HOME to a folder that you can write"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := OpenHome(environment(tt.vars))
			wantError(t, err, tt.want)
		})
	}
}

func TestReadOnlyHomeIsRefusedWithTheRemedy(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root may write everywhere: run as another user")
	}
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o500); err != nil {
		t.Fatal(err)
	}
	_, err := OpenHome(environment(map[string]string{EnvHome: dir}))
	wantError(t, err, "cannot be written", dir)
}

func TestSymbolicLinkToHomeGivesTheSamePaths(t *testing.T) {
	h := openHome(t)
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(h.Root(), link); err != nil {
		t.Fatal(err)
	}
	linked, err := OpenHome(environment(map[string]string{EnvHome: link}))
	if err != nil {
		t.Fatal(err)
	}
	if linked.Root() != h.Root() {
		t.Errorf("got %s, want %s", linked.Root(), h.Root())
	}
}

// sockets lists the three socket paths of a home.
func sockets(h Home) (paths []string, err error) {
	for _, f := range []func() (string, error){
		h.ServiceSocket, h.AgentSocket, func() (string, error) { return h.VMSocket("vm-0123456789ab") },
	} {
		p, e := f()
		paths, err = append(paths, p), errors.Join(err, e)
	}
	return paths, err
}

func TestSocketsLieInTheHomeWhereTheyFit(t *testing.T) {
	h := Home{root: "/h"}
	got, err := sockets(h)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"/h/run/service.sock", "/h/run/agent.sock", "/h/vms/vm-0123456789ab/vm.sock"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestSocketsOfALongHomeLieInTheRuntimeFolder(t *testing.T) {
	// The test's own folder has a name that is too long.
	runtime, err := os.MkdirTemp("", "r")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(runtime); err != nil {
			t.Error(err)
		}
	})
	long := Home{root: "/" + strings.Repeat("l", 100), runtime: runtime}
	got, err := sockets(long)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Dir(got[0])
	want := []string{dir + "/service.sock", dir + "/agent.sock", dir + "/vm-0123456789ab.sock"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if filepath.Dir(dir) != runtime || !strings.HasPrefix(filepath.Base(dir), "capsem-") {
		t.Errorf("folder is %s, want one in %s", dir, runtime)
	}
	other, err := Home{root: long.root + "x", runtime: runtime}.ServiceSocket()
	if err != nil {
		t.Fatal(err)
	}
	if other == got[0] {
		t.Error("two homes share a socket")
	}
}

func TestSocketPathAtTheBound(t *testing.T) {
	fits := Home{root: "/" + strings.Repeat("l", maxSocketPath-len("//run/service.sock"))}
	p, err := fits.ServiceSocket()
	if err != nil {
		t.Fatal(err)
	}
	if len(p) != maxSocketPath {
		t.Fatalf("path has %d bytes, want %d", len(p), maxSocketPath)
	}
	_, err = Home{root: fits.root + "l"}.ServiceSocket()
	wantError(t, err, "101 bytes", "XDG_RUNTIME_DIR is not set", "CAPSEM_HOME to a shorter path")
}

func TestSocketPathTooLongInBothPlacesNamesBoth(t *testing.T) {
	h := Home{root: "/" + strings.Repeat("l", 100), runtime: "/" + strings.Repeat("r", 100)}
	_, err := h.ServiceSocket()
	wantError(t, err, h.root+"/run/service.sock", h.runtimeDir()+"/service.sock", "118 bytes", "138 bytes")
}

func TestRuntimeFolderThatOthersCanEnterIsRefused(t *testing.T) {
	h := Home{root: "/" + strings.Repeat("l", 100), runtime: t.TempDir()}
	if err := os.Mkdir(h.runtimeDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(h.runtimeDir(), 0o777); err != nil {
		t.Fatal(err)
	}
	_, err := h.ServiceSocket()
	wantError(t, err, "mode 0700")
}

func TestSettingsSayWhereEachValueComesFrom(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(file, []byte("durability = \"power\"\nlog_level = \"debug\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := LoadSettings(file, environment(map[string]string{EnvAccelerator: "tcg"}))
	if err != nil {
		t.Fatal(err)
	}
	want := Settings{
		Accelerator: Value[string]{AcceleratorTCG, EnvAccelerator},
		Durability:  Value[string]{DurabilityPower, file + ":1:1"},
		LogLevel:    Value[slog.Level]{slog.LevelDebug, file + ":2:1"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestMissingSettingsAreTheDefaults(t *testing.T) {
	got, err := LoadSettings(filepath.Join(t.TempDir(), "none"), environment(nil))
	if err != nil {
		t.Fatal(err)
	}
	want := Settings{
		Accelerator: Value[string]{AcceleratorAuto, OriginDefault},
		Durability:  Value[string]{DurabilityProcess, OriginDefault},
		LogLevel:    Value[slog.Level]{slog.LevelInfo, OriginDefault},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestWrongSettingsAreRefused(t *testing.T) {
	_, err := LoadSettings("/none", environment(map[string]string{EnvAccelerator: "hvf"}))
	wantError(t, err, `CAPSEM_ACCELERATOR is "hvf"`)
	file := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(file, []byte("acelerator = \"tcg\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = LoadSettings(file, environment(nil))
	wantError(t, err, file+":1:1", `did you mean "accelerator"`)
}

func TestNames(t *testing.T) {
	tests := []struct {
		name  string
		check func(string) error
		ok    bool
	}{
		{"work", CheckName, true},
		{"0", CheckName, true},
		{strings.Repeat("a", 63), CheckName, true},
		{strings.Repeat("a", 64), CheckName, false},
		{"", CheckName, false},
		{"-a", CheckName, false},
		{"A", CheckName, false},
		{"a_b", CheckName, false},
		{"a/b", CheckName, false},
		{"a\n", CheckName, false},
		{"vm-0123456789ab", CheckName, false},
		{"vm-0123456789abc", CheckName, true},
		{"vm-work", CheckName, true},
		{"github", CheckServerName, true},
		{strings.Repeat("a", 33), CheckServerName, false},
		{"builtin", CheckServerName, false},
		{"git__hub", CheckServerName, false},
		{"github-token", CheckSecretName, true},
		{"../x", CheckSecretName, false},
		{".new-1", CheckSecretName, false},
		{"a\n", CheckSecretName, false},
		{"../../etc/passwd", CheckProfileName, false},
	}
	for _, tt := range tests {
		if err := tt.check(tt.name); (err == nil) != tt.ok {
			t.Errorf("%q: got %v, want valid = %t", tt.name, err, tt.ok)
		}
	}
}

func TestNewIDsAreIDsAndDiffer(t *testing.T) {
	seen := map[string]bool{}
	for range 1000 {
		id := NewID()
		if !IsID(id) || CheckName(id) == nil || seen[id] {
			t.Fatalf("%q: want a new id that is no name", id)
		}
		seen[id] = true
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]Size{"512MiB": 512 << 20, "1GiB": 1 << 30, "3KiB": 3 << 10, "2TiB": 2 << 40} {
		got, err := ParseSize(text)
		if err != nil || got != want {
			t.Errorf("%s: got %d, %v, want %d", text, got, err, want)
		}
		if got.String() != text {
			t.Errorf("%s is written back as %s", text, got)
		}
	}
	for _, text := range []string{"", "1", "1GB", "-1GiB", "0GiB", "1.5GiB", "GiB", "9999999999TiB", "1gib", "99999999999999999999GiB"} {
		if got, err := ParseSize(text); err == nil {
			t.Errorf("%q: got %d, want an error", text, got)
		}
	}
}

func TestSecretIsNeverPrinted(t *testing.T) {
	const value = "hunter2"
	s := NewSecret(value)
	holder := struct {
		S Secret
		P *Secret
		M map[string]Secret
	}{s, &s, map[string]Secret{"k": s}}
	var log strings.Builder
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "s", s, "h", holder)
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "s", s, "h", holder)
	encoded, err := json.Marshal(holder)
	if err != nil {
		t.Fatal(err)
	}
	outputs := []string{log.String(), string(encoded)}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		outputs = append(outputs, fmt.Sprintf(verb, s), fmt.Sprintf(verb, holder), fmt.Sprintf(verb, &holder))
	}
	for _, out := range outputs {
		if strings.Contains(out, value) || strings.Contains(out, "68756e746572") {
			t.Errorf("the secret shows in %q", out)
		}
	}
	if s.Reveal() != value {
		t.Errorf("Reveal gives %q, want %q", s.Reveal(), value)
	}
	if (Secret{}).Reveal() != "" {
		t.Error("the zero secret is not empty")
	}
}

func TestSecretStore(t *testing.T) {
	store := openHome(t).SecretStore()
	if err := store.Set("github-token", NewSecret("old")); err != nil {
		t.Fatal(err)
	}
	if err := store.Set("github-token", NewSecret("new")); err != nil {
		t.Fatal(err)
	}
	got, err := store.Get("github-token")
	if err != nil || got.Reveal() != "new" {
		t.Errorf("got %q, %v, want the new value", got.Reveal(), err)
	}
	info, err := os.Stat(filepath.Join(store.dir, "github-token"))
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("mode is %o, want 600", info.Mode().Perm())
	}
	names, err := store.List()
	if diff := cmp.Diff([]string{"github-token"}, names); diff != "" || err != nil {
		t.Error(diff, err)
	}
	if err := store.Remove("github-token"); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Get("github-token"); !errors.Is(err, ErrNoSecret) {
		t.Errorf("got %v, want ErrNoSecret", err)
	}
	if err := store.Remove("github-token"); !errors.Is(err, ErrNoSecret) {
		t.Errorf("got %v, want ErrNoSecret", err)
	}
}

func TestSecretStoreRefuses(t *testing.T) {
	store := openHome(t).SecretStore()
	wantError(t, store.Set("../x", NewSecret("v")), "not valid")
	wantError(t, store.Set("x", NewSecret("")), "empty")
	wantError(t, store.Set("x", NewSecret("a\x00b")), "zero byte")
	wantError(t, store.Set("x", NewSecret(strings.Repeat("v", maxSecretBytes+1))), "longer than")
	if err := store.Set("most", NewSecret(strings.Repeat("v", maxSecretBytes))); err != nil {
		t.Error(err)
	}
	open := filepath.Join(store.dir, "open")
	if err := os.WriteFile(open, []byte("v"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := store.Get("open")
	wantError(t, err, "mode 0600")
	if err := os.Symlink("/etc/hostname", filepath.Join(store.dir, "link")); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Get("link"); err == nil {
		t.Error("a symbolic link was followed")
	}
}

func TestRecordsComeBackAsWritten(t *testing.T) {
	h := openHome(t)
	id := NewID()
	if err := os.Mkdir(h.VMDir(id), 0o700); err != nil {
		t.Fatal(err)
	}
	self, err := IdentifyProcess(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	at := time.Date(2026, 12, 1, 10, 0, 0, 123456000, time.UTC)
	record := VMRecord{
		Version: recordVersion, ID: id, Name: "work", State: Running, CreatedAt: at, Profile: "default", Incarnation: 1,
		Spec: VMSpec{Image: "tiny", ImageDigest: "sha256:0", CPUs: 1, MemoryBytes: 1 << 29, Env: map[string]string{"A": "b"}, Accelerator: "tcg", Durability: "process"},
	}
	if err := WriteVMRecord(h.VMRecord(id), record); err != nil {
		t.Fatal(err)
	}
	gotRecord, err := ReadVMRecord(h.VMRecord(id))
	if diff := cmp.Diff(record, gotRecord); diff != "" || err != nil {
		t.Error(diff, err)
	}
	state := VMState{Version: recordVersion, Incarnation: 1, Phase: Ready, Process: self, Accelerator: "tcg", Isolation: "none", ReadyAt: at}
	if err := WriteVMState(h.VMState(id), state); err != nil {
		t.Fatal(err)
	}
	gotState, err := ReadVMState(h.VMState(id))
	if diff := cmp.Diff(state, gotState); diff != "" || err != nil {
		t.Error(diff, err)
	}
	entries, err := os.ReadDir(h.VMDir(id))
	if err != nil || len(entries) != 2 {
		t.Errorf("got %v, %v: want the two records and no other file", entries, err)
	}
}

func TestDamagedRecordsAreRefused(t *testing.T) {
	const good = `{"version":1,"id":"vm-0123456789ab","name":"work","state":"running","created_at":"2026-12-01T00:00:00Z","profile":"p","spec":{"image":"","image_digest":"","cpus":1,"memory_bytes":1,"accelerator":"","durability":""},"incarnation":1}`
	file := filepath.Join(t.TempDir(), "vm.json")
	tests := []struct{ name, data, want string }{
		{"empty", "", "unexpected end"},
		{"cut", good[:len(good)/2], "unexpected end"},
		{"unknown member", strings.Replace(good, `"name"`, `"nme"`, 1), `"nme"`},
		{"trailing", good + "{}", "after"},
		{"newer", strings.Replace(good, `"version":1`, `"version":2`, 1), "version 2"},
		{"foreign id", strings.Replace(good, "vm-0", "../0", 1), "no VM id"},
		{"unknown state", strings.Replace(good, "running", "floating", 1), "no state"},
		{"too large", good + strings.Repeat(" ", maxRecordBytes), "larger than"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if err := os.WriteFile(file, []byte(tt.data), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := ReadVMRecord(file)
			wantError(t, err, file, tt.want)
		})
	}
	if _, err := ReadVMRecord(file + ".none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v, want fs.ErrNotExist", err)
	}
}

func TestProcessIdentityKnowsItsProcessFromItsSuccessor(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "cat")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := IdentifyProcess(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	wantAlive := func(p ProcessIdentity, want bool) {
		t.Helper()
		if got, err := p.Alive(); got != want || err != nil {
			t.Errorf("got %t, %v, want %t", got, err, want)
		}
	}
	wantAlive(p, true)
	other := p
	other.StartTime++
	wantAlive(other, false)
	if err := other.Signal(syscall.SIGKILL); !errors.Is(err, ErrProcessGone) {
		t.Errorf("signalling another process: got %v, want ErrProcessGone", err)
	}
	other = p
	other.BootID = "earlier"
	wantAlive(other, false)
	wantAlive(ProcessIdentity{}, false)
	if err := p.Signal(0); err != nil {
		t.Error(err)
	}
	if err := stdin.Close(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	wantAlive(p, false)
	if _, err := p.Open(); !errors.Is(err, ErrProcessGone) {
		t.Errorf("got %v, want ErrProcessGone", err)
	}
}

func TestRequirementsOfTests(t *testing.T) {
	env := environment(map[string]string{EnvTestRequire: "vm, jail"})
	if !TestRequires(env, "vm") || !TestRequires(env, "jail") || TestRequires(env, "kvm") || TestRequires(environment(nil), "vm") {
		t.Error("CAPSEM_TEST_REQUIRE is read wrongly")
	}
}
