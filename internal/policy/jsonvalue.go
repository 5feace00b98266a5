package policy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"

	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"github.com/go-json-experiment/json/jsontext"
)

// maxDepth bounds the nesting of a JSON value. Messages are refused at 128
// before they are judged; this is for what did not come as a message.
const maxDepth = 256

// jsonValue converts JSON to CEL values. Whole numbers that fit are ints, larger
// ones uints where those fit, and all others doubles: comparisons between them
// are by value. What two readers could understand differently (duplicate names,
// invalid UTF-8, text after the value) is an error value.
func jsonValue(raw json.RawMessage) ref.Val {
	// jsontext refuses duplicate names and invalid UTF-8 by default.
	dec := jsontext.NewDecoder(bytes.NewBuffer(raw))
	v, err := readValue(dec, 0)
	if err == nil {
		if _, end := dec.ReadToken(); !errors.Is(end, io.EOF) {
			err = errors.New("there is more after the value")
		}
	}
	if err != nil {
		return types.WrapErr(fmt.Errorf("reading JSON: %w", err))
	}
	return v
}

// jsonObject is jsonValue for what must be an object.
func jsonObject(raw json.RawMessage) ref.Val {
	return ofType(jsonValue(raw), types.MapType, "an object")
}

// jsonList is jsonValue for what must be a list.
func jsonList(raw json.RawMessage) ref.Val { return ofType(jsonValue(raw), types.ListType, "a list") }

func ofType(v ref.Val, want ref.Type, name string) ref.Val {
	if types.IsError(v) || v.Type() == want {
		return v
	}
	return types.NewErr("the value is not %s", name)
}

func emptyObject() ref.Val { return types.NewRefValMap(types.DefaultTypeAdapter, nil) }

func readValue(dec *jsontext.Decoder, depth int) (ref.Val, error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("the value is nested deeper than %d", maxDepth)
	}
	tok, err := dec.ReadToken()
	if err != nil {
		return nil, err
	}
	switch tok.Kind() {
	case jsontext.KindNull:
		return types.NullValue, nil
	case jsontext.KindTrue, jsontext.KindFalse:
		return types.Bool(tok.Bool()), nil
	case jsontext.KindString:
		return types.String(tok.String()), nil
	case jsontext.KindNumber:
		return number(tok.String()), nil
	case jsontext.KindBeginObject:
		return readObject(dec, depth)
	case jsontext.KindBeginArray:
		return readArray(dec, depth)
	}
	return nil, fmt.Errorf("unexpected %s", tok.Kind())
}

func readObject(dec *jsontext.Decoder, depth int) (ref.Val, error) {
	m := map[ref.Val]ref.Val{}
	for dec.PeekKind() != jsontext.KindEndObject {
		name, err := readValue(dec, depth+1)
		if err != nil {
			return nil, err
		}
		if m[name], err = readValue(dec, depth+1); err != nil {
			return nil, err
		}
	}
	if _, err := dec.ReadToken(); err != nil {
		return nil, err
	}
	return types.NewRefValMap(types.DefaultTypeAdapter, m), nil
}

func readArray(dec *jsontext.Decoder, depth int) (ref.Val, error) {
	list := []ref.Val{}
	for dec.PeekKind() != jsontext.KindEndArray {
		v, err := readValue(dec, depth+1)
		if err != nil {
			return nil, err
		}
		list = append(list, v)
	}
	if _, err := dec.ReadToken(); err != nil {
		return nil, err
	}
	return types.NewRefValList(types.DefaultTypeAdapter, list), nil
}

// number converts the text of a JSON number. A fraction or an exponent makes it a
// double, also where its value is whole; `1.0 == 1` holds in CEL.
func number(text string) ref.Val {
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		return types.Int(n)
	}
	if n, err := strconv.ParseUint(text, 10, 64); err == nil {
		return types.Uint(n)
	}
	// Out of range gives an infinity, which compares as what it stands for.
	n, err := strconv.ParseFloat(text, 64)
	if err != nil && !errors.Is(err, strconv.ErrRange) {
		return types.WrapErr(fmt.Errorf("reading JSON: %w", err))
	}
	return types.Double(n)
}
