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
	"syscall"
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
