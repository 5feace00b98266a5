package egress_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/egress"
	"github.com/capsem/capsem/internal/event"
)

func TestAPlainRequestThroughTheProxyIsJudgedAndSentAsItWasJudged(t *testing.T) {
	var got *http.Request
	var body []byte
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = r
		body, _ = io.ReadAll(r.Body) // a short body shows in the comparison
		w.Header().Set("Proxy-Authenticate", "Basic")
		w.Header().Set("Keep-Alive", "timeout=5")
		w.Header().Set("X-Answer", "yes")
		w.WriteHeader(http.StatusTeapot)
		_, _ = io.WriteString(w, "short") // the comparison sees it
	}))
	defer srv.Close()
	j := newJail(t, newBook(), address(srv))
	answer := j.say(t, "POST http://"+address(srv)+"/a%2Fb?q=1 HTTP/1.1\r\nHost: "+address(srv)+"\r\nX-Token: t\r\nx-token: u\r\n"+
		"Connection: keep-alive, X-Private\r\nX-Private: p\r\nProxy-Connection: keep-alive\r\nProxy-Authorization: Basic x\r\n"+
		"TE: trailers\r\nUpgrade: websocket\r\nContent-Type: text/plain\r\nContent-Length: 7\r\n\r\npayload")
	if status(answer) != "418" || !strings.HasSuffix(answer, "\r\n\r\nshort") || strings.Contains(answer, "Proxy-Auth") || strings.Contains(answer, "Keep-Alive") ||
		!strings.Contains(answer, "X-Answer: yes\r\n") || !strings.Contains(answer, "Connection: close\r\n") {
		t.Errorf("the client got %q", answer)
	}
	if got.RequestURI != "/a%2Fb?q=1" || got.Host != address(srv) || string(body) != "payload" {
		t.Errorf("the server got %s for %s with %q", got.RequestURI, got.Host, body)
	}
	want := http.Header{"X-Token": {"t", "u"}, "Content-Type": {"text/plain"}, "Content-Length": {"7"}, "Connection": {"close"}}
	if diff := cmp.Diff(want, got.Header); diff != "" {
		t.Errorf("the server's headers: %s", diff)
	}
	r := j.book.finished(t, 1)[0]
	host, port, _ := strings.Cut(address(srv), ":")
	n, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&event.HTTPRequest{
		Method: "POST", Scheme: "http", Host: host, Port: n, Path: "/a%2Fb", Query: "q=1", Via: "files", Body: []byte("payload"),
		Headers: map[string]string{"x-token": "t, u", "content-type": "text/plain"},
	}, r.event.HTTP); diff != "" {
		t.Errorf("the rule saw: %s", diff)
	}
	if r.out.Status != event.Done || r.out.HTTP.Status != http.StatusTeapot || r.out.BytesSent != 7 || r.out.BytesReceived != 5 {
		t.Errorf("recorded %+v", r.out)
	}
	if i := r.event.Initiator; i.Kind != event.Deployment || i.ID != "server:files" {
		t.Errorf("caused by %+v", i)
	}
}

