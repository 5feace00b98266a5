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
	count  int
	few    [32]name // the first names, so that most messages need no heap
	more   []name   // the others
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

// nameSet is the names of one open object: those from base on, while it is the
// innermost.
type nameSet struct {
	base int
	fold bool // names that differ only in case clash
	// slots is an open-addressed hash table of the names' indices, plus one; nil
	// as long as the object has few names. Its size is a power of two.
	slots []uint32
}

// open begins an object.
func (n *names) open(fold bool) nameSet {
	if !n.seeded {
		n.seed, n.seeded = maphash.MakeSeed(), true
	}
	return nameSet{base: n.count, fold: fold}
}

// close ends the innermost object, which is set.
func (n *names) close(set *nameSet) {
	n.count = set.base
	n.more = n.more[:max(0, n.count-len(n.few))]
}

// at returns the name of an index below count.
func (n *names) at(i int) name {
	if i < len(n.few) {
		return n.few[i]
	}
	return n.more[i-len(n.few)]
}

// push appends a name.
func (n *names) push(nm name) {
	if n.count < len(n.few) {
		n.few[n.count] = nm
	} else {
		n.more = append(n.more, nm)
	}
	n.count++
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
		for i := set.base; i < n.count; i++ {
			if o := n.at(i); o.hash == nm.hash {
				if d := clash(b, o, nm, set.fold); d != "" {
					return d
				}
			}
		}
	} else if d := n.lookup(b, set, nm); d != "" {
		return d
	}
	n.push(nm)
	if n.count-set.base > linear {
		n.index(set)
	}
	return ""
}

// lookup is add's search by table.
func (n *names) lookup(b []byte, set *nameSet, nm name) Detail {
	mask := uint64(len(set.slots) - 1)
	for at := nm.hash & mask; set.slots[at] != 0; at = (at + 1) & mask {
		if o := n.at(int(set.slots[at]) - 1); o.hash == nm.hash {
			if d := clash(b, o, nm, set.fold); d != "" {
				return d
			}
		}
	}
	return ""
}

// index enters the last of the object's names into its table, or all of them where
// the table is new or has become too small.
func (n *names) index(set *nameSet) {
	from := n.count - 1
	if 2*(n.count-set.base) > len(set.slots) {
		set.slots = make([]uint32, max(8*linear, 2*len(set.slots)))
		from = set.base
	}
	mask := uint64(len(set.slots) - 1)
	for i := from; i < n.count; i++ {
		at := n.at(i).hash & mask
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
