package vhostvsock

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/vm"
)

// expectStop checks that the device stops by itself, says why, and leaves
// nothing to the connections that were open.
func expectStop(t *testing.T, d *Device, want string) {
	t.Helper()
	select {
	case <-d.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("the device did not stop")
	}
	if err := d.Err(); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %q in it", err, want)
	}
	if _, err := d.Listen(1); !errors.Is(err, vm.ErrStopped) {
		t.Errorf("Listen: got %v, want vm.ErrStopped", err)
	}
	if _, err := d.Dial(t.Context(), 1); !errors.Is(err, vm.ErrStopped) {
		t.Errorf("Dial: got %v, want vm.ErrStopped", err)
	}
	if n := len(d.memory.regions); n != 0 {
		t.Errorf("%d regions are still mapped", n)
	}
}

func TestMisuseOfVhostUserStopsTheDevice(t *testing.T) {
	raw := func(b ...byte) func(*testing.T, *driver) {
		return func(t *testing.T, g *driver) {
			if _, err := g.socket.Write(b); err != nil {
				t.Fatal(err)
			}
		}
	}
	say := func(r request, payload []byte) func(*testing.T, *driver) {
		return func(_ *testing.T, g *driver) { g.tell(r, payload, nil) }
	}
	for name, test := range map[string]struct {
		do   func(*testing.T, *driver)
		want string
	}{
		"an unknown request":         {say(99, nil), "not known"},
		"another version":            {raw(1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0), "flags 0x2"},
		"a reply to nothing":         {raw(1, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0), "reply"},
		"a message that is too long": {raw(1, 0, 0, 0, 1, 0, 0, 0, 1, 2, 0, 0), "513 bytes"},
		"a message that is cut": {func(t *testing.T, g *driver) {
			raw(2, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 1)(t, g)
			g.socket.Close()
		}, "EOF"},
		"features that were not offered":          {say(reqSetFeatures, u64(1)), "0x1 were not offered"},
		"protocol features that were not offered": {say(reqSetProtocolFeatures, u64(2)), "0x2 were not offered"},
		"a number of three bytes":                 {say(reqSetFeatures, []byte{1, 2, 3}), "3 bytes"},
		"a queue that is not there":               {say(reqSetVringNum, vringState{2, 128}.encode()), "no queue 2"},
		"a queue without entries":                 {say(reqSetVringNum, vringState{0, 0}.encode()), "power of two"},
		"a queue of an odd size":                  {say(reqSetVringNum, vringState{0, 127}.encode()), "power of two"},
		"a queue that is too large":               {say(reqSetVringNum, vringState{0, 2048}.encode()), "power of two"},
		"a position beyond 16 bits":               {say(reqSetVringBase, vringState{0, 1 << 16}.encode()), "16-bit"},
		"a ring with logging":                     {say(reqSetVringAddr, vringAddr{flags: 1}.encode()), "logging"},
		"an address that is cut":                  {say(reqSetVringAddr, make([]byte, 39)), "39 bytes"},
		"a queue to be polled":                    {say(reqSetVringKick, u64(noDescriptor)), "polled"},
		"a kick descriptor that is missing":       {say(reqSetVringKick, u64(0)), "does not agree"},
		"configuration that is not there":         {say(reqGetConfig, configPayload{offset: 1, data: make([]byte, 8)}.encode()), "no configuration"},
		"configuration of a wrong length":         {say(reqGetConfig, append(configPayload{data: make([]byte, 8)}.encode(), 0)), "for 8 bytes but has 9"},
		"a region without descriptor":             {say(reqAddMemReg, regionPayload{size: 4096}.encode()), "no descriptor"},
		"a region that is not there":              {say(reqRemMemReg, regionPayload{size: 4096}.encode()), "there is none"},
		"two descriptors at once": {func(t *testing.T, g *driver) {
			m := message{request: reqSetVringErr, flags: flagVersion, payload: u64(0)}
			fd := int(g.memory.Fd())
			if _, _, err := g.socket.WriteMsgUnix(appendMessage(nil, &m), unix.UnixRights(fd, fd), nil); err != nil {
				t.Fatal(err)
			}
		}, "descriptor"},
		"a file as kick descriptor": {func(t *testing.T, g *driver) {
			g.tell(reqSetFeatures, u64(featureVersion1), nil)
			g.tell(reqSetVringNum, vringState{0, 128}.encode(), nil)
			g.tell(reqSetVringKick, u64(0), g.memory)
		}, "polling"},
		"a ring that is not aligned": {func(t *testing.T, g *driver) {
			g.tell(reqSetFeatures, u64(featureVersion1), nil)
			g.tell(reqSetVringNum, vringState{0, 128}.encode(), nil)
			g.tell(reqSetVringAddr, vringAddr{desc: 8}.encode(), nil)
			g.tell(reqSetVringKick, u64(0), g.rx.kick)
		}, "not aligned"},
		"a ring outside of memory": {func(t *testing.T, g *driver) {
			g.tell(reqSetFeatures, u64(featureVersion1), nil)
			g.tell(reqSetVringNum, vringState{0, 128}.encode(), nil)
			g.tell(reqSetVringAddr, vringAddr{desc: 4096, avail: 8192, used: 12288}.encode(), nil)
			g.tell(reqSetVringKick, u64(0), g.rx.kick)
		}, "outside"},
		"a driver of before VIRTIO 1": {func(t *testing.T, g *driver) {
			g.tell(reqSetFeatures, u64(0), nil)
			g.tell(reqSetVringNum, vringState{0, 128}.encode(), nil)
			g.tell(reqSetVringKick, u64(0), g.rx.kick)
		}, "VIRTIO 1"},
	} {
		t.Run(name, func(t *testing.T) {
			d, socket := startDevice(t)
			g := newDriver(t, socket)
			test.do(t, g)
			expectStop(t, d, test.want)
		})
	}
}

