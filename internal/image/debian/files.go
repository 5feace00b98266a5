package debian

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// maxFile bounds one file that is taken from a package.
const maxFile = 256 << 20

// maxFiles bounds all files that are taken from one package. All modules of
// Debian 12's cloud kernel have 77 MB.
const maxFiles = 1 << 30

// Files unpacks a package and hands the files that are wanted to take, in the
// package's order. Names are relative, without a leading dot. A wanted name that
// is there twice, or is a link, a device or larger than 256 MiB, is an error;
// what is not wanted is skipped unseen. It does not close deb.
func Files(ctx context.Context, deb *os.File, wants func(name string) bool, take func(name string, body []byte) error) error {
	running, cancel := context.WithCancel(ctx)
	defer cancel()
	cmd, err := command(running, "dpkg-deb", "--fsys-tarfile", "-")
	if err != nil {
		return err
	}
	messages := &tail{limit: maxMessage}
	cmd.Stdin, cmd.Stderr = deb, messages
	out, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("running dpkg-deb: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("running dpkg-deb: %w", err)
	}
	readErr := takeFiles(out, wants, take)
	if readErr == nil {
		// A tar ends with padding: unless it is read too, dpkg-deb fails on a
		// broken pipe.
		_, readErr = io.Copy(io.Discard, out)
	}
	if readErr != nil {
		cancel()
	}
	waitErr := cmd.Wait()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(readErr, io.ErrUnexpectedEOF) && waitErr != nil:
		return explain(waitErr, cmd, messages)
	case readErr != nil:
		return readErr
	}
	return explain(waitErr, cmd, messages)
}

// takeFiles reads a package's tar. A tar is a list of instructions to whoever
// unpacks it; none is followed here but "these bytes have this name", and only
// for names that were asked for.
func takeFiles(r io.Reader, wants func(string) bool, take func(string, []byte) error) error {
	seen := make(map[string]bool)
	total := int64(0)
	for files := tar.NewReader(r); ; {
		h, err := files.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading the package's files: %w", err)
		}
		name := strings.TrimPrefix(h.Name, "./")
		if !filepath.IsLocal(name) || !wants(name) {
			continue
		}
		if h.Typeflag != tar.TypeReg {
			return fmt.Errorf("the package's %s is not a regular file (tar type %q)", name, h.Typeflag)
		}
		if seen[name] {
			return fmt.Errorf("the package has %s twice", name)
		}
		seen[name] = true
		total += h.Size
		if h.Size > maxFile || total > maxFiles {
			return fmt.Errorf("the package's %s has %d bytes, more than is accepted", name, h.Size)
		}
		body := make([]byte, h.Size)
		if _, err := io.ReadFull(files, body); err != nil {
			return fmt.Errorf("reading the package's %s: %w", name, err)
		}
		if err := take(name, body); err != nil {
			return err
		}
	}
}
