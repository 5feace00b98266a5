package kernel_test

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"io"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"

	"github.com/capsem/capsem/internal/image/kernel"
)

const release = "6.1.0-9-cloud-amd64"

// le is a little-endian encoding of values one after the other.
func le(t testing.TB, values ...any) []byte {
	t.Helper()
	var b bytes.Buffer
	for _, v := range values {
		if s, ok := v.(string); ok {
			v = []byte(s)
		}
		if err := binary.Write(&b, binary.LittleEndian, v); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

// elfHeader is the 64 bytes at the beginning of an ELF file.
func elfHeader(t testing.TB, kind uint16, progOff, sectOff uint64, progs, sects uint16) []byte {
	t.Helper()
	return le(t, "\x7fELF\x02\x01\x01\x00", uint64(0), kind, uint16(62), uint32(1), uint64(0),
		progOff, sectOff, uint32(0), uint16(64), uint16(56), progs, uint16(64), sects, sects-min(sects, 1))
}

// vmlinux is an ELF kernel that is all note and padding: note is its type, 18 for
// a PVH entry.
func vmlinux(t testing.TB, note uint32) []byte {
	t.Helper()
	const at = 64 + 56
	notes := le(t, uint32(4), uint32(3), uint32(1), "GNU\x00abc\x00", uint32(4), uint32(8), note, "Xen\x00", uint64(0x1000000))
	b := append(elfHeader(t, 2, 64, 0, 1, 0),
		le(t, uint32(4), uint32(4), uint64(at), uint64(0), uint64(0), uint64(len(notes)), uint64(len(notes)), uint64(4))...)
	b = append(b, notes...)
	return append(b, bytes.Repeat([]byte("kernel code "), 200)...)
}

// module is a relocatable ELF file with the given .modinfo.
func module(t testing.TB, info ...string) []byte {
	t.Helper()
	data := strings.Join(info, "\x00") + "\x00"
	names := "\x00.modinfo\x00.shstrtab\x00"
	section := func(name, kind uint32, off, size int) []byte {
		return le(t, name, kind, uint64(0), uint64(0), uint64(off), uint64(size), uint64(0), uint64(1), uint64(0))
	}
	b := elfHeader(t, 1, 0, uint64(64+len(data)+len(names)), 0, 3)
	b = append(append(b, data...), names...)
	b = append(b, make([]byte, 64)...)
	b = append(b, section(1, 1, 64, len(data))...)
	return append(b, section(10, 3, 64+len(data), len(names))...)
}

// bzImage wraps a payload as the kernel's build does.
func bzImage(t testing.TB, payload []byte) []byte {
	t.Helper()
	const setupSects, offset = 3, 100
	b := make([]byte, (setupSects+1)*512+offset)
	b[0x1f1] = setupSects
	copy(b[0x1fe:], "\x55\xaaxxHdrS\x0f\x02")
	binary.LittleEndian.PutUint32(b[0x248:], offset)
	binary.LittleEndian.PutUint32(b[0x24c:], uint32(len(payload)))
	return append(append(b, payload...), "trailing sections"...)
}

func packLZ4(t testing.TB, b []byte) []byte {
	t.Helper()
	block := make([]byte, lz4.CompressBlockBound(len(b)))
	n, err := lz4.CompressBlock(b, block, nil)
	if err != nil {
		t.Fatal(err)
	}
	return le(t, uint32(0x184c2102), uint32(n), block[:n], uint32(len(b)))
}

func packGzip(t testing.TB, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func packZstd(t testing.TB, b []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	return le(t, w.EncodeAll(b, nil), uint32(len(b)))
}

func packXZ(t testing.TB, b []byte) []byte {
	t.Helper()
	program, err := exec.LookPath("xz")
	if err != nil {
		t.Skip("xz is not installed (apt-get install xz-utils)")
	}
	cmd := exec.CommandContext(t.Context(), program, "--check=crc32", "--x86", "--lzma2=dict=32MiB")
	cmd.Stdin = bytes.NewReader(b)
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	return le(t, out, uint32(len(b)))
}

func TestVmlinuxIsUnpackedFromEveryUsualCompression(t *testing.T) {
	for name, pack := range map[string]func(testing.TB, []byte) []byte{
		"LZ4": packLZ4, "gzip": packGzip, "zstd": packZstd, "xz": packXZ,
	} {
		t.Run(name, func(t *testing.T) {
			want := vmlinux(t, 18)
			got, err := kernel.Vmlinux(bzImage(t, pack(t, want)))
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("unpacked %d bytes that differ from the %d that were packed", len(got), len(want))
			}
		})
	}
}

func TestBadKernelsAreRefusedWithTheReason(t *testing.T) {
	good := packLZ4(t, vmlinux(t, 18))
	edit := func(b []byte, at int, v ...byte) []byte {
		b = bytes.Clone(b)
		copy(b[at:], v)
		return b
	}
	tests := map[string]struct {
		image []byte
		want  string
	}{
		"empty":               {nil, "no Linux setup header"},
		"ELF, not bzImage":    {vmlinux(t, 18), "no Linux setup header"},
		"old boot protocol":   {edit(bzImage(t, good), 0x206, 0x07, 0x02), "boot protocol is 2.07"},
		"payload beyond end":  {edit(bzImage(t, good), 0x24c, 0xff, 0xff, 0xff, 0xff), "payload ends at"},
		"no payload":          {edit(bzImage(t, good), 0x24c, 0, 0, 0, 0), "holds nothing"},
		"bzip2":               {bzImage(t, []byte("BZh91AY&SY\x00\x01\x00\x00")), "compressed with bzip2"},
		"LZO":                 {bzImage(t, []byte("\x89LZO\x00\r\n\x1a\n\x00\x01\x00\x00")), "compressed with LZO"},
		"unknown compression": {bzImage(t, []byte("abcdefgh\x00\x01\x00\x00")), "no compression that Linux uses"},
		"larger than limit":   {bzImage(t, edit(good, len(good)-4, 0, 0, 0, 0x7f)), "the limit is"},
		"more than stated":    {bzImage(t, edit(good, len(good)-4, 9, 0, 0, 0)), "decompressing LZ4"},
		"less than stated":    {bzImage(t, edit(good, len(good)-2, 9)), "bytes and states"},
		"cut block":           {bzImage(t, edit(good, 4, 0xff, 0xff)), "unexpected EOF"},
		"no PVH entry":        {bzImage(t, packLZ4(t, vmlinux(t, 17))), "no PVH entry"},
		"no ELF inside":       {bzImage(t, packLZ4(t, bytes.Repeat([]byte("text"), 100))), "no ELF file"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := kernel.Vmlinux(test.image)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error is %v, want one with %q", err, test.want)
			}
		})
	}
}