func TestMemoryThatIsNotSafeToMapIsRefused(t *testing.T) {
	const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	for name, test := range map[string]struct {
		region regionPayload
		seals  int
		want   string
	}{
		"it can shrink":              {regionPayload{size: 4096}, unix.F_SEAL_GROW, "not sealed"},
		"it is empty":                {regionPayload{}, seals, "whole pages"},
		"it is part of a page":       {regionPayload{size: 4097}, seals, "whole pages"},
		"it begins within a page":    {regionPayload{size: 4096, offset: 1}, seals, "whole pages"},
		"it is longer than its file": {regionPayload{size: 3 * 4096}, seals, "0x2000 bytes"},
		"it begins behind its file":  {regionPayload{size: 4096, offset: 2 * 4096}, seals, "0x2000 bytes"},
		"its end wraps in the file":  {regionPayload{size: 1 << 62, offset: 1 << 63}, seals, "largest file"},
		"its guest address wraps":    {regionPayload{size: 4096, guest: ^uint64(0) - 4094}, seals, "wraps"},
		"its user address wraps":     {regionPayload{size: 4096, user: ^uint64(0) - 4094}, seals, "wraps"},
	} {
		t.Run(name, func(t *testing.T) {
			d, socket := startDevice(t)
			file := sealedMemory(t, 2*4096, test.seals)
			if err := sendMessage(socket, &message{request: reqAddMemReg, flags: flagVersion, payload: test.region.encode(), file: file}); err != nil {
				t.Fatal(err)
			}
			expectStop(t, d, test.want)
		})
	}
	t.Run("there are too many", func(t *testing.T) {
		d, socket := startDevice(t)
		file := sealedMemory(t, 4096, seals)
		for i := range uint64(maxRegions + 1) {
			r := regionPayload{size: 4096, guest: i << 20, user: i << 20}
			if err := sendMessage(socket, &message{request: reqAddMemReg, flags: flagVersion, payload: r.encode(), file: file}); err != nil {
				t.Fatal(err)
			}
		}
		expectStop(t, d, "32 already")
	})
}

