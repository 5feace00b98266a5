//go:build linux

package doctor

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Guest is what the checks of a guest look at.
type Guest struct {
	// Dial connects to a port of the host, or fails at once.
	Dial func(ctx context.Context, port uint32) (net.Conn, error)
	// Open are ports that answer, Closed one that refuses.
	Open   []uint32
	Closed uint32
	// Server is the program that a guest's MCP client starts.
	Server string
	// Cgroups is where commands have their cgroups, "" to pass that over.
	Cgroups string
}

// Checks are the checks of a guest, in the order in which one builds on the
// other.
func (g Guest) Checks() []Check {
	checks := []Check{
		{"kernel", checkKernel},
		{"mounts", checkMounts},
		{"clock", checkClock},
		{"entropy", checkEntropy},
		{"network_isolated", checkInterfaces},
		{"cgroup_commands", g.checkCgroups},
	}
	for _, port := range g.Open {
		checks = append(checks, Check{fmt.Sprintf("vsock_%d_open", port), func(ctx context.Context) (string, error) {
			return g.checkOpen(ctx, port)
		}})
	}
	return append(checks,
		Check{fmt.Sprintf("vsock_%d_closed", g.Closed), g.checkClosed},
		Check{"mcp_initialize", g.checkInitialize},
		Check{"mcp_tools_list", g.checkList},
		Check{"mcp_echo", g.checkEcho})
}

func checkKernel(context.Context) (string, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", fmt.Errorf("asking the kernel for its name: %w", err)
	}
	return fmt.Sprintf("%s %s", unix.ByteSliceToString(u.Sysname[:]), unix.ByteSliceToString(u.Release[:])), nil
}

func checkMounts(context.Context) (string, error) {
	table, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return "", fmt.Errorf("reading the mounts: %w", err)
	}
	types := make(map[string]string)
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) > 2 {
			types[f[1]] = f[2]
		}
	}
	want := map[string]string{"/proc": "proc", "/sys": "sysfs", "/dev": "devtmpfs", "/dev/pts": "devpts", "/dev/shm": "tmpfs", "/tmp": "tmpfs", "/run": "tmpfs"}
	var wrong []string
	for at, fstype := range want {
		if types[at] != fstype {
			wrong = append(wrong, fmt.Sprintf("%s is %q and should be %s", at, types[at], fstype))
		}
	}
	if len(wrong) > 0 {
		slices.Sort(wrong)
		return "", errors.New(strings.Join(wrong, "; "))
	}
	return fmt.Sprintf("%d of %d in place", len(want), len(want)), nil
}

// checkClock knows only that time has passed since this was written; the host's
// clock is the host's to compare.
func checkClock(context.Context) (string, error) {
	now := time.Now().UTC()
	if now.Year() < 2025 {
		return "", fmt.Errorf("the clock says %s: nobody has set it", now.Format(time.RFC3339))
	}
	return now.Format(time.RFC3339), nil
}

func checkEntropy(context.Context) (string, error) {
	var b [16]byte
	n, err := unix.Getrandom(b[:], unix.GRND_NONBLOCK)
	if err != nil || n != len(b) {
		return "", fmt.Errorf("the random pool is not ready: %d bytes, %w", n, err)
	}
	return "the random pool is ready", nil
}

func checkInterfaces(context.Context) (string, error) {
	all, err := net.Interfaces()
	if err != nil {
		return "", fmt.Errorf("listing network interfaces: %w", err)
	}
	var names []string
	up := false
	for _, i := range all {
		if i.Flags&net.FlagLoopback == 0 {
			names = append(names, i.Name)
			continue
		}
		up = i.Flags&net.FlagUp != 0
	}
	if len(names) > 0 {
		return "", fmt.Errorf("there are interfaces beside lo: %s", strings.Join(names, ", "))
	}
	if !up {
		return "", errors.New("lo is down")
	}
	return "only lo, and it is up", nil
}

func (g Guest) checkCgroups(context.Context) (string, error) {
	if g.Cgroups == "" {
		return "this kernel has no cgroup v2", nil
	}
	have, err := os.ReadFile(filepath.Join(g.Cgroups, "cgroup.subtree_control"))
	if err != nil {
		return "", fmt.Errorf("reading the commands' cgroup: %w", err)
	}
	if _, err := os.Stat(filepath.Join(g.Cgroups, "cgroup.kill")); err != nil {
		return "", fmt.Errorf("this kernel cannot kill a cgroup: %w", err)
	}
	return "controllers: " + strings.Join(strings.Fields(string(have)), " "), nil
}

