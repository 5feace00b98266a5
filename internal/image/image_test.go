package image

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/images"
	"github.com/capsem/capsem/internal/image/cpio"
	"github.com/capsem/capsem/internal/image/debian"
	"github.com/capsem/capsem/internal/image/kernel"
)

// program is an ELF executable that consists of a header, and of one program
// header if it has a type.
func program(t *testing.T, class byte, machine uint16, segment uint32) []byte {
	t.Helper()
	var b bytes.Buffer
	progs := uint16(0)
	if segment != 0 {
		progs = 1
	}
	for _, v := range []any{
		[]byte{0x7f, 'E', 'L', 'F', class, 1, 1, 0},
		uint64(0), uint16(2), machine, uint32(1), uint64(0), uint64(64), uint64(0),
		uint32(0), uint16(64), uint16(56), progs, uint16(64), uint16(0), uint16(0),
		segment, uint32(0), uint64(0), uint64(0), uint64(0), uint64(0), uint64(0), uint64(0),
	} {
		if err := binary.Write(&b, binary.LittleEndian, v); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

func static(t *testing.T) []byte { t.Helper(); return program(t, 2, 62, 0) }

// ingredients are a small image's, which has the recipe of tiny.
func ingredients(t *testing.T) (*builder, sources) {
	t.Helper()
	recipe, digest, err := readRecipe(images.FS, "tiny")
	if err != nil {
		t.Fatal(err)
	}
	src := sources{
		packages: []debian.Package{{Name: "linux-image-6.1.0", Version: "6.1.1-1", Architecture: "amd64", SHA256: strings.Repeat("a", 64)}},
		busybox:  []byte("busybox\x00sh\x00awk\x00[\x00"),
		kernel: kernelFiles{
			release:   "6.1.0",
			vmlinux:   bytes.Repeat([]byte("kernel"), 50_000),
			modules:   []kernel.Module{{Name: "vsock", Object: []byte("vsock object")}},
			available: []kernel.Module{{Name: "fuse", Object: []byte("fuse object")}, {Name: "aufs", Object: []byte("aufs object")}},
		},
	}
	return &builder{Options: Options{Name: "tiny"}, recipe: recipe, recipeSHA256: digest}, src
}

// publish builds a small image into a folder of images.
func publish(t *testing.T, dir string, relay []byte) Manifest {
	t.Helper()
	m, err := tryPublish(t, dir, relay)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func tryPublish(t *testing.T, dir string, relay []byte) (Manifest, error) {
	t.Helper()
	b, src := ingredients(t)
	m, content, err := b.assemble(src, relay)
	if err != nil {
		t.Fatal(err)
	}
	s, err := openStore(dir, m.Name)
	if err != nil {
		return m, err
	}
	err = s.publish(dir, m, content)
	return m, errors.Join(err, s.close())
}

func ref(t *testing.T, m Manifest) Ref {
	t.Helper()
	r, err := m.Ref()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestReferencesAreReadAndNothingElse(t *testing.T) {
	digest := strings.Repeat("0a", 32)
	for _, s := range []string{"tiny", "my.image-2_x", "tiny@sha256:" + digest} {
		r, err := ParseRef(s)
		if err != nil || r.String() != s {
			t.Errorf("%q gives %v, %v", s, r, err)
		}
	}
	for _, s := range []string{"", "..", "../x", "a/b", "Tiny", ".lock", "tiny@", "tiny@sha256:", "tiny@md5:" + digest, "tiny@sha256:" + digest[1:], "tiny@sha256:../" + digest[3:], "tiny@sha256:" + strings.ToUpper(digest)} {
		if r, err := ParseRef(s); err == nil {
			t.Errorf("%q was read as %v", s, r)
		}
	}
}

func TestSameInputsGiveTheSameImage(t *testing.T) {
	a, b := publish(t, t.TempDir(), static(t)), publish(t, t.TempDir(), static(t))
	if d := cmp.Diff(a, b); d != "" {
		t.Errorf("two builds of the same inputs (-first +second):\n%s", d)
	}
	other := publish(t, t.TempDir(), append(static(t), "newer"...))
	if ref(t, a) == ref(t, other) {
		t.Error("another guest program gave the same image")
	}
}

func TestInitramfsHasWhatAGuestNeeds(t *testing.T) {
	b, src := ingredients(t)
	raw, err := initramfs(b.recipe, parts{relay: []byte("relay"), busybox: src.busybox, kernel: src.kernel})
	if err != nil {
		t.Fatal(err)
	}
	entries, err := cpio.Read(raw)
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]cpio.Entry)
	for _, e := range entries {
		got[e.Name] = e
		if parent := filepath.Dir(e.Name); got[parent].Mode&cpio.TypeMask != cpio.Dir {
			t.Errorf("%s comes before its folder", e.Name)
		}
	}
	for name, want := range map[string]cpio.Entry{
		".":                            {Mode: cpio.Dir | 0o755},
		"init":                         {Mode: cpio.File | 0o755, Body: []byte("relay")},
		"bin/busybox":                  {Mode: cpio.File | 0o755, Body: src.busybox},
		"bin/sh":                       {Mode: cpio.Symlink | 0o777, Body: []byte("/bin/busybox")},
		"usr/bin/[":                    {Mode: cpio.Symlink | 0o777, Body: []byte("/bin/busybox")},
		"lib/capsem/modules":           {Mode: cpio.File | 0o644, Body: []byte("/lib/modules/6.1.0/vsock.ko\n")},
		"lib/capsem/modules.available": {Mode: cpio.File | 0o644, Body: []byte("/lib/modules/6.1.0/fuse.ko\n/lib/modules/6.1.0/aufs.ko\n")},
		"lib/modules/6.1.0/vsock.ko":   {Mode: cpio.File | 0o644, Body: []byte("vsock object")},
		"dev/console":                  {Mode: cpio.Char | 0o600, Major: 5, Minor: 1},
		"tmp":                          {Mode: cpio.Dir | 0o1777},
		"root":                         {Mode: cpio.Dir | 0o700},
		"workspace":                    {Mode: cpio.Dir | 0o755, UID: 1000, GID: 1000},
		"etc/resolv.conf":              {Mode: cpio.File | 0o644, Body: []byte{}},
	} {
		want.Name = name
		if d := cmp.Diff(want, got[name], cmp.Transformer("text", func(b []byte) string { return string(b) })); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
	if _, ok := got["bin/ls"]; ok {
		t.Error("bin/ls is linked to a busybox that does not know it")
	}
	if !strings.Contains(string(got["etc/passwd"].Body), "capsem:x:1000:1000:") {
		t.Errorf("etc/passwd has no user capsem:\n%s", got["etc/passwd"].Body)
	}
}

func TestRecipeThatNamesAFileTwiceIsRefused(t *testing.T) {
	r := Recipe{Busybox: Busybox{File: "bin/busybox"}, Links: []Link{{"init", "/bin/sh"}}}
	if _, err := initramfs(r, parts{}); err == nil || !strings.Contains(err.Error(), "init more than once") {
		t.Errorf("error is %v", err)
	}
}

func TestUnknownKeysOfARecipeAreRefused(t *testing.T) {
	fs := fstest.MapFS{"x/recipe.toml": {Data: []byte("kernle = 'typo'\n")}}
	if _, _, err := readRecipe(fs, "x"); err == nil {
		t.Error("a recipe with a key that nothing reads was accepted")
	}
	if _, _, err := readRecipe(fs, "y"); err == nil || !strings.Contains(err.Error(), "no recipe for an image") {
		t.Errorf("unknown recipe: error is %v", err)
	}
}

func TestOpenedImageIsWhatWasBuilt(t *testing.T) {
	dir := t.TempDir()
	m := publish(t, dir, static(t))
	for _, r := range []Ref{{Name: "tiny"}, ref(t, m)} {
		i, err := Open(dir, r)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(m, i.Manifest); d != "" {
			t.Errorf("manifest (-want +got):\n%s", d)
		}
		body := make([]byte, 6)
		if _, err := i.Kernel.Read(body); err != nil || string(body) != "kernel" {
			t.Errorf("the kernel, read from where it was opened, begins with %q, %v", body, err)
		}
		if err := i.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestMissingImageSaysHowToBuildIt(t *testing.T) {
	dir := t.TempDir()
	check := func(r Ref) {
		t.Helper()
		_, err := Open(dir, r)
		if !errors.Is(err, ErrNotBuilt) || !strings.Contains(err.Error(), "capsem image build tiny") {
			t.Errorf("%s: error is %v", r, err)
		}
	}
	check(Ref{Name: "tiny"})
	publish(t, dir, static(t))
	check(Ref{"tiny", strings.Repeat("0", 64)})
}

// replace puts other content in the place of a file that is read-only.
func replace(t *testing.T, name string, body []byte) {
	t.Helper()
	if err := os.Remove(name); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, body, 0o400); err != nil {
		t.Fatal(err)
	}
}

func TestOneAlteredByteIsFound(t *testing.T) {
	for _, name := range []string{KernelFile, InitrdFile, ManifestFile} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			r := ref(t, publish(t, dir, static(t)))
			file := filepath.Join(dir, "tiny", r.Digest, name)
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			was := sum(b)
			b[len(b)-2] ^= 1
			replace(t, file, b)
			_, err = Open(dir, Ref{Name: "tiny"})
			var altered *AlteredError
			if !errors.As(err, &altered) {
				t.Fatalf("error is %v, want an AlteredError", err)
			}
			want := &AlteredError{Image: r, File: name, Want: "SHA-256 " + was, Got: "SHA-256 " + sum(b)}
			if d := cmp.Diff(want, altered); d != "" {
				t.Errorf("error (-want +got):\n%s", d)
			}
			for _, word := range []string{name, was, sum(b), "capsem image build tiny"} {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("error %q does not say %q", err, word)
				}
			}
		})
	}
}

