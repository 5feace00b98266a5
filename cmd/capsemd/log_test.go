package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestALogKeepsItsEndAndItsBound(t *testing.T) {
	path := filepath.Join(t.TempDir(), "process.log")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	log := &boundedLog{file: f}
	line := func(n int) string { return fmt.Sprintf("%09d %s\n", n, strings.Repeat("x", 1000)) }
	last := 3 * maxLog / len(line(0))
	for n := range last + 1 {
		if _, err := log.Write([]byte(line(n))); err != nil {
			t.Fatal(err)
		}
		if info, err := f.Stat(); err != nil || info.Size() > maxLog {
			t.Fatalf("after line %d: %d bytes, %v", n, info.Size(), err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.SplitAfter(bytes.TrimSuffix(got, []byte("\n")), []byte("\n"))
	if len(got) < keptLog-len(line(0)) {
		t.Errorf("only %d bytes are kept", len(got))
	}
	for i := range lines {
		if want := strings.TrimSuffix(line(last-len(lines)+1+i), "\n"); string(bytes.TrimSuffix(lines[i], []byte("\n"))) != want {
			t.Fatalf("line %d of %d is %.20q, want %.20q", i, len(lines), lines[i], want)
		}
	}
}

func TestALogThatIsNoFileIsWrittenAsItIs(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := (&boundedLog{file: w}).Write([]byte("word\n")); err != nil {
		t.Fatal(err)
	}
	w.Close()
	buf := make([]byte, 16)
	if n, _ := r.Read(buf); string(buf[:n]) != "word\n" {
		t.Errorf("got %q", buf[:n])
	}
}
