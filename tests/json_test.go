package tests

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// lookUp finds a value in JSON by a path of `.member`, `[0]`, `[-1]` for the last
// element, `[name=value]` for the first element with that member, and `[]` for
// how many there are. A string is returned as it is, anything else as
// compact JSON.
func lookUp(doc []byte, path string) (string, error) {
	var v any
	dec := json.NewDecoder(bytes.NewReader(doc))
	dec.UseNumber()
	if err := dec.Decode(&v); err != nil {
		return "", fmt.Errorf("reading %.200q as JSON: %w", doc, err)
	}
	for rest := path; rest != ""; {
		step, err := nextStep(rest)
		if err != nil {
			return "", err
		}
		if v, err = take(v, step); err != nil {
			return "", fmt.Errorf("%s of %.2000s: %w", path, doc, err)
		}
		rest = rest[len(step):]
	}
	if s, ok := v.(string); ok {
		return s, nil
	}
	text, err := json.Marshal(v)
	return string(text), err
}

var stepForm = regexp.MustCompile(`^(\.[A-Za-z0-9_$-]+|\[[^\]]*\])`)

func nextStep(path string) (string, error) {
	step := stepForm.FindString(path)
	if step == "" {
		return "", fmt.Errorf("%q is no path into JSON", path)
	}
	return step, nil
}

func take(v any, step string) (any, error) {
	list, isList := v.([]any)
	object, isObject := v.(map[string]any)
	switch {
	case step == "[]" && isList:
		return json.Number(strconv.Itoa(len(list))), nil
	case step == "[]" && isObject:
		return json.Number(strconv.Itoa(len(object))), nil
	case step[0] == '.' && isObject:
		if member, ok := object[step[1:]]; ok {
			return member, nil
		}
	case step[0] == '[' && isList:
		return element(list, step[1:len(step)-1])
	}
	return nil, fmt.Errorf("there is no %s", step)
}

func element(list []any, which string) (any, error) {
	if name, want, ok := strings.Cut(which, "="); ok {
		for _, e := range list {
			if object, ok := e.(map[string]any); ok && fmt.Sprint(object[name]) == want {
				return e, nil
			}
		}
		return nil, fmt.Errorf("no element has %s", which)
	}
	i, err := strconv.Atoi(which)
	if err != nil {
		return nil, err
	}
	if i < 0 {
		i += len(list)
	}
	if i < 0 || i >= len(list) {
		return nil, fmt.Errorf("there are %d elements", len(list))
	}
	return list[i], nil
}

// matches compares text with what is wanted: the same text, or, between slashes,
// a regular expression.
func matches(text, want string) (bool, error) {
	if len(want) < 2 || want[0] != '/' || want[len(want)-1] != '/' {
		return text == want, nil
	}
	re, err := regexp.Compile("(?s)" + want[1:len(want)-1])
	if err != nil {
		return false, err
	}
	return re.MatchString(text), nil
}

// answerTo finds the JSON-RPC answer with an id among lines.
func answerTo(lines, id string) ([]byte, bool) {
	for line := range strings.Lines(lines) {
		var m struct {
			ID     json.RawMessage `json:"id"`
			Method *string         `json:"method"`
		}
		if json.Unmarshal([]byte(line), &m) == nil && m.Method == nil && string(m.ID) == id {
			return []byte(strings.TrimSuffix(line, "\n")), true
		}
	}
	return nil, false
}

func TestPathsFindValuesInJSON(t *testing.T) {
	doc := []byte(`{"vms":[{"name":"a","n":9007199254740993},{"name":"b","s":"x\"y"}],"none":null}`)
	for _, c := range []struct{ path, want string }{
		{".vms[]", "2"},
		{".vms[0].n", "9007199254740993"},
		{".vms[-1].name", "b"},
		{".vms[name=b].s", `x"y`},
		{".vms[name=b]", `{"name":"b","s":"x\"y"}`},
		{".none", "null"},
	} {
		if got, err := lookUp(doc, c.path); err != nil || got != c.want {
			t.Errorf("%s is %q, %v; want %q", c.path, got, err, c.want)
		}
	}
	for _, path := range []string{".no", ".vms[2]", ".vms[name=c]", ".vms.name", "vms", ".none[]"} {
		if got, err := lookUp(doc, path); err == nil {
			t.Errorf("%s is %q; want an error", path, got)
		}
	}
}
