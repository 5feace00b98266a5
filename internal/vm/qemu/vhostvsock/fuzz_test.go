package vhostvsock

import (
	"bytes"
	"encoding/binary"
	"io"
	"log/slog"
	"testing"
	"unsafe"

	"github.com/capsem/capsem/internal/vm"
)

func FuzzHeaderRoundTrip(f *testing.F) {
	h := header{srcCID: guestCID, dstCID: vm.HostCID, srcPort: 1, dstPort: 2, length: 3, typ: typeStream, op: opData, flags: 4, bufAlloc: 5, fwdCnt: 6}
	var b [headerSize]byte
	h.encode(&b)
	f.Add(b[:])
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) != headerSize {
			return
		}
		h := decodeHeader((*[headerSize]byte)(in))
		var out [headerSize]byte
		h.encode(&out)
		if !bytes.Equal(in, out[:]) {
			t.Errorf("decoded %x, encoded %x", in, out)
		}
	})
}

// FuzzMessageRoundTrip decodes a message and its payload as each kind that there
// is; what decodes must encode to the same bytes.
func FuzzMessageRoundTrip(f *testing.F) {
	for _, payload := range [][]byte{
		u64(5), vringState{1, 2}.encode(), vringAddr{index: 1, desc: 2, used: 3, avail: 4}.encode(),
		regionPayload{guest: 1, size: 2, user: 3, offset: 4}.encode(), configPayload{offset: 1, data: []byte("12345678")}.encode(),
	} {
		f.Add(appendMessage(nil, &message{request: reqAddMemReg, flags: flagVersion | flagNeedReply, payload: payload}))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) < messageHeaderSize {
			return
		}
		m, size, err := decodeMessageHeader((*[messageHeaderSize]byte)(in))
		if err != nil || len(in) != messageHeaderSize+size {
			return
		}
		m.payload = in[messageHeaderSize:]
		if out := appendMessage(nil, &m); !bytes.Equal(in, out) {
			t.Fatalf("decoded %x, encoded %x", in, out)
		}
		same := func(kind string, out []byte, err error) {
			if err == nil && !bytes.Equal(m.payload, out) {
				t.Errorf("%s: decoded %x, encoded %x", kind, m.payload, out)
			}
		}
		n, err := decodeUint64(m.payload)
		same("number", u64(n), err)
		s, err := decodeVringState(m.payload)
		same("state", s.encode(), err)
		a, err := decodeVringAddr(m.payload)
		same("address", a.encode(), err)
		r, err := decodeRegion(m.payload)
		same("region", r.encode(), err)
		c, err := decodeConfig(m.payload)
		same("config", c.encode(), err)
	})
}

// FuzzSession plays bytes to a device as QEMU. The device must answer or stop,
// and stop when the bytes end.
func FuzzSession(f *testing.F) {
	var good []byte
	for _, m := range []message{
		{request: reqGetFeatures},
		{request: reqSetFeatures, payload: u64(features)},
		{request: reqGetQueueNum},
		{request: reqSetVringNum, payload: vringState{0, 128}.encode()},
		{request: reqSetVringAddr, payload: vringAddr{}.encode()},
		{request: reqSetVringCall, payload: u64(noDescriptor)},
		{request: reqSetVringEnable, payload: vringState{1, 1}.encode()},
		{request: reqGetConfig, payload: configPayload{data: make([]byte, 8)}.encode()},
		{request: reqGetVringBase, payload: vringState{1, 1}.encode()},
	} {
		m.flags = flagVersion
		good = appendMessage(good, &m)
	}
	f.Add(good)
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > 4096 {
			return
		}
		d, socket := startDevice(t)
		go func() {
			// An error means that the device has stopped, which is its right.
			_, _ = socket.Write(in)
			_ = socket.CloseWrite()
		}()
		_, _ = io.Copy(io.Discard, socket) // ends when the device hangs up
		<-d.Done()
	})
}

// FuzzVirtqueue walks rings that are made of the input. The walk must end, and
// what it finds must lie in the guest's memory.
func FuzzVirtqueue(f *testing.F) {
	const size, pages = 8, 2
	ring := make([]byte, 1024)
	r := driverRing{desc: ring, avail: ring[128:], used: ring[256:]}
	r.put(0, descriptor{addr: 512, size: 44, flags: descriptorNext, next: 1})
	r.put(1, descriptor{addr: 600, size: 16, flags: descriptorTable})
	binary.LittleEndian.PutUint32(r.avail, 3<<16)
	f.Add(ring, false)
	f.Add(ring, true)
	f.Fuzz(func(t *testing.T, in []byte, write bool) {
		words := make([]uint64, pages*4096/8) // aligned, as a mapping is
		data := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), pages*4096)
		copy(data, in)
		m := &memory{regions: []region{{data: data[:4096]}, {guest: 4096, user: 1 << 40, data: data[4096:]}}}
		q := &virtqueue{direction: direction(write), size: size, started: true, enabled: true, indirect: true, eventIdx: true}
		q.address = ringAddress{desc: 0, avail: 128, used: 256}
		if err := q.resolve(m); err != nil || !q.running() {
			t.Fatalf("resolving: %v", err)
		}
		q.begin()
		for range size + 1 {
			c, ok, err := q.next(m)
			if err != nil || !ok {
				return
			}
			total := uint64(0)
			for _, s := range c.segments {
				total += uint64(len(s))
				if !within(data, s) {
					t.Fatalf("a segment of %d bytes is outside of the memory", len(s))
				}
			}
			if total != c.size || len(c.segments) > 2*(size+maxQueueSize) {
				t.Fatalf("%d segments have %d bytes, and say %d", len(c.segments), total, c.size)
			}
			q.push(c.head, 0)
			q.wantsInterrupt()
			q.listen()
		}
	})
}

