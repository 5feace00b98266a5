package vhostvsock

import (
	"container/list"
	"fmt"

	"github.com/capsem/capsem/internal/vm"
)

// maxPacket is how many bytes of data a packet has at most, in either direction
// (VIRTIO_VSOCK_MAX_PKT_BUF_SIZE in Linux).
const maxPacket = 64 << 10

// interruptEvery is how many packets are moved before the guest is told of them
// while more follow, so that it works on the first ones meanwhile.
const interruptEvery = 16

// flushLimit is how many packets one flush moves: a guest that takes them as fast
// as they come must not keep everybody else from the lock.
const flushLimit = 256

// note is a set of packets without data that a connection has to send. A set,
// and not a queue: however often a credit update becomes due, it is sent once,
// with the figures of the moment at which it is sent.
type note uint8

const (
	noteRequest note = 1 << iota
	noteResponse
	noteCredit
	noteShutdown
)

// outbox is what waits for room in the to-guest queue. What bounds it: refusals
// by maxRefusals, notes and writers by the number of connections, and the data
// stays with its writer.
type outbox struct {
	refusals []header  // resets, in order; their connections are gone
	notes    list.List // of *Conn with notes
	writers  list.List // of *Conn with data and credit to send it; served in turn
}

func (o *outbox) empty() bool {
	return len(o.refusals) == 0 && o.notes.Len() == 0 && o.writers.Len() == 0
}

// moveToGuest is called when the guest has made room.
func (d *Device) moveToGuest() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.flush()
}

// flush moves what waits into the buffers that the guest has posted, as far as
// they reach: first resets, then other packets without data, then data, one
// packet of each connection in turn. It never waits; where there are too few
// buffers, the guest's next kick continues, and where there is too much to move
// under one lock, the queue's watcher does.
func (d *Device) flush() {
	q := &d.queues[toGuest]
	for moved := 1; !d.stopped && q.running() && !d.out.empty(); moved++ {
		if moved > flushLimit {
			q.poke()
			break
		}
		c, ok, err := q.next(&d.memory)
		if err == nil && ok && c.size <= headerSize {
			err = fmt.Errorf("a receive buffer has only %d bytes", c.size)
		}
		if err != nil {
			d.stopLocked(fmt.Errorf("sending to the guest: %w", err))
			return
		}
		if !ok {
			if q.listen() {
				continue
			}
			break
		}
		h, data := d.takePacket(c.size - headerSize)
		scatter(c, &h, data)
		q.push(c.head, headerSize+uint32(len(data)))
		if moved%interruptEvery == 0 {
			d.interrupt(q)
		}
	}
	if !d.stopped && q.running() {
		if d.out.empty() {
			q.ignore()
		}
		d.interrupt(q)
	}
}

// takePacket takes the next packet, with at most room bytes of data, out of the
// outbox, which is not empty. The data is the writer's, to be copied at once.
func (d *Device) takePacket(room uint64) (header, []byte) {
	o := &d.out
	if len(o.refusals) > 0 {
		h := o.refusals[0]
		o.refusals = o.refusals[1:]
		return h, nil
	}
	if e := o.notes.Front(); e != nil {
		return e.Value.(*Conn).takeNote(), nil
	}
	return o.writers.Front().Value.(*Conn).takeData(room)
}

// takeNote takes the first packet that c has to send, in the order of their
// constants.
func (c *Conn) takeNote() header {
	n := c.notes & -c.notes
	c.notes &^= n
	if c.notes == 0 {
		c.device.out.notes.Remove(c.noteElement)
		c.noteElement = nil
	}
	switch n {
	case noteRequest:
		c.announced = true
		return c.stamp(opRequest)
	case noteResponse:
		return c.stamp(opResponse)
	case noteShutdown:
		h := c.stamp(opShutdown)
		h.flags = shutdownSend
		if c.closed {
			h.flags = shutdownBoth
		}
		return h
	default:
		return c.stamp(opCreditUpdate)
	}
}

// takeData takes the next packet of what c's writer has, which has credit.
func (c *Conn) takeData(room uint64) (header, []byte) {
	n := min(uint64(len(c.pending)), uint64(c.credit()), room, maxPacket)
	data := c.pending[:n]
	c.pending = c.pending[n:]
	c.sent += uint32(n)
	writers := &c.device.out.writers
	if len(c.pending) > 0 && c.credit() > 0 {
		writers.MoveToBack(c.writerElement)
	} else {
		writers.Remove(c.writerElement)
		c.writerElement = nil
	}
	if len(c.pending) == 0 {
		c.writable.Broadcast()
	}
	h := c.stamp(opData)
	h.length = uint32(n)
	return h, data
}

// stamp is the header of a packet that c sends now. It carries c's credit, so
// it counts as a credit update.
func (c *Conn) stamp(op opcode) header {
	c.notes &^= noteCredit
	if c.notes == 0 && c.noteElement != nil {
		c.device.out.notes.Remove(c.noteElement)
		c.noteElement = nil
	}
	c.reported = c.taken
	return header{
		srcCID: vm.HostCID, dstCID: uint64(c.device.cid),
		srcPort: c.key.hostPort, dstPort: c.key.guestPort,
		typ: typeStream, op: op,
		bufAlloc: BufferSize, fwdCnt: c.taken,
	}
}

// send notes that c has a packet without data to send.
func (c *Conn) send(n note) {
	c.notes |= n
	if c.noteElement == nil {
		c.noteElement = c.device.out.notes.PushBack(c)
	}
}

// refuse queues the reset that answers a packet with header h.
func (d *Device) refuse(h *header) {
	d.reset(header{
		srcCID: h.dstCID, dstCID: h.srcCID, srcPort: h.dstPort, dstPort: h.srcPort,
		typ: h.typ, op: opReset,
	})
}

// reset queues the reset h.
func (d *Device) reset(h header) {
	if len(d.out.refusals) >= maxRefusals {
		d.dropped.refusal(d.log)
		return
	}
	d.out.refusals = append(d.out.refusals, h)
}

// scatter writes a packet to a chain that is large enough for it.
func scatter(c chain, h *header, data []byte) {
	var head [headerSize]byte
	h.encode(&head)
	rest := head[:]
	for _, segment := range c.segments {
		n := copy(segment, rest)
		if rest = rest[n:]; len(rest) > 0 {
			continue
		}
		if data == nil {
			return
		}
		rest, data = data, nil
		n = copy(segment[n:], rest)
		rest = rest[n:]
	}
}
