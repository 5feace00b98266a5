// Package client speaks to the service, or to a VM's own process, over a Unix
// socket.
//
// It is the other end of package api: requests are made of api's shapes, and
// every failure that the far side names comes back as an *api.Error. A socket
// on which nobody listens is an error that matches ErrNotRunning.
package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/inspect"
)

// ErrNotRunning says that nobody serves the socket.
var ErrNotRunning = errors.New("the service is not running")

// maxError is how much of a failed response is read, in bytes.
const maxError = 1 << 20

// Client makes requests over one socket. It is safe for concurrent use.
type Client struct {
	socket string
	http   *http.Client
	header http.Header
}

// New returns a client of the server behind socket. Nothing is opened yet.
func New(socket string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}
	return &Client{socket: socket, http: &http.Client{Transport: &http.Transport{DialContext: dial}}, header: http.Header{}}
}

// ToolCall is the host tool on whose behalf requests are made.
type ToolCall struct {
	Name string
	// ID is the caller's JSON-RPC id as text.
	ID        string
	Arguments json.RawMessage
	// Client is what the MCP client says of itself.
	Client string
}

// For returns a client whose requests are recorded as a call of a host tool.
func (c *Client) For(call ToolCall) *Client {
	h := c.header.Clone()
	h.Set(api.HeaderTool, call.Name)
	h.Set(api.HeaderToolCall, call.ID)
	h.Set(api.HeaderToolArguments, base64.StdEncoding.EncodeToString(call.Arguments))
	h.Set(api.HeaderClient, call.Client)
	return &Client{socket: c.socket, http: c.http, header: h}
}

// As returns a client whose requests are made for someone else: the service's,
// when it passes on what a caller wants to a VM's own process.
func (c *Client) As(who inspect.Caller) *Client {
	h := c.header.Clone()
	h.Set(api.HeaderInitiator, inspect.FormatInitiator(who.Initiator))
	h.Set(api.HeaderTrace, who.TraceID)
	return &Client{socket: c.socket, http: c.http, header: h}
}

// Close ends the connections that are kept for reuse.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Do sends in as JSON and decodes the answer into out. Either may be nil.
func (c *Client) Do(ctx context.Context, method, path string, in, out any) error {
	resp, err := c.send(ctx, method, path, in, "application/json")
	if err != nil {
		return err
	}
	return errors.Join(decode(resp.Body, out), resp.Body.Close())
}

// Follow is Do for a request that takes a while: step is called with each thing
// that the far side begins to do.
func (c *Client) Follow(ctx context.Context, method, path string, in any, step func(string), out any) (err error) {
	resp, err := c.send(ctx, method, path, in, "application/x-ndjson")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	lines := json.NewDecoder(resp.Body)
	for {
		var p api.Progress
		if err := lines.Decode(&p); err != nil {
			return fmt.Errorf("reading the answer of the service: %w", err)
		}
		switch {
		case p.Error != nil:
			return p.Error
		case p.Step != "":
			step(p.Step)
		default:
			return decode(bytes.NewReader(p.Result), out)
		}
	}
}

// Download writes what path answers to w and returns the file's description.
// A path that asks for a part of a file gets that part.
func (c *Client) Download(ctx context.Context, path string, w io.Writer) (info api.FileInfo, err error) {
	resp, err := c.send(ctx, http.MethodGet, path, nil, "application/octet-stream")
	if err != nil {
		return info, err
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	if err := json.Unmarshal([]byte(resp.Header.Get(api.HeaderFile)), &info); err != nil {
		return info, fmt.Errorf("reading the file's description: %w", err)
	}
	n, err := io.Copy(w, resp.Body)
	if err != nil {
		return info, fmt.Errorf("receiving %s: %w", info.Path, err)
	}
	if n != info.Size && resp.StatusCode != http.StatusPartialContent {
		return info, fmt.Errorf("receiving %s: %d of %d bytes arrived", info.Path, n, info.Size)
	}
	return info, nil
}

// Upload sends r as the body of a PUT. size is -1 when it is not known.
func (c *Client) Upload(ctx context.Context, path string, r io.Reader, size int64) (api.FileInfo, error) {
	var info api.FileInfo
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, base+path, r)
	if err != nil {
		return info, fmt.Errorf("making a request: %w", err)
	}
	req.ContentLength = size
	req.Header = c.header.Clone()
	req.Header.Set("Content-Type", "application/octet-stream")
	resp, err := c.roundTrip(req)
	if err != nil {
		return info, err
	}
	return info, errors.Join(decode(resp.Body, &info), resp.Body.Close())
}

