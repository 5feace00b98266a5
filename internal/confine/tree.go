package confine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Access is what may be done with a file, or with everything in a folder.
type Access int

// The kinds of access.
const (
	// Read shows something to be read and executed.
	Read Access = iota
	// Write shows something to be changed too.
	Write
	// Device shows a device node to be opened for reading and writing.
	Device
)

// Shown is a file or folder of the host that a program sees, at the path that it
// has on the host. Of a folder it sees everything below, other file systems
// included.
type Shown struct {
	Path   string
	Access Access
	// Optional says that it may be missing on the host.
	Optional bool
}

// View is the whole file system that a program sees.
type View struct {
	Shown []Shown
	// Files are small files that exist for the program alone, by path.
	Files map[string]string
	// Temp is the size of the program's own /tmp in bytes, 0 for none.
	Temp int64
	// Proc gives it a /proc of its pid namespace, not to be written to.
	Proc bool
}

// stage is where a tree is built: a folder that every host has. What it holds on
// the host is opened before it is covered.
const stage = "/tmp"

// maxTempFiles bounds how many files a program's own /tmp takes.
const maxTempFiles = 16 << 10

// opened is one Shown, cloned out of the host's tree.
type opened struct {
	Shown
	fd     int
	folder bool
}

// EnterTree replaces the root of this process, which must be alone in its mount
// namespace and have CAP_SYS_ADMIN there, by a tree with the view in it. What is
// not in the view is not reachable by any path; the tree itself cannot be
// written to. Files that are open stay open.
func EnterTree(v View) (err error) {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("detaching mounts: %w", err)
	}
	clones, err := cloneAll(v.Shown)
	defer func() {
		for _, c := range clones {
			err = errors.Join(err, unix.Close(c.fd))
		}
	}()
	if err != nil {
		return err
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount("tmpfs", stage, "tmpfs", flags, "size=1m,nr_inodes=1k,mode=755"); err != nil {
		return fmt.Errorf("mounting an empty root: %w", err)
	}
	if err := unix.Chdir(stage); err != nil {
		return fmt.Errorf("entering the new root: %w", err)
	}
	if v.Temp > 0 {
		options := "mode=1777,size=" + strconv.FormatInt(v.Temp, 10) + ",nr_inodes=" + strconv.Itoa(maxTempFiles)
		if err := mountNew("tmpfs", "tmp", options); err != nil {
			return err
		}
	}
	if v.Proc {
		if err := mountNew("proc", "proc", ""); err != nil {
			return fmt.Errorf("%w; a container that covers parts of /proc forbids it", err)
		}
		if err := restrict("proc", unix.MOUNT_ATTR_RDONLY); err != nil {
			return err
		}
	}
	for _, c := range clones {
		if err := c.attach(); err != nil {
			return err
		}
	}
	if err := fill(v); err != nil {
		return err
	}
	return enter()
}

// cloneAll takes a detached copy of each mount that is shown, parents first.
func cloneAll(shown []Shown) (clones []opened, err error) {
	shown = slices.Clone(shown)
	slices.SortStableFunc(shown, func(a, b Shown) int { return strings.Compare(a.Path, b.Path) })
	for _, s := range shown {
		if !filepath.IsAbs(s.Path) || filepath.Clean(s.Path) != s.Path || s.Path == "/" {
			return clones, fmt.Errorf("showing %q: it is no clean absolute path below the root", s.Path)
		}
		fd, err := unix.OpenTree(unix.AT_FDCWD, s.Path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
		if s.Optional && (errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENOTDIR)) {
			continue
		}
		if err != nil {
			return clones, fmt.Errorf("showing %s: %w", s.Path, err)
		}
		c := opened{Shown: s, fd: fd}
		clones = append(clones, c)
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return clones, fmt.Errorf("showing %s: %w", s.Path, err)
		}
		clones[len(clones)-1].folder = st.Mode&unix.S_IFMT == unix.S_IFDIR
	}
	return clones, nil
}

// attach puts a clone in its place below the working directory.
func (c opened) attach() error {
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID}
	switch c.Access {
	case Read:
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NODEV
	case Write:
		attr.Attr_set |= unix.MOUNT_ATTR_NODEV
	case Device:
		attr.Attr_set |= unix.MOUNT_ATTR_NOEXEC
	}
	if err := unix.MountSetattr(c.fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		return fmt.Errorf("showing %s: restricting the mount: %w", c.Path, err)
	}
	place := strings.TrimPrefix(c.Path, "/")
	if err := makePlace(place, c.folder); err != nil {
		return fmt.Errorf("showing %s: making its place: %w", c.Path, err)
	}
	if err := unix.MoveMount(c.fd, "", unix.AT_FDCWD, place, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("showing %s: %w", c.Path, err)
	}
	return nil
}

// makePlace makes what a mount is put on, unless a parent that is shown has it.
func makePlace(place string, folder bool) error {
	if _, err := os.Lstat(place); err == nil {
		return nil
	}
	if folder {
		return os.MkdirAll(place, 0o755)
	}
	if err := os.MkdirAll(filepath.Dir(place), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(place, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o444)
	if err != nil {
		return err
	}
	return f.Close()
}

func mountNew(kind, place, options string) error {
	if err := os.MkdirAll(place, 0o755); err != nil {
		return fmt.Errorf("mounting /%s: %w", place, err)
	}
	flags := uintptr(unix.MS_NOSUID | unix.MS_NODEV)
	if kind == "proc" {
		flags |= unix.MS_NOEXEC
	}
	if err := unix.Mount(kind, place, kind, flags, options); err != nil {
		return fmt.Errorf("mounting /%s: %w", place, err)
	}
	return nil
}

// restrict adds attributes to one mount.
func restrict(place string, attributes uint64) error {
	attr := unix.MountAttr{Attr_set: attributes}
	if err := unix.MountSetattr(unix.AT_FDCWD, place, 0, &attr); err != nil {
		return fmt.Errorf("restricting the mount /%s: %w", strings.TrimPrefix(place, "."), err)
	}
	return nil
}

// fill writes the view's own files, and the links that programs expect in /dev.
func fill(v View) error {
	for path, text := range v.Files {
		place := strings.TrimPrefix(path, "/")
		if err := os.MkdirAll(filepath.Dir(place), 0o755); err != nil {
			return fmt.Errorf("making %s: %w", path, err)
		}
		if err := os.WriteFile(place, []byte(text), 0o444); err != nil {
			return fmt.Errorf("making %s: %w", path, err)
		}
	}
	if !v.Proc {
		return nil
	}
	if err := os.MkdirAll("dev", 0o755); err != nil {
		return fmt.Errorf("making /dev: %w", err)
	}
	for name, target := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, "dev/"+name); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("making /dev/%s: %w", name, err)
		}
	}
	return nil
}

// enter makes the working directory, which is a mount, the root, and lets go of
// the old one.
func enter() error {
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("changing the root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("letting go of the old root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return fmt.Errorf("entering the new root: %w", err)
	}
	return restrict("/", unix.MOUNT_ATTR_RDONLY)
}
