package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/config"
)

// endLimit is how long all that belongs to a home may take to end, once it was
// told to.
const endLimit = 30 * time.Second

// home is a home folder of Capsem for one test, with the programs that use it.
type home struct {
	// root holds the home itself, its programs and its temporary files. Its path
	// is short, as sockets need it, and stands in the command line or in the
	// environment of each process that belongs to the home.
	root string
	// vars is the environment of the programs.
	vars []string
	// last are the processes that the last signal was meant to end.
	last []watched
	// sessions are connections to guests' MCP servers that are open.
	sessions map[string]*guestSession
	// mounted says that the home is a file system of its own.
	mounted bool
	// web is the web server, nil if there is none.
	web *web
	t   testing.TB
}

// newHome makes a home. At the test's end it is taken down, and the test fails if
// anything of it is left.
func newHome(t testing.TB) *home {
	t.Helper()
	root, err := os.MkdirTemp("", "cs-")
	if err != nil {
		t.Fatal(err)
	}
	if root, err = filepath.EvalSymlinks(root); err != nil {
		t.Fatal(err)
	}
	h := &home{root: root, sessions: map[string]*guestSession{}, t: t}
	t.Cleanup(h.finish)
	if err := h.furnish(); err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *home) furnish() error {
	if err := os.Chmod(h.root, 0o755); err != nil { // a test enters as another user
		return err
	}
	for _, dir := range []string{"home", "tmp", "user"} {
		if err := os.Mkdir(filepath.Join(h.root, dir), 0o700); err != nil {
			return err
		}
	}
	// The programs are links, so that their paths say whose they are.
	if err := linkTree(built, h.path("bin")); err != nil {
		return err
	}
	if err := os.Chmod(h.path("bin"), 0o755); err != nil {
		return err
	}
	h.vars = []string{
		config.EnvHome + "=" + h.path("home"), config.EnvAccelerator + "=" + config.AcceleratorTCG,
		"PATH=" + h.path("bin") + ":" + config.OSEnv().Get("PATH"), "HOME=" + h.path("user"), "TMPDIR=" + h.path("tmp"), "LANG=C.UTF-8",
	}
	if noVM() != nil {
		return nil
	}
	images, err := tinyImages()
	if err != nil {
		return err
	}
	return linkTree(images, h.path("home/images"))
}

// mount puts the home on a file system of its own that has size bytes.
func (h *home) mount(size string) error {
	root := h.path("home")
	if err := os.Rename(filepath.Join(root, "images"), h.path("images")); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", root, "tmpfs", 0, "mode=0700,size="+size); err != nil {
		return fmt.Errorf("mounting a file system on %s: %w", root, err)
	}
	h.mounted = true
	return linkTree(h.path("images"), filepath.Join(root, "images"))
}

func (h *home) path(rel string) string { return filepath.Join(h.root, rel) }

// command prepares a program with this home's environment.
func (h *home) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	if path := h.path("bin/" + name); !strings.Contains(name, "/") {
		if _, err := os.Stat(path); err == nil {
			name = path
		}
	}
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env, cmd.Dir = h.vars, h.root
	return cmd
}

// capsem runs the command line, which must succeed, and returns its stdout.
func (h *home) capsem(args ...string) string {
	h.t.Helper()
	var stderr strings.Builder
	cmd := h.command(h.t.Context(), "capsem", args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		h.t.Fatalf("capsem %q: %v\n%s%s", args, err, out, &stderr)
	}
	return string(out)
}

// vm asks what is known of a VM.
func (h *home) vm(name string) (vm api.VM, err error) {
	out, err := h.command(context.Background(), "capsem", "info", "--json", name).Output()
	if err != nil {
		return vm, fmt.Errorf("asking for VM %s: %w: %s", name, err, out)
	}
	return vm, json.Unmarshal(out, &vm)
}

// writeProfile puts a profile into the home. $NAME stands for paths of this
// machine: $BIN, $NPM (installed programs of others) and $ROOT.
func (h *home) writeProfile(name, text string) error {
	npm, err := filepath.Abs("npm/node_modules")
	if err != nil {
		return err
	}
	text = strings.NewReplacer("$BIN", h.path("bin"), "$NPM", npm, "$ROOT", h.root).Replace(text)
	dir := h.path("home/profiles")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	// In one step, as an editor would: a reload may read at any time.
	next := filepath.Join(dir, "."+name+".next")
	return errors.Join(os.WriteFile(next, []byte(text), 0o600), os.Rename(next, filepath.Join(dir, name+".toml")))
}

// belonging lists the processes that belong to the home.
func (h *home) belonging() ([]process, error) {
	all, err := processes()
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(p process) bool { return p.pid == os.Getpid() || !p.mentions(h.root) }), nil
}