func TestMisuseOfTheRingsStopsTheDevice(t *testing.T) {
	// Each fills descriptors of the from-guest ring; the chain at 0 is offered.
	packet := func(g *driver) uint64 {
		h := header{srcCID: guestCID, dstCID: vm.HostCID, typ: typeStream, op: opRequest}
		h.encode((*[headerSize]byte)(g.tx.slot(0)))
		return g.guestAddress(g.tx.slot(0))
	}
	for name, test := range map[string]struct {
		fill func(*driver)
		want string
	}{
		"a next index out of range": {func(g *driver) {
			g.tx.put(0, descriptor{addr: packet(g), size: 44, flags: descriptorNext, next: ringSize})
		}, "outside of a table"},
		"a chain that is a circle": {func(g *driver) {
			g.tx.put(0, descriptor{addr: packet(g), size: 44, flags: descriptorNext, next: 1})
			g.tx.put(1, descriptor{addr: packet(g), size: 44, flags: descriptorNext, next: 0})
		}, "longer than its table"},
		"a chain that is its own next": {func(g *driver) {
			g.tx.put(0, descriptor{addr: packet(g), size: 44, flags: descriptorNext, next: 0})
		}, "longer than its table"},
		"an empty buffer":        {func(g *driver) { g.tx.put(0, descriptor{addr: packet(g)}) }, "empty"},
		"a buffer to be written": {func(g *driver) { g.tx.put(0, descriptor{addr: packet(g), size: 44, flags: descriptorWrite}) }, "direction"},
		"an address that is not the guest's": {func(g *driver) {
			g.tx.put(0, descriptor{addr: 1 << 50, size: 44})
		}, "outside of the guest's memory"},
		"a buffer that ends outside": {func(g *driver) {
			g.tx.put(0, descriptor{addr: bufferGuest + bufferBytes - 43, size: 44})
		}, "outside of the guest's memory"},
		"an address that wraps": {func(g *driver) {
			g.tx.put(0, descriptor{addr: ^uint64(0) - 10, size: 44})
		}, "outside of the guest's memory"},
		"a buffer of 4 GiB": {func(g *driver) {
			g.tx.put(0, descriptor{addr: packet(g), size: ^uint32(0)})
		}, "outside of the guest's memory"},
		"a packet without a whole header": {func(g *driver) {
			g.tx.put(0, descriptor{addr: packet(g), size: 43})
		}, "only 43 bytes"},
		"a packet with less data than it says": {func(g *driver) {
			at := packet(g)
			binary.LittleEndian.PutUint32(g.tx.slot(0)[24:], 1)
			g.tx.put(0, descriptor{addr: at, size: 44})
		}, "says that it has 1"},
		"an indirect table of half an entry": {func(g *driver) {
			g.tx.put(0, descriptor{addr: packet(g), size: 24, flags: descriptorTable})
		}, "24 bytes"},
		"an indirect table without entries": {func(g *driver) {
			g.tx.put(0, descriptor{addr: packet(g), flags: descriptorTable})
		}, "0 bytes"},
		"an indirect table that is too long": {func(g *driver) {
			g.tx.put(0, descriptor{addr: packet(g), size: 16 * 1025, flags: descriptorTable})
		}, "16400 bytes"},
		"an indirect table outside": {func(g *driver) {
			g.tx.put(0, descriptor{addr: 1 << 50, size: 16, flags: descriptorTable})
		}, "outside of the guest's memory"},
		"an indirect table that goes on": {func(g *driver) {
			g.tx.put(0, descriptor{addr: packet(g), size: 16, flags: descriptorTable | descriptorNext})
		}, "not allowed"},
		"an indirect table in another": {func(g *driver) {
			table := driverRing{desc: g.tx.slot(1)}
			table.put(0, descriptor{addr: packet(g), size: 16, flags: descriptorTable})
			g.tx.put(0, descriptor{addr: g.guestAddress(g.tx.slot(1)), size: 16, flags: descriptorTable})
		}, "not allowed"},
		"an indirect table that is a circle": {func(g *driver) {
			table := driverRing{desc: g.tx.slot(1)}
			table.put(0, descriptor{addr: packet(g), size: 44, flags: descriptorNext})
			g.tx.put(0, descriptor{addr: g.guestAddress(g.tx.slot(1)), size: 16, flags: descriptorTable})
		}, "longer than its table"},
	} {
		t.Run(name, func(t *testing.T) {
			d, g := startDriver(t)
			test.fill(g)
			g.tx.offer(0)
			expectStop(t, d, test.want)
		})
	}
	t.Run("a head out of range", func(t *testing.T) {
		d, g := startDriver(t)
		g.tx.offer(ringSize)
		expectStop(t, d, "outside of a table")
	})
	t.Run("more buffers than the ring has", func(t *testing.T) {
		d, g := startDriver(t)
		atomic.StoreUint32(word(g.tx.avail, 0), (ringSize+1)<<16)
		g.tx.ring()
		expectStop(t, d, "129 buffers available")
	})
	t.Run("a receive buffer without room", func(t *testing.T) {
		d, g := startDriver(t)
		for i := range slots {
			g.rx.put(2*i, descriptor{addr: g.guestAddress(g.rx.slot(i)), size: headerSize, flags: descriptorWrite})
		}
		g.transmit(header{srcCID: guestCID, dstCID: vm.HostCID, typ: typeStream, op: opRequest}, nil)
		expectStop(t, d, "only 44 bytes")
	})
}

func TestADeviceThatStopsLeavesNothingBehind(t *testing.T) {
	count := func() (fds, maps int) {
		names, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile("/proc/self/maps")
		if err != nil {
			t.Fatal(err)
		}
		return len(names), strings.Count(string(b), "memfd:guest")
	}
	// Once first: the poller and others open descriptors that stay.
	for i := range 2 {
		fds, maps := count()
		t.Run("", func(t *testing.T) {
			d, g := startDriver(t)
			l, err := d.Listen(1)
			if err != nil {
				t.Fatal(err)
			}
			g.transmit(header{srcCID: guestCID, dstCID: vm.HostCID, srcPort: 9, dstPort: 1, typ: typeStream, op: opRequest, bufAlloc: 1000}, nil)
			c, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			blocked := make(chan error, 1)
			go func() {
				_, err := c.Read(make([]byte, 1))
				blocked <- err
			}()
			g.tx.offer(ringSize) // a violation
			expectStop(t, d, "outside")
			if err := <-blocked; !errors.Is(err, vm.ErrStopped) {
				t.Errorf("a blocked read: got %v, want vm.ErrStopped", err)
			}
			if _, err := l.Accept(); !errors.Is(err, vm.ErrStopped) {
				t.Errorf("Accept: got %v, want vm.ErrStopped", err)
			}
			if _, err := c.Write([]byte("x")); !errors.Is(err, vm.ErrStopped) {
				t.Errorf("Write: got %v, want vm.ErrStopped", err)
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
				t.Errorf("Read after Close: got %v, want net.ErrClosed", err)
			}
		})
		fdsAfter, mapsAfter := count()
		if i > 0 && (fdsAfter != fds || mapsAfter != maps) {
			t.Errorf("descriptors: %d before, %d after; mappings: %d before, %d after", fds, fdsAfter, maps, mapsAfter)
		}
	}
}