func within(outer, inner []byte) bool {
	o, i := uintptr(unsafe.Pointer(unsafe.SliceData(outer))), uintptr(unsafe.Pointer(unsafe.SliceData(inner)))
	return len(inner) > 0 && i >= o && i+uintptr(len(inner)) <= o+uintptr(len(outer))
}

// FuzzPackets feeds a device packets of a guest that says anything, and checks
// that what it keeps stays within its bounds and is consistent.
func FuzzPackets(f *testing.F) {
	seed := func(ops ...opcode) []byte {
		var b []byte
		for _, op := range ops {
			h := fromGuestPort(5, op)
			h.length = 3
			var head [headerSize]byte
			h.encode(&head)
			b = append(b, head[:]...)
		}
		return b
	}
	f.Add(seed(opRequest, opData, opCreditRequest, opCreditUpdate, opShutdown, opReset))
	f.Add(seed(opRequest, opRequest, opData, 9))
	f.Fuzz(func(t *testing.T, in []byte) {
		d := &Device{
			cid: guestCID, log: slog.New(slog.DiscardHandler),
			listeners: make(map[uint32]*Listener), conns: make(map[connKey]*Conn), nextPort: firstEphemeral,
		}
		if _, err := d.Listen(1); err != nil {
			t.Fatal(err)
		}
		if _, err := d.call(5); err != nil {
			t.Fatal(err)
		}
		for len(in) >= headerSize {
			n := headerSize + int(in[24]) // as many bytes of data, or fewer than the packet says
			n = min(n, len(in))
			packet := append([]byte(nil), in[:n]...)
			in = in[n:]
			d.mu.Lock()
			err := d.receive(chain{segments: [][]byte{packet[:20], packet[20:]}, size: uint64(n)})
			checkBounds(t, d)
			if !d.out.empty() && n%2 == 0 {
				d.takePacket(64)
			}
			d.mu.Unlock()
			if err != nil {
				return
			}
		}
	})
}

// checkBounds checks what must always hold.
func checkBounds(t *testing.T, d *Device) {
	byGuest, notes, writers := 0, 0, 0
	for key, c := range d.conns {
		if c.key != key || c.state == stateGone || c.received.size > BufferSize {
			t.Fatalf("connection %+v is in state %d with %d bytes", key, c.state, c.received.size)
		}
		if c.byGuest {
			byGuest++
		}
		if c.noteElement != nil {
			notes++
		}
		if (c.noteElement != nil) != (c.notes != 0) {
			t.Fatalf("connection %+v has notes %b and element %v", key, c.notes, c.noteElement)
		}
		if c.writerElement != nil {
			writers++
		}
	}
	if byGuest != d.guestConns || byGuest > MaxGuestConns || notes != d.out.notes.Len() || writers != d.out.writers.Len() || len(d.out.refusals) > maxRefusals {
		t.Fatalf("%d of %d guest connections, %d of %d notes, %d of %d writers, %d refusals",
			byGuest, d.guestConns, notes, d.out.notes.Len(), writers, d.out.writers.Len(), len(d.out.refusals))
	}
}

func FuzzBuffer(f *testing.F) {
	f.Add([]byte{10, 200, 5, 100})
	f.Fuzz(func(t *testing.T, steps []byte) {
		var q buffer
		var want []byte
		next := byte(0)
		for i, n := range steps {
			if size := int(n) * 100; i%2 == 0 && len(want)+size <= BufferSize {
				b := make([]byte, size)
				for j := range b {
					b[j] = next
					next++
				}
				q.write(b)
				want = append(want, b...)
			} else {
				b := make([]byte, size)
				k := q.read(b)
				if k != min(size, len(want)) || !bytes.Equal(b[:k], want[:k]) {
					t.Fatalf("step %d: read %d bytes that differ", i, k)
				}
				want = want[k:]
			}
			if q.size != len(want) || len(q.ring) > BufferSize {
				t.Fatalf("step %d: %d bytes in %d, want %d", i, q.size, len(q.ring), len(want))
			}
		}
	})
}
