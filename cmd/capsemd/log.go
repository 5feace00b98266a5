package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"sync"
)

// Bounds of a log file, in bytes: one that would grow over maxLog begins anew
// with the last keptLog of it.
const (
	maxLog  = 8 << 20
	keptLog = 4 << 20
)

// boundedLog writes a log to a file that was opened for reading and appending,
// and keeps the file's size within maxLog: guests and servers have a say in what
// is logged, and in how often. A file that is no regular one is written to as it
// is. Several processes may share the file; one that cuts it while another
// writes loses that line and nothing else.
type boundedLog struct {
	mu   sync.Mutex
	file *os.File
}

// Write appends p.
func (l *boundedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	info, err := l.file.Stat()
	if err == nil && info.Mode().IsRegular() && info.Size()+int64(len(p)) > maxLog {
		err = l.cut(info.Size())
	}
	n, writeErr := l.file.Write(p)
	return n, errors.Join(err, writeErr)
}

// cut leaves only the end of the file, from the start of a line. A file that
// cannot be read is emptied.
func (l *boundedLog) cut(size int64) error {
	end := make([]byte, min(keptLog, size))
	n, readErr := l.file.ReadAt(end, size-int64(len(end)))
	if readErr != nil {
		readErr = fmt.Errorf("reading a log that has become too large: %w", readErr)
	}
	_, end, _ = bytes.Cut(end[:n], []byte{'\n'})
	if err := l.file.Truncate(0); err != nil {
		return errors.Join(readErr, fmt.Errorf("cutting a log: %w", err))
	}
	_, err := l.file.Write(end)
	return errors.Join(readErr, err)
}
