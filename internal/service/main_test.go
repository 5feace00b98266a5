package service_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/client"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/image"
	"github.com/capsem/capsem/internal/inspect"
	"github.com/capsem/capsem/internal/ledger"
	"github.com/capsem/capsem/internal/service"
)

// TestMain is also capsemd: the service starts this very program for each VM.
// It is a VM's process in all that the service sees of one (its records, its
// ledger, its socket, its words on the progress pipe) but has no machine.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "vm" {
		if err := hostProcess(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func hostProcess(args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	home, err := config.OpenHome(config.OSEnv())
	if err != nil {
		return err
	}
	if args[0] == "--recover" {
		_, err := ledger.Recover(ctx, home.Ledger(args[1]))
		return err
	}
	id := args[0]
	if _, err := config.ReadHandover(os.NewFile(3, "handover")); err != nil {
		return err
	}
	record, err := config.ReadVMRecord(home.VMRecord(id))
	if err != nil {
		return err
	}
	if record.Spec.Env["TEST"] == "instant-death" {
		return syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	self, err := config.IdentifyProcess(os.Getpid())
	if err != nil {
		return err
	}
	progress := json.NewEncoder(os.NewFile(4, "progress"))
	state := config.VMState{Incarnation: record.Incarnation, Phase: config.Starting, Process: self}
	end := func(reason error) error {
		state.Phase = config.Exited
		if reason != nil {
			state.ExitReason = reason.Error()
		}
		return errors.Join(config.WriteVMState(home.VMState(id), state), reason)
	}
	if err := config.WriteVMState(home.VMState(id), state); err != nil {
		return err
	}
	l, err := ledger.Open(ctx, home.Ledger(id), ledger.Options{})
	if err != nil {
		return end(err)
	}
	switch record.Spec.Env["TEST"] {
	case "fail":
		_ = progress.Encode(api.Progress{Error: &api.Error{Code: api.CodeFailed, Message: "it does not boot"}}) // the test sees it
		return errors.Join(l.Close(), end(errors.New("it does not boot")))
	case "silent-death":
		return syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	caller := inspect.Caller{VM: event.VM{ID: id}, Initiator: event.Initiator{Kind: event.Person}}
	if _, err := l.Begin(ctx, caller.Exec(event.Command{Argv: []string{"sleep"}}), event.Verdict{Decision: event.Allow}); err != nil {
		return end(err)
	}
	path, err := home.VMSocket(id)
	if err != nil {
		return end(err)
	}
	socket, err := service.ListenPrivate(ctx, path)
	if err != nil {
		return end(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/stop", func(w http.ResponseWriter, _ *http.Request) { api.WriteJSON(w, 202, struct{}{}); stop() })
	mux.HandleFunc("GET /v1/mcp", func(w http.ResponseWriter, _ *http.Request) { api.WriteJSON(w, 200, []api.Server{}) })
	mux.HandleFunc("POST /v1/exec", func(w http.ResponseWriter, r *http.Request) {
		api.WriteJSON(w, 200, api.ExecResult{Stdout: []byte(r.Header.Get(api.HeaderInitiator)), ExitCode: 5})
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: time.Second}
	go func() { _ = srv.Serve(socket) }() // ends with the process
	state.Phase, state.ReadyAt = config.Ready, time.Now()
	if err := config.WriteVMState(home.VMState(id), state); err != nil {
		return end(err)
	}
	_ = progress.Encode(api.Progress{Result: json.RawMessage(`["a note"]`)}) // the service may be gone
	<-ctx.Done()
	return errors.Join(l.Close(), end(nil))
}

// rig is a service in this process, on a home of its own.
type rig struct {
	t    *testing.T
	home config.Home
	env  []string
	stop func() error
}

func newRig(t *testing.T) *rig {
	t.Helper()
	// A test's own folder has the test's name, which is too long for a socket.
	base, err := os.MkdirTemp("", "capsem")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(base); err != nil {
			t.Error(err)
		}
	})
	root := filepath.Join(base, "h")
	vars := map[string]string{"CAPSEM_HOME": root, "HOME": base, "PATH": os.Getenv("PATH"), "CAPSEM_ACCELERATOR": "tcg"}
	home, err := config.OpenHome(func(name string) (string, bool) { v, ok := vars[name]; return v, ok })
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, home: home}
	for name, value := range vars {
		r.env = append(r.env, name+"="+value)
	}
	r.image()
	r.start()
	t.Cleanup(func() {
		for _, vm := range r.list() {
			if err := r.person().Do(context.Background(), "DELETE", "/v1/vms/"+vm.ID+"?force=true", nil, nil); err != nil {
				t.Error(err)
			}
		}
		if err := r.stop(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// image puts something into the images' folder that a plain name can stand for.
// Nothing boots it.
func (r *rig) image() {
	r.t.Helper()
	none := strings.Repeat("0", 64)
	m := image.Manifest{
		Format: image.Format, Name: "tiny", Architecture: "amd64", Packages: []image.Package{}, Modules: []string{},
		Files: []image.File{{Name: image.InitrdFile, SHA256: none}, {Name: image.KernelFile, SHA256: none}},
	}
	raw, err := m.Encode()
	if err != nil {
		r.t.Fatal(err)
	}
	ref, err := m.Ref()
	if err != nil {
		r.t.Fatal(err)
	}
	dir := filepath.Join(r.home.Images(), "tiny", ref.Digest)
	err = errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, image.ManifestFile), raw, 0o600),
		os.WriteFile(filepath.Join(dir, "..", "current"), []byte("sha256:"+ref.Digest+"\n"), 0o600))
	if err != nil {
		r.t.Fatal(err)
	}
}

// start runs a service; stop ends it and leaves the VMs alone.
func (r *rig) start() {
	r.t.Helper()
	self, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	settings, err := config.LoadSettings(r.home.Settings(), func(string) (string, bool) { return "", false })
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- service.Run(ctx, service.Options{
			Home: r.home, Settings: settings, Executable: self, Env: r.env, Version: "test",
			Log: slog.New(slog.DiscardHandler), Ready: func() { close(ready) },
		})
	}()
	select {
	case <-ready:
	case err := <-done:
		r.t.Fatal(err)
	}
	r.stop = func() error { cancel(); return <-done }
}

func (r *rig) person() *client.Client {
	path, err := r.home.ServiceSocket()
	if err != nil {
		r.t.Fatal(err)
	}
	return client.New(path)
}

func (r *rig) agent() *client.Client {
	path, err := r.home.AgentSocket()
	if err != nil {
		r.t.Fatal(err)
	}
	return client.New(path)
}

func (r *rig) list() []api.VM {
	r.t.Helper()
	var list api.VMList
	if err := r.person().Do(context.Background(), "GET", "/v1/vms", nil, &list); err != nil {
		r.t.Fatal(err)
	}
	return list.VMs
}

func (r *rig) create(req api.CreateRequest) (api.VM, error) {
	var vm api.VM
	err := r.person().Do(r.t.Context(), "POST", "/v1/vms", req, &vm)
	return vm, err
}

func (r *rig) mustCreate(req api.CreateRequest) api.VM {
	r.t.Helper()
	vm, err := r.create(req)
	if err != nil {
		r.t.Fatal(err)
	}
	return vm
}

// end returns a function that waits until the process has ended. It is called
// before whatever ends it.
func (r *rig) end(pid int) func() {
	r.t.Helper()
	id, err := config.IdentifyProcess(pid)
	if err != nil {
		r.t.Fatal(err)
	}
	fd, err := id.Open()
	if err != nil {
		r.t.Fatal(err)
	}
	return func() {
		r.t.Helper()
		defer func() { r.t.Log(fd.Close()) }()
		if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd.Fd()), Events: unix.POLLIN}}, 10_000); n != 1 {
			r.t.Fatalf("process %d lives on (%v)", pid, err)
		}
	}
}

// until waits for a VM to be in a state. The API has no way to wait for a crash
// to be noticed, so this asks again and again.
func (r *rig) until(name string, want api.State) api.VM {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 20*time.Second)
	defer cancel()
	for {
		var vm api.VM
		if err := r.person().Do(ctx, "GET", "/v1/vms/"+name, nil, &vm); err != nil {
			r.t.Fatal(err)
		}
		if vm.State == want {
			return vm
		}
	}
}

func unquote(raw string) string {
	var s string
	if err := json.Unmarshal([]byte(raw), &s); err != nil {
		return raw
	}
	return s
}

// tryService runs a second service on the same home, which must end at once.
func tryService(r *rig) error {
	ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
	defer cancel()
	return service.Run(ctx, service.Options{Home: r.home, Version: "test", Log: slog.New(slog.DiscardHandler)})
}
