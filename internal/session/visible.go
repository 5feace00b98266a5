package session

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/capsem/capsem/internal/child"
	"github.com/capsem/capsem/internal/config"
)

// visible lists the files and folders that a server's jail shows because its
// command line names them: its program, and every argument that is an absolute
// path. Of a file in a package, the package is shown, for a program without its
// parts does not run; of any other file, the file. A folder is shown whole.
//
// What holds the user's home or Capsem's, or lies in Capsem's, is left out,
// whoever names it: it would show the user's keys, or ledgers. A profile that
// needs some of it says so, with `read` and `write`.
func visible(s config.Server, env []string, user, capsem string) []string {
	private := func(path string) bool {
		return path == "/" || within(user, path) || within(capsem, path) || within(path, capsem)
	}
	var paths []string
	add := func(path string) {
		if whole := packageOf(path); !private(whole) {
			paths = append(paths, whole)
		} else if !private(path) {
			paths = append(paths, path)
		}
	}
	for i, name := range append([]string{s.Command}, s.Args...) {
		if i == 0 {
			file, err := child.Lookup(name, env)
			if err != nil {
				continue // its start says so
			}
			name = file
		}
		if !filepath.IsAbs(name) {
			continue
		}
		name = filepath.Clean(name)
		add(name)
		if real, err := filepath.EvalSymlinks(name); err == nil && real != name {
			add(real)
		}
	}
	slices.Sort(paths)
	return slices.Compact(paths)
}

// packageOf is the folder that has to be seen for path to be run, path itself if
// it stands alone: the outermost node_modules, in which packages find each other,
// the installation of a node or a virtual environment of Python whose program it
// is, or the nearest folder with a package's description.
func packageOf(path string) string {
	if before, _, found := strings.Cut(path, "/node_modules/"); found {
		return before + "/node_modules"
	}
	if info, err := os.Stat(path); err != nil || info.IsDir() {
		return path
	}
	if bin := filepath.Dir(path); filepath.Base(bin) == "bin" {
		for _, mark := range []string{"pyvenv.cfg", "lib/node_modules"} {
			if exists(filepath.Join(filepath.Dir(bin), mark)) {
				return filepath.Dir(bin)
			}
		}
	}
	for dir := filepath.Dir(path); dir != "/" && !shared(dir); dir = filepath.Dir(dir) {
		for _, mark := range []string{"package.json", "pyproject.toml", "pyvenv.cfg"} {
			if exists(filepath.Join(dir, mark)) {
				return dir
			}
		}
	}
	return path
}

// shared reports whether anybody may put files into a folder: there a package's
// description says nothing.
func shared(dir string) bool {
	info, err := os.Stat(dir)
	return err != nil || info.Mode().Perm()&0o002 != 0
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// within reports whether path is folder or lies below it.
func within(path, folder string) bool {
	if path == "" || folder == "" {
		return false
	}
	rel, err := filepath.Rel(folder, path)
	return err == nil && filepath.IsLocal(rel)
}

// existing leaves out paths that are not there.
func existing(paths []string) []string {
	return slices.DeleteFunc(slices.Clone(paths), func(p string) bool {
		_, err := os.Stat(p)
		return err != nil
	})
}

// makeServerHome makes the folder that is a server's HOME: it is all of the host
// that the server can write to, unless its profile names more.
func makeServerHome(path string) error { return os.MkdirAll(path, fs.FileMode(0o700)) }
