//go:build linux

package command

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// maxPasswd bounds how much of a guest's user and group files is read.
const maxPasswd = 1 << 20

// User is whom a command runs as.
type User struct {
	Name     string
	UID, GID uint32
	Groups   []uint32
	Home     string
	Shell    string
}

// Users looks users up, and remembers the last answer for as long as the files in
// which it stands are the same. Its methods may be called from any goroutine.
type Users struct {
	// Root is where etc/passwd and etc/group are, "" in a guest.
	Root string

	mu    sync.Mutex // guards what follows
	name  string
	user  User
	files [2]fileState // the zero value remembers nothing
}

// settleTime is more than the granularity of a file's times.
const settleTime = time.Second

// fileState tells a file from one that was written since.
type fileState struct {
	known    bool // and could not be written again unseen
	ino      uint64
	size     int64
	modified syscall.Timespec
	changed  syscall.Timespec
}

func stateOf(path string) fileState {
	var st syscall.Stat_t
	if syscall.Stat(path, &st) != nil {
		return fileState{}
	}
	// What was written a moment ago may be written again with the same times.
	settled := time.Since(time.Unix(st.Ctim.Unix())) > settleTime
	return fileState{settled, st.Ino, st.Size, st.Mtim, st.Ctim}
}

// Lookup is LookupUser below Root. Nobody may change the answer's Groups.
func (u *Users) Lookup(name string) (User, error) {
	files := [2]fileState{stateOf(u.Root + "/etc/passwd"), stateOf(u.Root + "/etc/group")}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.files == files && u.name == name && files[0].known && files[1].known {
		return u.user, nil
	}
	user, err := LookupUser(u.Root, name)
	if err == nil {
		u.name, u.user, u.files = name, user, files
	}
	return user, err
}

// LookupUser finds a user by name or number in etc/passwd and etc/group below
// root ("/" in a guest). The empty name is uid 0, or whoever we are where we
// are not root. Uid 0 needs no entry: an image may have no such files.
func LookupUser(root, name string) (User, error) {
	if name == "" {
		name = strconv.Itoa(os.Getuid())
	}
	u, found, err := passwdEntry(root, name)
	if err != nil {
		return User{}, err
	}
	if !found {
		uid, err := strconv.ParseUint(name, 10, 32)
		switch {
		case err == nil && uid != 0:
			u = User{Name: name, UID: uint32(uid), GID: uint32(uid), Home: "/", Shell: "/bin/sh"}
		case err == nil || name == "root":
			u = User{Name: "root", Home: "/root", Shell: "/bin/sh"}
		default:
			return User{}, &StartError{Code: codeCannot, Message: fmt.Sprintf("user %q is not in the guest's /etc/passwd", name)}
		}
	}
	u.Groups, err = groupsOf(root, u)
	return u, err
}

// passwdEntry finds the line of passwd(5) whose name, or else number, it is.
func passwdEntry(root, name string) (u User, found bool, err error) {
	err = eachLine(root+"/etc/passwd", 7, func(f []string) bool {
		uid, err1 := strconv.ParseUint(f[2], 10, 32)
		gid, err2 := strconv.ParseUint(f[3], 10, 32)
		if err1 != nil || err2 != nil || (f[0] != name && f[2] != name) {
			return true
		}
		if found && f[0] != name {
			return true // a name goes before a number
		}
		u = User{Name: f[0], UID: uint32(uid), GID: uint32(gid), Home: f[5], Shell: f[6]}
		found = true
		return f[0] != name
	})
	if u.Home == "" {
		u.Home = "/"
	}
	return u, found, err
}

// groupsOf lists the groups of group(5) that name the user.
func groupsOf(root string, u User) ([]uint32, error) {
	groups := []uint32{u.GID}
	err := eachLine(root+"/etc/group", 4, func(f []string) bool {
		gid, err := strconv.ParseUint(f[2], 10, 32)
		if err != nil || uint32(gid) == u.GID {
			return true
		}
		for member := range strings.SplitSeq(f[3], ",") {
			if member == u.Name {
				groups = append(groups, uint32(gid))
				break
			}
		}
		return len(groups) < 65536 // NGROUPS_MAX of linux/limits.h
	})
	return groups, err
}

// eachLine calls f with the colon-separated fields of each well-formed line
// until f returns false. A file that is not there has no lines.
func eachLine(path string, fields int, f func([]string) bool) error {
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("looking up a user: %w", err)
	}
	defer file.Close()
	s := bufio.NewScanner(io.LimitReader(file, maxPasswd))
	for s.Scan() {
		if parts := strings.Split(s.Text(), ":"); len(parts) == fields && !f(parts) {
			return nil
		}
	}
	if err := s.Err(); err != nil {
		return fmt.Errorf("reading %s: %w", path, err)
	}
	return nil
}

// switches reports whether running as the user needs a change of identity.
func (u User) switches() bool { return os.Getuid() == 0 && u.UID != 0 }

// credential is nil where the command keeps our own identity.
func (u User) credential() *syscall.Credential {
	if !u.switches() {
		return nil
	}
	return &syscall.Credential{Uid: u.UID, Gid: u.GID, Groups: u.Groups}
}

// environ is what a login would set for the user.
func (u User) environ() []string {
	return []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=" + u.Home, "USER=" + u.Name, "LOGNAME=" + u.Name, "SHELL=" + u.Shell,
	}
}

// Environ is a command's environment: what a login sets for the user, over it
// the layers in their order. Of several entries with one name the last stands,
// in the place of the first.
func (u User) Environ(layers ...[]string) []string {
	env := u.environ()
	at := make(map[string]int, len(env))
	for i, e := range env {
		name, _, _ := strings.Cut(e, "=")
		at[name] = i
	}
	for _, layer := range layers {
		for _, e := range layer {
			name, _, _ := strings.Cut(e, "=")
			if i, ok := at[name]; ok {
				env[i] = e
				continue
			}
			at[name] = len(env)
			env = append(env, e)
		}
	}
	return env
}
