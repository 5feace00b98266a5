package egress

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/textproto"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/capsem/capsem/internal/event"
)

// forward carries out a request in absolute form: what was judged is sent, and
// the answer's body is passed on as it comes once its head was judged.
func (p *Proxy) forward(ctx context.Context, c *client, u *url.URL, header http.Header, req event.HTTPRequest) *refusal {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	unwatch := c.gone(cancel)
	defer unwatch()
	var answer *http.Response
	act := func(context.Context) event.Outcome {
		// The answer's body outlives this function, and lives by this context.
		var err error
		if answer, err = p.roundTrip(ctx, u, header, req); err != nil { //nolint:bodyclose // closed below, when it was passed on or withheld
			return failed(err)
		}
		return event.Outcome{
			Status: event.Done, CarriedOut: true, BytesSent: int64(len(req.Body)),
			HTTP: &event.HTTPResponse{Status: answer.StatusCode, Headers: flatten(answer.Header), Truncated: true},
		}
	}
	passed := false
	rest := func(_ context.Context, out *event.Outcome) {
		passed = true
		p.pass(ctx, cancel, c, answer, out)
		if out.Status == event.Done {
			unwatch()
			c.leave(p.limits.farewell)
		}
	}
	v, out := p.opts.Gate.Stream(ctx, p.opts.Caller.HTTP(req), act, rest)
	if answer != nil {
		_ = answer.Body.Close() // it was passed on, or nobody is to have it
	}
	if passed {
		return nil
	}
	unwatch()
	return p.told(v, out, net.JoinHostPort(req.Host, strconv.Itoa(req.Port)))
}

func (p *Proxy) roundTrip(ctx context.Context, u *url.URL, header http.Header, req event.HTTPRequest) (*http.Response, error) {
	out, err := http.NewRequestWithContext(ctx, req.Method, u.String(), bytes.NewReader(req.Body))
	if err != nil {
		return nil, fmt.Errorf("making the request: %w", err)
	}
	out.URL, out.Header = u, header
	if len(header["User-Agent"]) == 0 {
		header["User-Agent"] = nil // none of ours instead
	}
	answer, err := p.transport.RoundTrip(out)
	if err != nil {
		return nil, fmt.Errorf("requesting %s://%s: %w", u.Scheme, u.Host, err)
	}
	if answer.StatusCode == http.StatusSwitchingProtocols {
		return nil, errors.Join(errors.New("the server changes to a protocol that nobody asked for"), answer.Body.Close())
	}
	return answer, nil
}

// gone calls cancel when the client closes its connection. What it returns ends
// the watch, and must be called.
func (c *client) gone(cancel func()) (stop func()) {
	var wg sync.WaitGroup
	wg.Go(func() {
		// More bytes are no request: they are left alone.
		if _, err := c.in.Peek(1); err != nil {
			cancel()
		}
	})
	return sync.OnceFunc(func() {
		// It fails on a closed connection alone, whose reader has ended.
		_ = c.conn.SetReadDeadline(time.Unix(1, 0))
		wg.Wait()
	})
}

// pass sends an answer on.
func (p *Proxy) pass(ctx context.Context, cancel func(), c *client, answer *http.Response, out *event.Outcome) {
	f := p.watch(func() {
		cancel()
		c.close()
	})
	defer f.stop()
	w := bufio.NewWriterSize(c.conn, copyBuffer+1<<10)
	chunked := c.chunks && answer.ContentLength < 0 && answer.Request.Method != http.MethodHead
	err := writeHead(w, answer, chunked)
	if err == nil {
		err = w.Flush()
	}
	var body io.Writer = w
	if chunked {
		body = httputil.NewChunkedWriter(w)
	}
	if err == nil {
		err = f.move(body, answer.Body, &out.BytesReceived, w.Flush)
	}
	if err == nil && chunked {
		// The end of the chunks, and of trailers, of which there are none.
		_, err = w.WriteString("0\r\n\r\n")
	}
	if err == nil {
		err = w.Flush()
	}
	var lost *writeError
	switch {
	case err == nil:
	case f.end(ctx, out, err) && out.Status != event.Cancelled:
	case out.Status == event.Cancelled, errors.As(err, &lost):
		out.Status, out.Error = event.Cancelled, &event.Error{Message: "the client went away, or the server's life ended"}
	default:
		out.Status, out.Error = event.Failed, &event.Error{Message: "reading the answer: " + err.Error()}
	}
}

// writeHead writes an answer's status and fields, for a connection that ends
// with it.
func writeHead(w *bufio.Writer, answer *http.Response, chunked bool) error {
	drop := hopByHop()
	for _, list := range answer.Header["Connection"] {
		for name := range strings.SplitSeq(list, ",") {
			drop = append(drop, textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name)))
		}
	}
	header := http.Header{}
	for name, values := range answer.Header {
		if !slices.Contains(drop, name) {
			header[name] = values
		}
	}
	header.Set("Connection", "close")
	switch {
	case chunked:
		header.Set("Transfer-Encoding", "chunked")
	case answer.ContentLength >= 0 && answer.StatusCode != http.StatusNoContent:
		header.Set("Content-Length", strconv.FormatInt(answer.ContentLength, 10))
	}
	// The reason phrase is the server's own; ours says the same.
	if _, err := fmt.Fprintf(w, "HTTP/1.1 %d %s\r\n", answer.StatusCode, http.StatusText(answer.StatusCode)); err != nil {
		return err
	}
	if err := header.Write(w); err != nil {
		return err
	}
	_, err := w.WriteString("\r\n")
	return err
}
