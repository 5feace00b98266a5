package config

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxSocketPath bounds the path of a Unix socket, in bytes. sun_path holds 108
// on Linux (unix(7)) and 104 on macOS; the rest is room for suffixes.
const maxSocketPath = 100

// corpSystemFile is where an organisation puts its rules for all users of a
// machine.
const corpSystemFile = "/etc/capsem/corp.toml"

// Home is the folder that holds everything Capsem keeps, and the only place that
// knows what lies where in it. It is made by OpenHome.
type Home struct {
	root string
	// runtime is $XDG_RUNTIME_DIR, "" where it is unset.
	runtime string
}

// OpenHome finds the home folder, creates it and its fixed folders with mode
// 0700, and checks that it is ours and can be written. Symbolic links are
// resolved, so that all programs derive the same paths.
func OpenHome(env Env) (Home, error) {
	root, err := locate(env)
	if err != nil {
		return Home{}, err
	}
	if err := os.MkdirAll(root, 0o700); err != nil {
		return Home{}, fmt.Errorf("creating the home folder: %w; set %s to a folder that you can write", err, EnvHome)
	}
	if root, err = filepath.EvalSymlinks(root); err != nil {
		return Home{}, fmt.Errorf("resolving the home folder: %w", err)
	}
	if err := claim(root, env); err != nil {
		return Home{}, err
	}
	h := Home{root: root, runtime: env.Get(envRuntimeDir)}
	for _, dir := range []string{h.run(), h.Profiles(), h.Images(), h.Secrets(), h.VMs(), h.Ledgers()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return Home{}, fmt.Errorf("creating the home folder: %w; set %s to a folder that you can write", err, EnvHome)
		}
	}
	return h, nil
}

func locate(env Env) (string, error) {
	root, set := env(EnvHome)
	if !set || root == "" {
		user := env.Get(envUserHome)
		if !filepath.IsAbs(user) {
			return "", fmt.Errorf("finding the home folder: neither %s nor %s is set to an absolute path", EnvHome, envUserHome)
		}
		return filepath.Join(user, ".capsem"), nil
	}
	if !filepath.IsAbs(root) {
		return "", fmt.Errorf("%s is %q: it must be an absolute path", EnvHome, root)
	}
	return filepath.Clean(root), nil
}

// claim checks that root may serve as the home folder, and closes it to others.
func claim(root string, env Env) error {
	if root == "/" {
		return fmt.Errorf("%s is /: use a folder of its own", EnvHome)
	}
	if user, err := filepath.EvalSymlinks(env.Get(envUserHome)); err == nil && user == root {
		return fmt.Errorf("%s is %s, your own home folder: use a folder of its own", EnvHome, root)
	}
	info, err := os.Stat(root)
	if err != nil {
		return fmt.Errorf("opening the home folder: %w", err)
	}
	if !info.IsDir() {
		return fmt.Errorf("the home folder %s is not a folder", root)
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("the home folder %s belongs to uid %d, not to you (uid %d): set %s to a folder of yours", root, st.Uid, os.Geteuid(), EnvHome)
	}
	if err := unix.Faccessat(unix.AT_FDCWD, root, unix.W_OK|unix.X_OK, unix.AT_EACCESS); err != nil {
		return fmt.Errorf("the home folder %s cannot be written: %w; set %s to a folder that you can write", root, err, EnvHome)
	}
	if info.Mode().Perm()&0o077 != 0 {
		if err := os.Chmod(root, 0o700); err != nil {
			return fmt.Errorf("closing the home folder to others: %w", err)
		}
	}
	return nil
}

// Root is the home folder itself.
func (h Home) Root() string { return h.root }

func (h Home) run() string { return filepath.Join(h.root, "run") }

// Settings is config.toml, the settings of this machine.
func (h Home) Settings() string { return filepath.Join(h.root, "config.toml") }

// Corp lists where the organisation's rules may be. Each that exists applies.
func (h Home) Corp() []string {
	return []string{corpSystemFile, filepath.Join(h.root, "corp.toml")}
}

// Profiles is the folder of profiles, Profile the file of one.
func (h Home) Profiles() string { return filepath.Join(h.root, "profiles") }

// Profile is the file of the profile called name, which the caller has checked
// with CheckProfileName.
func (h Home) Profile(name string) string { return filepath.Join(h.Profiles(), name+".toml") }

// Images holds one folder for each image name, in it one for each digest.
func (h Home) Images() string { return filepath.Join(h.root, "images") }

// Secrets is the folder of the secret store.
func (h Home) Secrets() string { return filepath.Join(h.root, "secrets") }

// Cache holds what can be fetched again: packages that images are built from.
func (h Home) Cache() string { return filepath.Join(h.root, "cache") }

// AccelCache is the acceleration probe's answer.
func (h Home) AccelCache() string { return filepath.Join(h.run(), "accel.json") }

