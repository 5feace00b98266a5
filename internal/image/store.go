package image

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Names in the folder of an image name that are no digests. The dot keeps them
// out of every list.
const (
	lockFile = ".lock"
	tmpGlob  = ".tmp-*"
)

// Stored is an image on disk. Its files are not verified.
type Stored struct {
	Ref      Ref
	Manifest Manifest
	BuiltAt  time.Time
	// Current means that the plain name stands for this image.
	Current bool
	// Err says why the image cannot be used, nil if nothing is known against
	// it. Then Manifest may be empty.
	Err error
}

// List returns the images in a folder, by name, the newest of a name first.
func List(images string) ([]Stored, error) {
	names, err := os.ReadDir(images)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing images: %w", err)
	}
	var all []Stored
	for _, name := range names {
		if !name.IsDir() || !nameForm.MatchString(name.Name()) {
			continue
		}
		some, err := listName(images, name.Name())
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}

func listName(images, name string) ([]Stored, error) {
	digests, err := os.ReadDir(filepath.Join(images, name))
	if err != nil {
		return nil, fmt.Errorf("listing images: %w", err)
	}
	current, _ := resolve(images, Ref{Name: name}) // without a readable pointer, none is current: Open reports it
	var some []Stored
	for _, d := range digests {
		if d.IsDir() && digestForm.MatchString(d.Name()) {
			some = append(some, stat(images, Ref{name, d.Name()}, current))
		}
	}
	slices.SortStableFunc(some, func(a, b Stored) int { return b.BuiltAt.Compare(a.BuiltAt) })
	return some, nil
}

func stat(images string, ref, current Ref) Stored {
	s := Stored{Ref: ref, Current: ref == current}
	dir, m, err := openDir(images, ref)
	if err != nil {
		s.Err = err
		return s
	}
	defer dir.Close() // a folder that was only read
	s.Manifest = m
	info, err := dir.Stat(ManifestFile)
	if err != nil {
		s.Err = fmt.Errorf("listing image %s: %w", ref, err)
		return s
	}
	s.BuiltAt = info.ModTime()
	return s
}

// Prune removes every image that is neither current nor one that keep wants, and
// what interrupted builds left behind. It returns what it removed, also with an
// error. An image that is open stays usable to whoever holds it.
func Prune(images string, keep func(Ref) bool) ([]Ref, error) {
	all, err := List(images)
	if err != nil {
		return nil, err
	}
	var removed []Ref
	for _, name := range slices.Compact(refNames(all)) {
		gone, err := pruneName(images, name, keep)
		removed = append(removed, gone...)
		if err != nil {
			return removed, err
		}
	}
	return removed, nil
}

func refNames(all []Stored) []string {
	names := make([]string, 0, len(all))
	for _, s := range all {
		names = append(names, s.Ref.Name)
	}
	return names
}

func pruneName(images, name string, keep func(Ref) bool) (removed []Ref, err error) {
	s, err := openStore(images, name)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	// Listed again, now that nobody else can change it.
	all, err := listName(images, name)
	if err != nil {
		return nil, err
	}
	for _, stored := range all {
		if stored.Current || keep(stored.Ref) {
			continue
		}
		if err := s.remove(stored.Ref.Digest); err != nil {
			return removed, fmt.Errorf("removing image %s: %w", stored.Ref, err)
		}
		removed = append(removed, stored.Ref)
	}
	return removed, s.clean()
}

// store is the folder of one image name, locked.
type store struct {
	name string
	dir  string
	lock *os.File
}

// openStore makes the folder where it is missing, and locks it for this process.
// The lock ends with the process, however it ends.
func openStore(images, name string) (*store, error) {
	s := &store{name: name, dir: filepath.Join(images, name)}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the folder of image %s: %w", name, err)
	}
	var err error
	if s.lock, err = os.OpenFile(filepath.Join(s.dir, lockFile), os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, fmt.Errorf("locking image %s: %w", name, err)
	}
	if err := unix.Flock(int(s.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = ErrBusy
		}
		return nil, errors.Join(fmt.Errorf("locking image %s: %w", name, err), s.lock.Close())
	}
	return s, nil
}

