package aggregator

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"strconv"
	"time"
)

// errEventTooLarge ends a stream with an event over the limit. What of the
// stream comes after it cannot be trusted to be an event.
var errEventTooLarge = errors.New("an event over the limit")

// sseEvent is one event of a stream.
type sseEvent struct {
	// name is the event's type, "" for none, which means "message".
	name string
	// id is the last event id as of this event.
	id   string
	data []byte
}

// sseReader reads server-sent events (WHATWG HTML, section 9.2.6) with a bound.
// It is used by one goroutine.
type sseReader struct {
	r   *bufio.Reader
	max int

	// id and retry are what the stream has last set; retry is 0 for never.
	id    string
	retry time.Duration

	started bool
	// skipLF says that the last line ended in CR, so that an LF belongs to it.
	skipLF bool
	line   []byte
}

func newSSEReader(r io.Reader, limit int) *sseReader {
	return &sseReader{r: bufio.NewReaderSize(r, 32<<10), max: limit}
}

// next returns the next event that has data, valid until the next call. An event
// that the stream's end cuts off is dropped, as the standard says. After an error
// the stream cannot be read further.
func (s *sseReader) next() (sseEvent, error) {
	var (
		event   sseEvent
		hasData bool
	)
	for {
		line, err := s.readLine(s.max - len(event.data))
		if err != nil {
			return sseEvent{}, err
		}
		if len(line) == 0 {
			if !hasData {
				event = sseEvent{}
				continue
			}
			event.id = s.id
			return event, nil
		}
		field, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(field) {
		case "data":
			if hasData {
				event.data = append(event.data, '\n')
			}
			hasData = true
			event.data = append(event.data, value...)
		case "event":
			event.name = string(value)
		case "id":
			if bytes.IndexByte(value, 0) < 0 {
				s.id = string(value)
			}
		case "retry":
			if ms, err := strconv.ParseUint(string(value), 10, 31); err == nil {
				s.retry = time.Duration(ms) * time.Millisecond
			}
		}
	}
}

// readLine returns the next line, which ends in LF, CR or CRLF and has at most
// limit bytes beside the field's name.
func (s *sseReader) readLine(limit int) ([]byte, error) {
	const fieldName = 16
	if cap(s.line) > keepLine {
		s.line = nil
	}
	s.line = s.line[:0]
	for {
		// Peek blocks for one byte only; Buffered tells what else is there.
		if _, err := s.r.Peek(1); err != nil {
			return nil, err
		}
		chunk, err := s.r.Peek(s.r.Buffered())
		if err != nil {
			return nil, err
		}
		if s.skipLF {
			s.skipLF = false
			if chunk[0] == '\n' {
				if _, err := s.r.Discard(1); err != nil {
					return nil, err
				}
				continue
			}
		}
		end := bytes.IndexAny(chunk, "\r\n")
		take, part := len(chunk), chunk
		if end >= 0 {
			take, part = end+1, chunk[:end]
			s.skipLF = chunk[end] == '\r'
		}
		if len(s.line)+len(part) > limit+fieldName {
			return nil, errEventTooLarge
		}
		s.line = append(s.line, part...)
		if _, err := s.r.Discard(take); err != nil {
			return nil, err
		}
		if end >= 0 {
			return s.unmarked(), nil
		}
	}
}

// unmarked returns the line, the first one without a byte order mark.
func (s *sseReader) unmarked() []byte {
	if s.started {
		return s.line
	}
	s.started = true
	return bytes.TrimPrefix(s.line, []byte("\xEF\xBB\xBF"))
}