func TestHostileRequestsAreRefusedRecordedAndReachNobody(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the server was reached") }))
	defer srv.Close()
	at := address(srv)
	port := at[strings.LastIndexByte(at, ':')+1:]
	host := "Host: " + at + "\r\n"
	post := "POST http://" + at + "/ HTTP/1.1\r\n" + host
	get := "GET http://" + at + "/ HTTP/1.1\r\n"
	for name, c := range map[string]struct{ raw, want string }{
		"two lengths":                {post + "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", "400"},
		"the same length twice":      {post + "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", "400"},
		"a list of lengths":          {post + "Content-Length: 3, 3\r\n\r\nabc", "400"},
		"a signed length":            {post + "Content-Length: +3\r\n\r\nabc", "400"},
		"a length beyond int64":      {post + "Content-Length: 99999999999999999999\r\n\r\nabc", "400"},
		"a length over the limit":    {post + fmt.Sprintf("Content-Length: %d\r\n\r\n", egress.MaxRequestBody+1), "413"},
		"length and coding":          {post + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "400"},
		"coding and length":          {post + "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", "400"},
		"two codings":                {post + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", "400"},
		"a coding that is not ours":  {post + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "400"},
		"a disguised coding":         {post + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", "400"},
		"a space before the colon":   {post + "Content-Length : 3\r\n\r\nabc", "400"},
		"a folded field":             {post + "X-A: 1\r\n Content-Length: 3\r\n\r\nabc", "400"},
		"a bare line feed":           {get + host + "X-A: 1\nX-B: 2\r\n\r\n", "400"},
		"a bare carriage return":     {get + host + "X-A: 1\rX-B: 2\r\n\r\n", "400"},
		"a NUL":                      {get + host + "X-A: 1\x002\r\n\r\n", "400"},
		"a control character":        {get + host + "X-A: 1\x082\r\n\r\n", "400"},
		"a field without a colon":    {get + host + "nonsense\r\n\r\n", "400"},
		"a huge field":               {get + host + "X-A: " + strings.Repeat("x", 70<<10) + "\r\n\r\n", "431"},
		"huge fields":                {get + host + strings.Repeat("X-A: "+strings.Repeat("x", 1000)+"\r\n", 70) + "\r\n", "431"},
		"many fields":                {get + host + strings.Repeat("A: 1\r\n", 200) + "\r\n", "431"},
		"a bad chunk":                {post + "Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n", "400"},
		"no host":                    {get + "\r\n", "400"},
		"two hosts":                  {get + host + host + "\r\n", "400"},
		"another host":               {get + "Host: example.org\r\n\r\n", "400"},
		"another port":               {get + "Host: 127.0.0.1:1\r\n\r\n", "400"},
		"a user":                     {"GET http://u:p@" + at + "/ HTTP/1.1\r\n" + host + "\r\n", "400"},
		"a fragment":                 {"GET http://" + at + "/#f HTTP/1.1\r\n" + host + "\r\n", "400"},
		"a backslash":                {"GET http://" + at + "\\@example.org/ HTTP/1.1\r\n" + host + "\r\n", "400"},
		"a tab in the target":        {"GET http://" + at + "/\t HTTP/1.1\r\n" + host + "\r\n", "400"},
		"two spaces":                 {"GET  http://" + at + "/ HTTP/1.1\r\n" + host + "\r\n", "400"},
		"an origin form":             {"GET / HTTP/1.1\r\n" + host + "\r\n", "400"},
		"an asterisk":                {"OPTIONS * HTTP/1.1\r\n" + host + "\r\n", "400"},
		"another scheme":             {"GET ftp://" + at + "/ HTTP/1.1\r\n" + host + "\r\n", "400"},
		"a file":                     {"GET file:///etc/passwd HTTP/1.1\r\n" + host + "\r\n", "400"},
		"port 0":                     {"GET http://127.0.0.1:0/ HTTP/1.1\r\nHost: 127.0.0.1:0\r\n\r\n", "400"},
		"no port":                    {"GET http://127.0.0.1:/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", "400"},
		"a port too large":           {"CONNECT 127.0.0.1:65536 HTTP/1.1\r\nHost: 127.0.0.1:65536\r\n\r\n", "400"},
		"a lower-case method":        {"get http://" + at + "/ HTTP/1.1\r\n" + host + "\r\n", "400"},
		"HTTP/2":                     {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "505"},
		"HTTP/0.9":                   {"GET http://" + at + "/\r\n\r\n", "400"},
		"an unknown expectation":     {post + "Expect: more\r\nContent-Length: 0\r\n\r\n", "417"},
		"CONNECT with a body":        {"CONNECT " + at + " HTTP/1.1\r\n" + host + "Content-Length: 3\r\n\r\nabc", "400"},
		"CONNECT without a port":     {"CONNECT 127.0.0.1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", "400"},
		"CONNECT with a URL":         {"CONNECT http://" + at + "/ HTTP/1.1\r\n" + host + "\r\n", "400"},
		"CONNECT with a user":        {"CONNECT u@" + at + " HTTP/1.1\r\n" + host + "\r\n", "400"},
		"an address with a zone":     {"CONNECT [fe80::1%25lo]:" + port + " HTTP/1.1\r\n" + host + "\r\n", "400"},
		"a URL with a zone":          {"GET http://[fe80::1%25lo]:" + port + "/ HTTP/1.1\r\n" + host + "\r\n", "400"},
		"a mapped address":           {"CONNECT [::ffff:127.0.0.1]:" + port + " HTTP/1.1\r\nHost: [::ffff:127.0.0.1]:" + port + "\r\n\r\n", "400"},
		"a number":                   {"CONNECT 2130706433:" + port + " HTTP/1.1\r\nHost: 2130706433:" + port + "\r\n\r\n", "400"},
		"a hexadecimal number":       {"CONNECT 0x7f000001:" + port + " HTTP/1.1\r\nHost: 0x7f000001:" + port + "\r\n\r\n", "400"},
		"an octal address":           {"CONNECT 0177.0.0.1:" + port + " HTTP/1.1\r\nHost: 0177.0.0.1:" + port + "\r\n\r\n", "400"},
		"a short address":            {"CONNECT 127.1:" + port + " HTTP/1.1\r\nHost: 127.1:" + port + "\r\n\r\n", "400"},
		"the unspecified address":    {"CONNECT 0.0.0.0:" + port + " HTTP/1.1\r\nHost: 0.0.0.0:" + port + "\r\n\r\n", "403"},
		"the address with a dot":     {"CONNECT 127.0.0.1.:" + port + " HTTP/1.1\r\nHost: 127.0.0.1.:" + port + "\r\n\r\n", "400"},
		"another address of the net": {"CONNECT 127.0.0.2:" + port + " HTTP/1.1\r\nHost: 127.0.0.2:" + port + "\r\n\r\n", "403"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBook()
			j := open(t, b, egress.Tight(options(t, b, at), 8, 5*time.Second, time.Minute, 1<<20))
			if answer := j.say(t, c.raw); status(answer) != c.want || !strings.Contains(answer, "\r\n\r\ncapsem: ") {
				t.Errorf("got %q, want status %s", answer, c.want)
			}
			if r := b.finished(t, 1)[0]; r.verdict.Decision != event.Block || r.verdict.Reason == "" || r.event.HTTP.Via != "files" {
				t.Errorf("recorded %+v", r)
			}
		})
	}
}

func TestWhatFollowsARequestOnItsConnectionIsNoRequest(t *testing.T) {
	var paths []string
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { paths = append(paths, r.URL.Path) }))
	defer srv.Close()
	j := newJail(t, newBook(), address(srv))
	one := func(path string) string {
		return "GET http://" + address(srv) + path + " HTTP/1.1\r\nHost: " + address(srv) + "\r\nConnection: keep-alive\r\n\r\n"
	}
	if answer := j.say(t, one("/first")+one("/second")); status(answer) != "200" || strings.Count(answer, "HTTP/1.1") != 1 {
		t.Errorf("got %q", answer)
	}
	j.book.finished(t, 1)
	if diff := cmp.Diff([]string{"/first"}, paths); diff != "" {
		t.Error(diff)
	}
}

