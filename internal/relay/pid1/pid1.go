//go:build linux

// Package pid1 is the first process of a guest: it makes a Linux system out of
// an initramfs, keeps the agent running, reaps orphans, and ends everything in
// good order.
//
// The agent is a child and not part of this process. The kernel panics when its
// first process dies, so what runs here is little and does not change: a bug in
// the agent costs the connections of one agent, not the machine, and the guest
// is never deaf for longer than a restart takes. It also keeps two kinds of
// waiting apart: commands are the agent's children, everything that loses its
// parent becomes ours, and nobody takes another's exit status.
//
// Every step is written with its time since boot to LogPath in the guest, and
// what fails also to the console. A step that fails does not stop the others: a
// guest that can still say what is wrong is worth more than one that does not
// boot. Only what the agent cannot do without ends the boot.
package pid1

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"
)

// LogPath is where a guest finds what happened at its boot.
const LogPath = "/tmp/capsem-init.log"

// Config is what differs between images and is not found out by looking.
type Config struct {
	// Program is the agent's file and Args its arguments, its name first. It is
	// given PowerFD, and the stages of the boot in StagesEnv.
	Program string
	Args    []string
	// Links are made before the agent starts: path → target.
	Links [][2]string
	// Hostname is the name until the host says another.
	Hostname string
}

// modulesPath is where the image lists its kernel modules, one path a line, in
// the order in which they are to be loaded.
const modulesPath = "/lib/capsem/modules"

// Run is the whole life of the guest. It does not return.
func Run(c Config) {
	err := run(c)
	// Without a first process there is no guest: what is left to do is to say
	// why, and to end the machine.
	fmt.Fprintln(os.Stderr, "capsem-init: ending the guest:", err)
	unix.Sync()
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		fmt.Fprintln(os.Stderr, "capsem-init: powering off:", err)
	}
	os.Exit(1)
}

func run(c Config) error {
	log := newLog()
	log.step("start", nil)
	unix.Umask(0o022)
	if err := mountAll(log); err != nil {
		return err
	}
	log.open(LogPath)
	// Before the modules: the kernel sends ctrl-alt-del to us from here on.
	stop := make(chan os.Signal, 4)
	signal.Notify(stop, unix.SIGTERM, unix.SIGINT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGPWR)
	log.step("ctrl-alt-del", unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF))

	log.step("modules", loadModules(modulesPath, log))
	log.step("hostname", unix.Sethostname([]byte(c.Hostname)))
	log.step("loopback", loopbackUp())
	for _, l := range append(deviceLinks(), c.Links...) {
		log.step("link "+l[0], link(l[0], l[1]))
	}
	log.step("cgroups", prepareCgroups())
	log.stage("init")

	g := &guest{config: c, log: log}
	grace := g.supervise(context.Background(), stop)
	g.end(grace)
	return errors.New("the kernel refused to power off")
}

// deviceLinks are the names that shells expect in /dev.
func deviceLinks() [][2]string {
	return [][2]string{
		{"/dev/fd", "/proc/self/fd"},
		{"/dev/stdin", "/proc/self/fd/0"},
		{"/dev/stdout", "/proc/self/fd/1"},
		{"/dev/stderr", "/proc/self/fd/2"},
	}
}

// link makes a symlink, replacing what is there.
func link(path, target string) error {
	err := os.Symlink(target, path)
	if errors.Is(err, os.ErrExist) {
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("replacing %s: %w", path, err)
		}
		err = os.Symlink(target, path)
	}
	if err != nil {
		return fmt.Errorf("linking %s: %w", path, err)
	}
	return nil
}

// sinceBoot is how long the kernel has run.
func sinceBoot() time.Duration {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) != nil {
		return 0 // a kernel before 2.6.39
	}
	return time.Duration(ts.Nano())
}
