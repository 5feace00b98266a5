package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/config"
)

type homeKey struct{}

// homeOf is the home of a script.
func homeOf(ts *testscript.TestScript) *home {
	h, ok := ts.Value(homeKey{}).(*home)
	if !ok {
		ts.Fatalf("the script has no home")
	}
	return h
}

func TestScripts(t *testing.T) {
	here, err := filepath.Abs(".")
	if err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir:                 "script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Condition:           condition,
		Cmds:                commands(),
		Setup: func(env *testscript.Env) error {
			tb, ok := env.T().(testing.TB)
			if !ok {
				return fmt.Errorf("testscript's T is %T, no testing.TB", env.T())
			}
			h := newHome(tb)
			env.Values[homeKey{}] = h
			env.Vars = append(env.Vars, h.vars...)
			env.Vars = append(env.Vars, "BIN="+h.path("bin"), "ROOT="+h.root, "NPM="+here+"/npm/node_modules", "DEMO="+here+"/demo/demo.sh")
			return nil
		},
	})
}

// condition says what this machine offers: vm, npm, root, or an unusable /dev/kvm.
func condition(name string) (bool, error) {
	lack := map[string]func() error{
		"vm": noVM,
		"npm": func() error {
			_, err := os.Stat("npm/node_modules/@modelcontextprotocol/server-everything/package.json")
			return err
		},
		"root": func() error {
			if os.Geteuid() != 0 {
				return fmt.Errorf("uid %d is not root", os.Geteuid())
			}
			return nil
		},
		"kvm": func() error { return unix.Access("/dev/kvm", unix.R_OK|unix.W_OK) },
	}[name]
	if lack == nil {
		return false, fmt.Errorf("there is no condition %s", name)
	}
	err := lack()
	if err != nil && config.TestRequires(config.OSEnv(), name) {
		return false, fmt.Errorf("CAPSEM_TEST_REQUIRE has %s, but: %w", name, err)
	}
	return err == nil, nil
}

// needVM skips a test that boots machines where there can be none.
func needVM(t *testing.T) {
	t.Helper()
	if ok, err := condition("vm"); err != nil {
		t.Fatal(err)
	} else if !ok {
		t.Skip("needs QEMU and apt: ./justw setup installs them on Debian and Ubuntu")
	}
}
