package mcptools

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
)

const (
	// idWithin is how near to its beginning or its end a message that is too long
	// is searched for its id, in bytes.
	idWithin = 1 << 10
	// codeTooLarge is the JSON-RPC code of an answer to it.
	codeTooLarge = -32001
)

// overlong is a message that is too long to be kept: its beginning and its end.
// Whoever sent it waits for an answer, which needs its id.
type overlong struct {
	head, tail []byte
}

func (o *overlong) Error() string {
	return fmt.Sprintf("the message has more than %d bytes: send less at once, for example a file in parts", maxLine)
}

// add takes the next bytes of the message.
func (o *overlong) add(p []byte) {
	o.tail = append(o.tail, p...)
	if extra := len(o.tail) - idWithin; extra > 0 {
		o.tail = append(o.tail[:0], o.tail[extra:]...)
	}
}

// id is the message's id, nil where it stands neither among the first members
// nor last.
func (o *overlong) id() json.RawMessage {
	dec := json.NewDecoder(bytes.NewReader(o.head))
	for open, err := dec.Token(); err == nil && open == json.Delim('{'); {
		var value json.RawMessage
		name, err := dec.Token()
		if err != nil || dec.Decode(&value) != nil {
			break // the first member that does not end here
		}
		if name == "id" && isID(value) {
			return value
		}
	}
	// What stands before the last brace is a member of the outermost object.
	last := regexp.MustCompile(`[,{]\s*"id"\s*:\s*("[^"\\]*"|-?[0-9]+)\s*}\s*$`).FindSubmatch(o.tail)
	if last == nil || !isID(last[1]) {
		return nil
	}
	return last[1]
}

// isID reports whether a value can be an id: a string or a number.
func isID(v json.RawMessage) bool {
	return json.Valid(v) && (v[0] == '"' || v[0] == '-' || v[0] >= '0' && v[0] <= '9')
}