// Stream starts a command whose streams the returned connection carries, as
// guestproto.Stream messages. The caller closes it.
func (c *Client) Stream(ctx context.Context, path string, in api.ExecRequest) (net.Conn, error) {
	body, err := json.Marshal(in)
	if err != nil {
		return nil, fmt.Errorf("encoding a request: %w", err)
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", c.socket)
	if err != nil {
		return nil, c.dialError(err)
	}
	stop := context.AfterFunc(ctx, func() {
		_ = conn.Close() // whoever uses it has ctx's error
	})
	upgraded, err := c.upgrade(ctx, conn, path, body)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return upgraded, nil
}

func (c *Client) upgrade(ctx context.Context, conn net.Conn, path string, body []byte) (net.Conn, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("making a request: %w", err)
	}
	req.Header = c.header.Clone()
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", api.StreamProtocol)
	if err := req.Write(conn); err != nil {
		return nil, fmt.Errorf("sending a request: %w", err)
	}
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, req)
	if err != nil {
		return nil, fmt.Errorf("reading the answer of the service: %w", err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		return nil, errors.Join(failure(resp), resp.Body.Close())
	}
	return &buffered{Conn: conn, r: r}, nil
}

// buffered reads what came after the response's header first.
type buffered struct {
	net.Conn
	r *bufio.Reader
}

func (b *buffered) Read(p []byte) (int, error) { return b.r.Read(p) }

// base is the URL's part that a Unix socket has no use for.
const base = "http://capsem"

func (c *Client) send(ctx context.Context, method, path string, in any, accept string) (*http.Response, error) {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return nil, fmt.Errorf("encoding a request: %w", err)
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, base+path, body)
	if err != nil {
		return nil, fmt.Errorf("making a request: %w", err)
	}
	req.Header = c.header.Clone()
	req.Header.Set("Accept", accept)
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	return c.roundTrip(req)
}

func (c *Client) roundTrip(req *http.Request) (*http.Response, error) {
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.dialError(err)
	}
	if resp.StatusCode >= http.StatusBadRequest {
		return nil, errors.Join(failure(resp), resp.Body.Close())
	}
	return resp, nil
}

func (c *Client) dialError(err error) error {
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" &&
		(errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)) {
		return fmt.Errorf("%w: nothing answers on %s", ErrNotRunning, c.socket)
	}
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	return fmt.Errorf("asking the service: %w", err)
}

// failure is the error that a response of status 400 or more carries.
func failure(resp *http.Response) error {
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxError))
	if err != nil {
		return fmt.Errorf("reading the answer of the service: %w", err)
	}
	var body api.ErrorBody
	if err := json.Unmarshal(raw, &body); err == nil && body.Error != nil {
		return body.Error
	}
	return &api.Error{Code: api.CodeFailed, Message: fmt.Sprintf("the service answered %s: %s", resp.Status, strings.TrimSpace(string(raw)))}
}

func decode(r io.Reader, out any) error {
	if out == nil {
		_, err := io.Copy(io.Discard, r)
		return err
	}
	if err := json.NewDecoder(r).Decode(out); err != nil {
		return fmt.Errorf("reading the answer of the service: %w", err)
	}
	return nil
}

// Put sends bytes as they are as the body of a PUT.
func (c *Client) Put(ctx context.Context, path string, body []byte, out any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, base+path, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("making a request: %w", err)
	}
	req.Header = c.header.Clone()
	resp, err := c.roundTrip(req)
	if err != nil {
		return err
	}
	return errors.Join(decode(resp.Body, out), resp.Body.Close())
}
