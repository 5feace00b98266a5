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
// What holds one of the private folders is left out, whoever names it: it would
// show the user's keys, or other VMs' ledgers. A profile that needs some of it
// says which, with `read` and `write`.
func visible(s config.Server, env, private []string) []string {
	var paths []string
	for _, name := range append([]string{s.Command}, s.Args...) {
		if name == s.Command {
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
		paths = append(paths, packageOf(name))
		if real, err := filepath.EvalSymlinks(name); err == nil && real != name {
			paths = append(paths, packageOf(real))
		}
	}
	paths = slices.DeleteFunc(paths, func(path string) bool {
		return path == "/" || slices.ContainsFunc(private, func(p string) bool { return within(p, path) })
	})
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
	for dir := filepath.Dir(path); dir != "/"; dir = filepath.Dir(dir) {
		for _, mark := range []string{"package.json", "pyproject.toml", "pyvenv.cfg"} {
			if exists(filepath.Join(dir, mark)) {
				return dir
			}
		}
	}
	return path
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// within reports whether path is folder or lies below it.
func within(path, folder string) bool {
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
