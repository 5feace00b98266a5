//go:build linux

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/capsem/capsem/bench/guest/wire"
)

// maxLine is the longest line that a relay carries, in bytes.
const maxLine = 1 << 20

// relay carries a line to the host and the host's line back, one at a time: the
// least that a process between a client and vsock can do.
func relay() error {
	conn, err := dial(wire.PortLines)
	if err != nil {
		return fmt.Errorf("calling the host: %w", err)
	}
	buf := make([]byte, maxLine)
	for {
		n, err := copyLine(conn, fd(0), buf)
		if n == 0 && errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			_, err = copyLine(fd(1), conn, buf)
		}
		if err != nil {
			return fmt.Errorf("carrying a line: %w", err)
		}
	}
}

// copyLine copies until it has copied a line's end.
func copyLine(dst io.Writer, src io.Reader, buf []byte) (int, error) {
	total := 0
	for {
		n, err := src.Read(buf)
		total += n
		if err != nil {
			return total, err
		}
		if _, err := dst.Write(buf[:n]); err != nil {
			return total, err
		}
		if n > 0 && buf[n-1] == '\n' {
			return total, nil
		}
	}
}

// warmUp is how many calls are made before the first that counts.
const warmUp = 20

// client starts a server, calls its tool builtin__echo count times with a text of
// so many bytes, and prints what each call took, in nanoseconds, as JSON.
func client(count, size string, server []string) error {
	n, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	length, err := strconv.Atoi(size)
	if err != nil {
		return err
	}
	cmd := exec.Command(server[0], server[1:]...) //nolint:noctx // it ends with its stdin
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	times, err := calls(in, bufio.NewReaderSize(out, maxLine), n, length)
	if err := errors.Join(err, in.Close(), cmd.Wait()); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(times)
}

func calls(in io.Writer, out *bufio.Reader, count, length int) ([]time.Duration, error) {
	text := strings.Repeat("a line that a tool might see; ", length/30+1)[:length]
	if _, err := exchange(in, out, `{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"bench","version":"1"}}}`); err != nil {
		return nil, err
	}
	var times []time.Duration
	for i := range warmUp + count {
		line := fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"builtin__echo","arguments":{"text":"%d %s"}}}`, i+1, i, text)
		began := time.Now()
		answer, err := exchange(in, out, line)
		took := time.Since(began)
		if err != nil {
			return nil, err
		}
		if !bytes.Contains(answer, []byte(text)) {
			return nil, fmt.Errorf("the answer is %.200q", answer)
		}
		if i >= warmUp {
			times = append(times, took)
		}
	}
	return times, nil
}

func exchange(in io.Writer, out *bufio.Reader, line string) ([]byte, error) {
	if _, err := io.WriteString(in, line+"\n"); err != nil {
		return nil, err
	}
	return out.ReadSlice('\n')
}
