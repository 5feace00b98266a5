package vhostvsock

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Features of virtio and of vhost-user that the device offers, as bits.
const (
	featureIndirect         = 1 << 28
	featureEventIdx         = 1 << 29
	featureProtocolFeatures = 1 << 30
	featureVersion1         = 1 << 32
	features                = featureIndirect | featureEventIdx | featureProtocolFeatures | featureVersion1

	protocolMQ             = 1 << 0
	protocolReplyAck       = 1 << 3
	protocolConfig         = 1 << 9
	protocolConfigMemSlots = 1 << 15
	protocolFeatures       = protocolMQ | protocolReplyAck | protocolConfig | protocolConfigMemSlots
)

// The device's queues. The third queue of a socket device, for events, is
// QEMU's.
const (
	toGuest   = 0
	fromGuest = 1
	queueNum  = 2
)

// serve answers QEMU until it hangs up, which is no error, or breaks the
// protocol.
func (d *Device) serve() error {
	for {
		m, err := readMessage(d.socket)
		if hungUp(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("serving vhost-user: %w", err)
		}
		err = d.answer(&m)
		if closeErr := m.closeFile(); err == nil {
			err = closeErr
		}
		if hungUp(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("serving vhost-user request %d: %w", m.request, err)
		}
	}
}

// hungUp reports whether err is the end of the connection: also that of a QEMU
// which was killed before it had read an answer.
func hungUp(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE)
}

// answer does what m asks for and replies if a reply is due.
func (d *Device) answer(m *message) error {
	reply, err := d.act(m)
	if err != nil {
		return err
	}
	if reply == nil && m.needsReply() {
		reply = make([]byte, 8) // zero: done
	}
	if reply == nil {
		return nil
	}
	out := message{request: m.request, flags: flagVersion | flagReply, payload: reply}
	if _, err := d.socket.Write(appendMessage(nil, &out)); err != nil {
		return fmt.Errorf("replying: %w", err)
	}
	return nil
}

// act does what m asks for. The reply is nil if the request has none.
func (d *Device) act(m *message) (reply []byte, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stopped {
		return nil, nil // whoever stopped it said why
	}
	switch m.request {
	case reqGetFeatures:
		return binary.LittleEndian.AppendUint64(nil, features), nil
	case reqGetProtocolFeatures:
		return binary.LittleEndian.AppendUint64(nil, protocolFeatures), nil
	case reqGetQueueNum:
		return binary.LittleEndian.AppendUint64(nil, queueNum), nil
	case reqGetMaxMemSlots:
		return binary.LittleEndian.AppendUint64(nil, maxRegions), nil
	case reqSetOwner:
		return nil, nil
	case reqSetFeatures:
		return nil, d.setFeatures(m.payload)
	case reqSetProtocolFeatures:
		return nil, checkFeatures(m.payload, protocolFeatures)
	case reqGetConfig:
		return d.getConfig(m.payload)
	case reqAddMemReg, reqRemMemReg:
		return nil, d.changeMemory(m)
	case reqSetVringNum, reqSetVringBase, reqGetVringBase, reqSetVringEnable:
		return d.setVring(m)
	case reqSetVringAddr:
		return nil, d.setVringAddr(m.payload)
	case reqSetVringKick, reqSetVringCall, reqSetVringErr:
		return nil, d.setVringFile(m)
	default:
		return nil, errors.New("the request is not known")
	}
}

// checkFeatures refuses feature bits that were not offered.
func checkFeatures(payload []byte, offered uint64) error {
	bits, err := decodeUint64(payload)
	if err == nil && bits&^offered != 0 {
		err = fmt.Errorf("features %#x were not offered", bits&^offered)
	}
	return err
}

func (d *Device) setFeatures(payload []byte) error {
	if err := checkFeatures(payload, features); err != nil {
		return err
	}
	bits := binary.LittleEndian.Uint64(payload)
	for i := range d.queues {
		q := &d.queues[i]
		if q.started {
			return errors.New("a queue runs")
		}
		q.eventIdx = bits&featureEventIdx != 0
		q.indirect = bits&featureIndirect != 0
	}
	d.version1 = bits&featureVersion1 != 0
	return nil
}

