package tests

import (
	"net/http"
	"sync"
	"testing"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/client"
)

// TestRequestsOfOneKeyMakeOneVM sends one create many times, as a caller does
// that does not know whether its first try arrived.
func TestRequestsOfOneKeyMakeOneVM(t *testing.T) {
	needVM(t)
	t.Parallel()
	h := newHome(t)
	h.capsem("service", "start")
	const callers = 50
	ids, failures := make([]string, callers), make([]error, callers)
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			c := client.New(h.path("home/run/service.sock"))
			defer c.Close()
			var vm api.VM
			failures[i] = c.Do(t.Context(), http.MethodPost, "/v1/vms", api.CreateRequest{Name: "box", RequestKey: "try-1"}, &vm)
			ids[i] = vm.ID
		})
	}
	wg.Wait()
	for i := range callers {
		if failures[i] != nil || ids[i] != ids[0] || ids[i] == "" {
			t.Errorf("caller %d got VM %q, %v; the first got %q", i, ids[i], failures[i], ids[0])
		}
	}
	vm, err := h.vm("box")
	if err != nil || vm.ID != ids[0] || vm.State != api.StateRunning {
		t.Errorf("box is %+v, %v; want %s, running", vm, err, ids[0])
	}
}
