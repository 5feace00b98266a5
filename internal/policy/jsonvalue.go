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

// jsonValue converts JSON to CEL values. Whole numbers that fit are ints, larger
// ones uints where those fit, and all others doubles: comparisons between them
// are by value. What two readers could understand differently (duplicate names,
// invalid UTF-8, text after the value) is an error value.
func jsonValue(raw json.RawMessage) ref.Val {
	// jsontext refuses duplicate names and invalid UTF-8 by default.
	dec := jsontext.NewDecoder(bytes.NewBuffer(raw))
	v, err := readValue(dec)
	if err == nil {
		if _, end := dec.ReadToken(); !errors.Is(end, io.EOF) {
			err = errors.New("there is more after the value")
		}
	}
	if err != nil {
		return types.WrapErr(fmt.Errorf("%w: %w", errUnreadable, err))
	}
	return v
}

// jsonObject is jsonValue for what must be an object.
func jsonObject(raw json.RawMessage) ref.Val {
	return ofType(jsonValue(raw), types.MapType)
}

// jsonList is jsonValue for what must be a list.
func jsonList(raw json.RawMessage) ref.Val { return ofType(jsonValue(raw), types.ListType) }

func ofType(v ref.Val, want ref.Type) ref.Val {
	if types.IsError(v) || v.Type() == want {
		return v
	}
	return types.WrapErr(errWrongKind)
}

func emptyObject() ref.Val { return types.NewRefValMap(types.DefaultTypeAdapter, nil) }

// readValue converts the next value. The decoder bounds the nesting, to 10,000.
func readValue(dec *jsontext.Decoder) (ref.Val, error) {
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
		return readObject(dec)
	case jsontext.KindBeginArray:
		return readArray(dec)
	}
	return nil, fmt.Errorf("unexpected %s", tok.Kind())
}

func readObject(dec *jsontext.Decoder) (ref.Val, error) {
	m := map[ref.Val]ref.Val{}
	for dec.PeekKind() != jsontext.KindEndObject {
		name, err := readValue(dec)
		if err != nil {
			return nil, err
		}
		if m[name], err = readValue(dec); err != nil {
			return nil, err
		}
	}
	if _, err := dec.ReadToken(); err != nil {
		return nil, err
	}
	return types.NewRefValMap(types.DefaultTypeAdapter, m), nil
}

func readArray(dec *jsontext.Decoder) (ref.Val, error) {
	list := []ref.Val{}
	for dec.PeekKind() != jsontext.KindEndArray {
		v, err := readValue(dec)
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
		return types.WrapErr(fmt.Errorf("%w: %w", errUnreadable, err))
	}
	return types.Double(n)
}
