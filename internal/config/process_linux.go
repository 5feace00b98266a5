package config

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// ProcessIdentity names one process for good. A process id alone is reused; with
// the time the process started and the boot it started in, it is not.
type ProcessIdentity struct {
	PID int `json:"pid"`
	// StartTime is in clock ticks since boot: field 22 of /proc/PID/stat (proc(5)).
	StartTime uint64 `json:"start_time"`
	// BootID is /proc/sys/kernel/random/boot_id.
	BootID string `json:"boot_id"`
}

// ErrProcessGone says that the process of an identity no longer runs.
var ErrProcessGone = errors.New("the process is gone")

// BootID identifies this boot of the machine.
func BootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("reading the boot id: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}

// IdentifyProcess returns the identity of the process that has pid now.
func IdentifyProcess(pid int) (ProcessIdentity, error) {
	boot, err := BootID()
	if err != nil {
		return ProcessIdentity{}, err
	}
	start, _, err := startTime(pid)
	if err != nil {
		return ProcessIdentity{}, err
	}
	return ProcessIdentity{PID: pid, StartTime: start, BootID: boot}, nil
}

// startTime returns when pid started and its state letter.
func startTime(pid int) (ticks uint64, state byte, err error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
		return 0, 0, fmt.Errorf("identifying process %d: %w", pid, ErrProcessGone)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("identifying process %d: %w", pid, err)
	}
	// Field 2 is the program's name in parentheses, and may hold any character:
	// what follows it begins after the last parenthesis, with field 3.
	_, rest, ok := cutLast(data, ')')
	fields := strings.Fields(string(rest))
	const startField = 22 - 3
	if !ok || len(fields) <= startField {
		return 0, 0, fmt.Errorf("identifying process %d: /proc/%d/stat has an unknown form", pid, pid)
	}
	ticks, err = strconv.ParseUint(fields[startField], 10, 64)
	if err != nil {
		return 0, 0, fmt.Errorf("identifying process %d: %w", pid, err)
	}
	return ticks, fields[0][0], nil
}

func cutLast(b []byte, sep byte) (before, after []byte, found bool) {
	i := bytes.LastIndexByte(b, sep)
	if i < 0 {
		return b, nil, false
	}
	return b[:i], b[i+1:], true
}

// Alive reports whether this very process still runs. A zombie does not.
func (p ProcessIdentity) Alive() (bool, error) {
	fd, err := p.open()
	if errors.Is(err, ErrProcessGone) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, unix.Close(fd)
}

// Signal sends a signal to this very process, never to another that took its id.
// A process that no longer runs matches ErrProcessGone.
func (p ProcessIdentity) Signal(sig syscall.Signal) error {
	fd, err := p.open()
	if err != nil {
		return err
	}
	err = unix.PidfdSendSignal(fd, sig, nil, 0)
	if errors.Is(err, unix.ESRCH) {
		err = ErrProcessGone
	}
	if err := errors.Join(err, unix.Close(fd)); err != nil {
		return fmt.Errorf("signalling process %d: %w", p.PID, err)
	}
	return nil
}

// Open returns a pidfd of this very process. It becomes readable when the process
// ends; the caller closes it. A process that no longer runs matches
// ErrProcessGone.
func (p ProcessIdentity) Open() (*os.File, error) {
	fd, err := p.open()
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), fmt.Sprintf("pidfd of process %d", p.PID)), nil
}

// open takes the descriptor first and looks at the process then: what the
// descriptor refers to cannot change between the two.
func (p ProcessIdentity) open() (int, error) {
	boot, err := BootID()
	if err != nil {
		return -1, err
	}
	if boot != p.BootID || p.PID <= 0 {
		return -1, ErrProcessGone
	}
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return -1, ErrProcessGone
	}
	if err != nil {
		return -1, fmt.Errorf("opening process %d: %w", p.PID, err)
	}
	start, state, err := startTime(p.PID)
	if err == nil && (start != p.StartTime || state == 'Z' || state == 'X') {
		err = ErrProcessGone
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}
