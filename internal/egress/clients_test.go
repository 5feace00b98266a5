package egress_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/egress"
	"github.com/capsem/capsem/internal/event"
)

// program finds a program of others. Without it the test is skipped, or fails
// where CAPSEM_TEST_REQUIRE has feature.
func program(t *testing.T, name, feature string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		if config.TestRequires(config.OSEnv(), feature) {
			t.Fatalf("CAPSEM_TEST_REQUIRE has %s, but: %v", feature, err)
		}
		t.Skipf("%v: install %s, or `just setup`, which does", err, name)
	}
	return path
}

// certificate writes the certificate of a test server to a file.
func certificate(t *testing.T, srv *httptest.Server) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "ca.pem")
	b := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// environment is that of a server in a jail.
func (j *jail) environment(t *testing.T, more ...string) []string {
	t.Helper()
	at := "http://" + j.addr
	return append([]string{
		"HOME=" + t.TempDir(), "PATH=/usr/local/bin:/usr/bin:/bin",
		"HTTP_PROXY=" + at, "HTTPS_PROXY=" + at, "http_proxy=" + at, "https_proxy=" + at,
		"npm_config_proxy=" + at, "npm_config_https_proxy=" + at, "NODE_USE_ENV_PROXY=1",
	}, more...)
}

func run(t *testing.T, env []string, name string, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Env, cmd.Dir = env, t.TempDir()
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestCurlGoesThroughTheProxy(t *testing.T) {
	curl := program(t, "curl", "curl")
	hello := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body) // a short body shows in the comparison
		_, _ = w.Write([]byte(strings.Repeat("x", int(n)%10) + "hello"))
	})
	plain, secure := httptest.NewServer(hello), httptest.NewTLSServer(hello)
	defer plain.Close()
	defer secure.Close()
	j := newJail(t, newBook(), address(plain), address(secure))
	env := j.environment(t)
	if out, err := run(t, env, curl, "-sS", plain.URL); err != nil || out != "hello" {
		t.Errorf("plain: %q, %v", out, err)
	}
	if out, err := run(t, env, curl, "-sS", "--cacert", certificate(t, secure), secure.URL); err != nil || out != "hello" {
		t.Errorf("TLS: %q, %v", out, err)
	}
	// curl waits for 100 Continue before a body of this size.
	large := filepath.Join(t.TempDir(), "large")
	if err := os.WriteFile(large, make([]byte, 2_000_003), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := run(t, env, curl, "-sS", "--expect100-timeout", "60", "--data-binary", "@"+large, plain.URL); err != nil || out != "xxxhello" {
		t.Errorf("a large body: %q, %v", out, err)
	}
	if out, err := run(t, env, curl, "-sS", "http://127.0.0.1:9/"); err != nil || !strings.Contains(out, `does not list "127.0.0.1:9"`) {
		t.Errorf("what is not listed: %q, %v", out, err)
	}
	if out, err := run(t, env, curl, "-sS", "https://example.org/"); err == nil || !strings.Contains(out, "403") {
		t.Errorf("a tunnel that is not listed: %q, %v", out, err)
	}
	j.book.finished(t, 5)
}

func TestNodeGoesThroughTheProxy(t *testing.T) {
	program(t, "node", "npm")
	node := "node"
	if newer, err := filepath.Abs("../../tests/npm/node_modules/node/bin/node"); err == nil {
		if _, err := os.Stat(newer); err == nil {
			node = newer // NODE_USE_ENV_PROXY needs 22.21
		}
	}
	secure := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("hello")) // the comparison sees it
	}))
	defer secure.Close()
	j := newJail(t, newBook(), address(secure))
	env := j.environment(t, "NODE_EXTRA_CA_CERTS="+certificate(t, secure))
	if out, err := run(t, env, node, "-p", "process.versions.node"); err != nil || strings.HasPrefix(out, "20.") || strings.HasPrefix(out, "18.") {
		t.Skipf("node %s has no NODE_USE_ENV_PROXY (%v): `just setup` installs a newer one", strings.TrimSpace(out), err)
	}
	out, err := run(t, env, node, "-e", "fetch(process.argv[1]).then(r => r.text()).then(t => process.stdout.write(t))", secure.URL)
	if err != nil || !strings.HasSuffix(out, "hello") { // after warnings
		t.Errorf("fetch: %q, %v", out, err)
	}
	if r := j.book.finished(t, 1)[0]; r.event.HTTP.Method != http.MethodConnect || r.out.Status != event.Done {
		t.Errorf("recorded %+v, %+v", r.event.HTTP, r.out)
	}
}

