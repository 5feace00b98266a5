// Vsockcat connects its stdin and stdout to a vsock port of the host: what a
// guest has that wants to say anything at all there. At the end of stdin it shuts
// its direction and copies what still comes.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"syscall"

	"github.com/mdlayher/vsock"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "vsockcat:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return errors.New("usage: vsockcat PORT")
	}
	port, err := strconv.ParseUint(args[0], 10, 32)
	if err != nil {
		return err
	}
	conn, err := vsock.Dial(vsock.Host, uint32(port), nil)
	if err != nil {
		return err
	}
	sent := make(chan error, 1)
	go func() {
		_, err := io.Copy(conn, os.Stdin)
		if err == nil {
			err = conn.CloseWrite()
		}
		sent <- err
	}()
	_, err = io.Copy(os.Stdout, conn)
	select {
	case sentErr := <-sent:
		err = errors.Join(err, sentErr)
	default: // the host closed first, and stdin may stay open for ever
	}
	if gone(err) {
		err = nil // the host closed; what it said stands on stdout
	}
	return errors.Join(err, conn.Close())
}

func gone(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ENOTCONN)
}