func TestFilesThatAreNotWhatWasBuiltAreFound(t *testing.T) {
	tests := map[string]struct {
		damage func(t *testing.T, dir, file string)
		want   string
	}{
		"cut short": {func(t *testing.T, _, file string) { replace(t, file, []byte("kernel")) }, "vmlinux has 6 bytes"},
		"removed": {func(t *testing.T, _, file string) {
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
		}, "vmlinux has been removed"},
		"link to outside": {func(t *testing.T, dir, file string) {
			outside := filepath.Join(dir, "outside")
			if err := os.Rename(file, outside); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(outside, file); err != nil {
				t.Fatal(err)
			}
		}, "path escapes"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			r := ref(t, publish(t, dir, static(t)))
			test.damage(t, dir, filepath.Join(dir, "tiny", r.Digest, KernelFile))
			if _, err := Open(dir, r); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error is %v, want one with %q", err, test.want)
			}
		})
	}
}

func TestVerifyChecksWhatABootDoesNotNeed(t *testing.T) {
	dir := t.TempDir()
	r := ref(t, publish(t, dir, static(t)))
	if _, err := Verify(dir, r); err != nil {
		t.Fatal(err)
	}
	replace(t, filepath.Join(dir, "tiny", r.Digest, "modules/fuse.ko"), []byte("fuse 0bject"))
	var altered *AlteredError
	if _, err := Verify(dir, r); !errors.As(err, &altered) || altered.File != "modules/fuse.ko" {
		t.Errorf("error is %v, want one about modules/fuse.ko", err)
	}
}

