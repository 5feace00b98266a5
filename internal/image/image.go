// Package image builds what a guest boots from, and makes sure that what boots
// is what was built.
//
// An image is a kernel, an initramfs and a manifest with the digest of every
// file, in the folder <images>/<name>/<digest>. The digest is the SHA-256 of the
// manifest, so it stands for the whole content: a rebuilt guest program, another
// kernel, a changed recipe give another image, and the same inputs give the same
// image byte for byte. A file named "current" beside the digests says which one
// a plain name means.
//
// Open verifies an image through the descriptors that it returns, before every
// boot: a file that was cut short, swapped or damaged is an error that says
// which. Against a process of the same user that writes to the file after that
// there is no protection here; such a process could replace Capsem itself.
//
// Images are never changed in place. Build makes a new folder and renames it,
// and only then moves "current"; whoever holds an image open keeps it.
package image

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// ErrNotBuilt means that there is no image of a name or digest.
var ErrNotBuilt = errors.New("it is not built")

// ErrBusy means that another process builds or prunes images of the same name.
var ErrBusy = errors.New("another process is building or pruning it: try again when that is done")

// Ref says which image is meant.
type Ref struct {
	// Name is the recipe's name, such as "tiny".
	Name string
	// Digest is 64 lower-case hexadecimal digits, or "" for the current image
	// of the name.
	Digest string
}

var (
	nameForm   = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)
	digestForm = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

const digestPrefix = "sha256:"

// ParseRef reads "name" or "name@sha256:<digest>".
func ParseRef(s string) (Ref, error) {
	name, digest, pinned := strings.Cut(s, "@")
	r := Ref{Name: name}
	if pinned {
		var ok bool
		if r.Digest, ok = strings.CutPrefix(digest, digestPrefix); !ok || r.Digest == "" {
			return Ref{}, fmt.Errorf("reading image reference %.100q: after @ comes sha256: and 64 hexadecimal digits", s)
		}
	}
	return r, r.check()
}

// check keeps a reference from being a path to somewhere else.
func (r Ref) check() error {
	if !nameForm.MatchString(r.Name) {
		return fmt.Errorf("image name %.100q is not valid: use 1 to 63 of a-z, 0-9, '-', '_' and '.', beginning with a letter or digit", r.Name)
	}
	if r.Digest != "" && !digestForm.MatchString(r.Digest) {
		return fmt.Errorf("image digest %.100q is not valid: it has 64 hexadecimal digits", r.Digest)
	}
	return nil
}

// String is the form that ParseRef reads.
func (r Ref) String() string {
	if r.Digest == "" {
		return r.Name
	}
	return r.Name + "@" + digestPrefix + r.Digest
}

// AlteredError is an image that is not what was built.
type AlteredError struct {
	// Image is the image, with its digest.
	Image Ref
	// File is the file's name in the image.
	File string
	// Want is what the file should be, and Got what it is, in words.
	Want, Got string
}

// Error says what to do next.
func (e *AlteredError) Error() string {
	return fmt.Sprintf("image %s was altered: %s has %s, and was built with %s: run \"capsem image build %s\"", e.Image, e.File, e.Got, e.Want, e.Image.Name)
}