func (s *store) close() error { return s.lock.Close() }

// clean removes what a process left that ended in mid-work.
func (s *store) clean() error {
	left, err := filepath.Glob(filepath.Join(s.dir, tmpGlob))
	if err != nil {
		return fmt.Errorf("cleaning up image %s: %w", s.name, err)
	}
	for _, dir := range left {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("cleaning up image %s: %w", s.name, err)
		}
	}
	return nil
}

// remove takes a digest's folder away in one step, then deletes it.
func (s *store) remove(digest string) error {
	tmp, err := os.MkdirTemp(s.dir, tmpGlob)
	if err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(s.dir, digest), filepath.Join(tmp, digest)); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return os.RemoveAll(tmp)
}

// publish writes an image's files to a folder of their own, makes that the
// folder of the image's digest, and the image the current one. If it fails, what
// was there before is as it was.
func (s *store) publish(images string, m Manifest, content map[string][]byte) error {
	ref, err := m.Ref()
	if err != nil {
		return err
	}
	// The same inputs were built before; unless that was damaged since, it
	// stays.
	if _, err := Verify(images, ref); err == nil {
		return s.point(ref)
	}
	if err := s.write(ref, m, content); err != nil {
		return fmt.Errorf("writing image %s: %w", ref, explainFull(err, m))
	}
	return s.point(ref)
}

func (s *store) write(ref Ref, m Manifest, content map[string][]byte) (err error) {
	tmp, err := os.MkdirTemp(s.dir, tmpGlob)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	dir := filepath.Join(tmp, "image")
	if err := os.MkdirAll(filepath.Join(dir, modulesDir), 0o700); err != nil {
		return err
	}
	for _, file := range m.Files {
		if err := writeFile(filepath.Join(dir, file.Name), content[file.Name]); err != nil {
			return err
		}
	}
	manifest, err := m.Encode()
	if err != nil {
		return err
	}
	if err := writeFile(filepath.Join(dir, ManifestFile), manifest); err != nil {
		return err
	}
	if err := syncDirs(filepath.Join(dir, modulesDir), dir); err != nil {
		return err
	}
	final := filepath.Join(s.dir, ref.Digest)
	if err := os.Rename(final, filepath.Join(tmp, "damaged")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Rename(dir, final); err != nil {
		return err
	}
	return syncDirs(s.dir)
}

// point makes an image the one that its plain name means.
func (s *store) point(ref Ref) (err error) {
	tmp, err := os.MkdirTemp(s.dir, tmpGlob)
	if err != nil {
		return fmt.Errorf("making image %s the current one: %w", ref, err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	file := filepath.Join(tmp, currentFile)
	if err := writeFile(file, []byte(digestPrefix+ref.Digest+"\n")); err != nil {
		return fmt.Errorf("making image %s the current one: %w", ref, err)
	}
	if err := os.Rename(file, filepath.Join(s.dir, currentFile)); err != nil {
		return fmt.Errorf("making image %s the current one: %w", ref, err)
	}
	return syncDirs(s.dir)
}

// writeFile writes a new file, read-only and durable.
func writeFile(name string, b []byte) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o400)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// syncDirs makes renames and new names in folders durable.
func syncDirs(dirs ...string) error {
	for _, dir := range dirs {
		f, err := os.Open(dir)
		if err != nil {
			return err
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// explainFull adds to a full disk's error what would help.
func explainFull(err error, m Manifest) error {
	if !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
		return err
	}
	const mega = 1_000_000
	return fmt.Errorf("%w: the image needs %d MB: free some (\"capsem image prune\" removes images that are not used), then run \"capsem image build %s\"",
		err, m.Size()/mega+1, m.Name)
}