func TestDamagedPointerIsNotFollowed(t *testing.T) {
	dir := t.TempDir()
	publish(t, dir, static(t))
	for _, content := range []string{"", "sha256:", "sha256:../../x\n", strings.Repeat("a", 64)} {
		replace(t, filepath.Join(dir, "tiny", currentFile), []byte(content))
		var altered *AlteredError
		if _, err := Open(dir, Ref{Name: "tiny"}); !errors.As(err, &altered) || altered.File != currentFile {
			t.Errorf("pointer %q: error is %v", content, err)
		}
	}
}

func TestManifestOfANewerVersionSaysSo(t *testing.T) {
	dir := t.TempDir()
	b := []byte("{\n  \"format\": 2,\n  \"novelty\": true\n}\n")
	r := Ref{"tiny", sum(b)}
	if err := os.MkdirAll(filepath.Join(dir, "tiny", r.Digest), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "tiny", r.Digest, ManifestFile), b, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, r); err == nil || !strings.Contains(err.Error(), "newer version of Capsem (format 2") {
		t.Errorf("error is %v", err)
	}
	list, err := List(dir)
	if err != nil || len(list) != 1 || list[0].Err == nil {
		t.Errorf("list is %v, %v; want one image that cannot be used", list, err)
	}
}

func TestBuildingAgainRepairsADamagedImage(t *testing.T) {
	dir := t.TempDir()
	r := ref(t, publish(t, dir, static(t)))
	kernelFile := filepath.Join(dir, "tiny", r.Digest, KernelFile)
	info, err := os.Stat(kernelFile)
	if err != nil {
		t.Fatal(err)
	}
	publish(t, dir, static(t))
	if again, err := os.Stat(kernelFile); err != nil || !os.SameFile(info, again) {
		t.Errorf("an image that was in order was written again (%v)", err)
	}
	replace(t, kernelFile, []byte("damage"))
	publish(t, dir, static(t))
	if _, err := Verify(dir, r); err != nil {
		t.Error(err)
	}
	noLeftovers(t, dir)
}

