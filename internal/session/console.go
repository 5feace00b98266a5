package session

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
)

// maxConsole is how much of a guest's console is kept: up to twice this, in
// bytes, in the file and the one before it.
const maxConsole = 4 << 20

// console keeps what a guest writes to its serial console, bounded: a guest
// that floods it loses the oldest of its own text and nothing else.
type console struct {
	path string

	mu   sync.Mutex
	file *os.File
	size int64
	// last is the end of what was written, for the message of a boot that
	// failed.
	last []byte
}

// tailBytes is how much of the console a failed boot shows.
const tailBytes = 2 << 10

func openConsole(path string) (*console, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the console's log: %w", err)
	}
	return &console{path: path, file: f}, nil
}

// Write never fails: a console that cannot be kept does not stop a guest.
func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last = append(c.last, p...)
	if over := len(c.last) - tailBytes; over > 0 {
		c.last = append([]byte(nil), c.last[over:]...)
	}
	if c.size+int64(len(p)) > maxConsole {
		c.turnOver()
	}
	n, err := c.file.Write(p)
	c.size += int64(n)
	if err != nil {
		return len(p), nil //nolint:nilerr // see above; the ledger is what must not lose anything
	}
	return len(p), nil
}

// turnOver keeps the full file beside a new one.
func (c *console) turnOver() {
	next, err := os.OpenFile(c.path+".next", os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err == nil {
		err = errors.Join(os.Rename(c.path, c.path+".1"), os.Rename(c.path+".next", c.path), c.file.Close())
		c.file, c.size = next, 0
		if err == nil {
			return
		}
	}
	// No second file can be had: write over the one there is.
	if _, err := c.file.Seek(0, io.SeekStart); err == nil {
		c.size = 0
	}
}

// Close ends the log.
func (c *console) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.file.Close()
}

// tail is the last that the guest wrote, as an addition to a message.
func (c *console) tail() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	text := strings.TrimSpace(strings.ToValidUTF8(string(c.last), "?"))
	if text == "" {
		return "; the guest's console shows nothing"
	}
	return "; the end of the guest's console:\n" + text
}
