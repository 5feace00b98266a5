# Recipes for work on Capsem. `./justw RECIPE` installs what a recipe needs, then runs it.
# Recipes are a few lines each; what takes more is a program.

set positional-arguments := true

lint_version := `sed -n 's|.*github.com/golangci/golangci-lint/v2 v\([0-9.]*\).*|\1|p' tools/go.mod`
golangci_lint := ".cache/bin/golangci-lint-" + lint_version
tool := "go tool -modfile=tools/go.mod"
test_home := justfile_directory() / ".cache/test-home" # images for tests, apart from the user's own home

# List the recipes
[private]
default:
    @'{{ just_executable() }}' --justfile '{{ justfile() }}' --list --unsorted

# Fetch everything that building, testing and linting use
setup: _peers
    go mod download
    go mod download -modfile=tools/go.mod
    @'{{ just_executable() }}' --justfile '{{ justfile() }}' _golangci-lint

# Build all programs into bin/
build:
    #!/usr/bin/env bash
    set -euo pipefail
    version=$(git describe --tags --always --dirty 2>/dev/null || echo devel)
    export CGO_ENABLED=0
    build() { go build -trimpath -buildvcs=false -ldflags "-s -w -X main.version=$version" -o "bin/$1" "./cmd/$2"; }
    build capsem capsem
    build capsemd capsemd
    build capsem-mcp capsem-mcp
    build capsem-aggregator aggregator
    build capsem-builtin builtin
    GOOS=linux build guest-relay guest-relay

# Build an image, `tiny` unless another is named
image name="tiny": build
    bin/capsem image build "$1"

# Boot a virtual machine and show what Capsem does with an agent's tool calls
[no-exit-message]
demo: build _peers
    @bin/capsem image build tiny
    @bash tests/demo/demo.sh

# Run a command in a virtual machine made for it: just run -- uname -a
[no-exit-message]
run *args: build
    @bin/capsem run "$@"

# Run a shell command line in a virtual machine made for it: just exec "ls / | wc -l"
[no-exit-message]
exec command: build
    @bin/capsem run -- sh -c "$1"

# Ask a machine's ledger: just sql VM "SELECT tool_name, decision FROM tool_calls"
[no-exit-message]
sql *args: build
    @bin/capsem sql "$@"

# Say what of this machine Capsem can use
[no-exit-message]
doctor: build
    @bin/capsem doctor

# Run the unit tests under the race detector, then the scripts on real virtual machines; with arguments, just those packages: just test ./internal/gate -run Block
test *args: build _peers
    #!/usr/bin/env bash
    set -euo pipefail
    if (($#)); then
        exec go test -race "$@"
    fi
    export CAPSEM_TEST_HOME='{{ test_home }}'
    CAPSEM_HOME=$CAPSEM_TEST_HOME bin/capsemd image build tiny
    digest=$(sed 's/^sha256://' "$CAPSEM_TEST_HOME/images/tiny/current")
    export CAPSEM_TEST_IMAGE=$CAPSEM_TEST_HOME/images/tiny/$digest
    go list ./... | grep -v '/\(tests\|bench\)\(/\|$\)' | xargs go test -race -timeout 15m
    go test -count=1 -timeout 15m ./tests/...

# Run the scripts on real virtual machines, and fail where there can be none: just e2e -run TestScripts/mcp
e2e *args: build _peers
    CAPSEM_TEST_HOME='{{ test_home }}' CAPSEM_TEST_REQUIRE=vm,npm go test -count=1 -timeout 15m ./tests/... "$@"

# All that must pass before a change is proposed
check: lint vet test (fuzz "5s") docs

# Find faults by reading: formatting, golangci-lint
lint: _golangci-lint
    {{ golangci_lint }} run ./...

# Mend what the formatters can
fmt: _golangci-lint
    {{ golangci_lint }} fmt ./...

# Run go vet
vet:
    go vet ./...

# Run every fuzz target for a while each, or those whose name matches: just fuzz 2m FuzzDecode
fuzz time="30s" match="Fuzz":
    #!/usr/bin/env bash
    set -euo pipefail
    grep -rlE --include='*_test.go' '^func Fuzz' internal | sort | while read -r file; do
        for target in $(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' "$file"); do
            [[ $target =~ $2 ]] || continue
            echo "fuzz: $(dirname "$file") $target for $1"
            go test -run '^$' -fuzz "^$target\$" -fuzztime "$1" "./$(dirname "$file")" </dev/null
        done
    done

# Measure, and write bench/report.md; with a name, one bar: just bench exec
bench *args: build _peers
    @bin/capsem image build tiny
    go run ./bench "$@"

# What takes too long for each change: fuzzing for ten minutes a target, every benchmark
soak: (fuzz "10m") bench

# Write the generated files again
gen:
    go generate ./...

# Check that the documents say what is so: links, recipes, generated pages
docs:
    go test -count=1 -run '^TestDocs' .

# Look the modules that we use up among known vulnerabilities
vuln:
    @{{ tool }} govulncheck ./... || { echo "govulncheck found something, or could not reach the Go vulnerability database (vuln.go.dev): see above." >&2; exit 1; }

# Programs of others that tests and benchmarks run: MCP servers and clients
[private]
_peers:
    #!/usr/bin/env bash
    set -euo pipefail
    cd tests/npm
    if ! cmp -s package-lock.json node_modules/.capsem-lock; then
        echo "installing the MCP servers and clients that tests run into tests/npm/node_modules (npm ci)"
        npm ci --loglevel=error
        cp package-lock.json node_modules/.capsem-lock
    fi

# The linter takes minutes to build: once for each version
[private]
_golangci-lint:
    #!/usr/bin/env bash
    set -euo pipefail
    if [ ! -x {{ golangci_lint }} ]; then
        echo "building golangci-lint {{ lint_version }} into .cache/bin: takes some minutes, once"
        mkdir -p .cache/bin
        CGO_ENABLED=0 nice -n 10 go build -modfile=tools/go.mod -trimpath -o {{ golangci_lint }}.new github.com/golangci/golangci-lint/v2/cmd/golangci-lint
        mv {{ golangci_lint }}.new {{ golangci_lint }}
    fi
