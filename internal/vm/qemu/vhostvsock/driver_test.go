package vhostvsock

import (
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// guestCID is the guest's address in all tests.
const guestCID = 3

// The layout of the driver's memory: rings in one region, buffers in another,
// with guest and user addresses that differ from each other.
const (
	ringSize    = 128
	ringBytes   = 16 << 10 // for each queue
	ringGuest   = 0x100000
	ringUser    = 0x7f0000000000
	slots       = ringSize / 2
	rxSlotSize  = 8 << 10
	txSlotSize  = 80 << 10
	bufferGuest = 1 << 32
	bufferUser  = 0x7e0000000000
	bufferBytes = slots * (rxSlotSize + txSlotSize)
	rxPayload   = 4 << 10  // as Linux posts it
	tableOffset = 70 << 10 // in a slot of the from-guest queue, an indirect table
)

// driver is the other side of the device, small and real: QEMU's half of
// vhost-user over a socketpair, and a guest kernel's half of the rings in shared
// memory. Package guest sockets are in guest_test.go.
type driver struct {
	t      testing.TB
	socket *net.UnixConn
	memory *os.File
	data   []byte // the whole of memory
	rx, tx driverRing

	features uint64 // what the driver negotiates

	sending  sync.Mutex // guards tx
	indirect bool       // packets are sent by indirect tables
	scratch  []byte     // the payload that receive returned
}

// driverRing is the driver's side of one queue. Each slot is a chain of two
// descriptors: a header and data.
type driverRing struct {
	desc, avail, used []byte
	kick, call        *os.File
	availIdx, usedIdx uint16
	base              uint32 // where the device goes on
	plain             bool   // without event indexes
	free              []int
	slot              func(i int) []byte // the slot's buffer
}

// startDevice serves a device and returns it with its connection to QEMU.
func startDevice(t testing.TB) (*Device, *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := unixConn(t, fds[0]), unixConn(t, fds[1])
	d := Serve(ours, guestCID, slog.New(slog.DiscardHandler))
	t.Cleanup(func() {
		theirs.Close()
		d.Close()
	})
	return d, theirs
}

func unixConn(t testing.TB, fd int) *net.UnixConn {
	t.Helper()
	file := os.NewFile(uintptr(fd), "socketpair")
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		t.Fatal(err)
	}
	return conn.(*net.UnixConn)
}

// startDriver starts a device and brings its driver up.
func startDriver(t testing.TB) (*Device, *driver) {
	t.Helper()
	return startDriverWith(t, features)
}

// startDriverWith is startDriver with some of the features only.
func startDriverWith(t testing.TB, some uint64) (*Device, *driver) {
	t.Helper()
	d, socket := startDevice(t)
	g := newDriver(t, socket)
	g.features = some
	g.rx.plain, g.tx.plain = some&featureEventIdx == 0, some&featureEventIdx == 0
	g.realize()
	g.start()
	return d, g
}

func newDriver(t testing.TB, socket *net.UnixConn) *driver {
	t.Helper()
	g := &driver{t: t, socket: socket, features: features, memory: sealedMemory(t, 2*ringBytes+bufferBytes, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)}
	data, err := unix.Mmap(int(g.memory.Fd()), 0, 2*ringBytes+bufferBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Munmap(data); err != nil {
			t.Error(err)
		}
	})
	g.data = data
	g.rx = g.newRing(0, rxSlotSize, 0)
	g.tx = g.newRing(1, txSlotSize, slots*rxSlotSize)
	return g
}

func sealedMemory(t testing.TB, size int64, seals int) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("guest", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "guest")
	t.Cleanup(func() { file.Close() })
	if err := file.Truncate(size); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	return file
}

func (g *driver) newRing(queue, slotSize, at int) driverRing {
	base := g.data[queue*ringBytes:][:ringBytes]
	buffers := g.data[2*ringBytes+at:]
	r := driverRing{
		desc: base[:ringSize*16], avail: base[4<<10:][:8+2*ringSize], used: base[8<<10:][:8+8*ringSize],
		kick: eventfd(g.t), call: eventfd(g.t),
		slot: func(i int) []byte { return buffers[i*slotSize:][:slotSize] },
	}
	for i := range slots {
		r.free = append(r.free, i)
	}
	return r
}

func eventfd(t testing.TB) *os.File {
	t.Helper()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "eventfd")
	t.Cleanup(func() { file.Close() })
	return file
}

// send sends a vhost-user message, with a descriptor if file is not nil.
func (g *driver) send(r request, flags uint32, payload []byte, file *os.File) error {
	return sendMessage(g.socket, &message{request: r, flags: flagVersion | flags, payload: payload, file: file})
}

func sendMessage(socket *net.UnixConn, m *message) error {
	var rights []byte
	if m.file != nil {
		fd, err := dupFd(m.file)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		rights = unix.UnixRights(fd)
	}
	_, _, err := socket.WriteMsgUnix(appendMessage(nil, m), rights, nil)
	return err
}

