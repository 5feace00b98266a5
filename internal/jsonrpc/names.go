package jsonrpc

import (
	"bytes"
	"hash/maphash"
	"unicode"
	"unicode/utf8"
)

// names are the member names of all objects that are open, innermost last. Each
// object's are a nameSet.
type names struct {
	seed   maphash.Seed
	seeded bool
	list   []name
	few    [32]name // list's first backing, so that most messages allocate none
}

// name is one member name: where it stands between its quotes, and the hash of
// what it means. The seed is random, so that nobody can choose names that collide.
type name struct {
	start, end uint32
	hash       uint64
}

// linear is how many names an object may have before they are looked up by a
// table.
const linear = 16

// nameSet is the names of one open object: list[base:] while it is the innermost.
type nameSet struct {
	base int
	fold bool // names that differ only in case clash
	// slots is an open-addressed hash table of indices into list, plus one; nil
	// as long as the object has few names. Its size is a power of two.
	slots []uint32
}

// open begins an object.
func (n *names) open(fold bool) nameSet {
	if !n.seeded {
		n.seed, n.seeded = maphash.MakeSeed(), true
		n.list = n.few[:0]
	}
	return nameSet{base: len(n.list), fold: fold}
}

// close ends the innermost object, which is set.
func (n *names) close(set *nameSet) {
	n.list = n.list[:set.base]
}

// add puts a name into the innermost object. It returns DuplicateMember or
// CaseVariant where the object has it already.
func (n *names) add(b []byte, set *nameSet, at span, escaped bool) Detail {
	content := b[at.start:at.end]
	if escaped || set.fold {
		var scratch [64]byte
		content = unescape(scratch[:0], content)
		if set.fold {
			content = foldInPlace(content)
		}
	}
	nm := name{uint32(at.start), uint32(at.end), maphash.Bytes(n.seed, content)}
	if set.slots == nil {
		for _, o := range n.list[set.base:] {
			if o.hash == nm.hash {
				if d := clash(b, o, nm, set.fold); d != "" {
					return d
				}
			}
		}
	} else if d := n.lookup(b, set, nm); d != "" {
		return d
	}
	n.list = append(n.list, nm)
	if count := len(n.list) - set.base; count > linear {
		n.index(set, count)
	}
	return ""
}

// lookup is add's search by table.
func (n *names) lookup(b []byte, set *nameSet, nm name) Detail {
	mask := uint64(len(set.slots) - 1)
	for at := nm.hash & mask; set.slots[at] != 0; at = (at + 1) & mask {
		if o := n.list[set.slots[at]-1]; o.hash == nm.hash {
			if d := clash(b, o, nm, set.fold); d != "" {
				return d
			}
		}
	}
	return ""
}

// index enters the last of the object's count names into its table, or all of
// them where the table is new or has become too small.
func (n *names) index(set *nameSet, count int) {
	from := len(n.list) - 1
	if 2*count > len(set.slots) {
		set.slots = make([]uint32, max(8*linear, 2*len(set.slots)))
		from = set.base
	}
	mask := uint64(len(set.slots) - 1)
	for i := from; i < len(n.list); i++ {
		at := n.list[i].hash & mask
		for set.slots[at] != 0 {
			at = (at + 1) & mask
		}
		set.slots[at] = uint32(i + 1)
	}
}

// clash compares two names whose hashes are equal.
func clash(b []byte, x, y name, fold bool) Detail {
	dx, dy := unescape(nil, b[x.start:x.end]), unescape(nil, b[y.start:y.end])
	if bytes.Equal(dx, dy) {
		return DuplicateMember
	}
	if fold && bytes.Equal(foldInPlace(dx), foldInPlace(dy)) {
		return CaseVariant
	}
	return ""
}

// foldInPlace returns decoded with each character replaced by the first of those
// that differ from it only in case (Unicode simple folding, as in
// strings.EqualFold), in the same memory where that fits.
func foldInPlace(decoded []byte) []byte {
	for i, c := range decoded {
		if c >= utf8.RuneSelf {
			return foldUnicode(decoded)
		}
		if 'a' <= c && c <= 'z' {
			decoded[i] = c - ('a' - 'A')
		}
	}
	return decoded
}

// foldUnicode is foldInPlace for text that is not all ASCII.
func foldUnicode(decoded []byte) []byte {
	out := make([]byte, 0, len(decoded)+utf8.UTFMax)
	for _, r := range string(decoded) {
		least := r
		for f := unicode.SimpleFold(r); f != r; f = unicode.SimpleFold(f) {
			least = min(least, f)
		}
		out = utf8.AppendRune(out, least)
	}
	return out
}

// equalFold reports whether decoded is name when case is ignored.
func equalFold(decoded []byte, name string) bool {
	return bytes.EqualFold(decoded, []byte(name))
}
