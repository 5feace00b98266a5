package image

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Format is the version of the manifest and of what the builder makes of given
// inputs. It is raised when either changes, so that nothing that an older
// version built is taken for what this one would build.
const Format = 1

// Names of files in an image's folder.
const (
	ManifestFile = "manifest.json"
	KernelFile   = "vmlinux"
	InitrdFile   = "initrd"
	modulesDir   = "modules/"
)

// maxManifest bounds a manifest in bytes; tiny's has 5 kB.
const maxManifest = 1 << 20

// Manifest describes an image completely: its digest is the image's.
type Manifest struct {
	Format        int       `json:"format"`
	Name          string    `json:"name"`
	Architecture  string    `json:"architecture"`
	KernelRelease string    `json:"kernel_release"`
	RecipeSHA256  string    `json:"recipe_sha256"`
	RelaySHA256   string    `json:"relay_sha256"`
	Packages      []Package `json:"packages"`
	// Modules are the files of the kernel modules that the guest loads at boot,
	// AvailableModules those that it can load after them, both in the order in
	// which that works.
	Modules          []string `json:"modules"`
	AvailableModules []string `json:"available_modules"`
	// Files is sorted by name.
	Files []File `json:"files"`
}

// Package is a distribution's package that went into an image.
type Package struct {
	Name         string `json:"name"`
	Version      string `json:"version"`
	Architecture string `json:"architecture"`
	SHA256       string `json:"sha256"`
}

// File is one file of an image.
type File struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

// Encode is the manifest's canonical form, as it lies on disk.
func (m Manifest) Encode() ([]byte, error) {
	b, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encoding an image's manifest: %w", err)
	}
	return append(b, '\n'), nil
}

// DecodeManifest reads a canonical manifest, and refuses any other spelling of
// the same content: one digest, one image.
func DecodeManifest(b []byte) (Manifest, error) {
	var version struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(b, &version); err != nil {
		return Manifest{}, fmt.Errorf("reading an image's manifest: %w", err)
	}
	if version.Format != Format {
		return Manifest{}, &formatError{version.Format}
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	var m Manifest
	if err := d.Decode(&m); err != nil {
		return Manifest{}, fmt.Errorf("reading an image's manifest: %w", err)
	}
	canonical, err := m.Encode()
	if err != nil {
		return Manifest{}, err
	}
	if !bytes.Equal(b, canonical) {
		return Manifest{}, errors.New("reading an image's manifest: it is not in the form that Capsem writes")
	}
	if err := m.check(); err != nil {
		return Manifest{}, fmt.Errorf("reading an image's manifest: %w", err)
	}
	return m, nil
}

// formatError is a manifest of another version.
type formatError struct{ format int }

func (e *formatError) Error() string {
	if e.format > Format {
		return fmt.Sprintf("it was made by a newer version of Capsem (format %d, this version reads %d): update Capsem, or build the image again", e.format, Format)
	}
	return fmt.Sprintf("it was made by another version of Capsem (format %d, this version reads %d): build the image again", e.format, Format)
}

var moduleForm = regexp.MustCompile(`^modules/[0-9A-Za-z_]+\.ko$`)

// check refuses names that could lead out of the image's folder, and an image
// that cannot boot.
func (m Manifest) check() error {
	if err := (Ref{Name: m.Name}).check(); err != nil {
		return err
	}
	if !slices.IsSortedFunc(m.Files, func(a, b File) int { return strings.Compare(a.Name, b.Name) }) {
		return errors.New("its files are not sorted")
	}
	seen := make(map[string]bool)
	for _, f := range m.Files {
		if f.Name != KernelFile && f.Name != InitrdFile && !moduleForm.MatchString(f.Name) {
			return fmt.Errorf("a file %.80q has no place in an image", f.Name)
		}
		if seen[f.Name] || f.Size < 0 || !digestForm.MatchString(f.SHA256) {
			return fmt.Errorf("its entry for %s is malformed", f.Name)
		}
		seen[f.Name] = true
	}
	for _, name := range slices.Concat([]string{KernelFile, InitrdFile}, m.Modules, m.AvailableModules) {
		if !seen[name] {
			return fmt.Errorf("it has no %.80s", name)
		}
	}
	return nil
}

// Ref is the image that the manifest describes, pinned by its digest.
func (m Manifest) Ref() (Ref, error) {
	b, err := m.Encode()
	if err != nil {
		return Ref{}, err
	}
	return Ref{Name: m.Name, Digest: sum(b)}, nil
}

// Size is the sum of all files in bytes.
func (m Manifest) Size() int64 {
	total := int64(0)
	for _, f := range m.Files {
		total += f.Size
	}
	return total
}

func (m Manifest) file(name string) (File, bool) {
	i := slices.IndexFunc(m.Files, func(f File) bool { return f.Name == name })
	if i < 0 {
		return File{}, false
	}
	return m.Files[i], true
}

func sum(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}