func TestOnlyWhatTheListNamesExactlyIsReached(t *testing.T) {
	for _, c := range []struct {
		list, target string
		ok           bool
	}{
		{"", "api.test:443", false},
		{"api.test:443", "api.test:443", true},
		{"api.test:443", "API.test:443", true},
		{"api.test:443", "api.test.:443", true},
		{"api.test:443", "api.test:444", false},
		{"api.test:443", "www.api.test:443", false},
		{"api.test:443", "test:443", false},
		{"api.test:443", "xapi.test:443", false},
		{"api.test:443", "api.test.evil.test:443", false},
		{"api.test:443", "93.184.216.34:443", false},
		{"93.184.216.34:443", "api.test:443", false},
	} {
		b := newBook()
		var list []string
		if c.list != "" {
			list = append(list, c.list)
		}
		o := options(t, b, list...)
		asked := 0
		o.Resolve = func(context.Context, string) ([]netip.Addr, error) {
			asked++
			return nil, fmt.Errorf("no such name")
		}
		j := open(t, b, egress.NewProxy(o))
		answer := j.say(t, "CONNECT "+c.target+" HTTP/1.1\r\nHost: "+c.target+"\r\n\r\n")
		r := b.finished(t, 1)[0]
		if c.ok && (status(answer) != "502" || asked != 1 || r.out.Status != event.Failed) {
			t.Errorf("%s with the list %q: %q, looked up %d times, %+v", c.target, c.list, answer, asked, r.out)
		}
		if !c.ok && (status(answer) != "403" || asked != 0 || !strings.Contains(answer, `its egress in the profile does not list "`)) {
			t.Errorf("%s with the list %q: %q, looked up %d times", c.target, c.list, answer, asked)
		}
	}
}

