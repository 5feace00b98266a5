package vhostvsock

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/capsem/capsem/internal/vm"
)

// Bounds on what a guest can make the device keep. Each is tested.
const (
	// MaxGuestConns is how many connections that the guest opened may exist at
	// a time, also among those that are closed here and not yet confirmed by the
	// guest. More are refused with a reset.
	MaxGuestConns = 1024
	// MaxHostConns is the same for connections that Dial opened.
	MaxHostConns = 1024
	// BufferSize is how many bytes a connection receives before its reader takes
	// them; it is what the guest is told as its credit.
	BufferSize = 256 << 10
	// maxRefusals is how many resets wait at most for a guest that does not take
	// them. More are dropped, which is logged; a working guest takes them at once.
	maxRefusals = 4096
)

// Device is one guest's socket device. Its methods may be called from any
// goroutine.
type Device struct {
	cid    uint32
	log    *slog.Logger
	socket *net.UnixConn
	done   chan struct{} // closed when nothing is left running

	lingerTime time.Duration // defaultLinger but in tests

	watchers sync.WaitGroup // one for each queue that was started

	mu       sync.Mutex
	stopped  bool
	err      error // why it stopped, nil if it was asked to or QEMU hung up
	version1 bool  // VIRTIO_F_VERSION_1 was negotiated
	memory   memory
	queues   [queueNum]virtqueue

	listeners  map[uint32]*Listener
	conns      map[connKey]*Conn
	guestConns int // of conns, those that the guest opened
	nextPort   uint32
	out        outbox
	dropped    drops
}

// connKey names a connection; both CIDs are always the same.
type connKey struct {
	guestPort, hostPort uint32
}

// Serve runs the device for the guest with the given CID on socket, our end of
// the connection that QEMU uses as its vhost-user chardev. It owns socket from
// now on. The caller must call Close.
func Serve(socket *net.UnixConn, cid uint32, log *slog.Logger) *Device {
	d := &Device{
		cid:       cid,
		log:       log,
		socket:    socket,
		done:      make(chan struct{}),
		listeners: make(map[uint32]*Listener),
		conns:     make(map[connKey]*Conn),
		nextPort:  firstEphemeral,

		lingerTime: defaultLinger,
	}
	d.queues[toGuest].direction = deviceWrites
	d.queues[fromGuest].direction = deviceReads
	go func() {
		defer close(d.done)
		d.stop(d.serve())
		d.watchers.Wait()
	}()
	return d
}

// Done is closed when the device has stopped and nothing of it is left running:
// after Close, after QEMU has hung up, or after a violation.
func (d *Device) Done() <-chan struct{} { return d.done }

// Err says which rule was violated, after Done; nil if none was.
func (d *Device) Err() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.err
}

// Close stops the device: connections and listeners fail with vm.ErrStopped,
// though what was received can still be read. It returns when nothing is left
// running, with what Err says, and is idempotent.
func (d *Device) Close() error {
	d.stop(nil)
	<-d.done
	return d.Err()
}

func (d *Device) stop(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stopLocked(err)
}

// stopLocked stops everything. The first reason is the one that is kept.
func (d *Device) stopLocked(err error) {
	if d.stopped {
		return
	}
	d.stopped, d.err = true, err
	for _, l := range d.listeners {
		l.closeLocked(vm.ErrStopped)
	}
	for _, c := range d.conns {
		c.finish(vm.ErrStopped)
	}
	errs := []error{d.socket.Close()} // ends serve
	for i := range d.queues {
		errs = append(errs, d.stopQueue(&d.queues[i]), d.queues[i].closeCall())
	}
	errs = append(errs, d.memory.clear())
	if err := errors.Join(errs...); err != nil {
		d.log.Warn("releasing a socket device", "error", err)
	}
	d.dropped.report(d.log)
}

// forget resets every connection that the guest took part in: its driver has
// just started on fresh rings and knows none of them.
func (d *Device) forget() {
	for _, c := range d.conns {
		if c.state != stateConnecting || c.announced {
			c.finish(errReset)
		}
	}
	d.out.refusals = nil
}

// Addr is one end of a connection.
type Addr struct {
	CID, Port uint32
}

// Network is "vsock".
func (a Addr) Network() string { return "vsock" }

func (a Addr) String() string { return fmt.Sprintf("vsock(%d):%d", a.CID, a.Port) }

// drops counts what was dropped without an answer, and logs the first of each.
type drops struct {
	foreign  uint64 // packets from a CID that is not the guest's
	refusals uint64 // resets that found maxRefusals waiting
}

func (c *drops) foreignPacket(log *slog.Logger, h *header) {
	if c.foreign++; c.foreign == 1 {
		log.Warn("the guest sends packets in another's name; they are dropped", "src_cid", h.srcCID)
	}
}

func (c *drops) refusal(log *slog.Logger) {
	if c.refusals++; c.refusals == 1 {
		log.Warn("the guest does not take its refusals; more are dropped", "waiting", maxRefusals)
	}
}

func (c *drops) report(log *slog.Logger) {
	if c.foreign+c.refusals > 0 {
		log.Warn("a socket device dropped packets", "foreign", c.foreign, "refusals", c.refusals)
	}
}
