//go:build linux

// Package sysmon lets the monitor thread of this program's Go runtime rest.
//
// While anything runs, the runtime's monitor ("sysmon" in runtime/proc.go) wakes
// up every 20 µs and looks whether a goroutine has kept a processor for too long.
// In a guest whose processor is emulated, each of these timers costs the host
// two changes of thread and the guest an interrupt: a program that does nothing
// but start another one spent half of its time on them. Rest gives the thread so
// much timer slack that the kernel lets it wake with interrupts that come
// anyway, or after Slack.
//
// What that delays is the monitor's help, by Slack at most: taking a processor
// away from a goroutine that is in a long system call, and polling the network
// where nobody has for 10 ms.
package sysmon

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Slack is how much later than it wants to the monitor may wake up.
const Slack = 10 * time.Millisecond

// usualSlack is what the kernel gives every process (prctl(2),
// PR_SET_TIMERSLACK).
const usualSlack = 50 * time.Microsecond

// maxGap is how many numbers after the main thread's the monitor's may be: other
// programs that start at the same moment take numbers too, and the first process
// of a guest has those of the kernel's own threads behind it.
const maxGap = 512

// Rest gives the monitor its slack. It is called once, with /proc mounted, before
// the program does much. A kernel that has no such file is an error and changes
// nothing. It makes a few system calls and readies none of the runtime's own
// machinery, because it is on the way of every boot.
func Rest() error {
	tid, err := monitor()
	if err != nil {
		return err
	}
	// Threads have a folder in /proc too, which no list shows (proc(5)).
	fd, err := unix.Open("/proc/"+strconv.Itoa(tid)+"/timerslack_ns", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("letting the runtime's monitor thread rest: %w", err)
	}
	_, err = unix.Write(fd, strconv.AppendInt(nil, int64(Slack), 10))
	if err := errors.Join(err, unix.Close(fd)); err != nil {
		return fmt.Errorf("letting the runtime's monitor thread rest: %w", err)
	}
	return nil
}

// monitor is the thread that the runtime starts first, before any other code
// runs: the one whose number is next to the main thread's. Should it be another
// one, that thread's timers are late by Slack, and nothing else.
func monitor() (int, error) {
	pid := unix.Getpid()
	for tid := pid + 1; tid <= pid+maxGap; tid++ {
		if unix.Access("/proc/self/task/"+strconv.Itoa(tid), unix.F_OK) == nil {
			return tid, nil
		}
	}
	return 0, fmt.Errorf("the runtime's monitor thread is none of the %d after process %d", maxGap, pid)
}

// Restore gives the calling thread the slack that every process begins with. A
// thread that the monitor has started has inherited the monitor's, and what is
// forked by it would inherit it in turn: whoever forks a program of somebody
// else calls this first, on the locked thread that forks.
func Restore() error {
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(usualSlack), 0, 0, 0); err != nil {
		return fmt.Errorf("setting a thread's timer slack: %w", err)
	}
	return nil
}