// getConfig answers with the configuration space, which is the guest's CID.
func (d *Device) getConfig(payload []byte) ([]byte, error) {
	c, err := decodeConfig(payload)
	if err != nil {
		return nil, err
	}
	space := binary.LittleEndian.AppendUint64(nil, uint64(d.cid))
	if uint64(c.offset)+uint64(len(c.data)) > uint64(len(space)) {
		return nil, fmt.Errorf("there is no configuration at %d+%d", c.offset, len(c.data))
	}
	c.data = space[c.offset:][:len(c.data)]
	return c.encode(), nil
}

// changeMemory maps or unmaps a region, and finds the rings anew.
func (d *Device) changeMemory(m *message) error {
	r, err := decodeRegion(m.payload)
	if err != nil {
		return err
	}
	switch {
	case m.request == reqRemMemReg:
		err = d.memory.remove(r) // some versions send the descriptor along
	case m.file == nil:
		err = errors.New("the region has no descriptor")
	default:
		err = d.memory.add(r, m.file)
	}
	if err != nil {
		return err
	}
	for i := range d.queues {
		if err := d.queues[i].resolve(&d.memory); err != nil {
			return err
		}
	}
	d.poke()
	return nil
}

// queue returns the queue that a message names.
func (d *Device) queue(index uint64) (*virtqueue, error) {
	if index >= queueNum {
		return nil, fmt.Errorf("there is no queue %d", index)
	}
	return &d.queues[index], nil
}

// setVring handles the requests that carry one number for one queue.
func (d *Device) setVring(m *message) ([]byte, error) {
	s, err := decodeVringState(m.payload)
	if err != nil {
		return nil, err
	}
	q, err := d.queue(uint64(s.index))
	if err != nil {
		return nil, err
	}
	switch m.request {
	case reqGetVringBase:
		s.value = uint32(q.lastAvail)
		return s.encode(), d.stopQueue(q)
	case reqSetVringEnable:
		q.enabled = s.value != 0
		d.poke()
		return nil, nil
	default:
		return nil, q.configure(m.request, s.value)
	}
}

// configure sets the size or the position of a queue that does not run.
func (q *virtqueue) configure(r request, value uint32) error {
	if q.started {
		return errors.New("the queue runs")
	}
	if r == reqSetVringBase {
		if value > 0xffff {
			return fmt.Errorf("position %d is no 16-bit number", value)
		}
		q.lastAvail = uint16(value)
		return nil
	}
	if value < 2 || value > maxQueueSize || value&(value-1) != 0 {
		return fmt.Errorf("a queue of %d is not a power of two from 2 to %d", value, maxQueueSize)
	}
	q.size = uint16(value)
	return nil
}

func (d *Device) setVringAddr(payload []byte) error {
	a, err := decodeVringAddr(payload)
	if err != nil {
		return err
	}
	q, err := d.queue(uint64(a.index))
	if err != nil {
		return err
	}
	if q.started {
		return errors.New("the queue runs")
	}
	if a.flags != 0 {
		return errors.New("logging was not offered")
	}
	q.address = ringAddress{desc: a.desc, avail: a.avail, used: a.used}
	return nil
}

// setVringFile takes the eventfd with which the driver kicks the device (a kick
// starts the queue), or the one that interrupts the driver. The third, for
// errors, is of no use: an error stops the device.
func (d *Device) setVringFile(m *message) error {
	v, err := decodeUint64(m.payload)
	if err != nil {
		return err
	}
	q, err := d.queue(v & queueIndexMask)
	if err != nil {
		return err
	}
	if has := m.file != nil; has == (v&noDescriptor != 0) || v&^(queueIndexMask|noDescriptor) != 0 {
		return fmt.Errorf("payload %#x does not agree with the descriptor", v)
	}
	switch m.request {
	case reqSetVringKick:
		return d.startQueue(q, m)
	case reqSetVringCall:
		return q.setCall(m)
	default:
		return nil // the caller closes the descriptor
	}
}

// setCall replaces the interrupt's descriptor.
func (q *virtqueue) setCall(m *message) error {
	if err := q.closeCall(); err != nil {
		return err
	}
	if m.file == nil {
		return nil
	}
	fd, err := duplicate(m.file)
	q.call, q.hasCall = fd, err == nil
	return err
}

// closeCall closes the interrupt's descriptor, if there is one.
func (q *virtqueue) closeCall() error {
	if !q.hasCall {
		return nil
	}
	q.hasCall = false
	return unix.Close(q.call)
}