// Reserve is disk space that the service sets aside for what frees disk space.
func (h Home) Reserve() string { return filepath.Join(h.run(), "reserve") }

// ServiceLog is what the service writes to its stderr when it is started in the
// background.
func (h Home) ServiceLog() string { return filepath.Join(h.run(), "service.log") }

// ServiceLock is locked by the one service that serves this home.
func (h Home) ServiceLock() string { return filepath.Join(h.run(), "service.lock") }

// ServiceLedger is the ledger of what concerns no VM.
func (h Home) ServiceLedger() string { return filepath.Join(h.root, "service.db") }

// Ledgers holds the sealed ledgers of deleted VMs, a folder for each id.
func (h Home) Ledgers() string { return filepath.Join(h.root, "ledgers") }

// SealedFolder is the folder of a deleted VM's ledger.
func (h Home) SealedFolder(id string) string { return filepath.Join(h.Ledgers(), id) }

// SealedLedger is the ledger of a deleted VM.
func (h Home) SealedLedger(id string) string { return filepath.Join(h.SealedFolder(id), "session.db") }

// VMs holds a folder for each VM that is not deleted.
func (h Home) VMs() string { return filepath.Join(h.root, "vms") }

// VMDir is the folder of one VM.
func (h Home) VMDir(id string) string { return filepath.Join(h.VMs(), id) }

// VMRecord is what the service says of a VM.
func (h Home) VMRecord(id string) string { return filepath.Join(h.VMDir(id), "vm.json") }

// VMState is what the VM's own process says of it.
func (h Home) VMState(id string) string { return filepath.Join(h.VMDir(id), "state.json") }

// Ledger is the ledger of a VM that is not deleted.
func (h Home) Ledger(id string) string { return filepath.Join(h.VMDir(id), "session.db") }

// SerialLog is what the guest wrote to its console.
func (h Home) SerialLog(id string) string { return filepath.Join(h.VMDir(id), "serial.log") }

// ServerHome is the folder that is a server's HOME, in its jail.
func (h Home) ServerHome(id, server string) string {
	return filepath.Join(h.VMDir(id), "servers", server)
}

// ProcessLog is what the VM's process wrote to its stderr.
func (h Home) ProcessLog(id string) string { return filepath.Join(h.VMDir(id), "process.log") }

// ServiceSocket is where the service serves people and the command line.
func (h Home) ServiceSocket() (string, error) {
	return h.socket(filepath.Join("run", "service.sock"), "service.sock")
}

// AgentSocket is where the service serves host agents.
func (h Home) AgentSocket() (string, error) {
	return h.socket(filepath.Join("run", "agent.sock"), "agent.sock")
}

// VMSocket is where the process of one VM serves.
func (h Home) VMSocket(id string) (string, error) {
	return h.socket(filepath.Join("vms", id, "vm.sock"), id+".sock")
}

// socket derives a socket's path for both of its ends: inside the home, or, where
// that path is too long for the kernel, under $XDG_RUNTIME_DIR in a folder named
// after the home. That folder is created.
func (h Home) socket(inside, short string) (string, error) {
	preferred := filepath.Join(h.root, inside)
	if len(preferred) <= maxSocketPath {
		return preferred, nil
	}
	problem := fmt.Sprintf("socket path %s has %d bytes, more than the %d that fit", preferred, len(preferred), maxSocketPath)
	remedy := fmt.Sprintf("set %s to a shorter path", EnvHome)
	if !filepath.IsAbs(h.runtime) {
		return "", fmt.Errorf("%s, and %s is not set to an absolute path that could hold it instead: %s, or set %s", problem, envRuntimeDir, remedy, envRuntimeDir)
	}
	dir := h.runtimeDir()
	fallback := filepath.Join(dir, short)
	if len(fallback) > maxSocketPath {
		return "", fmt.Errorf("%s, and so has %s with %d bytes: %s, or %s to one", problem, fallback, len(fallback), remedy, envRuntimeDir)
	}
	if err := claimRuntimeDir(dir); err != nil {
		return "", err
	}
	return fallback, nil
}

func (h Home) runtimeDir() string {
	sum := sha256.Sum256([]byte(h.root))
	return filepath.Join(h.runtime, "capsem-"+hex.EncodeToString(sum[:8]))
}

// claimRuntimeDir creates dir, or checks that it is a folder of ours that nobody
// else can enter: who could replace it could pose as the service.
func claimRuntimeDir(dir string) error {
	err := os.Mkdir(dir, 0o700)
	if err == nil {
		return nil
	}
	if !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("creating the folder for sockets: %w", err)
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("opening the folder for sockets: %w", err)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !info.IsDir() || !ok || int(st.Uid) != os.Geteuid() || info.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("the folder for sockets %s must be a folder of yours with mode 0700", dir)
	}
	return nil
}
