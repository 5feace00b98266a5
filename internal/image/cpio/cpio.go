// Package cpio writes and reads the archives that Linux unpacks into its first
// root file system: the "newc" form of
// Documentation/driver-api/early-userspace/buffer-format.rst, uncompressed.
//
// The form written here is canonical: the same entries in the same order give
// the same bytes. Modification times are zero, inode numbers count from 1, and
// hard links do not exist. Read accepts that form alone, so an archive that it
// accepts is written back byte for byte; an archive of another tool is refused.
//
// An archive is held in memory, which suits an initramfs of a few megabytes.
package cpio

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"strconv"
)

// File types in an entry's Mode, the values of S_IFMT in sys/stat.h.
const (
	TypeMask = 0o170000
	File     = 0o100000
	Dir      = 0o040000
	Symlink  = 0o120000
	Char     = 0o020000
)

const (
	magic      = "070701"
	headerSize = 110
	trailer    = "TRAILER!!!"
	// maxName is PATH_MAX: the kernel skips an entry with a longer name.
	maxName = 4096
	align   = 4
)

// Entry is one file of an archive.
type Entry struct {
	// Name is a slash-separated path in the form of fs.ValidPath, under 4096
	// bytes; "." is the root itself. Directories must come before what they hold: the kernel does not
	// create them.
	Name string
	// Mode is a file type and permission bits.
	Mode uint32
	// UID and GID own the file.
	UID, GID uint32
	// Major and Minor number a character device; they are 0 for other types.
	Major, Minor uint32
	// Body is a file's content or a symbolic link's target, empty for other
	// types.
	Body []byte
}

// Write writes entries and the trailer to w. It checks every entry before it
// writes the first.
func Write(w io.Writer, entries []Entry) error {
	for _, e := range entries {
		if err := e.check(); err != nil {
			return err
		}
	}
	for i, e := range entries {
		if err := e.write(w, i+1); err != nil {
			return fmt.Errorf("writing %s to the archive: %w", e.Name, err)
		}
	}
	if err := (Entry{Name: trailer}).write(w, 0); err != nil {
		return fmt.Errorf("writing the archive's trailer: %w", err)
	}
	return nil
}

func (e Entry) check() error {
	switch {
	case !fs.ValidPath(e.Name) || e.Name == trailer || len(e.Name) >= maxName:
		return fmt.Errorf("archive entry %.80q: not a name that an archive can hold", e.Name)
	case len(e.Body) > math.MaxUint32:
		return fmt.Errorf("archive entry %.80q: %d bytes are more than the format's 4 GiB", e.Name, len(e.Body))
	}
	for i := range len(e.Name) {
		if e.Name[i] == 0 {
			return fmt.Errorf("archive entry %.80q: a name cannot hold a zero byte", e.Name)
		}
	}
	kind := e.Mode & TypeMask
	switch kind {
	case File, Dir, Symlink, Char:
	default:
		return fmt.Errorf("archive entry %.80q: mode %#o has no type that is supported", e.Name, e.Mode)
	}
	if len(e.Body) > 0 && kind != File && kind != Symlink {
		return fmt.Errorf("archive entry %.80q: only files and links have content", e.Name)
	}
	if kind == Symlink && (len(e.Body) == 0 || len(e.Body) >= maxName) {
		return fmt.Errorf("archive entry %.80q: a link's target has 1 to %d bytes", e.Name, maxName-1)
	}
	if (e.Major|e.Minor) != 0 && kind != Char {
		return fmt.Errorf("archive entry %.80q: only devices have device numbers", e.Name)
	}
	return nil
}

// header is the entry's fixed part, name and padding. The kernel takes inode
// numbers only to find hard links, which need a link count above 1.
func (e Entry) header(inode int) []byte {
	h := fmt.Appendf(make([]byte, 0, headerSize+len(e.Name)+align), "%s%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00", magic,
		inode, e.Mode, e.UID, e.GID, 1, 0, len(e.Body), 0, 0, e.Major, e.Minor, len(e.Name)+1, 0, e.Name)
	return append(h, make([]byte, padding(len(h)))...)
}

func (e Entry) write(w io.Writer, inode int) error {
	for _, part := range [][]byte{e.header(inode), e.Body, make([]byte, padding(len(e.Body)))} {
		if _, err := w.Write(part); err != nil {
			return err
		}
	}
	return nil
}

// padding is the number of zero bytes that bring n to the next multiple of 4.
func padding(n int) int { return (align - n%align) % align }

var errNotCanonical = errors.New("the archive is cut short or not in the form that this package writes")

// Read decodes an archive that Write made. The bodies of the entries are slices
// of b.
func Read(b []byte) ([]Entry, error) {
	var entries []Entry
	for inode := 1; ; inode++ {
		e, rest, err := read(b, inode)
		if err != nil {
			return nil, fmt.Errorf("reading archive entry %d: %w", inode, err)
		}
		if e.Name == trailer {
			if len(rest) > 0 {
				return nil, fmt.Errorf("reading an archive: %d bytes follow its end", len(rest))
			}
			return entries, nil
		}
		entries, b = append(entries, e), rest
	}
}

// read decodes one entry and returns what follows it. It compares the header
// with the one it would write, which refuses every other spelling of the same
// values.
func read(b []byte, inode int) (Entry, []byte, error) {
	if len(b) < headerSize {
		return Entry{}, nil, errNotCanonical
	}
	var field [13]uint32
	for i := range field {
		at := len(magic) + 8*i
		v, err := strconv.ParseUint(string(b[at:at+8]), 16, 32)
		if err != nil {
			return Entry{}, nil, errNotCanonical
		}
		field[i] = uint32(v)
	}
	size, nameSize := int(field[6]), int(field[11])
	if nameSize < 2 || nameSize > maxName || len(b) < headerSize+nameSize {
		return Entry{}, nil, errNotCanonical
	}
	e := Entry{
		Name: string(b[headerSize : headerSize+nameSize-1]),
		Mode: field[1], UID: field[2], GID: field[3], Major: field[9], Minor: field[10],
	}
	at := headerSize + nameSize + padding(headerSize+nameSize)
	if len(b) < at || size > len(b)-at || padding(size) > len(b)-at-size {
		return Entry{}, nil, errNotCanonical
	}
	e.Body = b[at : at+size : at+size]
	end := at + size + padding(size)
	if e.Name == trailer {
		e, inode = Entry{Name: trailer}, 0
	} else if err := e.check(); err != nil {
		return Entry{}, nil, err
	}
	if string(e.header(inode)) != string(b[:at]) || string(b[at+size:end]) != string(make([]byte, end-at-size)) {
		return Entry{}, nil, errNotCanonical
	}
	return e, b[end:], nil
}