// tree makes a kernel package of modules, given as "name: dependencies".
func tree(t *testing.T, builtin string, modules ...string) *kernel.Tree {
	t.Helper()
	var tr kernel.Tree
	add := func(name string, body []byte) {
		t.Helper()
		if !kernel.Wants(name) {
			t.Fatalf("%s is not wanted", name)
		}
		if err := tr.Add(name, body); err != nil {
			t.Fatal(err)
		}
	}
	add("boot/vmlinuz-"+release, bzImage(t, packLZ4(t, vmlinux(t, 18))))
	add("lib/modules/"+release+"/modules.builtin", []byte(builtin))
	for _, m := range modules {
		name, deps, _ := strings.Cut(m, ":")
		add("lib/modules/"+release+"/kernel/drivers/"+name+".ko", module(t, "license=GPL", "depends="+strings.TrimSpace(deps), "vermagic="+release+" SMP"))
	}
	return &tr
}

func names(modules []kernel.Module) []string {
	var names []string
	for _, m := range modules {
		names = append(names, m.Name)
	}
	return names
}

func TestModulesComeAfterWhatTheyDependOn(t *testing.T) {
	tr := tree(t, "kernel/drivers/built-in.ko\n", "app: lib-a,lib_b,built_in", "lib-a: base", "lib_b: base", "base:", "other: app", "unused:")
	got, err := tr.Modules([]string{"lib_b", "other", "built-in"})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"base", "lib_b", "lib_a", "app", "other"}, names(got)); d != "" {
		t.Errorf("order (-want +got):\n%s", d)
	}
	if tr.Release() != release {
		t.Errorf("release is %q, want %q", tr.Release(), release)
	}
}

