package kernel

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
)

// maxModule bounds one unpacked module; the largest of Debian's has 7 MB.
const maxModule = 64 << 20

// Tree is the content of a kernel package: files are offered with Add, by their
// path, in any order. The zero value is an empty tree. Its methods are for one
// goroutine.
type Tree struct {
	release string            // of the bzImage, "" before it was added
	image   []byte            // the bzImage
	files   map[string][]byte // by name of module, as shipped
	origin  map[string]string // by name of module, the release whose folder held it
	builtin map[string]bool   // names of modules that are part of the kernel itself
}

// A package of Debian 12 has lib/modules, one of Debian 13 usr/lib/modules, with
// xz-compressed modules.
var (
	imagePath   = regexp.MustCompile(`^boot/vmlinuz-([0-9][0-9A-Za-z.+~_-]*)$`)
	modulePath  = regexp.MustCompile(`^(?:usr/)?lib/modules/([0-9][0-9A-Za-z.+~_-]*)/kernel/(?:.*/)?([0-9A-Za-z_-]+)\.ko(?:\.gz|\.xz|\.zst)?$`)
	builtinPath = regexp.MustCompile(`^(?:usr/)?lib/modules/[^/]+/modules\.builtin$`)
)

// Wants says whether a file of this path is part of a tree. Paths have no
// leading slash or dot.
func Wants(name string) bool {
	return imagePath.MatchString(name) || modulePath.MatchString(name) || builtinPath.MatchString(name)
}

// Add gives the tree a file that it Wants, and keeps body.
func (t *Tree) Add(name string, body []byte) error {
	if m := imagePath.FindStringSubmatch(name); m != nil {
		if t.image != nil {
			return fmt.Errorf("a kernel package with two kernels: %s and %s", t.release, m[1])
		}
		t.release, t.image = m[1], body
		return nil
	}
	if m := modulePath.FindStringSubmatch(name); m != nil {
		if t.files == nil {
			t.files, t.origin = make(map[string][]byte), make(map[string]string)
		}
		mod := moduleName(m[2])
		if _, ok := t.files[mod]; ok {
			return fmt.Errorf("a kernel package with two modules of the name %s", mod)
		}
		t.files[mod], t.origin[mod] = body, m[1]
		return nil
	}
	if !builtinPath.MatchString(name) {
		return fmt.Errorf("%s is no part of a kernel package that is wanted", name)
	}
	if t.builtin == nil {
		t.builtin = make(map[string]bool)
	}
	for line := range strings.Lines(string(body)) {
		t.builtin[moduleName(strings.TrimSuffix(path.Base(strings.TrimSpace(line)), ".ko"))] = true
	}
	return nil
}

// moduleName is a module's name in the one of its two spellings that the kernel
// uses itself.
func moduleName(s string) string { return strings.ReplaceAll(s, "-", "_") }

// Release is the kernel's release, as `uname -r` shows it in the guest.
func (t *Tree) Release() string { return t.release }

// Vmlinux unpacks the tree's kernel.
func (t *Tree) Vmlinux() ([]byte, error) {
	if t.image == nil {
		return nil, errors.New("the kernel package has no boot/vmlinuz-*")
	}
	return Vmlinux(t.image)
}

// Module is a loadable part of a kernel.
type Module struct {
	// Name is the module's name without a suffix, in underscores.
	Name string
	// Object is the uncompressed .ko file, with the signature at its end.
	Object []byte
}

// Modules returns the named modules and all that they depend on, each after what
// it depends on, otherwise in the order of names. Names of what is built into
// the kernel are skipped.
func (t *Tree) Modules(names []string) ([]Module, error) {
	w := walk{tree: t, state: make(map[string]visit)}
	for _, name := range names {
		if err := w.add(moduleName(name), "the recipe"); err != nil {
			return nil, err
		}
	}
	return w.out, nil
}

type visit int

const (
	unseen visit = iota
	entered
	done
)

// walk is a depth-first visit of the dependency graph.
type walk struct {
	tree  *Tree
	state map[string]visit
	out   []Module
}

func (w *walk) add(name, by string) error {
	switch w.state[name] {
	case done:
		return nil
	case entered:
		return fmt.Errorf("kernel module %s depends on itself, by way of %s", name, by)
	case unseen:
	}
	w.state[name] = entered
	file, ok := w.tree.files[name]
	if !ok {
		if w.tree.builtin[name] {
			w.state[name] = done
			return nil
		}
		return fmt.Errorf("kernel %s has no module %s, which %s needs", w.tree.release, name, by)
	}
	object, info, err := openModule(file)
	if err != nil {
		return fmt.Errorf("reading kernel module %s: %w", name, err)
	}
	if w.tree.origin[name] != w.tree.release || info.release() != w.tree.release {
		return fmt.Errorf("kernel module %s is for release %q, the kernel's is %q", name, info.release(), w.tree.release)
	}
	for _, dep := range info.depends() {
		if err := w.add(moduleName(dep), name); err != nil {
			return err
		}
	}
	w.state[name] = done
	w.out = append(w.out, Module{Name: name, Object: object})
	return nil
}

// modinfo is a module's .modinfo section: key=value strings, by key.
type modinfo map[string]string

func (m modinfo) depends() []string {
	return slices.DeleteFunc(strings.Split(m["depends"], ","), func(s string) bool { return s == "" })
}

// release is the kernel that the module was built for, the first word of its
// version magic.
func (m modinfo) release() string {
	release, _, _ := strings.Cut(m["vermagic"], " ")
	return release
}

// openModule decompresses a module where needed and reads what it says about
// itself.
func openModule(file []byte) ([]byte, modinfo, error) {
	object := file
	if !bytes.HasPrefix(file, []byte(elf.ELFMAG)) {
		var err error
		if object, err = expand(file, maxModule); err != nil {
			return nil, nil, err
		}
	}
	f, err := elf.NewFile(bytes.NewReader(object))
	if err != nil {
		return nil, nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, nil, errors.New("it has no .modinfo section")
	}
	data, err := section.Data()
	if err != nil {
		return nil, nil, fmt.Errorf("reading its .modinfo section: %w", err)
	}
	info := make(modinfo)
	for s := range strings.SplitSeq(string(data), "\x00") {
		key, value, ok := strings.Cut(s, "=")
		if _, seen := info[key]; ok && !seen {
			info[key] = value
		}
	}
	return object, info, nil
}
