package tests

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"
)

// eventually bounds how long a condition may take to come true.
const eventually = 30 * time.Second

// commands are what scripts have beside testscript's own.
func commands() map[string]func(ts *testscript.TestScript, neg bool, args []string) {
	return map[string]func(ts *testscript.TestScript, neg bool, args []string){
		"answer":     cmdAnswer,
		"ended":      cmdEnded,
		"eventually": cmdEventually,
		"flip":       cmdFlip,
		"json":       cmdJSON,
		"pad":        cmdPad,
		"parallel":   cmdParallel,
		"profile":    cmdProfile,
		"run":        cmdRun,
		"sametools":  cmdSameTools,
		"signal":     cmdSignal,
		"small":      cmdSmall,
		"sql":        cmdSQL,
		"talk":       cmdTalk,
		"web":        cmdWeb,
	}
}

func usage(ts *testscript.TestScript, neg, ok bool, text string) {
	if neg || !ok {
		ts.Fatalf("usage: %s", text)
	}
}

// cmdJSON compares a value in JSON: json FILE PATH WANT.
func cmdJSON(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, false, len(args) == 3, "[!] json FILE PATH WANT")
	compare(ts, neg, []byte(ts.ReadFile(args[0])), args[1], args[2])
}

// cmdAnswer compares a value in the answer to an id, of the lines on stdout:
// answer ID PATH WANT.
func cmdAnswer(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, false, len(args) == 3, "[!] answer ID PATH WANT")
	doc, ok := answerTo(ts.ReadFile("stdout"), args[0])
	if !ok {
		ts.Fatalf("there is no answer to %s", args[0])
	}
	compare(ts, neg, doc, args[1], args[2])
}

func compare(ts *testscript.TestScript, neg bool, doc []byte, path, want string) {
	got, err := lookUp(doc, path)
	if neg && err != nil {
		return
	}
	ts.Check(err)
	same, err := matches(got, want)
	ts.Check(err)
	if same == neg {
		ts.Fatalf("%s is %.4000q; want %s%q", path, got, map[bool]string{true: "anything but "}[neg], want)
	}
}

// cmdRun runs a program with more to say about how than exec: its exit status,
// how long it may take, and what its stdin is.
func cmdRun(ts *testscript.TestScript, neg bool, args []string) {
	flags := flag.NewFlagSet("run", flag.ContinueOnError)
	status := flags.Int("status", 0, "the exit status that is expected")
	within := flags.Duration("within", time.Minute, "the longest it may take")
	open := flags.Bool("open", false, "stdin is a pipe on which nothing comes, and which does not end")
	stdin := flags.String("stdin", "", "the file that stdin is")
	as := flags.String("user", "", "the user it runs as")
	ts.Check(flags.Parse(args))
	usage(ts, neg, flags.NArg() > 0, "run [-status N] [-within D] [-open] [-stdin FILE] [-user U] PROGRAM ARGS...")
	ctx, cancel := context.WithTimeout(context.Background(), *within)
	defer cancel()
	cmd := scripted(ctx, ts, flags.Args())
	cmd.Stdout, cmd.Stderr = ts.Stdout(), ts.Stderr()
	switch {
	case *open:
		r, w, err := os.Pipe()
		ts.Check(err)
		defer func() { ts.Check(errors.Join(r.Close(), w.Close())) }()
		cmd.Stdin = r
	case *stdin != "":
		f, err := os.Open(ts.MkAbs(*stdin))
		ts.Check(err)
		defer func() { ts.Check(f.Close()) }()
		cmd.Stdin = f
	}
	if *as != "" {
		ts.Check(become(cmd, *as))
	}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		ts.Fatalf("it was not done after %s", *within)
	case err != nil && !errors.As(err, &exit):
		ts.Check(err)
	case cmd.ProcessState.ExitCode() != *status:
		ts.Fatalf("the exit status is %d (%s); want %d", cmd.ProcessState.ExitCode(), cmd.ProcessState, *status)
	}
}

// scripted prepares a program with the script's environment.
func scripted(ctx context.Context, ts *testscript.TestScript, args []string) *exec.Cmd {
	cmd := homeOf(ts).command(ctx, args[0], args[1:]...)
	cmd.Dir = ts.MkAbs(".")
	cmd.Env = append([]string{}, cmd.Env...)
	for _, name := range []string{"CAPSEM_HOME", "CAPSEM_ACCELERATOR", "PATH", "HOME", "XDG_RUNTIME_DIR", "TOKEN"} {
		if value := ts.Getenv(name); value != "" {
			cmd.Env = append(cmd.Env, name+"="+value)
		}
	}
	return cmd
}

