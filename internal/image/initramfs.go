package image

import (
	"bytes"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/capsem/capsem/internal/image/cpio"
	"github.com/capsem/capsem/internal/image/kernel"
)

// Lists for the guest's init: absolute paths of modules, one a line, each after
// what it depends on. Those of the first are loaded at boot; a module of the
// second needs all of the first, and of the second at most the ones before it.
const (
	moduleList          = "lib/capsem/modules"
	availableModuleList = "lib/capsem/modules.available"
)

// parts are the files from which an initramfs is made.
type parts struct {
	relay, busybox []byte
	kernel         kernelFiles
}

// initramfs lays out a guest's first root file system. Everything in it belongs
// to root but for what the recipe says, and lies in the order of its names, which
// puts a folder before what is in it.
func initramfs(r Recipe, p parts) ([]byte, error) {
	l := make(layout)
	// Without this, Linux lets everybody write to the root of its first file
	// system.
	l.add(cpio.Entry{Name: ".", Mode: cpio.Dir | 0o755})
	l.add(cpio.Entry{Name: "init", Mode: cpio.File | 0o755, Body: p.relay})
	// The kernel opens this before init can mount anything on /dev.
	l.add(cpio.Entry{Name: "dev/console", Mode: cpio.Char | 0o600, Major: 5, Minor: 1})
	for _, f := range r.Folders {
		mode, err := f.mode()
		if err != nil {
			return nil, err
		}
		l.add(cpio.Entry{Name: f.Path, Mode: cpio.Dir | mode, UID: f.Owner, GID: f.Owner})
	}
	for _, f := range r.Files {
		l.add(cpio.Entry{Name: f.Path, Mode: cpio.File | 0o644, Body: []byte(f.Content)})
	}
	for _, link := range r.Links {
		l.add(cpio.Entry{Name: link.Path, Mode: cpio.Symlink | 0o777, Body: []byte(link.Target)})
	}
	l.addBusybox(r.Busybox, p.busybox)
	l.addModules(moduleList, p.kernel.release, p.kernel.modules)
	l.addModules(availableModuleList, p.kernel.release, p.kernel.available)
	return l.archive()
}

// layout collects entries. A name may be added several times; archive reports it.
type layout map[string][]cpio.Entry

func (l layout) add(e cpio.Entry) { l[e.Name] = append(l[e.Name], e) }

func (l layout) addBusybox(b Busybox, program []byte) {
	l.add(cpio.Entry{Name: b.File, Mode: cpio.File | 0o755, Body: program})
	for dir, names := range b.Applets {
		for _, name := range strings.Fields(names) {
			if hasApplet(program, name) {
				l.add(cpio.Entry{Name: path.Join(dir, name), Mode: cpio.Symlink | 0o777, Body: []byte("/" + b.File)})
			}
		}
	}
}

// hasApplet finds a name in busybox's table of applets, whose entries are
// strings that each end with a zero byte. It saves running the program.
func hasApplet(program []byte, name string) bool {
	return bytes.Contains(program, []byte("\x00"+name+"\x00"))
}

func (l layout) addModules(list, release string, modules []kernel.Module) {
	var lines strings.Builder
	for _, m := range modules {
		name := path.Join("lib/modules", release, m.Name+".ko")
		l.add(cpio.Entry{Name: name, Mode: cpio.File | 0o644, Body: m.Object})
		lines.WriteString("/" + name + "\n")
	}
	l.add(cpio.Entry{Name: list, Mode: cpio.File | 0o644, Body: []byte(lines.String())})
}

// archive adds the folders that nothing named, and encodes.
func (l layout) archive() ([]byte, error) {
	for _, name := range slices.Collect(maps.Keys(l)) {
		for dir := path.Dir(name); dir != "." && dir != "/" && len(l[dir]) == 0; dir = path.Dir(dir) {
			l.add(cpio.Entry{Name: dir, Mode: cpio.Dir | 0o755})
		}
	}
	entries := make([]cpio.Entry, 0, len(l))
	for name, same := range l {
		if len(same) > 1 {
			return nil, fmt.Errorf("the recipe has %s more than once", name)
		}
		entries = append(entries, same[0])
	}
	slices.SortFunc(entries, func(a, b cpio.Entry) int { return strings.Compare(a.Name, b.Name) })
	var out bytes.Buffer
	if err := cpio.Write(&out, entries); err != nil {
		return nil, fmt.Errorf("making the initramfs: %w", err)
	}
	return out.Bytes(), nil
}
