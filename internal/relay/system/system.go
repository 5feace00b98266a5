//go:build linux

// Package system makes a guest's operating system what the host says it is: its
// name, its clock, its files, its randomness.
//
// It writes to the real /etc and /run and sets the real clock: only the agent of
// a real guest may have one.
package system

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/guestproto"
)

// Folder is where the agent leaves what other programs of the guest need to
// know.
const Folder = "/run/capsem"

// maxDrift is how far the clock may be off before it is stepped. A time that came
// over a busy emulator is late by tens of milliseconds.
const maxDrift = 500 * time.Millisecond

// Known is what the agent tells other programs of the guest about their host. It
// is in Folder/boot.json.
type Known struct {
	// More says that the host takes MCP messages in several frames.
	More  bool   `json:"more"`
	Epoch uint64 `json:"epoch"`
}

// System is the guest's operating system.
type System struct {
	// Root is put before every path, "" in a guest.
	Root string
	// Power takes the request for power-off (pid1.PowerFD).
	Power *os.File
}

// Apply implements relay.System. It does all that it can and returns every
// error.
func (s *System) Apply(b *guestproto.Boot) error {
	var errs []error
	if b.TimeNS > 0 {
		errs = append(errs, setClock(time.Unix(0, b.TimeNS)))
	}
	if b.Hostname != "" {
		errs = append(errs, setHostname(b.Hostname), s.write("/etc/hostname", 0o644, []byte(b.Hostname+"\n")))
	}
	if b.MachineID != "" {
		errs = append(errs, s.write("/etc/machine-id", 0o444, []byte(b.MachineID+"\n")))
	}
	if len(b.Entropy) > 0 {
		errs = append(errs, addEntropy(b.Entropy))
	}
	if len(b.CA) > 0 {
		errs = append(errs, s.write(Folder+"/ca.pem", 0o644, b.CA))
	}
	for _, f := range b.Files {
		errs = append(errs, s.write(f.Path, f.Mode, f.Data))
	}
	known, err := json.Marshal(Known{More: b.More, Epoch: b.Epoch})
	errs = append(errs, err, s.write(Folder+"/boot.json", 0o644, known))
	return errors.Join(errs...)
}

// ReadKnown reads what the agent has left, the zero Known where there is nothing
// yet.
func ReadKnown() (Known, error) {
	var k Known
	b, err := os.ReadFile(Folder + "/boot.json")
	if errors.Is(err, fs.ErrNotExist) {
		return k, nil
	}
	if err != nil {
		return k, fmt.Errorf("reading what the agent knows: %w", err)
	}
	if err := json.Unmarshal(b, &k); err != nil {
		return Known{}, fmt.Errorf("reading what the agent knows: %w", err)
	}
	return k, nil
}

// write replaces a file.
func (s *System) write(path string, mode uint32, data []byte) error {
	if !filepath.IsAbs(path) || strings.ContainsRune(path, 0) {
		return fmt.Errorf("writing a file: %q is not an absolute path", path)
	}
	if mode == 0 {
		mode = 0o644
	}
	path = s.Root + path
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("writing a file: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".capsem-*")
	if err != nil {
		return fmt.Errorf("writing a file: %w", err)
	}
	_, err = f.Write(data)
	err = errors.Join(err, unix.Fchmod(int(f.Fd()), mode&0o7777), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("writing %s: %w", path, err), os.Remove(f.Name()))
	}
	return nil
}

// SyncClock implements relay.System.
func (s *System) SyncClock(now time.Time) error {
	if time.Until(now).Abs() <= maxDrift {
		return nil
	}
	return setClock(now)
}

// PowerOff implements relay.System: it asks the first process.
func (s *System) PowerOff(grace time.Duration) error {
	if _, err := fmt.Fprintf(s.Power, "%d\n", grace.Milliseconds()); err != nil {
		return fmt.Errorf("asking the first process for power-off: %w", err)
	}
	return nil
}

func setClock(t time.Time) error {
	ts := unix.NsecToTimespec(t.UnixNano())
	if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
		return fmt.Errorf("setting the clock: %w", err)
	}
	return nil
}

func setHostname(name string) error {
	if err := unix.Sethostname([]byte(name)); err != nil {
		return fmt.Errorf("setting the hostname: %w", err)
	}
	return nil
}

// addEntropy mixes bytes into the kernel's random pool, counts them as random
// and makes the generator use them at once (random(4)).
func addEntropy(b []byte) error {
	f, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("opening the random pool: %w", err)
	}
	// struct rand_pool_info of linux/random.h: bits, bytes, then the bytes.
	info := binary.NativeEndian.AppendUint32(nil, uint32(8*len(b)))
	info = binary.NativeEndian.AppendUint32(info, uint32(len(b)))
	info = append(info, b...)
	err = ioctlBytes(f, unix.RNDADDENTROPY, info)
	if err == nil {
		err = ioctlBytes(f, unix.RNDRESEEDCRNG, []byte{0})
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("adding to the random pool: %w", err)
	}
	return nil
}