func TestCompressedModulesAreUnpacked(t *testing.T) {
	want := module(t, "depends=", "vermagic="+release+" SMP")
	for suffix, pack := range map[string]func(testing.TB, []byte) []byte{".gz": packGzip, ".xz": packXZ, ".zst": packZstd} {
		t.Run(suffix, func(t *testing.T) {
			tr := tree(t, "")
			packed := pack(t, want)
			if suffix != ".gz" {
				packed = packed[:len(packed)-4] // the size is the bzImage's
			}
			if err := tr.Add("usr/lib/modules/"+release+"/kernel/fs/m.ko"+suffix, packed); err != nil {
				t.Fatal(err)
			}
			got, err := tr.Modules([]string{"m"})
			if err != nil {
				t.Fatal(err)
			}
			if len(got) != 1 || !bytes.Equal(got[0].Object, want) {
				t.Errorf("got %d modules, or another content", len(got))
			}
		})
	}
}

func TestModulesThatCannotBeLoadedAreRefused(t *testing.T) {
	foreign := tree(t, "")
	if err := foreign.Add("lib/modules/"+release+"/kernel/old.ko", module(t, "vermagic=5.10.0 SMP")); err != nil {
		t.Fatal(err)
	}
	broken := tree(t, "")
	if err := broken.Add("lib/modules/"+release+"/kernel/broken.ko", []byte("\x7fELF")); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		tree *kernel.Tree
		name string
		want string
	}{
		"missing":            {tree(t, ""), "ghost", "no module ghost, which the recipe needs"},
		"missing dependency": {tree(t, "", "app: ghost"), "app", "no module ghost, which app needs"},
		"circle":             {tree(t, "", "a: b", "b: a"), "a", "depends on itself"},
		"other kernel's":     {foreign, "old", `release "5.10.0"`},
		"not a module":       {broken, "broken", "reading kernel module broken"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := test.tree.Modules([]string{test.name})
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error is %v, want one with %q", err, test.want)
			}
		})
	}
}

func TestAmbiguousKernelPackagesAreRefused(t *testing.T) {
	tr := tree(t, "", "a:")
	if err := tr.Add("boot/vmlinuz-6.2.0", nil); err == nil {
		t.Error("a second kernel was accepted")
	}
	if err := tr.Add("lib/modules/"+release+"/kernel/net/a.ko.xz", nil); err == nil {
		t.Error("a second module of the same name was accepted")
	}
	for _, name := range []string{"etc/passwd", "boot/vmlinuz-../x", "lib/modules/6.1/extra/a.ko", "boot/config-6.1"} {
		if kernel.Wants(name) {
			t.Errorf("%s is wanted", name)
		}
		if err := tr.Add(name, nil); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

// Decompression has no inverse to compare with; what holds for every input is
// that it ends, within its limits, with a kernel that is one or an error.
func FuzzVmlinuxIsAKernelOrAnError(f *testing.F) {
	k := vmlinux(f, 18)
	for _, pack := range []func(testing.TB, []byte) []byte{packLZ4, packGzip, packZstd} {
		f.Add(bzImage(f, pack(f, k)))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		out, err := kernel.Vmlinux(in)
		if err == nil && !bytes.HasPrefix(out, []byte("\x7fELF")) {
			t.Errorf("%d bytes without an error are no kernel", len(out))
		}
	})
}

func FuzzModulesAreReadOrRefused(f *testing.F) {
	f.Add(module(f, "depends=", "vermagic="+release+" SMP"))
	f.Fuzz(func(t *testing.T, in []byte) {
		tr := tree(t, "", "base:")
		if err := tr.Add("lib/modules/"+release+"/kernel/m.ko", in); err != nil {
			t.Fatal(err)
		}
		got, err := tr.Modules([]string{"m"})
		if err == nil && (len(got) == 0 || got[len(got)-1].Name != "m") {
			t.Errorf("without an error, the module is not among %v", names(got))
		}
	})
}
