package vhostvsock

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"
)

// Limits and layout of a split virtqueue (VIRTIO 1.2 §2.7).
const (
	maxQueueSize    = 1024 // what QEMU caps a ring and an indirect table at
	descriptorSize  = 16
	descriptorNext  = 1 // flag: the chain goes on
	descriptorWrite = 2 // flag: the device writes it
	descriptorTable = 4 // flag: it holds a table of descriptors

	availNoInterrupt = 1 // the driver wants no interrupt
	usedNoNotify     = 1 // the device wants no kick
)

// direction is who fills the buffers of a queue.
type direction bool

const (
	deviceReads  direction = false
	deviceWrites direction = true
)

// ringAddress is where the three parts of a ring are in QEMU's address space.
type ringAddress struct {
	desc, avail, used uint64
}

// virtqueue is the device's side of one split ring. The driver, which may be
// hostile, writes desc and avail, and can change them at any moment: every value
// is read once, into a local, and checked there.
type virtqueue struct {
	direction direction
	size      uint16 // a power of two from 2 to maxQueueSize; 0 before SET_VRING_NUM
	address   ringAddress
	eventIdx  bool // VIRTIO_F_EVENT_IDX was negotiated
	indirect  bool // VIRTIO_F_INDIRECT_DESC was negotiated
	started   bool // a kick descriptor was given, and no GET_VRING_BASE since
	enabled   bool

	desc, avail, used []byte // nil while not mapped

	lastAvail uint16   // index of the next chain to take
	shadow    uint16   // avail.idx as last read
	usedIdx   uint16   // index of the next used element to fill
	signalled uint16   // usedIdx when an interrupt was last considered
	segments  [][]byte // reused by next

	kick    *os.File // eventfd, nil while stopped
	call    int      // eventfd, valid if hasCall; it is written without the poller
	hasCall bool     // false if the driver polls
}

// chain is one buffer of the driver's: its segments in order. They are valid
// until the next call of next, and as long as the memory is mapped.
type chain struct {
	head     uint16
	segments [][]byte
	size     uint64 // bytes in all segments
}

// running reports whether packets move.
func (q *virtqueue) running() bool {
	return q.started && q.enabled && q.desc != nil
}

// resolve finds the ring in memory. A ring that is not mapped leaves the queue
// paused: QEMU removes and adds memory regions while the guest runs.
func (q *virtqueue) resolve(m *memory) error {
	q.desc, q.avail, q.used = nil, nil, nil
	if q.size == 0 || !q.started {
		return nil
	}
	n := uint64(q.size)
	if q.address.desc%16 != 0 || q.address.avail%4 != 0 || q.address.used%4 != 0 {
		return fmt.Errorf("ring at %#x, %#x, %#x is not aligned", q.address.desc, q.address.avail, q.address.used)
	}
	desc := m.userSlice(q.address.desc, n*descriptorSize)
	// Two bytes more than the ring has, so that used_event can be read as half
	// of an aligned word; every layout that exists has them.
	avail := m.userSlice(q.address.avail, 8+2*n)
	used := m.userSlice(q.address.used, 6+8*n)
	if desc == nil || avail == nil || used == nil {
		return nil
	}
	q.desc, q.avail, q.used = desc, avail, used
	return nil
}

// begin takes over the ring where its last user left it.
func (q *virtqueue) begin() {
	q.shadow = q.lastAvail
	q.usedIdx = uint16(atomic.LoadUint32(word(q.used, 0)) >> 16)
	q.signalled = q.usedIdx
}

// word is the aligned 32-bit word at off. The rings' alignment was checked when
// they were resolved, and mappings are page-aligned.
func word(b []byte, off int) *uint32 {
	return (*uint32)(unsafe.Pointer(&b[off : off+4][0]))
}

// next takes the next chain that the driver has made available. The second
// result is false if there is none.
func (q *virtqueue) next(m *memory) (chain, bool, error) {
	if q.lastAvail == q.shadow {
		q.shadow = uint16(atomic.LoadUint32(word(q.avail, 0)) >> 16)
		if q.lastAvail == q.shadow {
			return chain{}, false, nil
		}
	}
	if ahead := q.shadow - q.lastAvail; ahead > q.size {
		return chain{}, false, fmt.Errorf("the driver made %d buffers available in a ring of %d", ahead, q.size)
	}
	slot := int(q.lastAvail & (q.size - 1))
	head := binary.LittleEndian.Uint16(q.avail[4+2*slot:])
	c, err := q.walk(m, head)
	if err != nil {
		return chain{}, false, fmt.Errorf("walking descriptor %d: %w", head, err)
	}
	q.lastAvail++
	return c, true, nil
}

// descriptor is one entry of a descriptor table.
type descriptor struct {
	addr  uint64
	size  uint32
	flags uint16
	next  uint16
}

