package tests

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/config"
)

// envCache names the folder in which built images and the packages that they are
// made of stay from one run of the tests to the next. The default is below the
// user's cache folder.
const envCache = "CAPSEM_TEST_HOME"

// imageTools are what building and booting an image needs.
var imageTools = []string{"qemu-system-x86_64", "apt-get", "apt-cache", "dpkg-deb"}

// noVM says why there can be no virtual machines here, nil if there can.
func noVM() error {
	for _, tool := range imageTools {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%w: ./justw setup installs it on Debian and Ubuntu", err)
		}
	}
	return nil
}

// tinyImages builds the image tiny with the programs under test, once for all
// tests, and returns the folder of images.
var tinyImages = sync.OnceValues(func() (string, error) {
	env := config.OSEnv()
	cache := env.Get(envCache)
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("finding a place for test images: %w; set %s", err, envCache)
		}
		cache = filepath.Join(user, "capsem-test")
	}
	if err := os.MkdirAll(cache, 0o700); err != nil {
		return "", err
	}
	lock, err := os.OpenFile(filepath.Join(cache, "test.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", err
	}
	defer lock.Close() // nothing is written to it; closing it unlocks
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return "", err
	}
	cmd := exec.CommandContext(context.Background(), filepath.Join(built, "capsemd"), "image", "build", "tiny")
	cmd.Env = append(cmd.Environ(), config.EnvHome+"="+cache)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the image: %w\n%s", err, out)
	}
	images := filepath.Join(cache, "images")
	return images, prune(filepath.Join(images, "tiny"))
})

// prune removes the images that earlier programs built.
func prune(dir string) error {
	current, err := os.ReadFile(filepath.Join(dir, "current"))
	if err != nil {
		return err
	}
	digest := strings.TrimPrefix(strings.TrimSpace(string(current)), "sha256:")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() && len(e.Name()) == len(digest) && e.Name() != digest {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	return err
}

// linkTree makes to a copy of the folder from, whose files are the same files
// where both are on one file system.
func linkTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		switch {
		case d.IsDir():
			return os.MkdirAll(target, 0o700)
		case d.Name() == ".lock":
			return nil
		}
		if err := os.Link(path, target); err != nil {
			return copyFile(path, target)
		}
		return nil
	})
}

func copyFile(from, to string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.Close()) }()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, info.Mode().Perm())
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