// noLeftovers checks that no temporary folder is left beside the images.
func noLeftovers(t *testing.T, dir string) {
	t.Helper()
	left, err := filepath.Glob(filepath.Join(dir, "tiny", tmpGlob))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestKernelOfTheCurrentImageIsUsedAgainOnlyIfItIsTheSame(t *testing.T) {
	dir := t.TempDir()
	b, src := ingredients(t)
	b.Images = dir
	pkg := src.packages[0]
	if _, ok := b.reuse(pkg); ok {
		t.Error("without an image there was a kernel")
	}
	r := ref(t, publish(t, dir, static(t)))
	got, ok := b.reuse(pkg)
	if !ok {
		t.Fatal("the kernel of the same package was not used again")
	}
	if d := cmp.Diff(src.kernel, got, cmp.AllowUnexported(kernelFiles{})); d != "" {
		t.Errorf("kernel (-want +got):\n%s", d)
	}
	newer := pkg
	newer.SHA256 = strings.Repeat("b", 64)
	if _, ok := b.reuse(newer); ok {
		t.Error("the kernel of another package was used")
	}
	changed := *b
	changed.recipeSHA256 = strings.Repeat("c", 64)
	if _, ok := changed.reuse(pkg); ok {
		t.Error("the kernel of another recipe was used")
	}
	replace(t, filepath.Join(dir, "tiny", r.Digest, "modules/vsock.ko"), []byte("vsock 0bject"))
	if _, ok := b.reuse(pkg); ok {
		t.Error("an altered module was used")
	}
}

func TestPruneKeepsWhatIsCurrentAndWhatIsInUse(t *testing.T) {
	dir := t.TempDir()
	var refs []Ref
	for _, version := range []string{"1", "2", "3"} {
		refs = append(refs, ref(t, publish(t, dir, append(static(t), version...))))
	}
	held, err := Open(dir, refs[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "tiny", ".tmp-interrupted", "image"), 0o700); err != nil {
		t.Fatal(err)
	}
	removed, err := Prune(dir, func(r Ref) bool { return r == refs[1] })
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(refs[:1], removed); d != "" {
		t.Errorf("removed (-want +got):\n%s", d)
	}
	list, err := List(dir)
	if err != nil {
		t.Fatal(err)
	}
	var left []Ref
	for _, s := range list {
		left = append(left, s.Ref)
		if s.Err != nil || s.Current != (s.Ref == refs[2]) || s.BuiltAt.IsZero() || s.Manifest.Size() == 0 {
			t.Errorf("listed: %+v", s)
		}
	}
	byDigest := func(a, b Ref) int { return strings.Compare(a.Digest, b.Digest) }
	slices.SortFunc(left, byDigest)
	want := slices.SortedFunc(slices.Values(refs[1:]), byDigest)
	if d := cmp.Diff(want, left); d != "" {
		t.Errorf("left (-want +got):\n%s", d)
	}
	noLeftovers(t, dir)
	if err := verify(refs[0], held.Manifest, KernelFile, held.Kernel); err != nil {
		t.Errorf("an image that was open is no longer usable: %v", err)
	}
	if err := held.Close(); err != nil {
		t.Error(err)
	}
}

func TestFolderWithoutImagesListsNone(t *testing.T) {
	list, err := List(filepath.Join(t.TempDir(), "missing"))
	if err != nil || len(list) > 0 {
		t.Errorf("list is %v, %v", list, err)
	}
}

func TestSecondBuilderIsTurnedAway(t *testing.T) {
	dir := t.TempDir()
	s, err := openStore(dir, "tiny")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := openStore(dir, "tiny"); !errors.Is(err, ErrBusy) {
		t.Errorf("error is %v, want ErrBusy", err)
	}
	if err := s.close(); err != nil {
		t.Fatal(err)
	}
	publish(t, dir, static(t))
}

func TestFullDiskLeavesTheOldImageInPlace(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("making a small disk: %v (run as root)", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	old := ref(t, publish(t, dir, static(t)))
	_, err := tryPublish(t, dir, append(static(t), bytes.Repeat([]byte("big"), 1<<20)...))
	if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "the image needs 4 MB") {
		t.Errorf("error is %v", err)
	}
	i, err := Open(dir, Ref{Name: "tiny"})
	if err != nil {
		t.Fatal(err)
	}
	if i.Ref != old {
		t.Errorf("the current image is %s, want %s", i.Ref, old)
	}
	if err := i.Close(); err != nil {
		t.Error(err)
	}
	noLeftovers(t, dir)
}

func TestGuestProgramMustRunAlone(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, b []byte) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	tests := map[string]struct{ file, want string }{
		"missing":         {filepath.Join(dir, "none"), "is missing: build it with"},
		"folder":          {dir, "is not a file"},
		"script":          {write("script", []byte("#!/bin/sh\n")), "not an ELF program"},
		"dynamic":         {write("dynamic", program(t, 2, 62, 3)), "linked dynamically"},
		"other processor": {write("arm", program(t, 2, 183, 0)), "the guest is x86-64"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if _, err := readRelay(test.file); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error is %v, want one with %q", err, test.want)
			}
		})
	}
	if _, err := readRelay(write("static", static(t))); err != nil {
		t.Errorf("a static program was refused: %v", err)
	}
}

