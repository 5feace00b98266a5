package service_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/client"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/ledger"
)

func code(err error) api.Code {
	var e *api.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

func TestOfManyCreatesOfOneNameOneWins(t *testing.T) {
	r := newRig(t)
	var mu sync.Mutex
	var made, exist []string
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			vm, err := r.create(api.CreateRequest{Name: "box"})
			mu.Lock()
			defer mu.Unlock()
			var e *api.Error
			switch {
			case err == nil:
				made = append(made, vm.ID)
			case errors.As(err, &e) && e.Code == api.CodeExists:
				exist = append(exist, e.VM)
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if len(made) != 1 || len(exist) != 49 {
		t.Fatalf("%d made, %d exist", len(made), len(exist))
	}
	for _, id := range exist {
		if id != made[0] {
			t.Errorf("a loser was told of %s, the winner is %s", id, made[0])
		}
	}
}

func TestCreatesOfOneRequestKeyMakeOneVM(t *testing.T) {
	r := newRig(t)
	var wg sync.WaitGroup
	ids := make([]string, 20)
	for i := range ids {
		wg.Go(func() {
			vm, err := r.create(api.CreateRequest{RequestKey: "k"})
			if err != nil {
				t.Error(err)
			}
			if vm.State != api.StateRunning {
				t.Errorf("answered while it is %s", vm.State)
			}
			ids[i] = vm.ID
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id != ids[0] {
			t.Errorf("%s and %s", id, ids[0])
		}
	}
}

func TestAVMOutlivesItsServiceAndTheNextFindsIt(t *testing.T) {
	r := newRig(t)
	before := r.mustCreate(api.CreateRequest{Name: "box"})
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	r.start()
	var after api.VM
	if err := r.person().Do(t.Context(), "GET", "/v1/vms/box", nil, &after); err != nil {
		t.Fatal(err)
	}
	if after.State != api.StateRunning || after.PID != before.PID || after.ID != before.ID {
		t.Errorf("before %+v, after %+v", before, after)
	}
	var stopped api.VM
	if err := r.person().Do(t.Context(), "POST", "/v1/vms/box/stop", api.StopRequest{}, &stopped); err != nil || stopped.State != api.StateStopped {
		t.Errorf("stopping it: %v, %+v", err, stopped)
	}
}

// TestAStartThatItsServiceDidNotSeeTheEndOfIsSeenThrough: the service is killed
// while a VM boots, the VM goes on.
func TestAStartThatItsServiceDidNotSeeTheEndOfIsSeenThrough(t *testing.T) {
	r := newRig(t)
	vm := r.mustCreate(api.CreateRequest{Name: "box"})
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	record, err := config.ReadVMRecord(r.home.VMRecord(vm.ID))
	if err != nil {
		t.Fatal(err)
	}
	state, err := config.ReadVMState(r.home.VMState(vm.ID))
	if err != nil {
		t.Fatal(err)
	}
	phase := func(p config.Phase) {
		t.Helper()
		state.Phase = p
		if err := config.WriteVMState(r.home.VMState(vm.ID), state); err != nil {
			t.Fatal(err)
		}
	}
	record.State = config.Creating
	if err := config.WriteVMRecord(r.home.VMRecord(vm.ID), record); err != nil {
		t.Fatal(err)
	}
	phase(config.Starting)
	r.start()
	if got := r.list()[0]; got.State != api.StateCreating {
		t.Errorf("before it is ready it is %s", got.State)
	}
	phase(config.Ready)
	if got := r.until("box", api.StateRunning); got.PID != vm.PID {
		t.Errorf("got %+v", got)
	}
}

// TestAVMWhoseGuestHasJustPoweredOffCanBeStarted: its process is on the way out.
func TestAVMWhoseGuestHasJustPoweredOffCanBeStarted(t *testing.T) {
	r := newRig(t)
	vm := r.mustCreate(api.CreateRequest{Name: "box"})
	state, err := config.ReadVMState(r.home.VMState(vm.ID))
	if err != nil {
		t.Fatal(err)
	}
	state.Phase = config.Stopping
	if err := errors.Join(config.WriteVMState(r.home.VMState(vm.ID), state), syscall.Kill(vm.PID, syscall.SIGTERM)); err != nil {
		t.Fatal(err)
	}
	var again api.VM
	if err := r.person().Do(t.Context(), "POST", "/v1/vms/box/start", nil, &again); err != nil || again.State != api.StateRunning || again.PID == vm.PID {
		t.Errorf("got %v, %+v", err, again)
	}
}

// TestAFrozenProcessHoldsNobodyUp: who wants to run a command is told, and a stop
// kills it and says so. It takes as long as both are patient.
func TestAFrozenProcessHoldsNobodyUp(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 20 s; run without -short")
	}
	t.Parallel()
	r := newRig(t)
	vm := r.mustCreate(api.CreateRequest{Name: "box"})
	if err := syscall.Kill(vm.PID, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	conn, err := r.person().Stream(ctx, "/v1/vms/box/exec", api.ExecRequest{Argv: [][]byte{[]byte("true")}})
	if code(err) != api.CodeUnavailable {
		t.Errorf("running a command: %v, %v", conn, err)
	}
	var stopped api.VM
	if err := r.person().Do(ctx, "POST", "/v1/vms/box/stop", api.StopRequest{TimeoutMS: 1}, &stopped); err != nil {
		t.Fatal(err)
	}
	if stopped.State != api.StateFailed || !strings.Contains(stopped.Reason, "killed") {
		t.Errorf("got %s: %s", stopped.State, stopped.Reason)
	}
}

func TestAKilledProcessLeavesAFailedVMAnInterruptedRowAndAWayBack(t *testing.T) {
	r := newRig(t)
	vm := r.mustCreate(api.CreateRequest{Name: "box"})
	if err := syscall.Kill(vm.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	failed := r.until("box", api.StateFailed)
	if !strings.Contains(failed.Reason, "unexpectedly") || failed.PID != 0 {
		t.Errorf("got %+v", failed)
	}
	if got := r.sql("box", "SELECT status FROM exec_events"); got != "interrupted" {
		t.Errorf("the row says %q", got)
	}
	if err := r.person().Do(t.Context(), "POST", "/v1/vms/box/exec", api.ExecRequest{}, nil); code(err) != api.CodeState || !strings.Contains(err.Error(), "capsem start box") {
		t.Errorf("exec in a failed VM: %v", err)
	}
	var back api.VM
	if err := r.person().Do(t.Context(), "POST", "/v1/vms/box/start", nil, &back); err != nil || back.State != api.StateRunning || back.Incarnation != 2 {
		t.Errorf("starting it again: %v, %+v", err, back)
	}
}

func TestAProcessThatDiesWithoutAServiceIsFoundDead(t *testing.T) {
	r := newRig(t)
	vm := r.mustCreate(api.CreateRequest{Name: "box"})
	ended := r.end(vm.PID)
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(vm.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ended()
	r.start()
	if got := r.list()[0]; got.State != api.StateFailed || got.Reason == "" {
		t.Errorf("got %+v", got)
	}
	if got := r.sql("box", "SELECT status FROM exec_events"); got != "interrupted" {
		t.Errorf("the row says %q", got)
	}
}

func TestACreateThatFailsInItsProcessLeavesAFailedVMThatSaysWhy(t *testing.T) {
	for how, want := range map[string]string{"fail": "it does not boot", "silent-death": "ended before the VM was ready", "instant-death": "ended before the VM was ready"} {
		t.Run(how, func(t *testing.T) {
			r := newRig(t)
			_, err := r.create(api.CreateRequest{Name: "box", Env: map[string]string{"TEST": how}})
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("got %v", err)
			}
			if got := r.list(); len(got) != 1 || got[0].State != api.StateFailed || got[0].Reason == "" {
				t.Errorf("got %+v", got)
			}
			// The name can be had again.
			if err := r.person().Do(t.Context(), "DELETE", "/v1/vms/box", nil, nil); err != nil {
				t.Error(err)
			}
			r.mustCreate(api.CreateRequest{Name: "box"})
		})
	}
}

func TestACreateThatCannotBeginLeavesNothing(t *testing.T) {
	r := newRig(t)
	for _, req := range []api.CreateRequest{
		{Name: "Bad Name"},
		{Name: "vm-0123456789ab"},
		{Profile: "missing"},
		{Image: "base"},
		{Image: "tiny@sha256:00"},
		{CPUs: 1000},
		{MemoryBytes: 1},
		{Env: map[string]string{"A=B": "x"}},
	} {
		if vm, err := r.create(req); err == nil {
			t.Errorf("%+v made %+v", req, vm)
		}
	}
	if left, err := os.ReadDir(r.home.VMs()); err != nil || len(left) != 0 || len(r.list()) != 0 {
		t.Errorf("left %v, %v", left, err)
	}
	if got := r.sql("service", "SELECT count(*) FROM vm_events WHERE status = 'failed'"); got != "8" {
		t.Errorf("%s rows of failed creates", got)
	}
}

func TestADeletedVMKeepsItsLedgerAndNothingElse(t *testing.T) {
	r := newRig(t)
	vm := r.mustCreate(api.CreateRequest{Name: "box"})
	if err := r.person().Do(t.Context(), "DELETE", "/v1/vms/box", nil, nil); code(err) != api.CodeState {
		t.Errorf("deleting one that runs: %v", err)
	}
	if err := r.person().Do(t.Context(), "DELETE", "/v1/vms/box?force=true", nil, nil); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(r.home.VMs()); err != nil || len(left) != 0 {
		t.Errorf("left %v, %v", left, err)
	}
	for _, ref := range []string{"box", vm.ID} {
		if got := r.sql(ref, "SELECT count(*) FROM exec_events"); got != "1" {
			t.Errorf("%s: %s rows", ref, got)
		}
	}
	var gone api.VM
	if err := r.person().Do(t.Context(), "GET", "/v1/vms/"+vm.ID, nil, &gone); err != nil || gone.State != api.StateDeleted {
		t.Errorf("got %v, %+v", err, gone)
	}
	if err := r.person().Do(t.Context(), "POST", "/v1/vms/box/start", nil, nil); code(err) != api.CodeNotFound {
		t.Errorf("starting it: %v", err)
	}
}

// TestADamagedLedgerDoesNotKeepAVMFromGoing: what is left of it is kept.
func TestADamagedLedgerDoesNotKeepAVMFromGoing(t *testing.T) {
	r := newRig(t)
	vm := r.mustCreate(api.CreateRequest{Name: "box"})
	if err := r.person().Do(t.Context(), "POST", "/v1/vms/box/stop", api.StopRequest{}, nil); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(r.home.Ledger(vm.ID), 5000); err != nil {
		t.Fatal(err)
	}
	if err := r.person().Do(t.Context(), "POST", "/v1/vms/box/start", nil, nil); err == nil {
		t.Error("it starts without a ledger")
	}
	if err := r.person().Do(t.Context(), "DELETE", "/v1/vms/box", nil, nil); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(r.home.SealedLedger(vm.ID)); err != nil || info.Size() != 5000 {
		t.Errorf("what is kept: %v, %v", info, err)
	}
	if left, err := os.ReadDir(r.home.VMs()); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	r.mustCreate(api.CreateRequest{Name: "box"})
}

func TestADeletionThatWasInterruptedIsFinishedByTheNextService(t *testing.T) {
	r := newRig(t)
	vm := r.mustCreate(api.CreateRequest{Name: "box"})
	if err := r.person().Do(t.Context(), "POST", "/v1/vms/box/stop", api.StopRequest{}, nil); err != nil {
		t.Fatal(err)
	}
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	record, err := config.ReadVMRecord(r.home.VMRecord(vm.ID))
	if err != nil {
		t.Fatal(err)
	}
	record.State = config.Deleting
	if err := config.WriteVMRecord(r.home.VMRecord(vm.ID), record); err != nil {
		t.Fatal(err)
	}
	r.start()
	if got := r.list(); len(got) != 0 {
		t.Errorf("still there: %+v", got)
	}
	if got := r.sql(vm.ID, "SELECT count(*) FROM exec_events"); got != "1" {
		t.Errorf("%s rows", got)
	}
}

func TestARecordThatCannotBeReadIsShownAndCanBeRemoved(t *testing.T) {
	r := newRig(t)
	vm := r.mustCreate(api.CreateRequest{Name: "box"})
	if err := r.person().Do(t.Context(), "POST", "/v1/vms/box/stop", api.StopRequest{}, nil); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.stop(), os.WriteFile(r.home.VMRecord(vm.ID), []byte("{"), 0o600)); err != nil {
		t.Fatal(err)
	}
	r.start()
	got := r.list()
	if len(got) != 1 || got[0].State != api.StateFailed || got[0].Reason == "" || got[0].ID != vm.ID {
		t.Fatalf("got %+v", got)
	}
	if err := r.person().Do(t.Context(), "DELETE", "/v1/vms/"+vm.ID, nil, nil); err != nil {
		t.Error(err)
	}
}

func TestOnlyOneServiceServesAHome(t *testing.T) {
	r := newRig(t)
	second := *r
	second.t = t
	if err := tryService(&second); err == nil || !strings.Contains(err.Error(), "another service") {
		t.Errorf("got %v", err)
	}
}

func TestTheSocketSaysWhoActs(t *testing.T) {
	r := newRig(t)
	r.mustCreate(api.CreateRequest{Name: "box"})
	for want, c := range map[string]*client.Client{"person": r.person(), "host_agent:cli": r.agent().For(client.ToolCall{Name: "capsem_exec", ID: "1", Arguments: []byte(`{}`), Client: "cli"})} {
		var result api.ExecResult
		if err := c.Do(t.Context(), "POST", "/v1/vms/box/exec", api.ExecRequest{Argv: [][]byte{[]byte("x")}}, &result); err != nil {
			t.Fatal(err)
		}
		if string(result.Stdout) != want {
			t.Errorf("the VM's process was told of %q, want %q", result.Stdout, want)
		}
	}
	// A host agent has no way to secrets.
	if err := r.agent().Do(t.Context(), "GET", "/v1/secrets", nil, nil); code(err) != api.CodeNotFound {
		t.Errorf("secrets: %v", err)
	}
}

func TestAHostToolThatConcernsTheServiceIsARowOfItsLedger(t *testing.T) {
	r := newRig(t)
	c := r.agent().For(client.ToolCall{Name: "capsem_list", ID: "7", Arguments: []byte(`{"a":1}`), Client: "test"})
	if err := c.Do(t.Context(), "GET", "/v1/vms", nil, nil); err != nil {
		t.Fatal(err)
	}
	got := r.sql("service", "SELECT origin || ' ' || tool_name || ' ' || status || ' ' || initiator_kind || ' ' || arguments FROM tool_calls")
	if got != `host capsem_list done host_agent {"a":1}` {
		t.Errorf("got %q", got)
	}
}

func TestRunMakesUsesAndRemovesAVM(t *testing.T) {
	r := newRig(t)
	var result api.RunResult
	if err := r.person().Do(t.Context(), "POST", "/v1/run", api.RunRequest{Exec: api.ExecRequest{Argv: [][]byte{[]byte("x")}}}, &result); err != nil {
		t.Fatal(err)
	}
	if result.Exec.ExitCode != 5 || len(r.list()) != 0 {
		t.Errorf("got %+v, left %v", result, r.list())
	}
}

func TestPurgeSaysWhatItWouldRemoveAndSparesWhatRuns(t *testing.T) {
	r := newRig(t)
	r.mustCreate(api.CreateRequest{Name: "on"})
	r.mustCreate(api.CreateRequest{Name: "off"})
	if err := r.person().Do(t.Context(), "POST", "/v1/vms/off/stop", api.StopRequest{Force: true}, nil); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		req  api.PurgeRequest
		want []string
		left int
	}{
		{api.PurgeRequest{DryRun: true}, []string{"off"}, 2},
		{api.PurgeRequest{}, []string{"off"}, 1},
		{api.PurgeRequest{}, []string{}, 1},
		{api.PurgeRequest{All: true}, []string{"on"}, 0},
	} {
		var got api.Purged
		if err := r.person().Do(t.Context(), "POST", "/v1/purge", tt.req, &got); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(tt.want, got.VMs); diff != "" || len(r.list()) != tt.left {
			t.Errorf("%+v: %s, %d left", tt.req, diff, len(r.list()))
		}
	}
}

func TestASecretCannotBeReadBack(t *testing.T) {
	r := newRig(t)
	if err := r.person().Put(t.Context(), "/v1/secrets/token", []byte("s3cret"), nil); err != nil {
		t.Fatal(err)
	}
	if err := r.person().Put(t.Context(), "/v1/secrets/short", []byte("abc"), nil); code(err) != api.CodeInvalid {
		t.Errorf("one that is too short: %v", err)
	}
	var list api.SecretList
	if err := r.person().Do(t.Context(), "GET", "/v1/secrets", nil, &list); err != nil || len(list.Names) != 1 || list.Names[0] != "token" {
		t.Errorf("got %v, %v", list, err)
	}
	if err := r.person().Do(t.Context(), "GET", "/v1/secrets/token", nil, nil); err == nil {
		t.Error("it was read back")
	}
	if err := r.person().Do(t.Context(), "DELETE", "/v1/secrets/token", nil, nil); err != nil {
		t.Error(err)
	}
	if err := r.person().Do(t.Context(), "DELETE", "/v1/secrets/token", nil, nil); code(err) != api.CodeNotFound {
		t.Errorf("removing it twice: %v", err)
	}
}

func TestAMissingSecretNamesItselfAndTheWayToSetIt(t *testing.T) {
	r := newRig(t)
	profile := "[[mcp.servers]]\nname = \"s\"\ncommand = \"true\"\nsecrets = { T = \"token\" }\n"
	if err := os.WriteFile(r.home.Profile("p"), []byte(profile), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := r.create(api.CreateRequest{Profile: "p"})
	if err == nil || !strings.Contains(err.Error(), "capsem secret set token") {
		t.Errorf("got %v", err)
	}
}

func TestAnUnknownProfileIsToldWithTheNearestNameOrWhereItWouldBe(t *testing.T) {
	r := newRig(t)
	if err := os.WriteFile(r.home.Profile("work"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"works": "did you mean work?", "other": r.home.Profile("other")} {
		_, err := r.create(api.CreateRequest{Profile: name})
		if code(err) != api.CodeInvalid || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestDoctorFindsARuleThatDoesNotCompile(t *testing.T) {
	r := newRig(t)
	check := func() api.Check {
		t.Helper()
		var report api.DoctorReport
		if err := r.person().Do(t.Context(), "GET", "/v1/doctor", nil, &report); err != nil {
			t.Fatal(err)
		}
		for _, c := range report.Checks {
			if c.Name == "profiles" {
				return c
			}
		}
		t.Fatal("profiles are not checked")
		return api.Check{}
	}
	if c := check(); !c.OK {
		t.Errorf("without profiles: %+v", c)
	}
	profile := "[rules.r]\nmatch = 'mcp.request.argument.x == 1'\naction = \"block\"\n"
	if err := os.WriteFile(r.home.Profile("p"), []byte(profile), 0o600); err != nil {
		t.Fatal(err)
	}
	if c := check(); c.OK || !strings.Contains(c.Detail, "p.toml:2") {
		t.Errorf("with a rule that does not compile: %+v", c)
	}
}

func TestARuleWithAMistakeIsToldBeforeThereIsAVM(t *testing.T) {
	r := newRig(t)
	profile := "[rules.typo]\nmatch = 'mcp.requst.text == \"x\"'\naction = \"block\"\n"
	if err := os.WriteFile(r.home.Profile("p"), []byte(profile), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := r.create(api.CreateRequest{Profile: "p"})
	if code(err) != api.CodeInvalid || !strings.Contains(err.Error(), "p.toml:2:") || !strings.Contains(err.Error(), "mcp.request") {
		t.Errorf("got %v", err)
	}
	if left := r.list(); len(left) != 0 {
		t.Errorf("left %+v", left)
	}
}

func TestAnUnknownVMIsToldWithTheNearestName(t *testing.T) {
	r := newRig(t)
	r.mustCreate(api.CreateRequest{Name: "builder"})
	err := r.person().Do(t.Context(), "GET", "/v1/vms/bulider", nil, nil)
	if code(err) != api.CodeNotFound || !strings.Contains(err.Error(), "did you mean builder?") {
		t.Errorf("got %v", err)
	}
}

func TestTwentyCyclesLeaveOnlySealedLedgers(t *testing.T) {
	r := newRig(t)
	for range 20 {
		vm := r.mustCreate(api.CreateRequest{Name: "box"})
		if err := r.person().Do(t.Context(), "DELETE", "/v1/vms/"+vm.ID+"?force=true", nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	var left []string
	err := filepath.WalkDir(r.home.Root(), func(path string, d os.DirEntry, err error) error {
		rel, _ := filepath.Rel(r.home.Root(), path) // path is below the root
		if err == nil && !d.IsDir() && !strings.HasPrefix(rel, "ledgers/") && !strings.HasPrefix(rel, "images/") &&
			!strings.HasPrefix(rel, "run/") && !strings.HasPrefix(rel, "service.db") {
			left = append(left, rel)
		}
		return err
	})
	sealed, listErr := os.ReadDir(r.home.Ledgers())
	if err != nil || listErr != nil || len(left) != 0 || len(sealed) != 20 {
		t.Errorf("left %v, %d sealed, %v %v", left, len(sealed), err, listErr)
	}
	reader, err := ledger.OpenReader(r.home.SealedLedger(sealed[0].Name()))
	if err != nil {
		t.Fatal(err)
	}
	if err := reader.Close(); err != nil {
		t.Error(err)
	}
}

// sql is the one value that a query gives.
func (r *rig) sql(ref, query string) string {
	r.t.Helper()
	var result api.SQLResult
	if err := r.person().Do(context.Background(), "POST", "/v1/vms/"+ref+"/sql", api.SQLRequest{Query: query}, &result); err != nil {
		r.t.Fatal(err)
	}
	if len(result.Rows) != 1 || len(result.Rows[0]) != 1 {
		return fmt.Sprint(result.Rows)
	}
	return unquote(string(result.Rows[0][0]))
}
