package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"github.com/capsem/capsem/internal/image/debian"
	"github.com/capsem/capsem/internal/image/kernel"
)

// Options say what to build.
type Options struct {
	// Name is the recipe's name and the image's.
	Name string
	// Recipes has <name>/recipe.toml.
	Recipes fs.FS
	// Images is the folder of images, and Cache one for downloaded packages.
	// Both are made where they are missing.
	Images, Cache string
	// Relay is the path of the guest's program, a static ELF executable. "" is
	// the file guest-relay beside the running program.
	Relay string
	// Progress is told, in words and on Build's goroutine, what begins that may
	// take longer than a second. It may be nil.
	Progress func(step string)
}

// Build builds an image and makes it the current one of its name. What it needs
// of a distribution comes through apt; with the packages in the cache, no network
// is needed. Building the same inputs again gives the same image.
//
// The kernel is taken from the current image if that has the same kernel package
// and recipe and verifies, which saves unpacking it.
func Build(ctx context.Context, o Options) (m Manifest, err error) {
	b := &builder{Options: o}
	if b.Progress == nil {
		b.Progress = func(string) {}
	}
	if b.recipe, b.recipeSHA256, err = readRecipe(o.Recipes, o.Name); err != nil {
		return Manifest{}, err
	}
	if b.recipe.Architecture != runtime.GOARCH {
		return Manifest{}, fmt.Errorf("building image %s: it is for %s, and this machine is %s", o.Name, b.recipe.Architecture, runtime.GOARCH)
	}
	relay, err := readRelay(o.Relay)
	if err != nil {
		return Manifest{}, fmt.Errorf("building image %s: %w", o.Name, err)
	}
	if b.archive, err = debian.Open(filepath.Join(o.Cache, "packages")); err != nil {
		return Manifest{}, fmt.Errorf("building image %s: %w", o.Name, err)
	}
	s, err := openStore(o.Images, o.Name)
	if err != nil {
		return Manifest{}, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.clean(); err != nil {
		return Manifest{}, err
	}
	src, err := b.sources(ctx)
	if err != nil {
		return Manifest{}, fmt.Errorf("building image %s: %w", o.Name, err)
	}
	m, content, err := b.assemble(src, relay)
	if err != nil {
		return Manifest{}, fmt.Errorf("building image %s: %w", o.Name, err)
	}
	b.Progress("writing the image")
	if err := s.publish(o.Images, m, content); err != nil {
		return Manifest{}, fmt.Errorf("building image %s: %w", o.Name, err)
	}
	return m, nil
}

type builder struct {
	Options
	recipe       Recipe
	recipeSHA256 string
	archive      *debian.Archive
}

// sources are an image's ingredients, unpacked.
type sources struct {
	packages []debian.Package
	kernel   kernelFiles
	busybox  []byte
}

type kernelFiles struct {
	release string
	vmlinux []byte
	// modules are loaded at boot, available ones can be after that.
	modules, available []kernel.Module
}

// sources gets everything that comes from the distribution. Package lists that
// are missing, or older than the archive they describe, are brought up to date if
// this process may do that.
func (b *builder) sources(ctx context.Context) (sources, error) {
	src, err := b.fetch(ctx)
	if err == nil || ctx.Err() != nil || !errors.Is(err, debian.ErrUnknown) && !errors.Is(err, debian.ErrDownload) {
		return src, err
	}
	if os.Geteuid() != 0 {
		return sources{}, fmt.Errorf("%w: if the network works, the package lists are missing or old: run \"sudo apt-get update\" on Debian 12 or later, then \"capsem image build %s\"", err, b.Name)
	}
	b.Progress("updating the package lists")
	if updateErr := b.archive.Update(ctx); updateErr != nil {
		return sources{}, errors.Join(err, updateErr)
	}
	if src, err = b.fetch(ctx); errors.Is(err, debian.ErrUnknown) || errors.Is(err, debian.ErrDownload) {
		err = fmt.Errorf("%w: images are built from the packages of Debian 12 or later: check the network and apt's sources", err)
	}
	return src, err
}

func (b *builder) fetch(ctx context.Context) (sources, error) {
	b.Progress("looking up packages")
	meta, err := b.archive.Lookup(ctx, b.recipe.Kernel)
	if err != nil {
		return sources{}, err
	}
	name, err := kernelPackage(meta)
	if err != nil {
		return sources{}, err
	}
	kernelPkg, err := b.lookup(ctx, name)
	if err != nil {
		return sources{}, err
	}
	busyboxPkg, err := b.lookup(ctx, b.recipe.Busybox.Package)
	if err != nil {
		return sources{}, err
	}
	src := sources{packages: []debian.Package{kernelPkg, busyboxPkg}}
	if src.busybox, err = b.unpackBusybox(ctx, busyboxPkg); err != nil {
		return sources{}, err
	}
	if kept, ok := b.reuse(kernelPkg); ok {
		src.kernel = kept
		return src, nil
	}
	src.kernel, err = b.unpackKernel(ctx, kernelPkg)
	return src, err
}

func (b *builder) lookup(ctx context.Context, name string) (debian.Package, error) {
	p, err := b.archive.Lookup(ctx, name)
	if err == nil && p.Architecture != b.recipe.Architecture {
		return debian.Package{}, fmt.Errorf("package %s is for %s, the image for %s", name, p.Architecture, b.recipe.Architecture)
	}
	return p, err
}

var kernelName = regexp.MustCompile(`^linux-image-[0-9]`)

// kernelPackage is the one kernel that a package which stands for the newest
// depends on.
func kernelPackage(meta debian.Package) (string, error) {
	found := ""
	for dep := range strings.SplitSeq(meta.Depends, ",") {
		name, _, _ := strings.Cut(strings.TrimSpace(dep), " ")
		if !kernelName.MatchString(name) {
			continue
		}
		if found != "" {
			return "", fmt.Errorf("package %s depends on two kernels: %s and %s", meta.Name, found, name)
		}
		found = name
	}
	if found == "" {
		return "", fmt.Errorf("package %s depends on no kernel: it depends on %.200q", meta.Name, meta.Depends)
	}
	return found, nil
}

// open returns a verified package file.
func (b *builder) open(ctx context.Context, p debian.Package) (*os.File, error) {
	if !b.archive.Cached(p) {
		const mega = 1e6
		b.Progress(fmt.Sprintf("downloading %s %s (%.1f MB)", p.Name, p.Version, float64(p.Size)/mega))
	}
	return b.archive.File(ctx, p)
}

func (b *builder) unpackBusybox(ctx context.Context, p debian.Package) ([]byte, error) {
	deb, err := b.open(ctx, p)
	if err != nil {
		return nil, err
	}
	defer deb.Close() // a file that was only read
	var program []byte
	wants := func(name string) bool { return name == b.recipe.Busybox.File || name == "usr/"+b.recipe.Busybox.File }
	if err := debian.Files(ctx, deb, wants, func(_ string, body []byte) error { program = body; return nil }); err != nil {
		return nil, fmt.Errorf("unpacking %s %s: %w", p.Name, p.Version, err)
	}
	if program == nil {
		return nil, fmt.Errorf("unpacking %s %s: it has no %s", p.Name, p.Version, b.recipe.Busybox.File)
	}
	if err := checkStatic(program); err != nil {
		return nil, fmt.Errorf("the %s of %s %s cannot run in a guest: %w", b.recipe.Busybox.File, p.Name, p.Version, err)
	}
	return program, nil
}

func (b *builder) unpackKernel(ctx context.Context, p debian.Package) (kernelFiles, error) {
	deb, err := b.open(ctx, p)
	if err != nil {
		return kernelFiles{}, err
	}
	defer deb.Close() // a file that was only read
	b.Progress("unpacking " + p.Name)
	var tree kernel.Tree
	if err := debian.Files(ctx, deb, kernel.Wants, tree.Add); err != nil {
		return kernelFiles{}, fmt.Errorf("unpacking %s %s: %w", p.Name, p.Version, err)
	}
	vmlinux, err := tree.Vmlinux()
	if err != nil {
		return kernelFiles{}, fmt.Errorf("unpacking %s %s: %w", p.Name, p.Version, err)
	}
	boot, err := tree.Modules(b.recipe.Modules)
	if err != nil {
		return kernelFiles{}, fmt.Errorf("unpacking %s %s: %w", p.Name, p.Version, err)
	}
	// The order is that of the names, so all begins with those of boot.
	all, err := tree.Modules(slices.Concat(b.recipe.Modules, b.recipe.AvailableModules))
	if err != nil {
		return kernelFiles{}, fmt.Errorf("unpacking %s %s: %w", p.Name, p.Version, err)
	}
	return kernelFiles{tree.Release(), vmlinux, boot, all[len(boot):]}, nil
}

// reuse reads the kernel of the current image if unpacking p would give the
// same. It says no for whatever reason it cannot: then p is unpacked.
func (b *builder) reuse(p debian.Package) (kernelFiles, bool) {
	ref, err := resolve(b.Images, Ref{Name: b.Name})
	if err != nil {
		return kernelFiles{}, false
	}
	dir, m, err := openDir(b.Images, ref)
	if err != nil {
		return kernelFiles{}, false
	}
	defer dir.Close() // a folder that was only read
	same := func(old Package) bool { return old.Name == p.Name && old.SHA256 == p.SHA256 }
	if m.RecipeSHA256 != b.recipeSHA256 || !slices.ContainsFunc(m.Packages, same) {
		return kernelFiles{}, false
	}
	k := kernelFiles{release: m.KernelRelease}
	if k.vmlinux, err = readVerified(dir, m, KernelFile); err != nil {
		return kernelFiles{}, false
	}
	if k.modules, err = readModules(dir, m, m.Modules); err != nil {
		return kernelFiles{}, false
	}
	if k.available, err = readModules(dir, m, m.AvailableModules); err != nil {
		return kernelFiles{}, false
	}
	return k, true
}

func readModules(dir *os.Root, m Manifest, names []string) ([]kernel.Module, error) {
	var modules []kernel.Module
	for _, name := range names {
		object, err := readVerified(dir, m, name)
		if err != nil {
			return nil, err
		}
		modules = append(modules, kernel.Module{Name: strings.TrimSuffix(filepath.Base(name), ".ko"), Object: object})
	}
	return modules, nil
}

func readVerified(dir *os.Root, m Manifest, name string) ([]byte, error) {
	want, ok := m.file(name)
	if !ok {
		return nil, fmt.Errorf("the manifest has no %s", name)
	}
	b, err := dir.ReadFile(name)
	if err != nil {
		return nil, err
	}
	if sum(b) != want.SHA256 {
		return nil, fmt.Errorf("%s was altered", name)
	}
	return b, nil
}

// assemble makes an image's files, and the manifest that describes them.
func (b *builder) assemble(src sources, relay []byte) (Manifest, map[string][]byte, error) {
	initrd, err := initramfs(b.recipe, parts{relay, src.busybox, src.kernel})
	if err != nil {
		return Manifest{}, nil, err
	}
	m := Manifest{
		Format:        Format,
		Name:          b.Name,
		Architecture:  b.recipe.Architecture,
		KernelRelease: src.kernel.release,
		RecipeSHA256:  b.recipeSHA256,
		RelaySHA256:   sum(relay),
	}
	for _, p := range src.packages {
		m.Packages = append(m.Packages, Package{p.Name, p.Version, p.Architecture, p.SHA256})
	}
	content := map[string][]byte{KernelFile: src.kernel.vmlinux, InitrdFile: initrd}
	addModules := func(modules []kernel.Module) (names []string) {
		for _, module := range modules {
			name := modulesDir + module.Name + ".ko"
			content[name] = module.Object
			names = append(names, name)
		}
		return names
	}
	m.Modules, m.AvailableModules = addModules(src.kernel.modules), addModules(src.kernel.available)
	for name, body := range content {
		m.Files = append(m.Files, File{name, int64(len(body)), sum(body)})
	}
	slices.SortFunc(m.Files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	return m, content, m.check()
}
