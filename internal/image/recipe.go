package image

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"github.com/pelletier/go-toml/v2"
)

// Recipe is what an image is made of, read from <name>/recipe.toml.
type Recipe struct {
	// Architecture is Debian's name of the processor that the image is for.
	Architecture string `toml:"architecture"`
	// Kernel is a package that depends on the newest kernel's package.
	Kernel string `toml:"kernel"`
	// Modules are the kernel modules that the guest loads at boot, in this
	// order, each after what it depends on.
	Modules []string `toml:"modules"`
	// AvailableModules are those that it may load later.
	AvailableModules []string `toml:"available_modules"`
	Busybox          Busybox  `toml:"busybox"`
	// Links, Folders and Files go into the initramfs. Folders that are missing
	// above them are made with mode 0755.
	Links   []Link   `toml:"link"`
	Folders []Folder `toml:"folder"`
	Files   []Text   `toml:"file"`
}

// Busybox is the program that is most of a tiny image's commands.
type Busybox struct {
	// Package holds it, and File is its path in the package and in the image.
	Package string `toml:"package"`
	File    string `toml:"file"`
	// Applets are its names by folder, separated by white space.
	Applets map[string]string `toml:"applets"`
}

// Link is a symbolic link.
type Link struct {
	Path   string `toml:"path"`
	Target string `toml:"target"`
}

// Folder is an empty folder.
type Folder struct {
	Path string `toml:"path"`
	// Mode is octal, "" for 0755.
	Mode string `toml:"mode"`
	// Owner is the user and group id that own it.
	Owner uint32 `toml:"owner"`
}

// Text is a file of root's with mode 0644.
type Text struct {
	Path    string `toml:"path"`
	Content string `toml:"content"`
}

// readRecipe returns a recipe and the digest of its file.
func readRecipe(recipes fs.FS, name string) (Recipe, string, error) {
	if err := (Ref{Name: name}).check(); err != nil {
		return Recipe{}, "", err
	}
	b, err := fs.ReadFile(recipes, path.Join(name, "recipe.toml"))
	if errors.Is(err, fs.ErrNotExist) {
		known, err := fs.Glob(recipes, "*/recipe.toml")
		if err != nil {
			return Recipe{}, "", fmt.Errorf("listing the recipes: %w", err)
		}
		for i, file := range known {
			known[i] = path.Dir(file)
		}
		return Recipe{}, "", fmt.Errorf("there is no recipe for an image %q; there is for %s", name, strings.Join(known, ", "))
	}
	if err != nil {
		return Recipe{}, "", fmt.Errorf("reading the recipe of image %s: %w", name, err)
	}
	var r Recipe
	d := toml.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		return Recipe{}, "", fmt.Errorf("reading the recipe of image %s: %w", name, err)
	}
	return r, sum(b), nil
}

// mode parses a folder's permission bits.
func (f Folder) mode() (uint32, error) {
	if f.Mode == "" {
		return 0o755, nil
	}
	m, err := strconv.ParseUint(f.Mode, 8, 12)
	if err != nil {
		return 0, fmt.Errorf("folder %s: mode %q is not octal", f.Path, f.Mode)
	}
	return uint32(m), nil
}
