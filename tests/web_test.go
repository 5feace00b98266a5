package tests

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/rogpeppe/go-internal/testscript"
)

// metadataURL is where clouds keep the credentials of a machine.
const metadataURL = "http://169.254.169.254/latest/meta-data/"

// web is an HTTP server on the loopback address that writes down what it is asked.
type web struct {
	mu    sync.Mutex
	asked []string
}

func (w *web) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	w.mu.Lock()
	w.asked = append(w.asked, r.Method+" "+r.URL.RequestURI())
	w.mu.Unlock()
	switch r.URL.Path {
	case "/redirect":
		http.Redirect(rw, r, r.URL.Query().Get("to"), http.StatusFound)
	case "/metadata":
		http.Redirect(rw, r, metadataURL, http.StatusFound)
	case "/loop":
		http.Redirect(rw, r, "/loop", http.StatusFound)
	case "/missing":
		http.NotFound(rw, r)
	case "/large":
		if _, err := io.WriteString(rw, strings.Repeat("l", 64<<20)); err != nil {
			return // the client has had enough, as it should
		}
	default:
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		fmt.Fprintf(rw, "%s %s said %q", r.Method, r.URL.Path, body)
	}
}

// requests returns what was asked since the last time.
func (w *web) requests() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	asked := strings.Join(w.asked, "\n") + "\n"
	w.asked = nil
	return asked
}

// mcpHandler is an MCP server over streamable HTTP, by the SDK, that lets in who
// has the token.
func mcpHandler() http.Handler {
	server := mcp.NewServer(&mcp.Implementation{Name: "remote", Version: "1"}, nil)
	type words struct {
		Text string `json:"text"`
	}
	mcp.AddTool(server, &mcp.Tool{Name: "shout", Description: "Say it louder."},
		func(_ context.Context, _ *mcp.CallToolRequest, in words) (*mcp.CallToolResult, any, error) {
			return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: strings.ToUpper(in.Text)}}}, nil, nil
		})
	handler := mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return server }, nil)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer hunter2-hunter2" {
			http.Error(w, "who are you?", http.StatusUnauthorized)
			return
		}
		handler.ServeHTTP(w, r)
	})
}

// cmdWeb serves HTTP: web start sets WEB to the address of a web server, with an
// MCP server at /mcp; web asked puts on stdout what it was asked since the last
// time.
func cmdWeb(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg, len(args) == 1, "web start|asked")
	h := homeOf(ts)
	if args[0] == "start" {
		h.web = &web{}
		mux := http.NewServeMux()
		mux.Handle("/", h.web)
		mux.Handle("/mcp", mcpHandler())
		server := httptest.NewServer(mux)
		h.t.Cleanup(server.Close)
		ts.Setenv("WEB", strings.TrimPrefix(server.URL, "http://"))
		return
	}
	_, err := io.WriteString(ts.Stdout(), h.web.requests())
	ts.Check(err)
}
