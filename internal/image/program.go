package image

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// relayName is the guest's program beside our own.
const relayName = "guest-relay"

// maxProgram bounds a program that goes into an image.
const maxProgram = 128 << 20

// readRelay reads the guest's program, which must run where there is no other
// file: as the kernel's first process.
func readRelay(name string) ([]byte, error) {
	if name == "" {
		self, err := os.Executable()
		if err != nil {
			return nil, fmt.Errorf("finding %s: %w", relayName, err)
		}
		name = filepath.Join(filepath.Dir(self), relayName)
	}
	info, err := os.Stat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("the guest's program %s is missing: build it with CGO_ENABLED=0 go build ./cmd/guest-relay", name)
	}
	if err != nil {
		return nil, fmt.Errorf("opening the guest's program: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() > maxProgram {
		return nil, fmt.Errorf("the guest's program %s is not a file of at most %d bytes", name, maxProgram)
	}
	b, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("reading the guest's program: %w", err)
	}
	if err := checkStatic(b); err != nil {
		return nil, fmt.Errorf("the guest's program %s cannot run in a guest: %w", name, err)
	}
	return b, nil
}

// checkStatic refuses what needs a dynamic linker or libraries, and what is for
// another processor.
func checkStatic(program []byte) error {
	f, err := elf.NewFile(bytes.NewReader(program))
	if err != nil {
		return fmt.Errorf("it is not an ELF program: %w", err)
	}
	if f.Class != elf.ELFCLASS64 || f.Machine != elf.EM_X86_64 {
		return fmt.Errorf("it is for %s %s, the guest is x86-64", f.Class, f.Machine)
	}
	if f.Type != elf.ET_EXEC && f.Type != elf.ET_DYN {
		return fmt.Errorf("it is not a program (%s)", f.Type)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return errors.New("it is linked dynamically: build it with CGO_ENABLED=0")
		}
	}
	libraries, err := f.ImportedLibraries()
	if err != nil && !errors.Is(err, elf.ErrNoSymbols) {
		return fmt.Errorf("reading what it is linked with: %w", err)
	}
	if len(libraries) > 0 {
		return fmt.Errorf("it needs the library %s: link it statically", libraries[0])
	}
	return nil
}
