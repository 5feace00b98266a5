package qemu

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/capsem/capsem/internal/vm"
)

// Bounds on what a machine is made of.
const (
	maxCPUs   = 255
	minMemory = 64 << 20
)

// firstFile is the number of the first descriptor that is handed to QEMU.
const firstFile = 3

// donation collects the descriptors that QEMU is handed.
type donation struct {
	files []*os.File
}

// add hands f over and returns its number in QEMU.
func (d *donation) add(f *os.File) int {
	d.files = append(d.files, f)
	return firstFile + len(d.files) - 1
}

// path is the name under which QEMU opens a file that it was handed, where it
// takes no descriptor. No name in the file system is involved.
func (d *donation) path(f *os.File) string {
	return "/proc/self/fd/" + strconv.Itoa(d.add(f))
}

// ends are QEMU's ends of its connections with this process.
type ends struct {
	monitor, console, vsock *os.File
}

func (e *ends) files() []*os.File { return []*os.File{e.monitor, e.console, e.vsock} }

// arguments is QEMU's command line for a machine, and the descriptors in it.
func arguments(spec vm.Spec, accelerator, cmdline string, e ends) ([]string, []*os.File) {
	var d donation
	memory := strconv.FormatInt(spec.MemoryBytes>>20, 10) + "M"
	args := []string{
		"-name", "guest=" + quote(spec.Name),
		"-nodefaults", "-no-user-config", "-nographic", "-no-reboot",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-machine", "q35,memory-backend=mem",
		"-m", memory,
		// Sealed (which is the default) so that it cannot shrink under the socket
		// device, which maps it.
		"-object", "memory-backend-memfd,id=mem,share=on,seal=on,size=" + memory,
		"-smp", strconv.Itoa(spec.CPUs),
	}
	if accelerator == KVM {
		args = append(args, "-accel", "kvm", "-cpu", "host")
	} else {
		// The kernel copies with byte-wide string instructions where the processor
		// says that they are fast. Translated they are not: without these two
		// features bulk data costs half.
		args = append(args, "-accel", "tcg,thread=multi", "-cpu", "max,-erms,-fsrm")
	}
	args = append(args, "-kernel", d.path(spec.Kernel), "-append", cmdline)
	if spec.Initrd != nil {
		args = append(args, "-initrd", d.path(spec.Initrd))
	}
	args = append(args,
		"-chardev", fmt.Sprintf("socket,id=monitor,fd=%d", d.add(e.monitor)), "-mon", "chardev=monitor,mode=control",
		"-chardev", fmt.Sprintf("socket,id=console,fd=%d", d.add(e.console)), "-serial", "chardev:console",
	)
	if e.vsock != nil {
		args = append(args,
			"-chardev", fmt.Sprintf("socket,id=vsock,fd=%d", d.add(e.vsock)),
			"-device", "pcie-root-port,id=rp0,chassis=1",
			"-device", "vhost-user-vsock-pci,id=vs,chardev=vsock,bus=rp0",
		)
	}
	return args, d.files
}

// quote makes s one value of a QEMU option, in which a comma ends a value.
func quote(s string) string { return strings.ReplaceAll(s, ",", ",,") }

// kernelCmdline is what the kernel needs to boot well, followed by extra.
//
// Without tsc_early_khz a guest under TCG calibrates its clock against a host
// that may be busy, and can hang there; without tsc=reliable its clock then falls
// back to steps of 4 ms. Under KVM the hypervisor tells the guest the frequency,
// and /proc/cpuinfo may show another one.
func kernelCmdline(accelerator string, khz int, extra string) string {
	words := []string{
		"console=ttyS0", "quiet", "panic=-1", "reboot=t", "no_timer_check", "random.trust_cpu=on",
		"cryptomgr.notests", "i8042.noaux", "i8042.nokbd", "8250.nr_uarts=1",
	}
	if accelerator == TCG {
		words = append(words, "tsc=reliable")
		if khz > 0 {
			words = append(words, "tsc_early_khz="+strconv.Itoa(khz))
		}
	}
	if extra != "" {
		words = append(words, extra)
	}
	return strings.Join(words, " ")
}
