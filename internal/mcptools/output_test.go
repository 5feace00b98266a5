package mcptools_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/api"
)

func TestAFailingCommandIsANormalResult(t *testing.T) {
	_, o := newService(t, reply(api.ExecResult{
		ExitCode: 7, Stdout: []byte("out\n"), StdoutBytes: 4, Stderr: []byte("err <&>\n"), StderrBytes: 8, DurationUS: 12_345, EventID: "e",
	}))
	got := result(t, call(t, connect(t, o, nil), "capsem_exec", map[string]any{"id": "box", "command": "false"}))
	want := map[string]any{
		"exitCode": 7.0, "stdout": "out\n", "stdoutEncoding": "utf8", "stdoutBytes": 4.0,
		"stderr": "err <&>\n", "stderrEncoding": "utf8", "stderrBytes": 8.0,
		"truncated": false, "durationMs": 12.0, "eventId": "e",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestTextIsShownToAModelAsItIs(t *testing.T) {
	_, o := newService(t, reply(api.Logs{Source: "serial", Text: "<a> & b"}))
	r := call(t, connect(t, o, nil), "capsem_vm_logs", map[string]any{"id": "box"})
	if !strings.Contains(text(t, r), "<a> & b") {
		t.Errorf("the text is escaped:\n%s", text(t, r))
	}
}

func TestOutputIsNeverAltered(t *testing.T) {
	tests := []struct {
		name, encoding string
		stdout         []byte
		total          int64
		want, how      string
		truncated      bool
	}{
		{"nothing", "", nil, 0, "", "utf8", false},
		{"text", "", []byte("grüße\x00\r\n"), 10, "grüße\x00\r\n", "utf8", false},
		{"the replacement character itself", "", []byte("\uFFFD"), 3, "\uFFFD", "utf8", false},
		{"one byte that is no text", "", []byte("a\xffb"), 3, "Yf9i", "base64", false},
		{"no text, though utf8 was asked for", "utf8", []byte("a\xffb"), 3, "Yf9i", "base64", false},
		{"text in base64", "base64", []byte("hi"), 2, "aGk=", "base64", false},
		{"a character that the program itself cut", "", []byte("gr\xc3"), 3, "Z3LD", "base64", false},
		{"a character cut by the limit", "", []byte("gr\xc3"), 100, "gr", "utf8", true},
		{"a character of four bytes cut by the limit", "", []byte("x\xf0\x9f\x98"), 100, "x", "utf8", true},
		{"no text, cut by the limit", "", []byte("\xff\xc3"), 100, "/8M=", "base64", true},
		{"cut by the limit, in base64", "base64", []byte("gr\xc3"), 100, "Z3LD", "base64", true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, o := newService(t, reply(api.ExecResult{Stdout: test.stdout, StdoutBytes: test.total}))
			arguments := map[string]any{"id": "box", "argv": []string{"x"}}
			if test.encoding != "" {
				arguments["encoding"] = test.encoding
			}
			got := result(t, call(t, connect(t, o, nil), "capsem_exec", arguments))
			if got["stdout"] != test.want || got["stdoutEncoding"] != test.how || got["truncated"] != test.truncated || got["stdoutBytes"] != float64(test.total) {
				t.Errorf("got %q", got)
			}
		})
	}
}

// file serves the parts of a file as the contract says.
func file(content []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		offset, err1 := strconv.Atoi(r.URL.Query().Get("offset"))
		limit, err2 := strconv.Atoi(r.URL.Query().Get("limit"))
		if err1 != nil || err2 != nil {
			api.WriteError(w, &api.Error{Code: api.CodeInvalid, Message: fmt.Sprint(err1, err2)})
			return
		}
		part := content[min(offset, len(content)):min(offset+limit, len(content))]
		w.Header().Set(api.HeaderFile, fmt.Sprintf(`{"path":%q,"size":%d,"mode":"0644"}`, r.URL.Query().Get("path"), len(content)))
		if len(part) < len(content) {
			w.WriteHeader(http.StatusPartialContent)
		}
		w.Write(part)
	}
}

func TestAFileIsReadInPartsThatAddUp(t *testing.T) {
	for name, content := range map[string][]byte{
		"text":       []byte(strings.Repeat("a€😀", 50)),
		"no text":    bytes.Repeat([]byte{0, 0xff, 0xc3, 'x'}, 50),
		"empty":      {},
		"one window": []byte("0123456"),
	} {
		t.Run(name, func(t *testing.T) {
			_, o := newService(t, file(content))
			s := connect(t, o, nil)
			var all []byte
			for offset := 0.0; ; {
				got := result(t, call(t, s, "capsem_read_file", map[string]any{"id": "box", "path": "/f", "offset": offset, "limit": 7}))
				part := got["content"].(string)
				switch got["encoding"] {
				case "utf8":
					all = append(all, part...)
				default:
					if name == "text" {
						t.Errorf("a part of a text came in %s", got["encoding"])
					}
					var b []byte
					if err := json.Unmarshal([]byte(`"`+part+`"`), &b); err != nil {
						t.Fatal(err)
					}
					all = append(all, b...)
				}
				if got["size"] != float64(len(content)) || got["path"] != "/f" || got["offset"] != offset {
					t.Errorf("got %v", got)
				}
				if got["truncated"] == false {
					break
				}
				offset = got["nextOffset"].(float64)
			}
			if !bytes.Equal(all, content) {
				t.Errorf("the parts make %q, want %q", all, content)
			}
		})
	}
}