// duplicate returns a non-blocking duplicate of file's descriptor.
func duplicate(file *os.File) (int, error) {
	fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("duplicating an eventfd: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return 0, errors.Join(fmt.Errorf("preparing an eventfd: %w", err), unix.Close(fd))
	}
	return fd, nil
}

// pollable duplicates file so that the runtime's poller serves it, and Close
// unblocks a read. What cannot be polled is no eventfd.
func pollable(file *os.File) (*os.File, error) {
	fd, err := duplicate(file)
	if err != nil {
		return nil, err
	}
	kick := os.NewFile(uintptr(fd), "eventfd")
	if err := kick.SetReadDeadline(time.Time{}); err != nil {
		return nil, errors.Join(fmt.Errorf("polling an eventfd: %w", err), kick.Close())
	}
	return kick, nil
}

// startQueue begins to serve q, which is kicked through m's file.
func (d *Device) startQueue(q *virtqueue, m *message) error {
	switch {
	case m.file == nil:
		return errors.New("a queue without a kick descriptor would have to be polled")
	case q.started:
		return errors.New("the queue runs")
	case q.size == 0:
		return errors.New("the queue has no size")
	case !d.version1:
		return errors.New("the driver does not speak VIRTIO 1")
	}
	kick, err := pollable(m.file)
	if err != nil {
		return err
	}
	q.kick, q.started = kick, true
	if err := q.resolve(&d.memory); err != nil {
		return err
	}
	if q.desc == nil {
		return fmt.Errorf("ring at %#x, %#x, %#x is outside of the guest's memory", q.address.desc, q.address.avail, q.address.used)
	}
	q.begin()
	if d.fresh() {
		d.forget()
	}
	d.watchers.Add(1)
	go d.watch(q, kick)
	d.poke()
	return nil
}

// fresh reports whether both queues have been started from their beginning, as a
// driver that has just been loaded does. After a pause at least one of them goes
// on from somewhere else.
func (d *Device) fresh() bool {
	for i := range d.queues {
		if q := &d.queues[i]; !q.started || q.lastAvail != 0 {
			return false
		}
	}
	return true
}

// stopQueue ends serving q. Its position stays for the next start.
func (d *Device) stopQueue(q *virtqueue) error {
	q.started, q.enabled = false, false
	q.desc, q.avail, q.used = nil, nil, nil
	if q.kick == nil {
		return nil
	}
	kick := q.kick
	q.kick = nil
	return kick.Close() // ends its watcher
}

// watch moves packets each time the driver kicks q or poke is called, until kick
// is closed.
func (d *Device) watch(q *virtqueue, kick *os.File) {
	defer d.watchers.Done()
	var count [8]byte
	for {
		n, err := kick.Read(count[:])
		if errors.Is(err, os.ErrDeadlineExceeded) {
			n, err = len(count), kick.SetReadDeadline(time.Time{})
		}
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil || n != len(count) {
			d.stop(fmt.Errorf("reading a kick: got %d bytes, error %w", n, err))
			return
		}
		if q == &d.queues[toGuest] {
			d.moveToGuest()
		} else {
			d.moveFromGuest()
		}
	}
}

// poke makes the watchers look at their queues without a kick. It is called
// when a queue may have begun to run: what the driver put there before may never
// be kicked again.
func (d *Device) poke() {
	for i := range d.queues {
		if q := &d.queues[i]; q.running() {
			q.poke()
		}
	}
}

// poke makes the watcher of a queue that runs look at it.
func (q *virtqueue) poke() {
	// It fails for a descriptor that was closed, whose watcher has ended, and
	// for one without deadlines, which startQueue has refused.
	_ = q.kick.SetReadDeadline(time.Unix(1, 0))
}

// interrupt tells the driver of what was pushed to q, if it wants to know.
func (d *Device) interrupt(q *virtqueue) {
	if !q.wantsInterrupt() || !q.hasCall {
		return
	}
	one := [8]byte{1}
	// A full counter (EAGAIN) is an interrupt that is still pending.
	if _, err := unix.Write(q.call, one[:]); err != nil && !errors.Is(err, unix.EAGAIN) {
		d.stopLocked(fmt.Errorf("interrupting the driver: %w", err))
	}
}
