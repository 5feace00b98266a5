package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"time"
)

func mcpGuestBenchmark() benchmark {
	return benchmark{
		name: "mcp-guest",
		about: "a call of builtin__echo with 1 KiB, by a client in the guest: relay, vsock, gate with 20 rules, jailed built-in, ledger, and back; the floor " +
			"is the same client and the same lines through a process that only copies, a raw vsock echo, a process on the host that only copies, and " +
			"the SQL of the call committed once",
		run: benchMCPGuest,
	}
}

const (
	// mcpServer is Capsem's MCP server in a guest.
	mcpServer = "/run/capsem-mcp-server"
	// guestProgram is bench/guest/raw in Capsem's machine.
	guestProgram = "/tmp/bench-raw"
	// echoBytes is the size of the text that is echoed, echoCalls how many calls
	// make one round.
	echoBytes = 1 << 10
	echoCalls = 100
)

func benchMCPGuest(ctx context.Context, l *lab) (rows []row, err error) {
	f, err := l.raw(ctx)
	if err != nil {
		return nil, err
	}
	guest, err := l.buildGuest(ctx, "raw")
	if err != nil {
		return nil, err
	}
	program, err := os.ReadFile(guest)
	if err != nil {
		return nil, fmt.Errorf("reading the guest's program: %w", err)
	}
	if err := l.upload(ctx, program, guestProgram); err != nil {
		return nil, err
	}
	e, err := l.openEchoer(ctx, f.lines)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	count, size := strconv.Itoa(echoCalls), strconv.Itoa(echoBytes)
	all, err := alternate(ctx, l.rounds(7),
		func(ctx context.Context) (float64, error) {
			result, err := l.exec(ctx, guestProgram, "client", count, size, mcpServer)
			if err != nil {
				return 0, err
			}
			return medianOf(result.Stdout)
		},
		func(ctx context.Context) (float64, error) {
			out, err := f.run(ctx, "/init", "client", count, size, "/init", "relay")
			if err != nil {
				return 0, errors.Join(err, e.failure())
			}
			return medianOf(out)
		},
	)
	if err != nil {
		return nil, err
	}
	return []row{compare("MCP echo from the guest, p50", "µs", all[0], all[1], atMost(2), "")}, nil
}

// medianOf reads what `raw client` prints.
func medianOf(out []byte) (float64, error) {
	var times []time.Duration
	if err := json.Unmarshal(out, &times); err != nil {
		return 0, fmt.Errorf("reading the client's times: %w", err)
	}
	return inMicros(times).median(), nil
}

// echoer answers each line with itself, after a process has copied it and the
// rows of a call were committed.
type echoer struct {
	l    net.Listener
	hop  *hop
	sql  *rawLedger
	done sync.WaitGroup

	mu  sync.Mutex
	err error
}

func (l *lab) openEchoer(ctx context.Context, lines net.Listener) (*echoer, error) {
	e := &echoer{l: lines}
	var err error
	if e.sql, err = newRaw(ctx, l.dir); err != nil {
		return nil, err
	}
	if e.hop, err = l.openHop(ctx); err != nil {
		return nil, errors.Join(err, e.sql.close())
	}
	e.done.Go(func() {
		for {
			conn, err := lines.Accept()
			if err != nil {
				return // closed
			}
			err = e.serve(ctx, conn)
			e.mu.Lock()
			e.err = errors.Join(e.err, err, conn.Close())
			e.mu.Unlock()
		}
	})
	return e, nil
}

// serve answers one connection until it ends.
func (e *echoer) serve(ctx context.Context, conn net.Conn) error {
	in, back := bufio.NewReaderSize(conn, 64<<10), bufio.NewReaderSize(e.hop.out, 64<<10)
	for {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return nil //nolint:nilerr // the guest has ended its client
		}
		if _, err := e.hop.in.Write(line); err != nil {
			return err
		}
		answer, err := back.ReadSlice('\n')
		if err != nil {
			return err
		}
		if err := e.record(ctx, line, answer); err != nil {
			return err
		}
		if _, err := conn.Write(answer); err != nil {
			return err
		}
	}
}

// record commits a whole call at once.
func (e *echoer) record(ctx context.Context, request, response []byte) error {
	call := &rawCall{arguments: request, response: response}
	if err := e.sql.begin(ctx); err != nil {
		return err
	}
	if err := e.sql.intent(ctx, call); err != nil {
		return err
	}
	if err := e.sql.outcome(ctx, call); err != nil {
		return err
	}
	return e.sql.commit(ctx)
}

func (e *echoer) failure() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.err
}

func (e *echoer) close() error {
	err := e.l.Close()
	e.done.Wait()
	return errors.Join(err, e.failure(), e.hop.close(), e.sql.close())
}
