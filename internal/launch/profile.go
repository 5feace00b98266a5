package launch

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Profile names what a program is, and with that, how it is confined. The set is
// fixed: who asks the launcher can pick a profile and cannot describe one.
type Profile string

// The profiles.
const (
	// VMM is the hypervisor.
	VMM Profile = "vmm"
	// Aggregator is capsem-aggregator with the external MCP server in it.
	Aggregator Profile = "aggregator"
	// Builtin is capsem-builtin.
	Builtin Profile = "builtin"
)

// confinement is what the init does to itself before it starts the program,
// beyond the process tree that every program gets.
//
// This is the seam for confining: each profile has one function that returns
// its confinement, and apply is where the init puts it in force. What exists so
// far is below, in full; there are no namespaces but those of package comment,
// no Landlock rules and no system call filters yet.
type confinement struct {
	// limits are resource limits, soft and hard, by RLIMIT_ number.
	limits map[int]uint64
	// noNewPrivs keeps set-uid programs and file capabilities from adding
	// anything to what the program has.
	noNewPrivs bool
}

func (p Profile) confinement() (confinement, error) {
	switch p {
	case VMM:
		return vmmConfinement(), nil
	case Aggregator:
		return aggregatorConfinement(), nil
	case Builtin:
		return builtinConfinement(), nil
	}
	return confinement{}, fmt.Errorf("unknown profile %q", string(p))
}

// vmmConfinement: no core file, which would hold the guest's memory.
func vmmConfinement() confinement {
	return confinement{noNewPrivs: true, limits: map[int]uint64{unix.RLIMIT_CORE: 0}}
}

// aggregatorConfinement: no core file, which would hold the server's secrets.
func aggregatorConfinement() confinement {
	return confinement{noNewPrivs: true, limits: map[int]uint64{unix.RLIMIT_CORE: 0}}
}

// builtinConfinement: no core file, and few descriptors, since it works on its
// pipes alone.
func builtinConfinement() confinement {
	return confinement{noNewPrivs: true, limits: map[int]uint64{unix.RLIMIT_CORE: 0, unix.RLIMIT_NOFILE: 64}}
}

// apply confines the calling thread, which must be locked and be the one that
// forks the program.
func (c confinement) apply() error {
	for resource, value := range c.limits {
		limit := unix.Rlimit{Cur: value, Max: value}
		if err := unix.Setrlimit(resource, &limit); err != nil {
			return fmt.Errorf("setting resource limit %d to %d: %w", resource, value, err)
		}
	}
	// Capabilities that the init needed for its mounts are not for the program.
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("clearing ambient capabilities: %w", err)
	}
	if c.noNewPrivs {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("setting no_new_privs: %w", err)
		}
	}
	return nil
}
