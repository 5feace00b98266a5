// Mcpserver is an MCP server for tests, on stdio. It writes down every message
// that it gets, so that a test can tell what reached it, and its tools do what
// good and bad servers do. It shares no code with what is under test.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

func main() {
	journal := flag.String("journal", "", "append every message that comes to this `file`")
	exit := flag.Int("exit", -1, "exit with this `status` at once")
	banner := flag.Bool("banner", false, "greet with lines that are no messages")
	flag.Parse()
	if *exit >= 0 {
		fmt.Fprintln(os.Stderr, "mcpserver: the licence has expired")
		os.Exit(*exit)
	}
	s := &server{out: bufio.NewWriter(os.Stdout)}
	if *banner {
		s.line("Welcome to mcpserver!\n\n[info] ready")
	}
	err := s.serve(os.Stdin, *journal)
	switch {
	case errors.Is(err, errCrash):
		fmt.Fprintln(os.Stderr, "mcpserver:", err)
		os.Exit(7)
	case err != nil:
		fmt.Fprintln(os.Stderr, "mcpserver:", err)
		os.Exit(1)
	}
}

// errCrash is what the tool crash ends the program with.
var errCrash = errors.New("out of cheese")

type server struct {
	out   *bufio.Writer
	calls int
	// failed ends the program.
	failed error
}

// message is what comes.
type message struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
}

func (s *server) serve(in io.Reader, journal string) (err error) {
	log := io.Discard
	if journal != "" {
		f, err := os.OpenFile(journal, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		log = f
	}
	lines := bufio.NewReader(in)
	for {
		text, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if _, err := log.Write(text); err != nil {
			return err
		}
		var m message
		if err := json.Unmarshal(text, &m); err != nil {
			return err
		}
		if s.answer(m); s.failed != nil {
			return s.failed
		}
	}
}

// line writes one line as it is.
func (s *server) line(text string) {
	_, err := s.out.WriteString(text + "\n")
	s.failed = errors.Join(s.failed, err, s.out.Flush())
}

func (s *server) result(m message, result string) {
	s.line(fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":%s}`, m.ID, result))
}

func (s *server) text(m message, text string) {
	quoted, err := json.Marshal(text)
	if err != nil {
		panic(err)
	}
	s.result(m, `{"content":[{"type":"text","text":`+string(quoted)+`}]}`)
}

// tools are the names of what callTool knows.
var tools = []string{
	"big", "count", "crash", "echo", "environ", "fails", "files", "hidden", "is-error", "junk", "never", "secret-text", "stderr", "strange",
}

func (s *server) answer(m message) {
	switch m.Method {
	case "initialize":
		s.result(m, `{"protocolVersion":"2025-11-25","capabilities":{"tools":{"listChanged":true}},"serverInfo":{"name":"mcpserver","version":"1"}}`)
	case "notifications/initialized":
		s.line(`{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}`)
	case "tools/list":
		var list []string
		for _, name := range tools {
			list = append(list, fmt.Sprintf(`{"name":%q,"inputSchema":{"type":"object"},"x-kept":{"a":1.50,"b":null}}`, name))
		}
		s.result(m, `{"tools":[`+strings.Join(list, ",")+`]}`)
	case "tools/call":
		s.calls++
		s.callTool(m)
	}
}

type arguments struct {
	Name      string `json:"name"`
	Arguments struct {
		Text  string `json:"text"`
		Bytes int    `json:"bytes"`
	} `json:"arguments"`
}

func (s *server) callTool(m message) {
	var call arguments
	if err := json.Unmarshal(m.Params, &call); err != nil {
		panic(err)
	}
	args := call.Arguments
	switch call.Name {
	case "big":
		s.text(m, strings.Repeat("b", args.Bytes))
	case "count":
		s.text(m, fmt.Sprint(s.calls))
	case "crash":
		s.failed = errCrash
	case "echo":
		s.text(m, args.Text)
	case "environ":
		s.text(m, strings.Join(os.Environ(), "\n"))
	case "fails":
		s.line(fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"error":{"code":-31999,"message":"no such record","data":{"table":"people","n":1.50}}}`, m.ID))
	case "files":
		s.text(m, openFiles())
	case "is-error":
		s.result(m, `{"content":[{"type":"text","text":"the disk is on fire"}],"isError":true}`)
	case "junk":
		s.line("npm warn deprecated everything\n{half an object\n")
		s.text(m, "after the junk")
	case "never":
	case "secret-text":
		s.text(m, "the code is 0000-OPEN-SESAME")
	case "stderr":
		fmt.Fprint(os.Stderr, strings.Repeat("e", args.Bytes))
		s.text(m, "said it")
	case "strange":
		s.line(`{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"?"}}`)
		s.line(`{"jsonrpc":"2.0","id":987654321,"result":{}}`)
		s.text(m, "the real answer")
	default:
		s.line(fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"error":{"code":-32602,"message":"no such tool"}}`, m.ID))
	}
}

// own are parts of the names of what this program opens itself: the folder that it
// reads, and the files of Go's runtime.
var own = []string{"/fd", "eventpoll", "eventfd", "/sys/fs/cgroup/"}

// openFiles lists what this process has open.
func openFiles() string {
	dir, err := os.Open("/proc/self/fd")
	if err != nil {
		return err.Error()
	}
	names, err := dir.Readdirnames(-1)
	if err := errors.Join(err, dir.Close()); err != nil {
		return err.Error()
	}
	var list []string
	for _, fd := range names {
		target, err := os.Readlink("/proc/self/fd/" + fd)
		if err == nil && !slices.ContainsFunc(own, func(s string) bool { return strings.Contains(target, s) }) {
			list = append(list, fd+" "+target)
		}
	}
	return strings.Join(list, "\n")
}