// dupFd duplicates file's descriptor and leaves its mode alone, as Fd would not.
func dupFd(file *os.File) (int, error) {
	raw, err := file.SyscallConn()
	if err != nil {
		return 0, err
	}
	var fd int
	var dupErr error
	err = raw.Control(func(f uintptr) { fd, dupErr = unix.FcntlInt(f, unix.F_DUPFD_CLOEXEC, 0) })
	return fd, errors.Join(err, dupErr)
}

// ask sends a message and returns the payload of the reply.
func (g *driver) ask(r request, flags uint32, payload []byte, file *os.File) []byte {
	g.t.Helper()
	if err := g.send(r, flags, payload, file); err != nil {
		g.t.Fatalf("request %d: %v", r, err)
	}
	var head [messageHeaderSize]byte
	if _, err := io.ReadFull(g.socket, head[:]); err != nil {
		g.t.Fatalf("request %d: reading the reply: %v", r, err)
	}
	le := binary.LittleEndian
	if got := request(le.Uint32(head[0:])); got != r || le.Uint32(head[4:]) != flagVersion|flagReply {
		g.t.Fatalf("request %d was answered by %d with flags %#x", r, got, le.Uint32(head[4:]))
	}
	reply := make([]byte, le.Uint32(head[8:]))
	if _, err := io.ReadFull(g.socket, reply); err != nil {
		g.t.Fatal(err)
	}
	return reply
}

func (g *driver) tell(r request, payload []byte, file *os.File) {
	g.t.Helper()
	if err := g.send(r, 0, payload, file); err != nil {
		g.t.Fatalf("request %d: %v", r, err)
	}
}

func u64(v uint64) []byte { return binary.LittleEndian.AppendUint64(nil, v) }

// realize does what QEMU does when it creates the device.
func (g *driver) realize() {
	g.t.Helper()
	for r, want := range map[request]uint64{
		reqGetFeatures: features, reqGetProtocolFeatures: protocolFeatures, reqGetQueueNum: queueNum, reqGetMaxMemSlots: maxRegions,
	} {
		if got := binary.LittleEndian.Uint64(g.ask(r, 0, nil, nil)); got != want {
			g.t.Fatalf("request %d: got %#x, want %#x", r, got, want)
		}
	}
	g.tell(reqSetProtocolFeatures, u64(protocolFeatures), nil)
	g.tell(reqSetOwner, nil, nil)
	config := g.ask(reqGetConfig, 0, configPayload{data: make([]byte, 8)}.encode(), nil)
	if got := binary.LittleEndian.Uint64(config[configHeaderSize:]); got != guestCID {
		g.t.Fatalf("the guest's CID is %d, want %d", got, guestCID)
	}
}

// start does what QEMU does when the guest's driver is ready, from position 0.
func (g *driver) start() {
	g.t.Helper()
	g.tell(reqSetFeatures, u64(g.features&^featureProtocolFeatures), nil)
	for _, r := range g.regions() {
		g.ask(reqAddMemReg, flagNeedReply, r.encode(), g.memory)
	}
	g.startRings()
	g.postAll()
}

func (g *driver) regions() []regionPayload {
	return []regionPayload{
		{guest: ringGuest, size: 2 * ringBytes, user: ringUser},
		{guest: bufferGuest, size: bufferBytes, user: bufferUser, offset: 2 * ringBytes},
	}
}

func (g *driver) startRings() {
	g.t.Helper()
	for i, r := range []*driverRing{&g.rx, &g.tx} {
		index := uint32(i)
		user := uint64(ringUser + i*ringBytes)
		g.tell(reqSetVringNum, vringState{index, ringSize}.encode(), nil)
		g.tell(reqSetVringBase, vringState{index, r.base}.encode(), nil)
		g.tell(reqSetVringAddr, vringAddr{index: index, desc: user, avail: user + 4<<10, used: user + 8<<10}.encode(), nil)
		g.tell(reqSetVringCall, u64(uint64(i)), r.call)
		g.tell(reqSetVringErr, u64(uint64(i)|noDescriptor), nil)
		g.tell(reqSetVringKick, u64(uint64(i)), r.kick)
	}
	for i := range queueNum {
		g.ask(reqSetVringEnable, flagNeedReply, vringState{uint32(i), 1}.encode(), nil)
	}
}

// stop does what QEMU does when the driver is reset or the guest is paused.
func (g *driver) stop() {
	g.t.Helper()
	for i := range queueNum {
		g.tell(reqSetVringEnable, vringState{uint32(i), 0}.encode(), nil)
	}
	for i, r := range []*driverRing{&g.rx, &g.tx} {
		reply, err := decodeVringState(g.ask(reqGetVringBase, 0, vringState{index: uint32(i)}.encode(), nil))
		if err != nil {
			g.t.Fatal(err)
		}
		r.base = reply.value
	}
}

// resume goes on after stop where the device left off. The receive buffers that
// were posted stay posted.
func (g *driver) resume() {
	g.t.Helper()
	g.startRings()
}

// guestAddress is the guest-physical address of b, a slot's buffer.
func (g *driver) guestAddress(b []byte) uint64 {
	return bufferGuest + uint64(cap(g.data)-cap(b)) - 2*ringBytes
}

