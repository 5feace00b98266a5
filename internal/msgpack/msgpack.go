// Package msgpack encodes and decodes MessagePack values that were checked
// before they are decoded.
//
// A decoder that trusts a value's declared sizes can be killed with five bytes:
// `dd ff ff ff ff` declares an array of four billion elements, and a long run of
// `91` is an array in an array in an array until the stack ends. A bound on the
// size of a frame does not help against either. So every value is walked first,
// by [Check], which allocates nothing, follows no declared size further than the
// bytes that are there, and refuses
//
//   - values nested deeper, or with more nodes, than [Limits] say;
//   - bytes after the value, or a value that ends early;
//   - extension types, timestamps among them, and float 32: no message of ours
//     has one;
//   - an encoding that is not the shortest of its value, so that a number, a
//     string or a length can be written in one way only;
//   - map keys that are not strings, and two equal keys in one map;
//   - strings that are not UTF-8. Bytes that need not be text travel as bin.
//
// What passes is decoded into a typed struct, never into `any`. [Marshal] checks
// what it wrote in the same way: a value that a peer would refuse is an error at
// the sender, where it can be explained.
//
// Fields that the receiver's struct does not have are skipped. A newer peer can
// therefore add fields to a message that an older one must still understand, its
// hello above all: version skew is then an error with a name rather than a
// decoding error. This is safe because bytes are never forwarded by way of this
// package: what is skipped has no effect on anybody.
//
// The format is that of https://github.com/msgpack/msgpack/blob/master/spec.md.
package msgpack

import (
	"bytes"
	"fmt"
	"reflect"

	"github.com/vmihailenco/msgpack/v5"
)

// appender is the encoder's writer: it appends to a slice, without the
// bookkeeping of a bytes.Buffer.
type appender struct{ b []byte }

// Write appends p. It never fails.
func (a *appender) Write(p []byte) (int, error) {
	a.b = append(a.b, p...)
	return len(p), nil
}

// WriteByte appends c. It never fails.
func (a *appender) WriteByte(c byte) error {
	a.b = append(a.b, c)
	return nil
}

// Marshal returns the encoding of v, a struct whose fields carry `msgpack` tags,
// or a pointer to one. Integers take their shortest form and the keys of a
// map[string]string are sorted, so that equal values have equal encodings. What
// [Check] with [DefaultLimits] would refuse is an error.
func Marshal(v any) ([]byte, error) {
	return MarshalAppend(nil, v)
}

// MarshalAppend is [Marshal] with the encoding appended to dst, which saves the
// allocation where a buffer is at hand. After an error dst's content is what it
// was.
func MarshalAppend(dst []byte, v any) ([]byte, error) {
	w := appender{b: dst}
	enc := msgpack.GetEncoder()
	defer msgpack.PutEncoder(enc)
	enc.Reset(&w)
	enc.UseCompactInts(true)
	enc.SetSortMapKeys(true)
	if err := enc.Encode(v); err != nil {
		return dst, fmt.Errorf("encoding %T: %w", v, err)
	}
	if err := Check(w.b[len(dst):], DefaultLimits()); err != nil {
		return dst, fmt.Errorf("encoding %T: %w", v, err)
	}
	return w.b, nil
}

// Unmarshal checks b with [DefaultLimits] and decodes it into v, a non-nil
// pointer to a struct. Nothing in v shares memory with b afterwards. Fields that
// b does not have keep their values; after an error v may be half filled and is
// of no use.
func Unmarshal(b []byte, v any) error {
	if err := Check(b, DefaultLimits()); err != nil {
		return err
	}
	if p := reflect.ValueOf(v); p.Kind() != reflect.Pointer || p.IsNil() || p.Elem().Kind() != reflect.Struct {
		return fmt.Errorf("decoding into %T: not a pointer to a struct", v)
	}
	if c := b[0]; c&0xf0 != fixMap && c != map16 && c != map32 {
		return &CheckError{Kind: Type, Offset: 0}
	}
	dec := msgpack.GetDecoder()
	defer msgpack.PutDecoder(dec)
	dec.Reset(bytes.NewReader(b))
	if err := dec.Decode(v); err != nil {
		return fmt.Errorf("decoding %T: %w", v, err)
	}
	return nil
}