// readDescriptor copies entry i out of a table, so that what is checked is what
// is used.
func readDescriptor(table []byte, i uint16) descriptor {
	var b [descriptorSize]byte
	copy(b[:], table[int(i)*descriptorSize:])
	le := binary.LittleEndian
	return descriptor{addr: le.Uint64(b[0:]), size: le.Uint32(b[8:]), flags: le.Uint16(b[12:]), next: le.Uint16(b[14:])}
}

// walk collects the segments of the chain that starts at head.
func (q *virtqueue) walk(m *memory, head uint16) (chain, error) {
	c := chain{head: head, segments: q.segments[:0]}
	table, entries, nested := q.desc, q.size, false
	at := head
	for steps := 0; ; steps++ {
		if at >= entries {
			return chain{}, fmt.Errorf("descriptor %d is outside of a table of %d", at, entries)
		}
		if steps >= int(entries) {
			return chain{}, fmt.Errorf("the chain is longer than its table of %d", entries)
		}
		d := readDescriptor(table, at)
		if d.flags&descriptorTable != 0 {
			if nested || d.flags&descriptorNext != 0 || !q.indirect {
				return chain{}, errors.New("an indirect table is not allowed here")
			}
			var err error
			if table, err = indirectTable(m, d); err != nil {
				return chain{}, err
			}
			entries, nested, at, steps = uint16(len(table)/descriptorSize), true, 0, -1
			continue
		}
		if err := q.take(m, &c, d); err != nil {
			return chain{}, err
		}
		if d.flags&descriptorNext == 0 {
			q.segments = c.segments
			return c, nil
		}
		at = d.next
	}
}

// take adds what descriptor d points to to c.
func (q *virtqueue) take(m *memory, c *chain, d descriptor) error {
	if direction(d.flags&descriptorWrite != 0) != q.direction {
		return errors.New("a buffer has the wrong direction")
	}
	if d.size == 0 {
		return errors.New("a buffer is empty")
	}
	segments, err := m.appendGuest(c.segments, d.addr, d.size)
	if err != nil {
		return err
	}
	c.segments = segments
	c.size += uint64(d.size)
	return nil
}

// indirectTable finds the table that d points to.
func indirectTable(m *memory, d descriptor) ([]byte, error) {
	if d.size == 0 || d.size%descriptorSize != 0 || d.size/descriptorSize > maxQueueSize {
		return nil, fmt.Errorf("an indirect table has %d bytes", d.size)
	}
	table := m.guestFrom(d.addr, uint64(d.size))
	if uint64(len(table)) != uint64(d.size) {
		return nil, fmt.Errorf("indirect table %#x+%d is outside of the guest's memory", d.addr, d.size)
	}
	return table, nil
}

// push gives a chain back to the driver; n is how many bytes were written to it.
func (q *virtqueue) push(head uint16, n uint32) {
	at := 4 + 8*int(q.usedIdx&(q.size-1))
	binary.LittleEndian.PutUint32(q.used[at:], uint32(head))
	binary.LittleEndian.PutUint32(q.used[at+4:], n)
	q.usedIdx++
	// The flags are the low half of the word, and ours alone to write. The store
	// is sequentially consistent: the element is visible before its index.
	flags := atomic.LoadUint32(word(q.used, 0)) & 0xffff
	atomic.StoreUint32(word(q.used, 0), uint32(q.usedIdx)<<16|flags)
}

// listen asks the driver to kick when it makes the next buffer available, and
// reports whether one is available already, in which case no kick may come.
func (q *virtqueue) listen() bool {
	if q.eventIdx {
		binary.LittleEndian.PutUint16(q.used[4+8*int(q.size):], q.lastAvail)
		fence()
	} else {
		atomic.StoreUint32(word(q.used, 0), uint32(q.usedIdx)<<16)
	}
	q.shadow = uint16(atomic.LoadUint32(word(q.avail, 0)) >> 16)
	return q.shadow != q.lastAvail
}

// ignore tells the driver that kicks are not needed for now. With event indexes
// there is nothing to do: the index that was asked for stays behind.
func (q *virtqueue) ignore() {
	if !q.eventIdx {
		atomic.StoreUint32(word(q.used, 0), uint32(q.usedIdx)<<16|usedNoNotify)
	}
}

// wantsInterrupt reports whether the driver must be told of what was pushed
// since this was last asked.
func (q *virtqueue) wantsInterrupt() bool {
	before := q.signalled
	q.signalled = q.usedIdx
	if before == q.usedIdx {
		return false
	}
	if !q.eventIdx {
		return atomic.LoadUint32(word(q.avail, 0))&availNoInterrupt == 0
	}
	// push's store and this load are sequentially consistent, which is the
	// barrier that VIRTIO 1.2 §2.7.7.2 asks for.
	event := uint16(atomic.LoadUint32(word(q.avail, 4+2*int(q.size))))
	return q.usedIdx-event-1 < q.usedIdx-before
}

// fence orders the plain 16-bit store before it against the loads after it: a
// sequentially consistent read-modify-write releases the store, and atomic loads
// stay behind it.
func fence() {
	var w uint32
	atomic.AddUint32(&w, 1)
}
