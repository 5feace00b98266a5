package tests

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"time"
)

// answerLimit is how long a test waits for one answer.
const answerLimit = time.Minute

// guestSession is a conversation in JSON-RPC lines with a program, most often the
// guest's MCP server behind `capsem exec -i`.
type guestSession struct {
	cmd    *exec.Cmd
	in     io.WriteCloser
	stderr strings.Builder
	ended  chan struct{}
	// err is how the program ended, once ended is closed.
	err error

	mu    sync.Mutex
	got   strings.Builder
	fresh chan struct{} // closed and replaced at each line
}

// talk starts a conversation.
func (h *home) talk(name string, args ...string) (*guestSession, error) {
	if h.sessions[name] != nil {
		return nil, fmt.Errorf("there is a session %s already", name)
	}
	s := &guestSession{cmd: h.command(context.Background(), args[0], args[1:]...), ended: make(chan struct{}), fresh: make(chan struct{})}
	s.cmd.Stderr = &s.stderr
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if s.in, err = s.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	h.sessions[name] = s
	go func() {
		defer close(s.ended)
		s.err = s.read(out)
		s.err = errors.Join(s.err, s.cmd.Wait())
	}()
	return s, nil
}

func (s *guestSession) read(out io.Reader) error {
	r := bufio.NewReader(out)
	for {
		line, err := r.ReadString('\n')
		s.mu.Lock()
		s.got.WriteString(line)
		close(s.fresh)
		s.fresh = make(chan struct{})
		s.mu.Unlock()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (s *guestSession) send(text string) error {
	_, err := io.WriteString(s.in, strings.TrimSuffix(text, "\n")+"\n")
	return err
}

// wait returns the answer to an id.
func (s *guestSession) wait(id string) (string, error) {
	deadline := time.NewTimer(answerLimit)
	defer deadline.Stop()
	for {
		s.mu.Lock()
		lines, fresh := s.got.String(), s.fresh
		s.mu.Unlock()
		if answer, ok := answerTo(lines, id); ok {
			return string(answer), nil
		}
		select {
		case <-fresh:
		case <-s.ended:
			if answer, ok := answerTo(s.lines(), id); ok {
				return string(answer), nil
			}
			return "", fmt.Errorf("the program ended without an answer to %s: %w: %s", id, s.err, s.stderr.String())
		case <-deadline.C:
			return "", fmt.Errorf("no answer to %s within %s; there is %s", id, answerLimit, lines)
		}
	}
}

// await returns once a line contains text.
func (s *guestSession) await(text string) error {
	deadline := time.NewTimer(answerLimit)
	defer deadline.Stop()
	for {
		s.mu.Lock()
		lines, fresh := s.got.String(), s.fresh
		s.mu.Unlock()
		if strings.Contains(lines, text) {
			return nil
		}
		select {
		case <-fresh:
		case <-s.ended:
			return fmt.Errorf("the program ended without saying %q, but %s", text, s.lines())
		case <-deadline.C:
			return fmt.Errorf("it did not say %q within %s, but %s", text, answerLimit, lines)
		}
	}
}

func (s *guestSession) lines() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.got.String()
}

// close ends the conversation as a client does, and returns all that was said.
func (s *guestSession) close() (string, error) {
	if err := s.in.Close(); err != nil {
		return "", err
	}
	select {
	case <-s.ended:
		return s.lines(), s.err
	case <-time.After(answerLimit):
		return s.lines(), errors.New("the program did not end with its input")
	}
}

// kill ends the program of a conversation.
func (s *guestSession) kill() error {
	select {
	case <-s.ended:
		return nil
	default:
	}
	if err := s.cmd.Process.Kill(); err != nil {
		return err
	}
	<-s.ended
	return nil
}