func become(cmd *exec.Cmd, name string) error {
	u, err := user.Lookup(name)
	if err != nil {
		return err
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return err
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return err
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	cmd.Dir = "/"
	return nil
}

// cmdParallel runs a program many times at once: parallel N PROGRAM ARGS...
// stdout has a line for each, its exit status and what it printed.
func cmdParallel(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg, len(args) > 1, "parallel N PROGRAM ARGS...")
	n, err := strconv.Atoi(args[0])
	ts.Check(err)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	lines := make([]string, n)
	var wg sync.WaitGroup
	for i := range n {
		cmd := scripted(ctx, ts, args[1:])
		wg.Go(func() {
			out, err := cmd.CombinedOutput()
			lines[i] = fmt.Sprintf("status %d: %s", cmd.ProcessState.ExitCode(), strings.ReplaceAll(string(out), "\n", " "))
			if cmd.ProcessState == nil {
				lines[i] = err.Error()
			}
		})
	}
	wg.Wait()
	_, err = io.WriteString(ts.Stdout(), strings.Join(lines, "\n")+"\n")
	ts.Check(err)
}

// cmdProfile puts NAME.toml of the script into the home's profiles.
func cmdProfile(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg, len(args) == 1 || len(args) == 3 && args[1] == "from", "profile NAME [from FILE]")
	file := args[0] + ".toml"
	if len(args) == 3 {
		file = args[2]
	}
	text := strings.NewReplacer("$WORK", ts.Getenv("WORK"), "$WEB", ts.Getenv("WEB")).Replace(ts.ReadFile(file))
	ts.Check(homeOf(ts).writeProfile(args[0], text))
}

// cmdSignal sends a signal to a process by its role: signal KILL ROLE [VM]. The
// roles are service, vm, launcher, qemu, aggregator, builtin, and else the name
// of the program. What descends from it is remembered for ended.
func cmdSignal(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg, len(args) == 2 || len(args) == 3, "signal NAME ROLE [VM]")
	h, vm := homeOf(ts), ""
	if len(args) == 3 {
		vm = args[2]
	}
	sig := unix.SignalNum("SIG" + args[0])
	if sig == 0 {
		ts.Fatalf("there is no signal %s", args[0])
	}
	p, tree, err := h.find(args[1], vm)
	ts.Check(err)
	if vm == "" {
		tree = tree[:1] // the service's VMs outlive it
	}
	h.last, err = watch(tree)
	ts.Check(err)
	ts.Check(unix.Kill(p.pid, sig))
}

// cmdEnded waits until a signalled process and all below it have ended: ended D.
func cmdEnded(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg, len(args) == 1, "ended DURATION")
	limit, err := time.ParseDuration(args[0])
	ts.Check(err)
	h := homeOf(ts)
	begun := time.Now()
	alive, err := awaitEnd(h.last, limit)
	ts.Check(err)
	ts.Logf("%d processes, %s", len(h.last), time.Since(begun))
	h.last = nil
	if len(alive) > 0 {
		ts.Fatalf("after %s there are still %v", limit, alive)
	}
}

// cmdEventually runs a program until a value in the JSON that it prints is the
// one that is wanted: eventually PATH WANT PROGRAM ARGS...
func cmdEventually(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg, len(args) > 2, "eventually PATH WANT PROGRAM ARGS...")
	ctx, cancel := context.WithTimeout(context.Background(), eventually)
	defer cancel()
	for {
		out, runErr := scripted(ctx, ts, args[2:]).Output()
		got, err := lookUp(out, args[0])
		same := false
		if err == nil {
			same, err = matches(got, args[1])
		}
		if same {
			_, err := ts.Stdout().Write(out)
			ts.Check(err)
			return
		}
		if ctx.Err() != nil {
			ts.Fatalf("after %s %s is %q, not %q (%v)", eventually, args[0], got, args[1], errors.Join(err, runErr))
		}
	}
}

// cmdSQL compares what a query selects: sql VM QUERY ROW..., rows as CSV has them.
func cmdSQL(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg, len(args) >= 2, "sql VM QUERY ROW...")
	var stderr bytes.Buffer
	cmd := scripted(context.Background(), ts, []string{"capsem", "sql", "--format", "csv", args[0], args[1]})
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		ts.Fatalf("%v: %s", err, &stderr)
	}
	_, rows, _ := strings.Cut(string(out), "\n")
	got := strings.Split(strings.TrimSuffix(rows, "\n"), "\n")
	if rows == "" {
		got = nil
	}
	ok := len(got) == len(args)-2
	for i := 0; ok && i < len(got); i++ {
		same, err := matches(got[i], args[2+i])
		ts.Check(err)
		ok = same
	}
	if !ok {
		ts.Fatalf("there is\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(args[2:], "\n"))
	}
}