func TestNewestKernelIsWhatItsPackageDependsOn(t *testing.T) {
	tests := map[string]struct{ depends, want string }{
		"one":  {"linux-image-6.1.0-57-cloud-amd64 (= 6.1.192-3)", "linux-image-6.1.0-57-cloud-amd64"},
		"more": {"kmod, linux-image-6.1.0-57-cloud-amd64", "linux-image-6.1.0-57-cloud-amd64"},
		"two":  {"linux-image-6.1.0-1, linux-image-6.1.0-2", ""},
		"none": {"linux-image-generic", ""},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := kernelPackage(debian.Package{Name: "linux-image-cloud-amd64", Depends: test.depends})
			if got != test.want || (err == nil) != (test.want != "") {
				t.Errorf("kernel is %q, %v; want %q", got, err, test.want)
			}
		})
	}
}

func FuzzManifestThatIsReadIsWrittenBackTheSame(f *testing.F) {
	m := Manifest{Format: Format, Name: "tiny", Modules: []string{"modules/a.ko"}, Files: []File{
		{InitrdFile, 1, strings.Repeat("a", 64)}, {"modules/a.ko", 2, strings.Repeat("b", 64)}, {KernelFile, 3, strings.Repeat("c", 64)},
	}}
	seed, err := m.Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add(bytes.Replace(seed, []byte("modules/a.ko"), []byte("modules/../../x.ko"), -1))
	f.Fuzz(func(t *testing.T, in []byte) {
		m, err := DecodeManifest(in)
		if err != nil {
			return
		}
		out, err := m.Encode()
		if err != nil || !bytes.Equal(in, out) {
			t.Errorf("written back differently (%v):\n%s\n%s", err, in, out)
		}
		for _, file := range m.Files {
			if !filepath.IsLocal(file.Name) || strings.Contains(file.Name, "..") {
				t.Errorf("a file %q was accepted", file.Name)
			}
		}
	})
}

func TestRecipesOfThisVersionAreWellFormed(t *testing.T) {
	r, _, err := readRecipe(images.FS, "tiny")
	if err != nil {
		t.Fatal(err)
	}
	if r.Architecture != runtime.GOARCH {
		t.Skipf("the recipe is for %s", r.Architecture)
	}
	seen := make(map[string]bool)
	for _, names := range r.Busybox.Applets {
		for _, name := range strings.Fields(names) {
			if name == "init" || name == "busybox" || seen[name] {
				t.Errorf("applet %s is there twice, or must not be there", name)
			}
			seen[name] = true
		}
	}
	if !seen["sh"] || !seen["env"] {
		t.Error("there is no sh or env")
	}
}
