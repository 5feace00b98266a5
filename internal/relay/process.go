//go:build linux

package relay

import (
	"bytes"
	"os"
	"path"
	"strconv"

	"github.com/capsem/capsem/internal/guestproto"
)

// maxCmdline is how much of a command line is read to find the program's name.
const maxCmdline = 4096

// ProcessName is the name of a running program as others would know it: the last
// part of its first argument, or else what the kernel calls it, sanitised.
func ProcessName(pid int) string {
	dir := "/proc/" + strconv.Itoa(pid)
	first, _, _ := bytes.Cut(readStart(dir+"/cmdline"), []byte{0})
	name := path.Base(string(first))
	if name == "." || name == "/" {
		name = string(bytes.TrimSpace(readStart(dir + "/comm")))
	}
	if name == "" {
		name = "unknown"
	}
	return guestproto.SanitizeProcess(name)
}

// readStart reads the beginning of a file, nothing if it cannot.
func readStart(name string) []byte {
	f, err := os.Open(name)
	if err != nil {
		return nil
	}
	defer f.Close()
	b := make([]byte, maxCmdline)
	n, err := f.Read(b)
	if err != nil {
		return nil
	}
	return b[:n]
}
