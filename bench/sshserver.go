package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/capsem/capsem/internal/image/cpio"
)

// sshdConfig is the default but for what an initramfs does not have.
const sshdConfig = `HostKey /etc/ssh/ssh_host_ed25519_key
AuthorizedKeysFile /etc/ssh/authorized_keys
StrictModes no
PermitRootLogin prohibit-password
UsePAM no
UseDNS no
PrintMotd no
`

const sshPasswd = `root:x:0:0:root:/root:/bin/sh
sshd:x:100:65534:sshd:/run/sshd:/bin/false
`

// sshServer collects what a guest needs to run this machine's sshd: the program,
// its libraries, keys made for the occasion, and a configuration. It returns the
// path of the private key that logs in.
func sshServer(ctx context.Context, dir string) ([]cpio.Entry, string, error) {
	sshd, err := exec.LookPath("sshd")
	if err != nil {
		sshd = "/usr/sbin/sshd" // seldom in PATH
	}
	if _, err := os.Stat(sshd); err != nil {
		return nil, "", errors.New("there is no sshd to compare with: on Debian and Ubuntu, `apt-get install openssh-server` installs it")
	}
	files := map[string]file{
		"etc/ssh/sshd_config": {0o600, []byte(sshdConfig)},
		"etc/passwd":          {0o644, []byte(sshPasswd)},
	}
	if err := addProgram(ctx, files, sshd); err != nil {
		return nil, "", err
	}
	key := filepath.Join(dir, "login")
	for _, name := range []string{key, filepath.Join(dir, "host")} {
		if out, err := exec.CommandContext(ctx, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", name).CombinedOutput(); err != nil {
			return nil, "", fmt.Errorf("making a key: %w: %s", err, out)
		}
	}
	for name, from := range map[string]string{"ssh_host_ed25519_key": "host", "authorized_keys": "login.pub"} {
		b, err := os.ReadFile(filepath.Join(dir, from))
		if err != nil {
			return nil, "", fmt.Errorf("reading a key: %w", err)
		}
		files["etc/ssh/"+name] = file{0o600, b}
	}
	return layOut(files, "run/sshd"), key, nil
}

// file is one of an initramfs.
type file struct {
	mode fs.FileMode
	body []byte
}

// addProgram adds a program with the libraries that it is linked to.
func addProgram(ctx context.Context, files map[string]file, program string) error {
	out, err := exec.CommandContext(ctx, "ldd", program).Output()
	if err != nil {
		return fmt.Errorf("finding the libraries of %s: %w", program, err)
	}
	names := []string{program}
	for _, word := range strings.Fields(string(out)) {
		if strings.HasPrefix(word, "/") {
			names = append(names, word)
		}
	}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			return fmt.Errorf("reading %s: %w", name, err)
		}
		if name == program {
			name = "/usr/sbin/sshd"
		}
		files[strings.TrimPrefix(path.Clean(name), "/")] = file{0o755, b}
	}
	return nil
}

// layOut puts every folder before what is in it.
func layOut(files map[string]file, folders ...string) []cpio.Entry {
	all := map[string]cpio.Entry{}
	addFolders := func(dir string) {
		for ; dir != "."; dir = path.Dir(dir) {
			all[dir] = cpio.Entry{Name: dir, Mode: cpio.Dir | 0o755}
		}
	}
	for _, dir := range folders {
		addFolders(dir)
	}
	for name, f := range files {
		addFolders(path.Dir(name))
		all[name] = cpio.Entry{Name: name, Mode: cpio.File | uint32(f.mode), Body: f.body}
	}
	entries := make([]cpio.Entry, 0, len(all))
	for _, name := range slices.Sorted(maps.Keys(all)) {
		entries = append(entries, all[name])
	}
	return entries
}
