package vmtest

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sync/errgroup"
)

// The ports of the suite. The guest serves those below 200.
const (
	portEcho    = 101 // what comes back, and then its end
	portDigest  = 102 // reads to the end, answers with the SHA-256 in hex
	portSource  = 103 // reads a line with a number, sends so many pseudo-random bytes
	portDiscard = 104 // reads to the end, answers with one byte
	portZeros   = 105 // reads a line with a number, sends so many zero bytes
	portControl = 201 // the guest calls the host: lines of commands, see serve
	portCalls   = 202 // the guest calls the host when told to
	portNobody  = 5003
)

// Network is a guest's view of its sockets.
type Network interface {
	// Listen accepts the host's connections to port.
	Listen(port uint32) (net.Listener, error)
	// Dial connects to the host's port.
	Dial(ctx context.Context, port uint32) (net.Conn, error)
}

// Guest is the half of the suite that runs in the guest. It calls the host on its
// control port, does what it is told, and returns when it is told to power off;
// the machine is to end then.
func Guest(ctx context.Context, network Network) error {
	listeners := make(map[uint32]net.Listener)
	var serving errgroup.Group
	for port, serve := range map[uint32]func(conn) error{
		portEcho: echo, portDigest: digest, portSource: source, portDiscard: discard, portZeros: zeros,
	} {
		l, err := network.Listen(port)
		if err != nil {
			return fmt.Errorf("listening on port %d: %w", port, err)
		}
		listeners[port] = l
		serving.Go(func() error { return accept(l, serve) })
	}
	control, err := network.Dial(ctx, portControl)
	if err != nil {
		return fmt.Errorf("calling the host: %w", err)
	}
	errs := []error{obey(ctx, network, control)}
	for _, l := range listeners {
		errs = append(errs, l.Close())
	}
	errs = append(errs, control.Close(), serving.Wait())
	return errors.Join(errs...)
}

// conn is what every connection of a machine can do.
type conn interface {
	net.Conn
	CloseWrite() error
}

// accept serves every connection of l until it is closed. A connection that
// fails is the host's to notice.
func accept(l net.Listener, serve func(conn) error) error {
	var conns errgroup.Group
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil // those that are open end with the machine
		}
		if err != nil {
			return errors.Join(err, conns.Wait())
		}
		conns.Go(func() error {
			defer c.Close()
			if err := serve(c.(conn)); err != nil {
				return fmt.Errorf("serving %s: %w", c.RemoteAddr(), err)
			}
			return nil
		})
	}
}

func echo(c conn) error {
	if _, err := io.Copy(c, struct{ io.Reader }{c}); err != nil {
		return err
	}
	return c.CloseWrite()
}

func digest(c conn) error {
	h := sha256.New()
	if _, err := io.Copy(h, c); err != nil {
		return err
	}
	_, err := io.WriteString(c, hex.EncodeToString(h.Sum(nil)))
	return err
}

func source(c conn) error {
	n, err := number(c)
	if err == nil {
		_, err = io.Copy(c, noise(n))
	}
	return err
}

func discard(c conn) error {
	if _, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{c}, make([]byte, copySize)); err != nil {
		return err
	}
	_, err := c.Write([]byte{0})
	return err
}

func zeros(c conn) error {
	n, err := number(c)
	if err != nil {
		return err
	}
	for b := make([]byte, copySize); n > 0; n -= int64(len(b)) {
		b = b[:min(n, int64(len(b)))]
		if _, err := c.Write(b); err != nil {
			return err
		}
	}
	return nil
}

// copySize is how much is written at a time where speed is measured.
const copySize = 64 << 10

// number reads a line that has one.
func number(c conn) (int64, error) {
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(line), 10, 64)
}

// noise is n pseudo-random bytes, always the same.
func noise(n int64) io.Reader { return io.LimitReader(rand.NewChaCha8([32]byte{1}), n) }

// obey reads commands, one a line, and answers each with a line: "ok" or what
// went wrong. "power-off" ends it.
func obey(ctx context.Context, network Network, control net.Conn) error {
	lines := bufio.NewScanner(control)
	for lines.Scan() {
		var port uint32
		var count int
		answer := "ok"
		line := lines.Text()
		switch {
		case line == "power-off":
			return nil
		case scan(line, "call %d %d", &port, &count):
			if err := call(ctx, network, port, count); err != nil {
				answer = err.Error()
			}
		case scan(line, "refused %d", &port):
			if c, err := network.Dial(ctx, port); err == nil {
				answer = errors.Join(errors.New("the connection was accepted"), c.Close()).Error()
			} else if !errors.Is(err, syscall.ECONNRESET) {
				answer = err.Error()
			}
		default:
			answer = "what?"
		}
		if _, err := fmt.Fprintln(control, strings.ReplaceAll(answer, "\n", "; ")); err != nil {
			return fmt.Errorf("answering the host: %w", err)
		}
	}
	return errors.Join(errors.New("the host hung up"), lines.Err())
}

func scan(line, format string, into ...any) bool {
	n, err := fmt.Sscanf(line, format, into...)
	return err == nil && n == len(into)
}

// call opens count connections to the host at once and echoes on each.
func call(ctx context.Context, network Network, port uint32, count int) error {
	var calls errgroup.Group
	for range count {
		calls.Go(func() error {
			c, err := network.Dial(ctx, port)
			if err != nil {
				return err
			}
			defer c.Close()
			return echo(c.(conn))
		})
	}
	return calls.Wait()
}
