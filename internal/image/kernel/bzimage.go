// Package kernel takes a Linux kernel apart as a distribution ships it: the
// compressed bzImage, and the modules with what they depend on.
//
// Its input comes from packages that were verified, and is nevertheless read as
// if it were hostile: every offset is checked and every expansion has a limit.
package kernel

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
)

// Offsets in the setup header of a bzImage
// (Documentation/arch/x86/boot.rst, "The Real-Mode Kernel Header").
const (
	offSetupSects    = 0x1f1
	offBootFlag      = 0x1fe
	offMagic         = 0x202
	offVersion       = 0x206
	offPayload       = 0x248
	offPayloadLength = 0x24c
	setupEnd         = 0x250

	bootFlag = 0xaa55
	magic    = "HdrS"
	// payloadVersion is the boot protocol, 2.08, that introduced the payload's
	// position.
	payloadVersion = 0x208
	sector         = 512
	// defaultSetupSects is what a count of 0 means, for compatibility.
	defaultSetupSects = 4
)

// maxVmlinux bounds an unpacked kernel. Debian's cloud kernel has 53 MB.
const maxVmlinux = 256 << 20

// Vmlinux unpacks the ELF kernel inside a bzImage. The kernel is for x86-64
// and has a PVH entry point, without which a hypervisor cannot start it
// directly. The error names the compression if it is one without a decoder.
func Vmlinux(bzImage []byte) ([]byte, error) {
	payload, err := payload(bzImage)
	if err != nil {
		return nil, fmt.Errorf("reading a bzImage: %w", err)
	}
	vmlinux, err := expandPayload(payload)
	if err != nil {
		return nil, fmt.Errorf("unpacking the kernel of a bzImage: %w", err)
	}
	if err := checkVmlinux(vmlinux); err != nil {
		return nil, fmt.Errorf("unpacking the kernel of a bzImage: %w", err)
	}
	return vmlinux, nil
}

func payload(b []byte) ([]byte, error) {
	if len(b) < setupEnd || binary.LittleEndian.Uint16(b[offBootFlag:]) != bootFlag || string(b[offMagic:offMagic+4]) != magic {
		return nil, errors.New("it has no Linux setup header")
	}
	if v := binary.LittleEndian.Uint16(b[offVersion:]); v < payloadVersion {
		return nil, fmt.Errorf("its boot protocol is %d.%02d, older than 2.08", v>>8, v&0xff)
	}
	sects := int(b[offSetupSects])
	if sects == 0 {
		sects = defaultSetupSects
	}
	start := uint64(sects+1)*sector + uint64(binary.LittleEndian.Uint32(b[offPayload:]))
	end := start + uint64(binary.LittleEndian.Uint32(b[offPayloadLength:]))
	if end > uint64(len(b)) {
		return nil, fmt.Errorf("its payload ends at byte %d of %d", end, len(b))
	}
	return b[start:end], nil
}

// expandPayload decompresses a payload into exactly the size that its last four
// bytes state: those of gzip are part of its stream, for the others the kernel's
// build appends them (scripts/Makefile.lib, size_append).
func expandPayload(p []byte) ([]byte, error) {
	const sizeLen = 4
	if len(p) < 2*sizeLen {
		return nil, fmt.Errorf("a payload of %d bytes holds nothing", len(p))
	}
	size := binary.LittleEndian.Uint32(p[len(p)-sizeLen:])
	if size > maxVmlinux {
		return nil, fmt.Errorf("it states a size of %d bytes, the limit is %d", size, maxVmlinux)
	}
	if !bytes.HasPrefix(p, []byte{0x1f, 0x8b}) {
		p = p[:len(p)-sizeLen]
	}
	out, err := expand(p, int(size))
	if err != nil {
		return nil, err
	}
	if len(out) != int(size) {
		return nil, fmt.Errorf("it has %d bytes and states %d", len(out), size)
	}
	return out, nil
}

// noteXen and notePVH identify the note with the PVH entry point,
// XEN_ELFNOTE_PHYS32_ENTRY of xen/interface/elfnote.h.
const (
	noteXen = "Xen\x00"
	notePVH = 18
)

func checkVmlinux(b []byte) error {
	f, err := elf.NewFile(bytes.NewReader(b))
	if err != nil {
		return fmt.Errorf("it is no ELF file: %w", err)
	}
	if f.Class != elf.ELFCLASS64 || f.Machine != elf.EM_X86_64 || f.Type != elf.ET_EXEC {
		return fmt.Errorf("it is a %s %s for %s, not an executable for x86-64", f.Class, f.Type, f.Machine)
	}
	for _, p := range f.Progs {
		if p.Type != elf.PT_NOTE || p.Filesz > uint64(len(b)) {
			continue
		}
		notes := make([]byte, p.Filesz)
		if _, err := p.ReadAt(notes, 0); err != nil {
			return fmt.Errorf("reading its notes: %w", err)
		}
		if hasPVH(notes) {
			return nil
		}
	}
	return errors.New("it has no PVH entry point (CONFIG_PVH), so it cannot be booted directly")
}

// hasPVH walks ELF notes: name size, descriptor size, type, name, descriptor,
// each aligned to 4 bytes.
func hasPVH(b []byte) bool {
	const header = 12
	for len(b) >= header {
		nameSize := uint64(binary.LittleEndian.Uint32(b))
		descSize := uint64(binary.LittleEndian.Uint32(b[4:]))
		kind := binary.LittleEndian.Uint32(b[8:])
		desc := header + (nameSize+3)&^3
		next := desc + (descSize+3)&^3
		if next > uint64(len(b)) {
			return false
		}
		if kind == notePVH && string(b[header:header+nameSize]) == noteXen {
			return true
		}
		b = b[next:]
	}
	return false
}
