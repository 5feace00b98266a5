package qemu

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/vm"
	"github.com/capsem/capsem/internal/vm/qemu/vhostvsock"
)

// hangUpGrace is how long QEMU may go on after it has closed its socket device,
// as it does on its way out.
const hangUpGrace = time.Second

// Machine is a guest in a QEMU process of its own.
type Machine struct {
	config  Config
	spec    vm.Spec
	log     *slog.Logger
	device  *vhostvsock.Device
	monitor *monitor
	console net.Conn
	ended   chan struct{} // closed when nothing is left; err is set before

	mu       sync.Mutex
	theirs   ends // QEMU's ends, until it has them
	process  Process
	stopping bool   // Stop was called
	shutdown string // the reason in QEMU's SHUTDOWN event
	err      error
}

var (
	_ vm.Machine   = (*Machine)(nil)
	_ vm.Inspector = (*Machine)(nil)
)

// newMachine makes the connections, and serves the socket device on its one.
func newMachine(config Config, spec vm.Spec) (*Machine, error) {
	m := &Machine{config: config, spec: spec, log: config.Log.With("vm", spec.Name), ended: make(chan struct{})}
	vsock, err := m.connect(&m.theirs.vsock)
	if err != nil {
		return nil, err
	}
	m.device = vhostvsock.Serve(vsock, guestCID, m.log)
	qmp, err := m.connect(&m.theirs.monitor)
	if err == nil {
		m.monitor = newMonitor(qmp, m.onEvent)
		m.console, err = m.connect(&m.theirs.console)
	}
	if err != nil {
		return nil, errors.Join(err, m.release())
	}
	return m, nil
}

// connect makes a connection between this process and QEMU, and keeps QEMU's end
// in *theirs.
func (m *Machine) connect(theirs **os.File) (*net.UnixConn, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("making a socketpair: %w", err)
	}
	*theirs = os.NewFile(uintptr(fds[1]), "qemu's end")
	ours := os.NewFile(uintptr(fds[0]), "our end")
	conn, err := net.FileConn(ours)
	if err := errors.Join(err, ours.Close()); err != nil {
		return nil, fmt.Errorf("making a socketpair: %w", err)
	}
	return conn.(*net.UnixConn), nil
}

// release gives back everything that a machine holds which runs no QEMU.
func (m *Machine) release() error {
	errs := []error{m.device.Close(), m.closeTheirs()}
	if m.monitor != nil {
		errs = append(errs, m.monitor.conn.Close())
	}
	if m.console != nil {
		errs = append(errs, m.console.Close())
	}
	return errors.Join(errs...)
}

// closeTheirs closes QEMU's ends: only when QEMU alone has them does its end
// close the connections.
func (m *Machine) closeTheirs() error {
	var errs []error
	for _, f := range m.theirs.files() {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	m.theirs = ends{}
	return errors.Join(errs...)
}

// Listen accepts the guest's connections to port.
func (m *Machine) Listen(port uint32) (net.Listener, error) { return m.device.Listen(port) }

// Dial connects to a port of the guest.
func (m *Machine) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	return m.device.Dial(ctx, port)
}

// Accelerator is what the machine runs with: KVM or TCG.
func (m *Machine) Accelerator() string { return m.config.Accelerator }

// PID is QEMU's process id, 0 before Start.
func (m *Machine) PID() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.process == nil {
		return 0
	}
	return m.process.PID()
}

// Start runs QEMU and returns when its monitor answers.
func (m *Machine) Start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, m.spec.BootTimeout)
	defer cancel()
	output := new(tail)
	if err := m.launch(ctx, output); err != nil {
		return fmt.Errorf("starting machine %s: %w", m.spec.Name, err)
	}
	err := m.monitor.negotiate(ctx)
	if err == nil {
		return nil
	}
	if ctx.Err() == nil { // the monitor broke, as it does when QEMU ends: why is better to know
		select {
		case <-m.ended:
			err = cmp.Or(m.Wait(), err)
		case <-ctx.Done():
		}
	}
	return fmt.Errorf("starting machine %s: %w", m.spec.Name, errors.Join(err, m.Stop(context.WithoutCancel(ctx))))
}

// launch starts QEMU and what watches it.
func (m *Machine) launch(ctx context.Context, output *tail) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stopping {
		return vm.ErrStopped
	}
	if m.process != nil {
		return errors.New("it was started before")
	}
	outRead, outWrite, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("making a pipe for QEMU's output: %w", err)
	}
	cmdline := kernelCmdline(m.config.Accelerator, hostKHz(), m.spec.Cmdline)
	args, files := arguments(m.spec, m.config.Accelerator, cmdline, m.theirs)
	process, err := m.config.start(ctx, args, outWrite, files)
	closeErr := outWrite.Close()
	if err != nil {
		return errors.Join(err, closeErr, outRead.Close())
	}
	m.process = process
	if err := errors.Join(closeErr, m.closeTheirs()); err != nil {
		m.log.Warn("closing QEMU's descriptors", "error", err)
	}
	go m.watch(process, output, outRead)
	return nil
}

