//go:build linux

package pid1

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// What passes between us and the agent.
const (
	// PowerFD is the agent's descriptor on which it asks for power-off: a line
	// with the grace that processes get, in milliseconds.
	PowerFD = 3
	// StagesEnv names the variable with the stages of the boot so far, as
	// FormatStages writes them.
	StagesEnv = "CAPSEM_BOOT_STAGES"
)

// The times of supervision.
const (
	// defaultGrace is what processes get between TERM and KILL when a signal,
	// and not the host, asked for the end.
	defaultGrace = 5 * time.Second
	// maxGrace bounds what may be asked for.
	maxGrace = time.Hour
	// killWait is how long the dead may take to be reaped.
	killWait = 2 * time.Second
	// An agent that ends is started again after restartFirst, which doubles up to
	// restartMost, and begins anew once it has lived for restartReset.
	restartFirst = 50 * time.Millisecond
	restartMost  = 10 * time.Second
	restartReset = 30 * time.Second
)

// guest is the running system.
type guest struct {
	config Config
	log    *bootLog

	agent   int // its pid, 0 while none runs
	started time.Time
	wait    time.Duration // before the next start

	children chan os.Signal
	power    *os.File // our end of PowerFD
	agentEnd *os.File // the agent's end, kept for the next agent
}

// supervise runs the agent, and reaps, until the end of the guest is asked for.
// It returns the grace that processes get.
func (g *guest) supervise(ctx context.Context, stop <-chan os.Signal) time.Duration {
	// One place is enough: whoever is told once looks for all that have ended.
	g.children = make(chan os.Signal, 1)
	signal.Notify(g.children, unix.SIGCHLD)
	requests := make(chan time.Duration, 1)
	if err := g.openPower(ctx, requests); err != nil {
		g.log.step("power pipe", err)
	}
	g.wait = restartFirst
	restart := time.NewTimer(0)
	for {
		select {
		case <-restart.C:
			err := g.startAgent()
			g.log.step("agent", err)
			if err != nil {
				restart.Reset(g.backOff())
			}
		case <-g.children:
			if ended, how := g.reap(); ended {
				g.log.step("agent", errors.New(how))
				restart.Reset(g.backOff())
			}
		case sig := <-stop:
			g.log.step("power-off", fmt.Errorf("asked for by %v", sig))
			return defaultGrace
		case grace := <-requests:
			g.log.step("power-off asked for by the host", nil)
			return grace
		}
	}
}

// backOff is how long to wait before the agent is started again.
func (g *guest) backOff() time.Duration {
	if time.Since(g.started) > restartReset {
		g.wait = restartFirst
	}
	wait := g.wait
	g.wait = min(2*wait, restartMost)
	return wait
}

// openPower makes the pipe on which agents ask for power-off.
func (g *guest) openPower(ctx context.Context, requests chan<- time.Duration) error {
	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("opening the power pipe: %w", err)
	}
	g.power, g.agentEnd = r, w
	go func() { // ends with the guest: the pipe's write end stays open till then
		s := bufio.NewScanner(r)
		for s.Scan() {
			select {
			case requests <- parseGrace(s.Text()):
			case <-ctx.Done():
				return
			}
		}
	}()
	return nil
}

// parseGrace reads a line of PowerFD. What is no number is no grace.
func parseGrace(s string) time.Duration {
	ms, err := strconv.ParseInt(strings.TrimSpace(s), 10, 64)
	if err != nil || ms < 0 {
		return 0
	}
	return time.Duration(min(ms, int64(maxGrace/time.Millisecond))) * time.Millisecond
}

func (g *guest) startAgent() error {
	g.started = time.Now()
	files := []uintptr{0, 1, 2}
	if g.agentEnd != nil {
		files = append(files, g.agentEnd.Fd())
	}
	env := []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		StagesEnv + "=" + FormatStages(g.log.stages),
	}
	pid, err := syscall.ForkExec(g.config.Program, g.config.Args, &syscall.ProcAttr{
		Dir:   "/",
		Env:   env,
		Files: files,
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return fmt.Errorf("starting the agent: %w", err)
	}
	g.agent = pid
	return nil
}

// reap takes in all that have ended, and says whether and how the agent did.
func (g *guest) reap() (ended bool, how string) {
	for {
		var ws unix.WaitStatus
		pid, err := unix.Wait4(-1, &ws, unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return ended, how
		}
		if pid != g.agent {
			continue
		}
		g.agent, ended = 0, true
		how = fmt.Sprintf("ended with status %d", ws.ExitStatus())
		if ws.Signaled() {
			how = fmt.Sprintf("ended by signal %s", unix.SignalName(ws.Signal()))
		}
	}
}

// end ends all processes, then the machine. It returns only if the kernel
// refuses.
func (g *guest) end(grace time.Duration) {
	g.log.step("TERM to all", ignoreNone(unix.Kill(-1, unix.SIGTERM)))
	g.awaitChildless(grace)
	g.log.step("KILL to all", ignoreNone(unix.Kill(-1, unix.SIGKILL)))
	g.awaitChildless(killWait)
	unix.Sync()
	releaseDisks(g.log)
	unix.Sync()
	g.log.step("power off", unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF))
}

// ignoreNone drops the error of a signal that found nobody.
func ignoreNone(err error) error {
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// awaitChildless reaps until no process is left but ours. Every process's last
// ancestor is the first process, so having no children means being alone.
func (g *guest) awaitChildless(limit time.Duration) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		g.reap()
		var info unix.Siginfo
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		if errors.Is(err, unix.ECHILD) {
			return
		}
		select {
		case <-g.children:
		case <-timer.C:
			return
		}
	}
}

// FormatStages writes stages for StagesEnv.
func FormatStages(stages []Stage) string {
	parts := make([]string, len(stages))
	for i, s := range stages {
		parts[i] = s.Name + "=" + strconv.FormatInt(int64(s.At), 10)
	}
	return strings.Join(parts, ",")
}

// ParseStages reads what FormatStages wrote, and skips what it cannot read.
func ParseStages(s string) []Stage {
	var stages []Stage
	for part := range strings.SplitSeq(s, ",") {
		name, at, ok := strings.Cut(part, "=")
		ns, err := strconv.ParseInt(at, 10, 64)
		if ok && err == nil {
			stages = append(stages, Stage{Name: name, At: time.Duration(ns)})
		}
	}
	return stages
}
