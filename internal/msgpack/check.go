package msgpack

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"unicode/utf8"
)

// Limits bound what [Check] accepts beside the size of its input.
type Limits struct {
	// Depth is how many maps and arrays may be open at once, at most MaxDepth.
	Depth int
	// Nodes is how many values there may be in all: scalars, containers and map
	// keys each count as one. It bounds what a decoder allocates, because a
	// byte of input may stand for a whole struct in an array.
	Nodes int
}

// Bounds of the walk. No Limits can raise MaxDepth and MaxKeys: the walk's state
// lives in fixed arrays.
const (
	// MaxDepth is the deepest nesting.
	MaxDepth = 32
	// MaxKeys is how many keys all open maps may have together. Keys are
	// compared with those before them in their map, so it also bounds that work.
	MaxKeys = 128
	// MaxNodes is the number of values in one message between our own processes.
	MaxNodes = 1 << 16
)

// DefaultLimits returns those of every message between our own processes.
func DefaultLimits() Limits {
	return Limits{Depth: MaxDepth, Nodes: MaxNodes}
}

// Kind is the reason for which a value was refused.
type Kind string

// The reasons.
const (
	Truncated  Kind = "ends before its declared size"
	Trailing   Kind = "has bytes after its end"
	Depth      Kind = "is nested too deeply"
	Nodes      Kind = "has too many values"
	Keys       Kind = "has too many map keys"
	Type       Kind = "has a type that no message of ours has"
	NotMinimal Kind = "is not in its shortest encoding"
	KeyType    Kind = "has a map key that is not a string"
	Duplicate  Kind = "has two equal keys in one map"
	NotUTF8    Kind = "has a string that is not UTF-8"
)

// CheckError says why and where [Check] refused a value. It tells nothing of the
// value's content.
type CheckError struct {
	Kind Kind
	// Offset is the index of the byte at which the fault was seen.
	Offset int
}

// Error implements error.
func (e *CheckError) Error() string {
	return fmt.Sprintf("MessagePack value %s (at byte %d)", e.Kind, e.Offset)
}

// First bytes of each format, by the table "Formats" of the specification.
// Those below 0xc0 and from 0xe0 up carry a value or a length in their low bits.
const (
	fixMap, fixArray, fixStr        = 0x80, 0x90, 0xa0
	nilCode, falseCode, trueCode    = 0xc0, 0xc2, 0xc3
	bin8, bin16, bin32              = 0xc4, 0xc5, 0xc6
	float64Code                     = 0xcb
	uint8Code, uint16Code           = 0xcc, 0xcd
	uint32Code, uint64Code          = 0xce, 0xcf
	int8Code, int16Code             = 0xd0, 0xd1
	int32Code, int64Code            = 0xd2, 0xd3
	str8, str16, str32              = 0xd9, 0xda, 0xdb
	array16, array32, map16, map32  = 0xdc, 0xdd, 0xde, 0xdf
	negativeFixInt                  = 0xe0
	maxFixStr, maxFixArray          = 31, 15
	maxUint8, maxUint16, maxPosFix  = 1<<8 - 1, 1<<16 - 1, 1<<7 - 1
	minInt8, minInt16, minNegFixInt = -1 << 7, -1 << 15, -1 << 5
)

// Check walks one MessagePack value, without allocating or recursing, and
// returns a *[CheckError] unless b is exactly one value within lim whose
// declared sizes are covered by bytes that are there. The package's doc comment
// lists what else is refused.
func Check(b []byte, lim Limits) error {
	w := walk{b: b, lim: lim}
	if kind := w.run(); kind != "" {
		return &CheckError{Kind: kind, Offset: w.at}
	}
	return nil
}

// level is one open map or array.
type level struct {
	left  uint32 // elements to come; for a map, keys and values together
	keys  uint16 // where this map's keys begin in walk.keys
	isMap bool
}

// span is the place of one map key, its header included. Because an encoding
// that is not minimal is refused, equal keys have equal bytes.
type span struct{ start, end uint32 }

// walk is the state of one Check. A level's keys are those from its keys index
// to the next deeper level's.
type walk struct {
	b     []byte
	at    int // the byte under consideration
	lim   Limits
	depth int
	nodes int
	nkeys int
	open  [MaxDepth]level
	keys  [MaxKeys]span
}

// run walks the whole value and returns the kind of the first fault, "" for none.
func (w *walk) run() Kind {
	if uint64(len(w.b)) > 1<<32-1 {
		return Trailing // no length field of ours can announce it
	}
	for {
		if kind := w.next(); kind != "" {
			return kind
		}
		for w.depth > 0 && w.open[w.depth-1].left == 0 {
			w.depth--
			if l := w.open[w.depth]; l.isMap {
				w.nkeys = int(l.keys)
			}
		}
		if w.depth == 0 {
			break
		}
	}
	if w.at != len(w.b) {
		return Trailing
	}
	return ""
}

// next consumes one scalar, or the header of one container, and accounts for it
// in the container that it stands in.
func (w *walk) next() Kind {
	if w.nodes++; w.nodes > w.lim.Nodes {
		return Nodes
	}
	if w.at >= len(w.b) {
		return Truncated
	}
	if w.depth == 0 {
		return w.value()
	}
	l := &w.open[w.depth-1]
	isKey := l.isMap && l.left%2 == 0
	l.left--
	if !isKey {
		return w.value()
	}
	return w.key(l)
}