// put fills descriptor i.
func (r *driverRing) put(i int, d descriptor) {
	b := r.desc[i*16:]
	le := binary.LittleEndian
	le.PutUint64(b, d.addr)
	le.PutUint32(b[8:], d.size)
	le.PutUint16(b[12:], d.flags)
	le.PutUint16(b[14:], d.next)
}

// offer makes the chain at head available and kicks the device if it asks for it.
func (r *driverRing) offer(head int) {
	binary.LittleEndian.PutUint16(r.avail[4+2*int(r.availIdx%ringSize):], uint16(head))
	r.availIdx++
	atomic.StoreUint32(word(r.avail, 0), uint32(r.availIdx)<<16)
	event := uint16(atomic.LoadUint32(word(r.used, 4+8*ringSize)))
	wanted := r.availIdx-event-1 < 1
	if r.plain {
		wanted = atomic.LoadUint32(word(r.used, 0))&usedNoNotify == 0
	}
	if wanted {
		r.ring()
	}
}

// ring kicks the device.
func (r *driverRing) ring() {
	one := [8]byte{1}
	if _, err := r.kick.Write(one[:]); err != nil && !errors.Is(err, os.ErrClosed) {
		panic(err)
	}
}

// take returns the next chain that the device has used.
func (r *driverRing) take() (head int, n uint32, ok bool) {
	if uint16(atomic.LoadUint32(word(r.used, 0))>>16) == r.usedIdx {
		return 0, 0, false
	}
	b := r.used[4+8*int(r.usedIdx%ringSize):]
	r.usedIdx++
	return int(binary.LittleEndian.Uint32(b)), binary.LittleEndian.Uint32(b[4:]), true
}

// await waits until the device has used a chain; false when call is closed.
func (r *driverRing) await() bool {
	var count [8]byte
	for {
		binary.LittleEndian.PutUint16(r.avail[4+2*ringSize:], r.usedIdx)
		fence()
		if uint16(atomic.LoadUint32(word(r.used, 0))>>16) != r.usedIdx {
			return true
		}
		if _, err := r.call.Read(count[:]); err != nil {
			return false
		}
	}
}

// postAll gives the device all receive buffers.
func (g *driver) postAll() {
	for len(g.rx.free) > 0 {
		g.post(g.rx.free[0], rxPayload)
		g.rx.free = g.rx.free[1:]
	}
}

// post gives the device one receive buffer with room for n bytes of data.
func (g *driver) post(slot int, n uint32) {
	at := g.guestAddress(g.rx.slot(slot))
	g.rx.put(2*slot, descriptor{addr: at, size: headerSize, flags: descriptorWrite | descriptorNext, next: uint16(2*slot + 1)})
	g.rx.put(2*slot+1, descriptor{addr: at + headerSize, size: n, flags: descriptorWrite})
	g.rx.offer(2 * slot)
}

// transmit sends a packet. It waits while all slots are under way, and returns
// false when the driver is closed.
func (g *driver) transmit(h header, payload []byte) bool {
	g.sending.Lock()
	defer g.sending.Unlock()
	for {
		head, _, ok := g.tx.take()
		if ok {
			g.tx.free = append(g.tx.free, head/2)
			continue
		}
		if len(g.tx.free) > 0 {
			break
		}
		if !g.tx.await() {
			return false
		}
	}
	slot := g.tx.free[0]
	g.tx.free = g.tx.free[1:]
	b := g.tx.slot(slot)
	h.encode((*[headerSize]byte)(b))
	n := copy(b[headerSize:], payload)
	at := g.guestAddress(b)
	table, entry := &g.tx, 2*slot
	if g.indirect {
		table, entry = &driverRing{desc: b[tableOffset:]}, 0
		g.tx.put(2*slot, descriptor{addr: at + tableOffset, size: 2 * descriptorSize, flags: descriptorTable})
	}
	first := descriptor{addr: at, size: headerSize}
	if n > 0 {
		first.flags, first.next = descriptorNext, uint16(entry+1)
		table.put(entry+1, descriptor{addr: at + headerSize, size: uint32(n)})
	}
	table.put(entry, first)
	g.tx.offer(2 * slot)
	return true
}

// receive waits for the next packet from the device and posts its buffer anew;
// false when the driver is closed. It is called by one goroutine. The payload is
// valid until its next call.
func (g *driver) receive() (header, []byte, bool) {
	for {
		head, n, ok := g.rx.take()
		if !ok {
			if !g.rx.await() {
				return header{}, nil, false
			}
			continue
		}
		slot := head / 2
		b := g.rx.slot(slot)
		h := decodeHeader((*[headerSize]byte)(b))
		if uint32(headerSize)+h.length != n {
			g.t.Errorf("the device used %d bytes for %d of data", n, h.length)
			return header{}, nil, false
		}
		payload := append(g.scratch[:0], b[headerSize:n]...)
		g.scratch = payload
		g.post(slot, rxPayload)
		return h, payload, true
	}
}

// close ends everything that waits for the device.
func (g *driver) close() {
	g.rx.call.Close()
	g.tx.call.Close()
}
