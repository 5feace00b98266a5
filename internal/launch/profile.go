package launch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/confine"
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

// Jail is a profile with what varies from one program to the next.
type Jail struct {
	Profile Profile
	// Weak takes what the host has where something of the profile cannot be
	// had. Without it the program is not started then.
	Weak bool
	// KVM gives a hypervisor /dev/kvm. It belongs to VMM.
	KVM bool
	// Read and Write are files and folders, by clean absolute path, that the
	// program sees beside those of its profile: to be read and executed, and to
	// be changed. One that is missing is not seen. They belong to Aggregator.
	Read, Write []string
}

// maxShown bounds each list of a Jail.
const maxShown = 256

// confinement is what a profile takes from its program. It is all data: init
// puts it in force.
type confinement struct {
	// proxy gives the program's network, in which nothing else is, a listener at
	// ProxyAddress, see Process.Proxy. A program that runs weakly is in the host's
	// network instead.
	proxy bool
	// limits are resource limits, soft and hard, by RLIMIT_ number.
	limits map[int]uint64
	filter confine.Filter
	// view is what the program sees of the file system, beside its own program
	// file and what its Jail names.
	view confine.View
	// oomFirst lets the kernel kill the program first when memory runs out.
	oomFirst bool
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

// vmmConfinement: all that QEMU works on are descriptors. It finds its libraries,
// modules and firmware by itself, in folders that hold nothing else: which of
// them it loads, and what these load in turn, depends on its version and its
// options, so the folders are shown whole. Once it runs it starts nothing.
//
// No core file, which would hold the guest's memory.
func vmmConfinement() confinement {
	return confinement{
		limits: map[int]uint64{unix.RLIMIT_CORE: 0},
		filter: confine.Filter{Deny: confine.Dangerous(), Once: true},
		view: confine.View{Proc: true, Shown: slices.Concat(libraries(), devices(), optional(
			"/usr/share/qemu", "/usr/share/seabios", "/usr/share/qemu-efi-aarch64", "/usr/share/OVMF", "/usr/share/AAVMF",
			"/usr/share/edk2", "/usr/share/ipxe", "/usr/share/vgabios", "/usr/libexec/qemu-kvm", "/usr/share/qemu-kvm",
		))},
	}
}

// aggregatorConfinement: the server may be anything, in any language, so it gets
// the programs and libraries of the system, and a filter that lists what is
// refused rather than what is allowed.
//
// No core file, which would hold the server's secrets. No limit on the address
// space, with which node does not start: RLIMIT_DATA bounds the memory that a
// process can write to.
func aggregatorConfinement() confinement {
	return confinement{
		proxy:    true,
		oomFirst: true,
		limits: map[int]uint64{
			unix.RLIMIT_CORE: 0, unix.RLIMIT_NOFILE: 4096, unix.RLIMIT_NPROC: 512,
			unix.RLIMIT_FSIZE: 1 << 30, unix.RLIMIT_DATA: 8 << 30, unix.RLIMIT_MEMLOCK: 64 << 10, unix.RLIMIT_MSGQUEUE: 0,
		},
		filter: confine.Filter{Deny: confine.Dangerous(), Families: []uint32{unix.AF_INET, unix.AF_INET6}},
		view: confine.View{Proc: true, Temp: 256 << 20, Files: identity(), Shown: slices.Concat(libraries(), devices(), optional(
			"/usr", "/bin", "/sbin", "/etc/alternatives", "/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/etc/localtime",
			"/etc/mime.types", "/etc/protocols", "/etc/services",
		))},
	}
}

// builtinConfinement: our own tools work on their pipes alone, and ask the
// supervisor for everything else. The program is static, so it needs no library.
func builtinConfinement() confinement {
	return confinement{
		oomFirst: true,
		limits: map[int]uint64{
			unix.RLIMIT_CORE: 0, unix.RLIMIT_NOFILE: 64, unix.RLIMIT_NPROC: 64,
			unix.RLIMIT_DATA: 2 << 30, unix.RLIMIT_MEMLOCK: 0, unix.RLIMIT_MSGQUEUE: 0,
		},
		filter: confine.Filter{Allow: confine.GoRuntime(), Once: true},
		view:   confine.View{Shown: []confine.Shown{{Path: "/dev/null", Access: confine.Device}}},
	}
}

// libraries are where the dynamic loader looks.
func libraries() []confine.Shown {
	return optional("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
}

// devices are those that hold nothing.
func devices() []confine.Shown {
	var shown []confine.Shown
	for _, name := range []string{"null", "zero", "full", "random", "urandom"} {
		shown = append(shown, confine.Shown{Path: "/dev/" + name, Access: confine.Device})
	}
	return shown
}

func optional(paths ...string) []confine.Shown {
	shown := make([]confine.Shown, len(paths))
	for i, p := range paths {
		shown[i] = confine.Shown{Path: p, Optional: true}
	}
	return shown
}

// identity is who the program is for the libraries that ask: users of the host
// have no names in a jail.
func identity() map[string]string {
	return map[string]string{
		"/etc/passwd": "root:x:0:0:root:/:/usr/sbin/nologin\njail:x:1000:1000:jail:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
		"/etc/group":  "root:x:0:\njail:x:1000:\nnogroup:x:65534:\n",
	}
}

// check refuses what belongs to another profile, and paths that are not clean.
func (j Jail) check() error {
	if _, err := j.Profile.confinement(); err != nil {
		return err
	}
	if j.Profile != Aggregator && len(j.Read)+len(j.Write) > 0 {
		return fmt.Errorf("profile %s shows no files by request", j.Profile)
	}
	if j.Profile != VMM && j.KVM {
		return fmt.Errorf("profile %s has no use for KVM", j.Profile)
	}
	if len(j.Read) > maxShown || len(j.Write) > maxShown {
		return fmt.Errorf("more than %d files to show", maxShown)
	}
	for _, path := range slices.Concat(j.Read, j.Write) {
		if !filepath.IsAbs(path) || filepath.Clean(path) != path || path == "/" {
			return fmt.Errorf("%q is no clean absolute path below the root", path)
		}
	}
	return nil
}

// confine is the profile's confinement for one program: its view has the
// program's own file, and what the jail names.
func (j Jail) confine(program string, env []string) (confinement, error) {
	c, err := j.Profile.confinement()
	if err != nil {
		return c, err
	}
	file, err := child.Lookup(program, env)
	if err != nil {
		return c, fmt.Errorf("starting %s: %w", program, err)
	}
	if file, err = filepath.Abs(file); err != nil {
		return c, fmt.Errorf("starting %s: %w", program, err)
	}
	// A program that is not there is reported by its start, as such.
	_, err = os.Stat(file)
	shown := append(c.view.Shown, confine.Shown{Path: file, Optional: errors.Is(err, fs.ErrNotExist)})
	if j.KVM {
		shown = append(shown, confine.Shown{Path: "/dev/kvm", Access: confine.Device, Optional: true})
	}
	for _, path := range j.Read {
		shown = append(shown, confine.Shown{Path: path, Optional: true})
	}
	for _, path := range j.Write {
		shown = append(shown, confine.Shown{Path: path, Access: confine.Write, Optional: true})
	}
	c.view.Shown = withoutNested(shown)
	return c, nil
}

// withoutNested leaves out what a folder shows already, with the same access or
// more.
func withoutNested(shown []confine.Shown) []confine.Shown {
	return slices.DeleteFunc(slices.Clone(shown), func(s confine.Shown) bool {
		return slices.ContainsFunc(shown, func(other confine.Shown) bool {
			if other.Access == confine.Device || s.Access == confine.Device || other.Path == s.Path {
				return false
			}
			rel, err := filepath.Rel(other.Path, s.Path)
			return err == nil && filepath.IsLocal(rel) && other.Access >= s.Access
		})
	})
}
