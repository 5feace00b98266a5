package vhostvsock

import (
	"errors"
	"fmt"
	"math"
	"os"

	"golang.org/x/sys/unix"
)

// maxRegions is how many pieces of guest memory are mapped at most. It is what
// GET_MAX_MEM_SLOTS answers.
const maxRegions = 32

// region is one piece of guest memory. It has two addresses: descriptors name
// guest-physical ones, and vhost-user names the rings by the addresses that they
// have in QEMU.
type region struct {
	guest, user uint64
	data        []byte
}

// memory is the guest memory that is mapped into this process. Slices that it
// hands out are valid until the region that they lie in is removed: callers hold
// Device.mu while they use them.
type memory struct {
	regions []region
}

// add maps the piece of file that r describes. The file stays the caller's.
//
// A file that can shrink is refused: its owner could truncate it under our feet,
// and the next access would kill the process with SIGBUS. QEMU seals its memfd.
func (m *memory) add(r regionPayload, file *os.File) error {
	if len(m.regions) == maxRegions {
		return fmt.Errorf("adding a memory region: there are %d already", maxRegions)
	}
	if err := checkRegion(r, file); err != nil {
		return fmt.Errorf("adding memory region %#x+%#x: %w", r.guest, r.size, err)
	}
	data, err := unix.Mmap(int(file.Fd()), int64(r.offset), int(r.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mapping memory region %#x+%#x: %w", r.guest, r.size, err)
	}
	m.regions = append(m.regions, region{guest: r.guest, user: r.user, data: data})
	return nil
}

// checkRegion says why r must not be mapped from file, or nil.
func checkRegion(r regionPayload, file *os.File) error {
	page := uint64(os.Getpagesize())
	switch {
	case r.size == 0 || r.size%page != 0 || r.offset%page != 0:
		return fmt.Errorf("size %#x and offset %#x are not whole pages", r.size, r.offset)
	case r.size > math.MaxInt64 || r.offset > math.MaxInt64-r.size:
		return errors.New("it ends beyond the largest file")
	case r.guest > math.MaxUint64-r.size || r.user > math.MaxUint64-r.size:
		return errors.New("it wraps around the address space")
	}
	seals, err := unix.FcntlInt(file.Fd(), unix.F_GET_SEALS, 0)
	if err != nil {
		return fmt.Errorf("reading the seals of its file: %w", err)
	}
	if seals&unix.F_SEAL_SHRINK == 0 {
		return errors.New("its file is not sealed against shrinking")
	}
	info, err := file.Stat()
	if err != nil {
		return fmt.Errorf("sizing its file: %w", err)
	}
	if uint64(info.Size()) < r.offset+r.size {
		return fmt.Errorf("its file has only %#x bytes", info.Size())
	}
	return nil
}

// remove unmaps the region that r describes.
func (m *memory) remove(r regionPayload) error {
	for i, have := range m.regions {
		if have.guest != r.guest || have.user != r.user || uint64(len(have.data)) != r.size {
			continue
		}
		m.regions = append(m.regions[:i], m.regions[i+1:]...)
		if err := unix.Munmap(have.data); err != nil {
			return fmt.Errorf("unmapping memory region %#x+%#x: %w", r.guest, r.size, err)
		}
		return nil
	}
	return fmt.Errorf("removing memory region %#x+%#x: there is none", r.guest, r.size)
}

// clear unmaps everything.
func (m *memory) clear() error {
	var errs []error
	for _, r := range m.regions {
		if err := unix.Munmap(r.data); err != nil {
			errs = append(errs, fmt.Errorf("unmapping memory region %#x: %w", r.guest, err))
		}
	}
	m.regions = nil
	return errors.Join(errs...)
}

// appendGuest appends the n bytes at guest-physical address addr to dst: one
// slice, or several where the bytes run from one region into the next.
func (m *memory) appendGuest(dst [][]byte, addr uint64, n uint32) ([][]byte, error) {
	for left := uint64(n); left > 0; {
		piece := m.guestFrom(addr, left)
		if piece == nil {
			return dst, fmt.Errorf("guest address %#x+%d is outside of the guest's memory", addr, left)
		}
		dst = append(dst, piece)
		addr += uint64(len(piece)) // cannot wrap: no region ends beyond 2⁶⁴-1
		left -= uint64(len(piece))
	}
	return dst, nil
}

// guestFrom returns the bytes from addr on, at most limit of them and at least
// one, that lie in one region; nil if there are none.
func (m *memory) guestFrom(addr, limit uint64) []byte {
	for _, r := range m.regions {
		if addr < r.guest || addr-r.guest >= uint64(len(r.data)) {
			continue
		}
		at := addr - r.guest
		n := min(limit, uint64(len(r.data))-at)
		return r.data[at : at+n : at+n]
	}
	return nil
}

// userSlice returns the n bytes at QEMU's address addr, which must lie in one
// region; nil if they do not.
func (m *memory) userSlice(addr, n uint64) []byte {
	for _, r := range m.regions {
		if addr < r.user || addr-r.user > uint64(len(r.data)) {
			continue
		}
		at := addr - r.user
		if n > uint64(len(r.data))-at {
			continue
		}
		return r.data[at : at+n : at+n]
	}
	return nil
}
