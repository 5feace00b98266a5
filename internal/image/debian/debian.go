// Package debian gets packages from the archive that this machine's apt is set
// up for, and reads their files.
//
// Trust comes from apt: it checks the archive's signed index, and refuses to
// download what no signature covers. A package is used only if its size and
// SHA-256 are those of the index, each time anew, so a cache needs no trust.
// Nothing is installed, and no program of a package is run.
package debian

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// maxPackage bounds a package file. Debian 13's cloud kernel has 35 MB.
const maxPackage = 512 << 20

// Package is one package of the index.
type Package struct {
	Name, Version, Architecture string
	// SHA256 is the digest of the package file in lower-case hexadecimal.
	SHA256 string
	// Size is the package file's size in bytes.
	Size int64
	// Depends is the package's Depends field as it stands.
	Depends string
}

// Errors that fresh package lists may cure.
var (
	// ErrUnknown means that no archive that apt knows has a package.
	ErrUnknown = errors.New("no archive that apt knows has it")
	// ErrDownload means that a package of the index was not to be had.
	ErrDownload = errors.New("it cannot be downloaded")
)

// Archive fetches packages through apt. Its methods may be called by one
// goroutine at a time.
type Archive struct {
	dir string
}

// Open returns an archive that keeps packages and apt's parsed index in the
// folder dir, which it makes where it is missing.
func Open(dir string) (*Archive, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the package cache: %w", err)
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("making the package cache: %w", err)
	}
	return &Archive{dir: abs}, nil
}

// Lookup finds the version of a package that apt would install now. It needs no
// network. The error matches ErrUnknown if there is none.
func (a *Archive) Lookup(ctx context.Context, name string) (Package, error) {
	if !packageName.MatchString(name) {
		return Package{}, fmt.Errorf("looking up package %.80q: not a package's name", name)
	}
	out, err := a.apt(ctx, "apt-cache", "show", "--no-all-versions", name)
	var failed *exitError
	if errors.As(err, &failed) && failed.code == aptFailed {
		return Package{}, fmt.Errorf("looking up package %s: %w (%s)", name, ErrUnknown, failed.message)
	}
	if err != nil {
		return Package{}, fmt.Errorf("looking up package %s: %w", name, err)
	}
	p, err := parseStanza(out)
	if err != nil {
		return Package{}, fmt.Errorf("looking up package %s: %w", name, err)
	}
	if p.Name != name {
		return Package{}, fmt.Errorf("looking up package %s: apt answered with %s", name, p.Name)
	}
	return p, nil
}

// Update brings apt's index up to date with its archives. Only root may.
func (a *Archive) Update(ctx context.Context) error {
	if _, err := a.apt(ctx, "apt-get", "update"); err != nil {
		return fmt.Errorf("updating the package lists: %w", err)
	}
	return nil
}

// Cached says whether a package's file is in the cache, so that File needs no
// network unless the file was altered.
func (a *Archive) Cached(p Package) bool {
	info, err := os.Lstat(a.path(p))
	return err == nil && info.Mode().IsRegular() && info.Size() == p.Size
}

// File opens a package's file, downloading it where the cache does not have it
// whole. The file was verified through the descriptor that is returned, which
// the caller must close.
func (a *Archive) File(ctx context.Context, p Package) (*os.File, error) {
	if !packageName.MatchString(p.Name) || !digest.MatchString(p.SHA256) {
		return nil, fmt.Errorf("opening package %.80q: not a package of the index", p.Name)
	}
	f, err := openVerified(a.path(p), p)
	if err == nil {
		return f, nil
	}
	if err := a.download(ctx, p); err != nil {
		return nil, fmt.Errorf("fetching package %s %s: %w: %w", p.Name, p.Version, ErrDownload, err)
	}
	if f, err = openVerified(a.path(p), p); err != nil {
		return nil, fmt.Errorf("opening package %s %s: %w", p.Name, p.Version, err)
	}
	return f, nil
}

func (a *Archive) path(p Package) string {
	return filepath.Join(a.dir, p.Name+"_"+p.SHA256+".deb")
}

// download fetches into a folder of its own, so that a package takes its place
// in the cache whole and verified, or not at all.
func (a *Archive) download(ctx context.Context, p Package) error {
	tmp, err := os.MkdirTemp(a.dir, "download-")
	if err != nil {
		return err
	}
	defer func() {
		_ = os.RemoveAll(tmp) // what is left in a cache after a failure does no harm
	}()
	if _, err := a.aptIn(ctx, tmp, "apt-get", "download", p.Name+"="+p.Version); err != nil {
		return err
	}
	// apt names the file by the version, with its own escapes.
	debs, err := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if err != nil {
		return err
	}
	if len(debs) != 1 {
		return fmt.Errorf("apt-get made %d packages instead of one", len(debs))
	}
	f, err := openVerified(debs[0], p)
	if err != nil {
		return err
	}
	err = errors.Join(f.Sync(), f.Close())
	if err != nil {
		return err
	}
	return os.Rename(debs[0], a.path(p))
}

// openVerified opens a package's file and compares it with the index.
func openVerified(name string, p Package) (*os.File, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	if err := verify(f, p); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func verify(f *os.File, p Package) error {
	sum := sha256.New()
	n, err := io.Copy(sum, io.LimitReader(f, p.Size+1))
	if err != nil {
		return err
	}
	if n != p.Size {
		return fmt.Errorf("the file has not the %d bytes that the archive's index states", p.Size)
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != p.SHA256 {
		return fmt.Errorf("the file does not verify: its SHA-256 is %s, the archive's index states %s", got, p.SHA256)
	}
	_, err = f.Seek(0, io.SeekStart)
	return err
}

// The forms of Debian Policy 5.6.1 and 5.6.12, a little narrower.
var (
	packageName = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]{1,127}$`)
	version     = regexp.MustCompile(`^[0-9][0-9A-Za-z.+:~-]{0,127}$`)
	arch        = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,31}$`)
	digest      = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// parseStanza reads the first stanza of `apt-cache show`. A package that is
// installed here and in no archive has a stanza too, without a digest.
func parseStanza(b []byte) (Package, error) {
	field := make(map[string]string)
	lines := bufio.NewScanner(bytes.NewReader(b))
	lines.Buffer(nil, maxOutput)
	for lines.Scan() && lines.Text() != "" {
		key, value, ok := strings.Cut(lines.Text(), ":")
		if _, seen := field[key]; ok && !seen && !strings.HasPrefix(key, " ") {
			field[key] = strings.TrimSpace(value)
		}
	}
	if err := lines.Err(); err != nil {
		return Package{}, fmt.Errorf("reading the index: %w", err)
	}
	p := Package{
		Name: field["Package"], Version: field["Version"], Architecture: field["Architecture"],
		SHA256: field["SHA256"], Depends: field["Depends"],
	}
	if p.SHA256 == "" {
		return Package{}, ErrUnknown
	}
	size, err := strconv.ParseInt(field["Size"], 10, 64)
	if err != nil || size <= 0 || size > maxPackage {
		return Package{}, fmt.Errorf("the index states a size of %.40q bytes, the limit is %d", field["Size"], maxPackage)
	}
	p.Size = size
	if !packageName.MatchString(p.Name) || !version.MatchString(p.Version) || !arch.MatchString(p.Architecture) || !digest.MatchString(p.SHA256) {
		return Package{}, fmt.Errorf("the index's entry is malformed: %.80q %.80q %.80q %.80q", p.Name, p.Version, p.Architecture, p.SHA256)
	}
	return p, nil
}