func TestAFileIsReadWholeWithoutALimit(t *testing.T) {
	content := []byte(strings.Repeat("é", 300<<10))
	_, o := newService(t, file(content))
	got := result(t, call(t, connect(t, o, nil), "capsem_read_file", map[string]any{"id": "box", "path": "/f"}))
	if got["content"] != string(content) || got["truncated"] != false {
		t.Errorf("got %d bytes, truncated %v", len(got["content"].(string)), got["truncated"])
	}
}

func TestBytesThatAreNoTextAreAnErrorWhereTextIsWanted(t *testing.T) {
	_, o := newService(t, file([]byte("a\xff")))
	s := connect(t, o, nil)
	r := call(t, s, "capsem_read_file", map[string]any{"id": "box", "path": "/f", "encoding": "utf8"})
	if !r.IsError || !strings.Contains(text(t, r), "base64") {
		t.Errorf("isError %v: %s", r.IsError, text(t, r))
	}
	got := result(t, call(t, s, "capsem_read_file", map[string]any{"id": "box", "path": "/f", "encoding": "base64"}))
	if got["content"] != "Yf8=" || got["encoding"] != "base64" {
		t.Errorf("got %v", got)
	}
}

func TestAServerThatSendsMoreThanAskedForIsNotBelieved(t *testing.T) {
	_, o := newService(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set(api.HeaderFile, `{"path":"/f","size":9}`)
		w.WriteHeader(http.StatusPartialContent)
		w.Write([]byte("123456789"))
	})
	r := call(t, connect(t, o, nil), "capsem_read_file", map[string]any{"id": "box", "path": "/f", "limit": 8})
	if !r.IsError {
		t.Errorf("got %s", text(t, r))
	}
}

func TestLargeArgumentsAreRecordedBySizeAndDigest(t *testing.T) {
	content := strings.Repeat("x", 16<<10+1)
	sum := sha256.Sum256([]byte(content))
	far, o := newService(t, reply(api.FileInfo{Path: "/f", Size: int64(len(content)), Mode: "0644"}))
	got := result(t, call(t, connect(t, o, nil), "capsem_write_file", map[string]any{"id": "box", "path": "/f", "content": content}))
	if got["bytes"] != float64(len(content)) {
		t.Errorf("got %v", got)
	}
	q := far.last(t)
	want := fmt.Sprintf(`{"content":{"size":%d,"sha256":"%s"},"id":"box","path":"/f"}`, len(content), hex.EncodeToString(sum[:]))
	if q.Arguments != want {
		t.Errorf("recorded %.200s\nwant     %s", q.Arguments, want)
	}
	if q.Body != content {
		t.Errorf("the body has %d bytes", len(q.Body))
	}
}

func TestHeadersStaySmallWhateverTheArguments(t *testing.T) {
	many := make([]string, 10_000)
	for i := range many {
		many[i] = strings.Repeat("y", 100)
	}
	env := map[string]string{}
	for i := range 500 {
		env[fmt.Sprintf("NAME_%d", i)] = strings.Repeat("z", 1000)
	}
	for name, arguments := range map[string]map[string]any{
		"many small strings":  {"id": "box", "argv": many},
		"many variables":      {"id": "box", "command": "ls", "env": env},
		"all large":           {"id": "box", "command": strings.Repeat("c", 1<<20), "stdin": strings.Repeat("s", 1<<20), "env": env},
		"just below":          {"id": "box", "command": strings.Repeat("c", 16<<10), "stdin": strings.Repeat("s", 16<<10), "cwd": strings.Repeat("w", 16<<10)},
		"escapes that expand": {"id": "box", "stdin": strings.Repeat("\x01", 16<<10), "command": "ls"},
	} {
		t.Run(name, func(t *testing.T) {
			far, o := newService(t, reply(api.ExecResult{}))
			result(t, call(t, connect(t, o, nil), "capsem_exec", arguments))
			q := far.last(t)
			if q.headerBytes >= 64<<10 {
				t.Errorf("the headers have %d bytes", q.headerBytes)
			}
			if !json.Valid([]byte(q.Arguments)) || !strings.Contains(q.Arguments, `"id":"box"`) {
				t.Errorf("recorded %.200s", q.Arguments)
			}
		})
	}
}