func TestANameThatLeadsInsideIsRefusedUnlessTheAddressIsListedToo(t *testing.T) {
	srv := httptest.NewServer(http.NotFoundHandler())
	defer srv.Close()
	_, port, err := net.SplitHostPort(address(srv))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		addrs []string
		list  []string
		want  string
	}{
		{[]string{"127.0.0.1"}, []string{"a.test:" + port}, "403"},
		{[]string{"127.0.0.1"}, []string{"a.test:" + port, "127.0.0.1:1"}, "403"},
		{[]string{"93.184.216.34", "127.0.0.1"}, []string{"a.test:" + port}, "403"},
		{[]string{"169.254.169.254"}, []string{"a.test:" + port}, "403"},
		{[]string{"10.0.0.1"}, []string{"a.test:" + port}, "403"},
		{[]string{"::ffff:127.0.0.1"}, []string{"a.test:" + port}, "403"},
		{[]string{"::1"}, []string{"a.test:" + port}, "403"},
		{[]string{"0.0.0.0"}, []string{"a.test:" + port}, "403"},
		{[]string{"224.0.0.1"}, []string{"a.test:" + port}, "403"},
		{[]string{"127.0.0.1"}, []string{"a.test:" + port, "127.0.0.1:" + port}, "404"},
	} {
		b := newBook()
		o := options(t, b, c.list...)
		o.Resolve = func(context.Context, string) ([]netip.Addr, error) {
			var out []netip.Addr
			for _, a := range c.addrs {
				out = append(out, netip.MustParseAddr(a))
			}
			return out, nil
		}
		answer := open(t, b, egress.NewProxy(o)).say(t, "GET http://a.test:"+port+"/ HTTP/1.1\r\nHost: a.test:"+port+"\r\n\r\n")
		if status(answer) != c.want {
			t.Errorf("%v with the list %v: got %q, want %s", c.addrs, c.list, answer, c.want)
		}
		r := b.finished(t, 1)[0]
		if c.want == "403" && (r.out.Status != event.Blocked || r.out.CarriedOut || strings.Contains(answer, c.addrs[0])) {
			t.Errorf("%v recorded as %+v, and told %q", c.addrs, r.out, answer)
		}
	}
}

func TestANameThatChangesItsMindGainsNothing(t *testing.T) {
	reached := false
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached = true }))
	defer srv.Close()
	_, port, err := net.SplitHostPort(address(srv))
	if err != nil {
		t.Fatal(err)
	}
	b := newBook()
	o := options(t, b, "a.test:"+port)
	answers := 0
	o.Resolve = func(context.Context, string) ([]netip.Addr, error) {
		if answers++; answers == 1 {
			return nil, fmt.Errorf("later") // the first answer leads nowhere, and is not kept
		}
		return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, nil
	}
	j := open(t, b, egress.NewProxy(o))
	for i, want := range []string{"502", "403", "403"} {
		if got := j.say(t, "GET http://a.test:"+port+"/ HTTP/1.1\r\nHost: a.test:"+port+"\r\n\r\n"); status(got) != want {
			t.Errorf("request %d: got %q, want %s", i, got, want)
		}
	}
	if answers != 3 || reached {
		t.Errorf("looked up %d times for 3 requests, reached %v", answers, reached)
	}
}

func TestARedirectIsANewRequest(t *testing.T) {
	srv := httptest.NewServer(http.RedirectHandler("http://169.254.169.254/latest/meta-data/", http.StatusFound))
	defer srv.Close()
	j := newJail(t, newBook(), address(srv))
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, srv.URL, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := j.client(t, srv).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusForbidden {
		t.Errorf("got %s", resp.Status)
	}
	rows := j.book.finished(t, 2)
	if rows[0].out.HTTP.Status != http.StatusFound || rows[1].event.HTTP.Host != "169.254.169.254" || rows[1].verdict.Decision != event.Block {
		t.Errorf("recorded %+v", rows)
	}
}

