package qemu

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// hostKHz is the frequency of this machine's processors as /proc/cpuinfo gives
// it, 0 if it does not.
func hostKHz() int {
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return 0 // the kernel calibrates by itself
	}
	return parseKHz(info)
}

func parseKHz(cpuinfo []byte) int {
	lines := bufio.NewScanner(bytes.NewReader(cpuinfo))
	for lines.Scan() {
		key, value, _ := strings.Cut(lines.Text(), ":")
		if strings.TrimSpace(key) != "cpu MHz" {
			continue
		}
		mhz, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if err != nil || mhz < 1 || mhz > 1e5 {
			return 0
		}
		return int(mhz * 1000)
	}
	return 0
}

// bootID names this machine's boot: an answer that was found in another one may
// no longer hold.
func bootID() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("reading the host's boot id: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}