// key consumes a map key: a string that no earlier key of the map equals.
func (w *walk) key(l *level) Kind {
	start := w.at
	if c := w.b[start]; c&0xe0 != fixStr && c != str8 && c != str16 && c != str32 {
		return KeyType
	}
	if kind := w.value(); kind != "" {
		return kind
	}
	if w.nkeys == MaxKeys {
		return Keys
	}
	key := w.b[start:w.at]
	for _, k := range w.keys[l.keys:w.nkeys] {
		if bytes.Equal(w.b[k.start:k.end], key) {
			w.at = start
			return Duplicate
		}
	}
	w.keys[w.nkeys] = span{uint32(start), uint32(w.at)}
	w.nkeys++
	return ""
}

// value consumes what begins at w.at, which is within the input.
func (w *walk) value() Kind {
	c := w.b[w.at]
	switch {
	case c < fixMap || c >= negativeFixInt || c == nilCode || c == falseCode || c == trueCode:
		w.at++
		return ""
	case c < fixArray:
		return w.enter(1, uint64(c&0x0f), true)
	case c < fixStr:
		return w.enter(1, uint64(c&0x0f), false)
	case c < nilCode:
		return w.text(1, uint64(c&0x1f))
	}
	switch c {
	case float64Code:
		return w.skip(1, 8)
	case uint8Code, uint16Code, uint32Code, uint64Code, int8Code, int16Code, int32Code, int64Code:
		return w.integer(c)
	}
	size, least := lengthField(c)
	if size == 0 {
		return Type
	}
	if len(w.b)-w.at-1 < size {
		return Truncated
	}
	n := beUint(w.b[w.at+1 : w.at+1+size])
	if n < least {
		return NotMinimal
	}
	switch c {
	case bin8, bin16, bin32:
		return w.skip(1+size, n)
	case str8, str16, str32:
		return w.text(1+size, n)
	default:
		return w.enter(1+size, n, c == map16 || c == map32)
	}
}

// lengthField returns how many bytes of length follow c, and the smallest length
// that has no shorter form; size 0 means that c is refused (extension types,
// float 32, and 0xc1, which the specification never uses).
func lengthField(c byte) (size int, least uint64) {
	switch c {
	case bin8:
		return 1, 0
	case bin16, str16:
		return 2, maxUint8 + 1
	case bin32, str32:
		return 4, maxUint16 + 1
	case str8:
		return 1, maxFixStr + 1
	case array16, map16:
		return 2, maxFixArray + 1
	case array32, map32:
		return 4, maxUint16 + 1
	}
	return 0, 0
}

// skip consumes a header, the bytes of which are there, and n bytes after it.
func (w *walk) skip(header int, n uint64) Kind {
	if n > uint64(len(w.b)-w.at-header) {
		return Truncated
	}
	w.at += header + int(n)
	return ""
}

// text consumes a string of n bytes.
func (w *walk) text(header int, n uint64) Kind {
	start := w.at
	if kind := w.skip(header, n); kind != "" {
		return kind
	}
	if !utf8.Valid(w.b[start+header : w.at]) {
		w.at = start
		return NotUTF8
	}
	return ""
}

// enter opens a container of n elements (a map: n pairs). Each element takes at
// least one byte, so a count that the rest of the input cannot cover is refused
// at once.
func (w *walk) enter(header int, n uint64, isMap bool) Kind {
	if isMap {
		n *= 2
	}
	if n > uint64(len(w.b)-w.at-header) {
		return Truncated
	}
	if w.depth >= MaxDepth || w.depth >= w.lim.Depth {
		return Depth
	}
	w.at += header
	w.open[w.depth] = level{left: uint32(n), keys: uint16(w.nkeys), isMap: isMap}
	w.depth++
	return ""
}

// integer consumes an integer with a width of its own and refuses it where a
// shorter format holds the same value. Non-negative values are unsigned.
func (w *walk) integer(c byte) Kind {
	signed := c >= int8Code
	size := 1 << (c - uint8Code)
	if signed {
		size = 1 << (c - int8Code)
	}
	if len(w.b)-w.at-1 < size {
		return Truncated
	}
	v := beUint(w.b[w.at+1 : w.at+1+size])
	if signed {
		shift := 64 - 8*size
		n := int64(v<<shift) >> shift
		least := [...]int64{1: minNegFixInt, 2: minInt8, 4: minInt16, 8: -1 << 31}
		if n >= least[size] {
			return NotMinimal
		}
	} else {
		least := [...]uint64{1: maxPosFix, 2: maxUint8, 4: maxUint16, 8: 1<<32 - 1}
		if v <= least[size] {
			return NotMinimal
		}
	}
	w.at += 1 + size
	return ""
}

// beUint reads a big-endian number of 1, 2, 4 or 8 bytes.
func beUint(b []byte) uint64 {
	switch len(b) {
	case 1:
		return uint64(b[0])
	case 2:
		return uint64(binary.BigEndian.Uint16(b))
	case 4:
		return uint64(binary.BigEndian.Uint32(b))
	default:
		return binary.BigEndian.Uint64(b)
	}
}
