package service

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/image"
	"github.com/capsem/capsem/internal/policy"
)

// reserve is how much room on disk the home should have, in bytes.
const reserve = 1 << 30

// serveDoctor says what this machine offers and what it lacks.
func (s *Service) serveDoctor(w http.ResponseWriter, r *http.Request) error {
	report := api.DoctorReport{Checks: []api.Check{
		s.checkQEMU(r), s.checkAccelerator(), s.checkImage(), checkImageTools(), s.checkSockets(), s.checkDisk(), s.checkProfiles(),
	}}
	api.WriteJSON(w, http.StatusOK, report)
	return nil
}

func (s *Service) checkQEMU(r *http.Request) api.Check {
	c := api.Check{Name: "qemu", Hint: "apt-get install qemu-system-x86"}
	path, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		c.Detail = "qemu-system-x86_64 is not in PATH"
		return c
	}
	out, err := exec.CommandContext(r.Context(), path, "--version").Output()
	if err != nil {
		c.Detail = fmt.Sprintf("%s does not run: %v", path, err)
		return c
	}
	version, _, _ := strings.Cut(string(out), "\n")
	return api.Check{Name: c.Name, OK: true, Detail: version}
}

// checkAccelerator says what the last probe found; a probe boots a guest, which
// a check does not.
func (s *Service) checkAccelerator() api.Check {
	c := api.Check{Name: "accelerator", OK: true}
	if v := s.opts.Settings.Accelerator; v.Value != config.AcceleratorAuto {
		c.Detail = fmt.Sprintf("%s, as %s says", v.Value, v.Origin)
		return c
	}
	b, err := os.ReadFile(s.opts.Home.AccelCache())
	var probe struct{ Accelerator, Reason string }
	if err == nil {
		err = json.Unmarshal(b, &probe)
	}
	switch {
	case errors.Is(err, os.ErrNotExist):
		c.Detail = "not known yet: the first VM that starts finds out, by booting one"
	case err != nil:
		c.OK, c.Detail = false, err.Error()
	default:
		c.Detail = probe.Accelerator + ": " + probe.Reason
		if probe.Accelerator == config.AcceleratorTCG {
			c.Detail = probe.Accelerator + ": software emulation, which is slower, for KVM failed: " + probe.Reason
		}
	}
	return c
}

func (s *Service) checkImage() api.Check {
	c := api.Check{Name: "image", Hint: "capsem image build tiny"}
	m, err := image.Verify(s.opts.Home.Images(), image.Ref{Name: "tiny"})
	if err != nil {
		c.Detail = err.Error()
		return c
	}
	return api.Check{Name: c.Name, OK: true, Detail: fmt.Sprintf("tiny, kernel %s, %d MiB, verified", m.KernelRelease, m.Size()>>20)}
}

func checkImageTools() api.Check {
	c := api.Check{Name: "image build", OK: true, Detail: "apt-get and dpkg-deb are there"}
	for _, tool := range []string{"apt-get", "apt-cache", "dpkg-deb"} {
		if _, err := exec.LookPath(tool); err != nil {
			return api.Check{Name: c.Name, Detail: tool + " is not in PATH; images can be used but not built here", Hint: "build on Debian or Ubuntu, and copy the images folder"}
		}
	}
	return c
}

func (s *Service) checkSockets() api.Check {
	path, err := s.opts.Home.VMSocket(config.NewID())
	if err != nil {
		return api.Check{Name: "sockets", Detail: err.Error()}
	}
	return api.Check{Name: "sockets", OK: true, Detail: fmt.Sprintf("%d bytes of path, which fits", len(path))}
}

func (s *Service) checkDisk() api.Check {
	var st unix.Statfs_t
	if err := unix.Statfs(s.opts.Home.Root(), &st); err != nil {
		return api.Check{Name: "disk", Detail: err.Error()}
	}
	free := st.Bavail * uint64(st.Bsize)
	return api.Check{
		Name: "disk", OK: free >= reserve, Detail: fmt.Sprintf("%d MiB free in %s", free>>20, s.opts.Home.Root()),
		Hint: "capsem purge removes VMs that do not run",
	}
}

// checkProfiles compiles the rules of this machine and of every profile: a VM of a
// profile that does not compile fails to start.
func (s *Service) checkProfiles() api.Check {
	names, err := config.ProfileNames(s.opts.Home)
	if err != nil {
		return api.Check{Name: "profiles", Detail: err.Error()}
	}
	var files []string
	for _, corp := range s.opts.Home.Corp() {
		if _, err := os.Stat(corp); !errors.Is(err, os.ErrNotExist) {
			files = append(files, corp)
		}
	}
	for _, name := range names {
		files = append(files, s.opts.Home.Profile(name))
	}
	var broken []string
	for _, file := range policy.Check(files...).Files {
		for _, f := range file.Findings {
			if f.Severity == policy.SeverityError {
				broken = append(broken, f.String())
			}
		}
	}
	if len(broken) > 0 {
		return api.Check{Name: "profiles", Detail: strings.Join(broken, "\n"), Hint: "capsem policy check FILE says when it is mended"}
	}
	return api.Check{Name: "profiles", OK: true, Detail: fmt.Sprintf("%d, all compile", len(names))}
}