func (g Guest) checkOpen(ctx context.Context, port uint32) (string, error) {
	start := time.Now()
	conn, err := g.Dial(ctx, port)
	if err != nil {
		return "", err
	}
	took := time.Since(start)
	if err := conn.Close(); err != nil {
		return "", fmt.Errorf("closing the connection: %w", err)
	}
	return fmt.Sprintf("answers in %v", took.Round(time.Microsecond)), nil
}

func (g Guest) checkClosed(ctx context.Context) (string, error) {
	conn, err := g.Dial(ctx, g.Closed)
	if err == nil {
		return "", errors.Join(fmt.Errorf("port %d is open and should not be", g.Closed), conn.Close())
	}
	if !errors.Is(err, unix.ECONNRESET) {
		return "", fmt.Errorf("port %d does not refuse as a closed port does: %w", g.Closed, err)
	}
	return "refused", nil
}

const (
	initialize  = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"capsem-doctor","version":"1"}}}`
	initialized = `{"jsonrpc":"2.0","method":"notifications/initialized"}`
	list        = `{"jsonrpc":"2.0","id":2,"method":"tools/list"}`
	echoText    = "capsem-doctor was here"
	echo        = `{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"builtin__echo","arguments":{"text":"` + echoText + `"}}}`
)

func (g Guest) checkInitialize(ctx context.Context) (string, error) {
	answers, err := g.converse(ctx, initialize)
	if err != nil {
		return "", err
	}
	var r struct {
		ProtocolVersion string `json:"protocolVersion"`
		ServerInfo      struct{ Name, Version string }
	}
	if err := json.Unmarshal(answers["1"], &r); err != nil {
		return "", fmt.Errorf("reading the answer to initialize: %w", err)
	}
	if r.ProtocolVersion == "" || r.ServerInfo.Name == "" {
		return "", errors.New("the answer to initialize names no version and no server")
	}
	return fmt.Sprintf("%s %s, protocol %s", r.ServerInfo.Name, r.ServerInfo.Version, r.ProtocolVersion), nil
}

func (g Guest) checkList(ctx context.Context) (string, error) {
	answers, err := g.converse(ctx, initialize, initialized, list)
	if err != nil {
		return "", err
	}
	var r struct{ Tools []struct{ Name string } }
	if err := json.Unmarshal(answers["2"], &r); err != nil {
		return "", fmt.Errorf("reading the list of tools: %w", err)
	}
	if len(r.Tools) == 0 {
		return "", errors.New("the list of tools is empty")
	}
	return fmt.Sprintf("%d tools", len(r.Tools)), nil
}

func (g Guest) checkEcho(ctx context.Context) (string, error) {
	start := time.Now()
	answers, err := g.converse(ctx, initialize, initialized, echo)
	if err != nil {
		return "", err
	}
	if !bytes.Contains(answers["2"], []byte(echoText)) {
		return "", fmt.Errorf("the echo is not what was sent: %.200s", answers["2"])
	}
	return fmt.Sprintf("came back, %v with the server's start", time.Since(start).Round(time.Millisecond)), nil
}

// converse starts the MCP server as a client does, sends it lines, and returns
// the results by id.
func (g Guest) converse(ctx context.Context, lines ...string) (map[string]json.RawMessage, error) {
	cmd := exec.CommandContext(ctx, g.Server)
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("running %s: %w: %.400s", g.Server, err, stderr.String())
	}
	results := make(map[string]json.RawMessage)
	s := bufio.NewScanner(bytes.NewReader(out))
	s.Buffer(nil, 16<<20)
	for s.Scan() {
		var m struct {
			ID     json.RawMessage
			Result json.RawMessage
			Error  *struct {
				Code    int
				Message string
			}
		}
		if err := json.Unmarshal(s.Bytes(), &m); err != nil {
			return nil, fmt.Errorf("reading a line of %s: %w", g.Server, err)
		}
		if m.Error != nil {
			return nil, fmt.Errorf("request %s: error %d: %s", m.ID, m.Error.Code, m.Error.Message)
		}
		results[string(m.ID)] = m.Result
	}
	return results, s.Err()
}
