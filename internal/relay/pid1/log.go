//go:build linux

package pid1

import (
	"fmt"
	"os"
	"time"
)

// maxEarly bounds what is kept of the steps before the log file can be opened,
// in lines.
const maxEarly = 256

// Stage is a part of the boot and when it ended, after the kernel's start.
type Stage struct {
	Name string
	At   time.Duration
}

// bootLog writes what happens at boot to a file in the guest. It is used by one
// goroutine.
type bootLog struct {
	file   *os.File
	early  []string
	stages []Stage
}

func newLog() *bootLog { return &bootLog{} }

// step notes that something was done, or why it was not. What failed is also
// told to the console, which the host keeps.
func (l *bootLog) step(name string, err error) {
	text := fmt.Sprintf("%10.6f %s: ok\n", sinceBoot().Seconds(), name)
	if err != nil {
		text = fmt.Sprintf("%10.6f %s: %v\n", sinceBoot().Seconds(), name, err)
		fmt.Fprint(os.Stderr, "capsem-init: ", text)
	}
	l.write(text)
}

// stage notes the end of a part of the boot for the host.
func (l *bootLog) stage(name string) {
	l.stages = append(l.stages, Stage{Name: name, At: sinceBoot()})
}

func (l *bootLog) write(text string) {
	if l.file == nil {
		if len(l.early) < maxEarly {
			l.early = append(l.early, text)
		}
		return
	}
	if _, err := l.file.WriteString(text); err != nil {
		fmt.Fprint(os.Stderr, "capsem-init: ", text) // a full /tmp: the console is what is left
	}
}

// open begins the file with what was kept so far.
func (l *bootLog) open(path string) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		fmt.Fprintln(os.Stderr, "capsem-init: opening the log:", err)
		return
	}
	early := l.early
	l.file, l.early = f, nil
	for _, text := range early {
		l.write(text)
	}
}