// find returns the one process of a role, and all that descends from it: of the VM
// called name, or of all that belong to the home if name is "".
func (h *home) find(role, name string) (process, []process, error) {
	var none process
	all, err := processes()
	if err != nil {
		return none, nil, err
	}
	within, err := h.belonging()
	if err != nil {
		return none, nil, err
	}
	if name != "" {
		if within, err = h.processesOf(name, all); err != nil {
			return none, nil, err
		}
	}
	var found []process
	for _, p := range within {
		if p.role() == role {
			found = append(found, p)
		}
	}
	if len(found) != 1 {
		return none, nil, fmt.Errorf("there are %d processes with the role %q among %v", len(found), role, within)
	}
	return found[0], below(all, found[0]), nil
}

// processesOf are those of a VM.
func (h *home) processesOf(name string, all []process) ([]process, error) {
	vm, err := h.vm(name)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(all, func(p process) bool { return p.pid == vm.PID })
	if i < 0 {
		return nil, fmt.Errorf("VM %s has no process %d", name, vm.PID)
	}
	return below(all, all[i]), nil
}

// finish takes the home down and says what of it is left.
func (h *home) finish() {
	for name, s := range h.sessions {
		if err := s.kill(); err != nil {
			h.t.Errorf("closing session %s: %v", name, err)
		}
	}
	if h.t.Failed() {
		h.showLogs()
	}
	before, err := h.belonging()
	if err != nil {
		h.t.Error(err)
	}
	held, err := watch(append(before, unwatched(h.last)...))
	if err != nil {
		h.t.Error(err)
	}
	if err := os.Remove(h.path("home/ballast")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		h.t.Error(err)
	}
	if _, err := os.Stat(h.path("home/service.db")); err == nil {
		h.shutDown()
	}
	alive, err := awaitEnd(held, endLimit)
	if err != nil {
		h.t.Error(err)
	}
	left, err := h.belonging()
	if err != nil {
		h.t.Error(err)
	}
	for _, p := range append(alive, left...) {
		h.t.Errorf("a process is left: %s", p)
		if owner, err := os.FindProcess(p.pid); err == nil {
			if err := owner.Kill(); err != nil {
				h.t.Log(err)
			}
		}
	}
	h.checkFiles()
	if h.mounted {
		if err := unix.Unmount(h.path("home"), 0); err != nil {
			h.t.Errorf("unmounting the home: %v", err)
		}
	}
	h.checkKernel()
	if err := os.RemoveAll(h.root); err != nil {
		h.t.Error(err)
	}
}

func unwatched(list []watched) []process {
	out := make([]process, len(list))
	for i, w := range list {
		out[i] = w.process
	}
	return out
}

// shutDown removes every VM and ends the service, by the product's own means.
func (h *home) shutDown() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*endLimit)
	defer cancel()
	for _, args := range [][]string{{"purge", "--all", "--yes"}, {"service", "stop"}} {
		if out, err := h.command(ctx, "capsem", args...).CombinedOutput(); err != nil {
			h.t.Errorf("capsem %q: %v\n%s", args, err, out)
		}
	}
}

// kept are the files that a home without VMs has, as patterns.
var kept = []string{
	"service.db", "service.db.lock", "config.toml", "corp.toml", "profiles/*", "secrets/*", "cache/*", "images/*", "images/*/*", "images/*/*/*", "images/*/*/*/*",
	"run/service.log", "run/service.lock", "run/service.lock.start", "run/accel.json", "run/reserve",
	"ledgers/vm-*/session.db", "ledgers/vm-*/vm.json",
}

// checkFiles says which files are left that nothing needs.
func (h *home) checkFiles() {
	root := h.path("home")
	walk := func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil || d.IsDir() && filepath.Dir(rel) != "vms" {
			return err
		}
		if !slices.ContainsFunc(kept, func(pattern string) bool { ok, err := filepath.Match(pattern, rel); return ok && err == nil }) {
			h.t.Errorf("a file is left in the home: %s (%s)", rel, d.Type())
		}
		return nil
	}
	if err := filepath.WalkDir(root, walk); err != nil {
		h.t.Error(err)
	}
	if left, err := os.ReadDir(h.path("tmp")); err != nil || len(left) > 0 {
		h.t.Errorf("temporary files are left: %v %v", left, err)
	}
}

// checkKernel says which sockets and mounts of the home the kernel still has.
func (h *home) checkKernel() {
	for what, file := range map[string]string{"socket": "/proc/net/unix", "mount": "/proc/self/mountinfo"} {
		text, err := os.ReadFile(file)
		if err != nil {
			h.t.Error(err)
		}
		for line := range strings.Lines(string(text)) {
			if strings.Contains(line, h.root) {
				h.t.Errorf("a %s is left: %s", what, line)
			}
		}
	}
}

// showLogs helps to see why a test failed.
func (h *home) showLogs() {
	logs := []string{h.path("home/run/service.log")}
	more, err := filepath.Glob(h.path("home/vms/*/process.log"))
	if err != nil {
		h.t.Error(err)
	}
	for _, log := range append(logs, more...) {
		text, err := os.ReadFile(log)
		if err == nil {
			h.t.Logf("%s:\n%s", log, text[max(0, len(text)-4000):])
		}
	}
}
