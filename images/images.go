// Package images holds the recipes of the images that Capsem can build, as data:
// <name>/recipe.toml. Package image reads them.
package images

import "embed"

// FS has every recipe.
//
//go:embed */recipe.toml
var FS embed.FS
