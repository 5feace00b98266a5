// Capsem is the command line: see package cli.
package main

import (
	"context"
	"os"

	"github.com/capsem/capsem/internal/cli"
	"github.com/capsem/capsem/internal/config"
)

// version is set by the build.
var version = "dev"

func main() {
	os.Exit(cli.Main(context.Background(), os.Args[1:], cli.Options{
		In: os.Stdin, Out: os.Stdout, Err: os.Stderr,
		Env: config.OSEnv(), Version: version,
	}))
}
