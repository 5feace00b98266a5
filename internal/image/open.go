package image

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sync/errgroup"
)

// currentFile holds the digest that a plain name means, in the form
// "sha256:<digest>\n".
const currentFile = "current"

// Image is an image that is open and verified. The caller must close it.
type Image struct {
	Ref      Ref
	Manifest Manifest
	// Kernel and Initrd are open for reading at their beginning.
	Kernel, Initrd *os.File
}

// Close closes the image's files.
func (i *Image) Close() error { return errors.Join(i.Kernel.Close(), i.Initrd.Close()) }

// Open finds an image in the folder of images, opens what a boot needs and
// verifies it. The error matches ErrNotBuilt if there is no such image, and is an
// *AlteredError if a file is not what it was when the image was built.
func Open(images string, ref Ref) (*Image, error) {
	ref, err := resolve(images, ref)
	if err != nil {
		return nil, err
	}
	dir, m, err := openDir(images, ref)
	if err != nil {
		return nil, err
	}
	defer dir.Close() // a folder that was only read
	i := &Image{Ref: ref, Manifest: m}
	if i.Kernel, err = dir.Open(KernelFile); err != nil {
		return nil, missing(ref, KernelFile, err)
	}
	if i.Initrd, err = dir.Open(InitrdFile); err != nil {
		return nil, errors.Join(missing(ref, InitrdFile, err), i.Kernel.Close())
	}
	var both errgroup.Group
	both.Go(func() error { return verify(ref, m, KernelFile, i.Kernel) })
	both.Go(func() error { return verify(ref, m, InitrdFile, i.Initrd) })
	if err := both.Wait(); err != nil {
		return nil, errors.Join(err, i.Close())
	}
	return i, nil
}

// Verify checks every file of an image, also those that a boot does not need.
// Its errors are those of Open.
func Verify(images string, ref Ref) (Manifest, error) {
	ref, err := resolve(images, ref)
	if err != nil {
		return Manifest{}, err
	}
	dir, m, err := openDir(images, ref)
	if err != nil {
		return Manifest{}, err
	}
	defer dir.Close() // a folder that was only read
	for _, file := range m.Files {
		if err := verifyFile(dir, ref, m, file.Name); err != nil {
			return Manifest{}, err
		}
	}
	return m, nil
}

func verifyFile(dir *os.Root, ref Ref, m Manifest, name string) error {
	f, err := dir.Open(name)
	if err != nil {
		return missing(ref, name, err)
	}
	return errors.Join(verify(ref, m, name, f), f.Close())
}

// resolve pins a plain name to the digest that "current" has.
func resolve(images string, ref Ref) (Ref, error) {
	if err := ref.check(); err != nil {
		return Ref{}, err
	}
	if ref.Digest != "" {
		return ref, nil
	}
	b, err := os.ReadFile(filepath.Join(images, ref.Name, currentFile))
	if errors.Is(err, fs.ErrNotExist) {
		return Ref{}, notBuilt(ref)
	}
	if err != nil {
		return Ref{}, fmt.Errorf("finding image %s: %w", ref.Name, err)
	}
	digest, ok := strings.CutPrefix(strings.TrimSuffix(string(b), "\n"), digestPrefix)
	if !ok || !digestForm.MatchString(digest) {
		return Ref{}, &AlteredError{ref, currentFile, "the digest of an image", fmt.Sprintf("the content %.100q", b)}
	}
	return Ref{ref.Name, digest}, nil
}

func notBuilt(ref Ref) error {
	return fmt.Errorf("opening image %s: %w: run \"capsem image build %s\"", ref, ErrNotBuilt, ref.Name)
}

func missing(ref Ref, name string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return &AlteredError{ref, name, "that file", "been removed"}
	}
	return fmt.Errorf("opening %s of image %s: %w", name, ref, err)
}

// openDir opens the folder of a pinned image and reads its manifest. Files are
// opened through the folder, where no symbolic link leads out of it.
func openDir(images string, ref Ref) (*os.Root, Manifest, error) {
	dir, err := os.OpenRoot(filepath.Join(images, ref.Name, ref.Digest))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, Manifest{}, notBuilt(ref)
	}
	if err != nil {
		return nil, Manifest{}, fmt.Errorf("opening image %s: %w", ref, err)
	}
	m, err := readManifest(dir, ref)
	if err != nil {
		return nil, Manifest{}, errors.Join(err, dir.Close())
	}
	return dir, m, nil
}

func readManifest(dir *os.Root, ref Ref) (Manifest, error) {
	f, err := dir.Open(ManifestFile)
	if err != nil {
		return Manifest{}, missing(ref, ManifestFile, err)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	if err := errors.Join(err, f.Close()); err != nil {
		return Manifest{}, fmt.Errorf("reading the manifest of image %s: %w", ref, err)
	}
	if got := sum(b); got != ref.Digest {
		return Manifest{}, &AlteredError{ref, ManifestFile, "SHA-256 " + ref.Digest, "SHA-256 " + got}
	}
	m, err := DecodeManifest(b)
	if err != nil {
		return Manifest{}, fmt.Errorf("opening image %s: %w", ref, err)
	}
	if m.Name != ref.Name {
		return Manifest{}, fmt.Errorf("opening image %s: its manifest is that of an image named %s", ref, m.Name)
	}
	return m, nil
}

// readBuffer is the size of one read of a file that is verified. Reading
// through a mapping is no faster and turns a truncation into a signal.
const readBuffer = 1 << 20

// verify compares an open file with the manifest, without moving its offset.
func verify(ref Ref, m Manifest, name string, f *os.File) error {
	want, ok := m.file(name)
	if !ok {
		return fmt.Errorf("verifying image %s: its manifest has no %s", ref, name)
	}
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("verifying %s of image %s: %w", name, ref, err)
	}
	if !info.Mode().IsRegular() || info.Size() != want.Size {
		return &AlteredError{ref, name, fmt.Sprintf("%d bytes", want.Size), fmt.Sprintf("%d bytes", info.Size())}
	}
	hash := sha256.New()
	if _, err := io.CopyBuffer(hash, io.NewSectionReader(f, 0, want.Size), make([]byte, readBuffer)); err != nil {
		return fmt.Errorf("verifying %s of image %s: %w", name, ref, err)
	}
	if got := hex.EncodeToString(hash.Sum(nil)); got != want.SHA256 {
		return &AlteredError{ref, name, "SHA-256 " + want.SHA256, "SHA-256 " + got}
	}
	return nil
}