// registry is a small npm registry with one package, whose program says hello.
// It is example.com, for which test servers have a certificate, at its own port.
func registry(t *testing.T) (srv *httptest.Server, at string) {
	t.Helper()
	files := map[string]string{
		"package/package.json": `{"name":"greeter","version":"1.0.0","bin":{"greeter":"greet.js"}}`,
		"package/greet.js":     "#!/usr/bin/env node\nconsole.log('hello from greeter')\n",
	}
	var archive bytes.Buffer
	zipped := gzip.NewWriter(&archive)
	w := tar.NewWriter(zipped)
	for name, content := range files {
		err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(content)), Typeflag: tar.TypeReg})
		if err == nil {
			_, err = io.WriteString(w, content)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(w.Close(), zipped.Close()); err != nil {
		t.Fatal(err)
	}
	sum := sha512.Sum512(archive.Bytes())
	srv = httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/greeter":
			rw.Header().Set("Content-Type", "application/json")
			// The client says what is wrong with an answer that it cannot read.
			_ = json.NewEncoder(rw).Encode(map[string]any{
				"name": "greeter", "dist-tags": map[string]string{"latest": "1.0.0"},
				"versions": map[string]any{"1.0.0": map[string]any{
					"name": "greeter", "version": "1.0.0", "bin": map[string]string{"greeter": "greet.js"},
					"dist": map[string]string{
						"tarball":   "https://" + at + "/greeter/-/greeter-1.0.0.tgz",
						"integrity": "sha512-" + base64.StdEncoding.EncodeToString(sum[:]),
					},
				}},
			})
		case "/greeter/-/greeter-1.0.0.tgz":
			_, _ = rw.Write(archive.Bytes()) // the client checks it
		default:
			http.NotFound(rw, r)
		}
	}))
	at = strings.Replace(address(srv), "127.0.0.1", "example.com", 1)
	srv.StartTLS()
	t.Cleanup(srv.Close)
	return srv, at
}

func TestNpxStartsAPackageWithAColdCacheAndOnlyTheRegistryListed(t *testing.T) {
	npx := program(t, "npx", "npm")
	srv, at := registry(t)
	command := []string{"-y", "greeter"}
	settings := []string{"npm_config_registry=https://" + at + "/", "npm_config_cafile=" + certificate(t, srv), "npm_config_fetch_retries=0", "npm_config_audit=false", "npm_config_update_notifier=false"}

	b := newBook()
	o := options(t, b, at, address(srv))
	o.Resolve = func(context.Context, string) ([]netip.Addr, error) {
		return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, nil
	}
	j := open(t, b, egress.NewProxy(o))
	if out, err := run(t, j.environment(t, settings...), npx, command...); err != nil || !strings.Contains(out, "hello from greeter") {
		t.Errorf("%v: %s", err, out)
	}
	j.book.mu.Lock()
	tunnels := len(j.book.rows)
	j.book.mu.Unlock()
	if tunnels == 0 {
		t.Error("nothing went through the proxy")
	}
	j.book.finished(t, tunnels)

	closed := newJail(t, newBook(), "example.org:443")
	if out, err := run(t, closed.environment(t, settings...), npx, command...); err == nil || !strings.Contains(out, "403") {
		t.Errorf("without the registry in the list: %v, %s", err, out)
	}
}
