package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
)

// hop is a process that copies its stdin to its stdout: what any process beside
// ours costs at least.
type hop struct {
	cmd *exec.Cmd
	in  *os.File
	out *os.File
}

func (l *lab) openHop(ctx context.Context) (*hop, error) {
	theirIn, in, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("making a pipe: %w", err)
	}
	out, theirOut, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("making a pipe: %w", err), theirIn.Close(), in.Close())
	}
	h := &hop{cmd: exec.CommandContext(ctx, l.self, roleEcho), in: in, out: out}
	h.cmd.Stdin, h.cmd.Stdout, h.cmd.Stderr = theirIn, theirOut, os.Stderr
	err = h.cmd.Start()
	if err := errors.Join(err, theirIn.Close(), theirOut.Close()); err != nil {
		return nil, errors.Join(fmt.Errorf("starting a process: %w", err), in.Close(), out.Close())
	}
	return h, nil
}

// close ends the process by ending its input.
func (h *hop) close() error {
	return errors.Join(h.in.Close(), h.cmd.Wait(), h.out.Close())
}