// watch lives as long as QEMU does, and then puts everything away.
func (m *Machine) watch(process Process, output *tail, outRead *os.File) {
	var readers sync.WaitGroup
	readers.Go(func() { m.drain("reading QEMU's output", output, outRead) })
	readers.Go(func() { m.drain("reading the console", m.spec.Console, m.console) })
	readers.Go(func() {
		if err := m.monitor.run(); err != nil && !errors.Is(err, unix.ECONNRESET) {
			m.log.Warn("QEMU's monitor broke", "error", err)
		}
	})
	gone := make(chan struct{})
	readers.Go(func() { m.killWhenUnplugged(process, gone) })

	exit := process.Wait()
	close(gone)
	readers.Wait() // QEMU held the other ends, so they have reached their ends
	violation := m.device.Err()
	if err := errors.Join(m.device.Close(), m.monitor.conn.Close(), m.console.Close(), outRead.Close()); err != nil && violation == nil {
		m.log.Warn("releasing a machine", "error", err)
	}
	m.mu.Lock()
	m.err = m.reason(exit, violation, output.String())
	m.mu.Unlock()
	close(m.ended)
}

// drain copies src to dst until it ends. A dst that fails is not written to any
// more, but src is still read: QEMU blocks on an output that nobody takes.
func (m *Machine) drain(what string, dst io.Writer, src io.Reader) {
	_, err := io.Copy(dst, src)
	if err == nil || errors.Is(err, unix.ECONNRESET) {
		return
	}
	m.log.Warn("output is lost from here on", "doing", what, "error", err)
	if _, err := io.Copy(io.Discard, src); err != nil && !errors.Is(err, unix.ECONNRESET) {
		m.log.Warn("output cannot be read", "doing", what, "error", err)
	}
}

// killWhenUnplugged kills a QEMU whose socket device has ended. It returns when
// gone is closed.
func (m *Machine) killWhenUnplugged(process Process, gone <-chan struct{}) {
	select {
	case <-gone:
		return
	case <-m.device.Done():
	}
	if m.device.Err() == nil { // QEMU hung up: most likely it is ending
		grace := time.NewTimer(hangUpGrace)
		defer grace.Stop()
		select {
		case <-gone:
			return
		case <-grace.C:
		}
	}
	if err := process.Kill(); err != nil {
		m.log.Warn("killing QEMU", "error", err)
	}
	<-gone
}

// onEvent notes why QEMU ends.
func (m *Machine) onEvent(e event) {
	if e.Name != "SHUTDOWN" {
		m.log.Debug("QEMU reports an event", "event", e.Name)
		return
	}
	var data struct {
		Reason string `json:"reason"`
	}
	if err := json.Unmarshal(e.Data, &data); err != nil {
		m.log.Warn("reading a SHUTDOWN event", "error", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.shutdown = data.Reason
}

// reason says why the machine ended: nil if the guest powered itself off.
func (m *Machine) reason(exit, violation error, output string) error {
	switch {
	case violation != nil:
		return fmt.Errorf("machine %s was killed: its guest or QEMU misused the socket device: %w", m.spec.Name, violation)
	case m.stopping:
		return fmt.Errorf("machine %s: %w", m.spec.Name, vm.ErrStopped)
	case m.shutdown == "guest-shutdown" && exit == nil:
		return nil
	case m.shutdown == "guest-reset" || m.shutdown == "guest-panic":
		return fmt.Errorf("machine %s: the guest reset itself, as it does when its kernel panics; the serial console says why", m.spec.Name)
	}
	if exit == nil {
		exit = errors.New("exit status 0")
	}
	if m.shutdown != "" {
		exit = fmt.Errorf("%s: %w", m.shutdown, exit)
	}
	if output == "" {
		output = "nothing"
	}
	return fmt.Errorf("machine %s: QEMU ended: %w; it printed: %s", m.spec.Name, exit, output)
}

// Wait blocks until QEMU is gone and says why.
func (m *Machine) Wait() error {
	<-m.ended
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

// Stop kills QEMU and returns when it and all that belongs to it are gone.
func (m *Machine) Stop(ctx context.Context) error {
	m.mu.Lock()
	first, process := !m.stopping, m.process
	m.stopping = true
	m.mu.Unlock()
	if process == nil {
		if !first {
			<-m.ended
			return nil
		}
		m.mu.Lock()
		m.err = fmt.Errorf("machine %s: %w", m.spec.Name, vm.ErrStopped)
		m.mu.Unlock()
		defer close(m.ended)
		return m.release()
	}
	if err := process.Kill(); err != nil {
		return fmt.Errorf("stopping machine %s: %w", m.spec.Name, err)
	}
	select {
	case <-m.ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stopping machine %s: waiting for QEMU to end: %w", m.spec.Name, ctx.Err())
	}
}