// cmdSmall puts the home on a file system of its own: small SIZE. A file ballast
// in it is removed at the script's end, so that there is room to clean up.
func cmdSmall(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg, len(args) == 1, "small SIZE")
	ts.Check(homeOf(ts).mount(args[0]))
}

// cmdFlip changes one bit in the middle of a file.
func cmdFlip(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg, len(args) == 1, "flip FILE")
	file := ts.MkAbs(args[0])
	b, err := os.ReadFile(file)
	ts.Check(err)
	b[len(b)/2] ^= 1
	// The file is shared with other homes: this one gets its own.
	ts.Check(os.Remove(file))
	ts.Check(os.WriteFile(file, b, 0o400))
}

// cmdPad writes a line of a wanted length: pad FILE SIZE TEXT puts TEXT into FILE
// with its first @ replaced by as many x as make it SIZE bytes.
func cmdPad(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg, len(args) == 3 && strings.Contains(args[2], "@"), "pad FILE SIZE TEXT@TEXT")
	size, err := strconv.Atoi(args[1])
	ts.Check(err)
	text := strings.Replace(args[2], "@", strings.Repeat("x", size+1-len(args[2])), 1)
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(text+"\n"), 0o600))
}

// cmdSameTools compares two answers to tools/list, byte for byte: the second is
// to have the tools of the first, with PREFIX before their names.
func cmdSameTools(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg, len(args) == 3, "sametools DIRECT LISTED PREFIX")
	direct, listed := toolsOf(ts, args[0]), toolsOf(ts, args[1])
	if len(direct) == 0 {
		ts.Fatalf("%s lists no tools", args[0])
	}
	for name, definition := range direct {
		got := listed[args[2]+name]
		want := strings.Replace(definition, strconv.Quote(name), strconv.Quote(args[2]+name), 1)
		if got != want {
			ts.Fatalf("%s is listed as\n%s\nwant\n%s", name, got, want)
		}
	}
	for name := range listed {
		if rest, ok := strings.CutPrefix(name, args[2]); ok && direct[rest] == "" {
			ts.Fatalf("%s is listed, which the server does not have", name)
		}
	}
}

func toolsOf(ts *testscript.TestScript, file string) map[string]string {
	var answer struct {
		Result struct {
			Tools []json.RawMessage `json:"tools"`
		} `json:"result"`
	}
	ts.Check(json.Unmarshal([]byte(ts.ReadFile(file)), &answer))
	out := map[string]string{}
	for _, tool := range answer.Result.Tools {
		var t struct {
			Name string `json:"name"`
		}
		ts.Check(json.Unmarshal(tool, &t))
		out[t.Name] = string(tool)
	}
	return out
}

// cmdTalk speaks JSON-RPC, one message a line, with a program: talk open NAME
// PROGRAM ARGS..., talk send NAME LINE (or @FILE), talk wait NAME ID, which puts
// the answer on stdout, talk await NAME TEXT, which waits for any line with TEXT,
// and talk close NAME, which puts all that the program said on stdout and wants it
// to succeed, or, with !, to fail.
func cmdTalk(ts *testscript.TestScript, neg bool, args []string) {
	usage(ts, neg && (len(args) == 0 || args[0] != "close"), len(args) >= 2, "talk open|send|wait|await|[!] close NAME ...")
	h, verb, name, rest := homeOf(ts), args[0], args[1], args[2:]
	s := h.sessions[name]
	if verb == "open" {
		_, err := h.talk(name, rest...)
		ts.Check(err)
		return
	}
	if s == nil {
		ts.Fatalf("there is no session %s", name)
	}
	var said string
	var err error
	switch {
	case verb == "send" && len(rest) == 1:
		text := rest[0]
		if file, ok := strings.CutPrefix(text, "@"); ok {
			text = ts.ReadFile(file)
		}
		err = s.send(text)
	case verb == "wait" && len(rest) == 1:
		said, err = s.wait(rest[0])
		said += "\n"
	case verb == "await" && len(rest) == 1:
		err = s.await(rest[0])
	case verb == "close":
		said, err = s.close()
		delete(h.sessions, name)
		if neg && err == nil {
			ts.Fatalf("the program succeeded")
		}
		if neg {
			err = nil
		}
	default:
		ts.Fatalf("usage: talk open|send|wait|await|close NAME ...")
	}
	_, writeErr := io.WriteString(ts.Stdout(), said)
	ts.Check(errors.Join(err, writeErr))
}