func TestRulesDecideAboutWhatTheListAllows(t *testing.T) {
	reached := 0
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		reached++
		w.WriteHeader(http.StatusPaymentRequired)
		_, _ = io.WriteString(w, "classified") // the comparison sees it
	}))
	defer srv.Close()
	b := newBook()
	b.block = func(q *event.HTTPRequest, out *event.Outcome) string {
		switch {
		case out == nil && strings.Contains(string(q.Body), "evil"):
			return "profile.no_evil"
		case out == nil && q.Method == http.MethodConnect:
			return "profile.no_tunnel"
		case out != nil && out.HTTP != nil && out.HTTP.Status == http.StatusPaymentRequired:
			return "profile.no_pay"
		}
		return ""
	}
	j := newJail(t, b, address(srv))
	at := " http://" + address(srv) + "/ HTTP/1.1\r\nHost: " + address(srv) + "\r\n"
	if got := j.say(t, "POST"+at+"Content-Length: 4\r\n\r\nevil"); status(got) != "403" || !strings.Contains(got, "profile.no_evil") {
		t.Errorf("got %q", got)
	}
	if got := j.say(t, "POST"+at+"Transfer-Encoding: chunked\r\n\r\n2\r\nev\r\n2\r\nil\r\n0\r\n\r\n"); status(got) != "403" {
		t.Errorf("in chunks: got %q", got)
	}
	if got := j.say(t, "CONNECT "+address(srv)+" HTTP/1.1\r\nHost: "+address(srv)+"\r\n\r\n"); status(got) != "403" {
		t.Errorf("a tunnel: got %q", got)
	}
	if reached != 0 {
		t.Error("what was blocked was sent")
	}
	if got := j.say(t, "GET"+at+"\r\n"); status(got) != "403" || strings.Contains(got, "classified") || reached != 1 {
		t.Errorf("an answer that is blocked: got %q", got)
	}
}

func TestBodiesUpToTheBoundAreSeenWhole(t *testing.T) {
	var got int64
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		got, _ = io.Copy(io.Discard, r.Body) // a short body shows in the comparison
	}))
	defer srv.Close()
	j := newJail(t, newBook(), address(srv))
	for n, want := range map[int]int{egress.MaxRequestBody: http.StatusOK, egress.MaxRequestBody + 1: http.StatusRequestEntityTooLarge, 64 << 10: http.StatusOK} {
		for _, known := range []bool{true, false} {
			got = 0
			var body io.Reader = strings.NewReader(strings.Repeat("x", n))
			if !known {
				body = bufio.NewReader(body) // sent in chunks
			}
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, srv.URL, body)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Expect", "100-continue")
			resp, err := j.client(t, srv).Do(req)
			if err != nil {
				t.Fatalf("%d bytes, length known %v: %v", n, known, err)
			}
			resp.Body.Close()
			if resp.StatusCode != want || (want == http.StatusOK && got != int64(n)) {
				t.Errorf("%d bytes, length known %v: %s, the server got %d", n, known, resp.Status, got)
			}
		}
	}
}

func TestAnAnswerIsPassedOnAsItComes(t *testing.T) {
	next := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for range 3 {
			_, _ = io.WriteString(w, "data: x\n\n") // the client waits for it
			w.(http.Flusher).Flush()
			<-next
		}
	}))
	defer srv.Close()
	j := newJail(t, newBook(), address(srv))
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, srv.URL, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := j.client(t, srv).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	for range 3 {
		b := make([]byte, 9)
		if _, err := io.ReadFull(resp.Body, b); err != nil || string(b) != "data: x\n\n" {
			t.Fatalf("got %q, %v", b, err)
		}
		next <- struct{}{}
	}
	if _, err := resp.Body.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("at the end: %v", err)
	}
	if r := j.book.finished(t, 1)[0]; r.out.Status != event.Done || r.out.BytesReceived != 27 {
		t.Errorf("recorded %+v", r.out)
	}
}

func TestAClientThatGoesAwayEndsItsRequest(t *testing.T) {
	arrived, ended := make(chan struct{}), make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(arrived)
		<-r.Context().Done()
		close(ended)
	}))
	defer srv.Close()
	j := newJail(t, newBook(), address(srv))
	conn := j.dial(t)
	if _, err := io.WriteString(conn, "GET "+srv.URL+"/ HTTP/1.1\r\nHost: "+address(srv)+"\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	<-arrived
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	<-ended
	if r := j.book.finished(t, 1)[0]; r.out.Status != event.Cancelled {
		t.Errorf("recorded %+v", r.out)
	}
}
