package vhostvsock

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// request is what QEMU asks for (docs/interop/vhost-user.rst, "Front-end message
// types"). Those that are not here are refused.
type request uint32

const (
	reqGetFeatures         request = 1
	reqSetFeatures         request = 2
	reqSetOwner            request = 3
	reqSetVringNum         request = 8
	reqSetVringAddr        request = 9
	reqSetVringBase        request = 10
	reqGetVringBase        request = 11
	reqSetVringKick        request = 12
	reqSetVringCall        request = 13
	reqSetVringErr         request = 14
	reqGetProtocolFeatures request = 15
	reqSetProtocolFeatures request = 16
	reqGetQueueNum         request = 17
	reqSetVringEnable      request = 18
	reqGetConfig           request = 24
	reqGetMaxMemSlots      request = 36
	reqAddMemReg           request = 37
	reqRemMemReg           request = 38
)

// The header of a vhost-user message: request, flags, size of the payload.
const (
	messageHeaderSize = 12
	maxPayload        = 512 // GET_CONFIG with 256 bytes is the largest that we take

	flagVersion     = 1
	flagVersionMask = 3
	flagReply       = 4
	flagNeedReply   = 8
)

// noDescriptor says, in the payload of a vring descriptor message, that none
// came with it; the low byte is the queue.
const (
	noDescriptor   = 0x100
	queueIndexMask = 0xff
)

// message is one vhost-user message. A message that was received owns its file.
type message struct {
	request request
	flags   uint32
	payload []byte
	file    *os.File // what came with it, or nil
}

// needsReply reports whether QEMU waits for an answer to a message that has none
// of its own.
func (m *message) needsReply() bool {
	return m.flags&flagNeedReply != 0
}

// closeFile closes the file that nobody has taken.
func (m *message) closeFile() error {
	if m.file == nil {
		return nil
	}
	file := m.file
	m.file = nil
	return file.Close()
}

// decodeMessageHeader reads the 12 bytes before the payload.
func decodeMessageHeader(b *[messageHeaderSize]byte) (m message, size int, err error) {
	le := binary.LittleEndian
	m = message{request: request(le.Uint32(b[0:])), flags: le.Uint32(b[4:])}
	n := le.Uint32(b[8:])
	if m.flags&flagVersionMask != flagVersion || m.flags&^(flagVersionMask|flagReply|flagNeedReply) != 0 {
		return m, 0, fmt.Errorf("message %d has flags %#x", m.request, m.flags)
	}
	if m.flags&flagReply != 0 {
		return m, 0, fmt.Errorf("message %d is a reply to nothing", m.request)
	}
	if n > maxPayload {
		return m, 0, fmt.Errorf("message %d has %d bytes, the limit is %d", m.request, n, maxPayload)
	}
	return m, int(n), nil
}

// appendMessage appends m, without its file, as it goes over the socket.
func appendMessage(dst []byte, m *message) []byte {
	le := binary.LittleEndian
	dst = le.AppendUint32(dst, uint32(m.request))
	dst = le.AppendUint32(dst, m.flags)
	dst = le.AppendUint32(dst, uint32(len(m.payload)))
	return append(dst, m.payload...)
}

// readMessage reads the next message. io.EOF means that the other end is gone
// between two messages. The caller closes the message's file.
func readMessage(conn *net.UnixConn) (message, error) {
	var head [messageHeaderSize]byte
	file, err := readWithFile(conn, head[:])
	if err != nil {
		return message{}, err
	}
	m, size, err := decodeMessageHeader(&head)
	m.file = file
	if err != nil {
		return message{}, errors.Join(err, m.closeFile())
	}
	m.payload = make([]byte, size)
	if _, err := io.ReadFull(conn, m.payload); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF // it is the end, but not between messages
		}
		return message{}, errors.Join(fmt.Errorf("reading %d bytes of message %d: %w", size, m.request, err), m.closeFile())
	}
	return m, nil
}

// readWithFile fills b and returns the one descriptor that may come with it.
// Descriptors come with the first byte, so b is asked for exactly: the payload,
// and the descriptors of the next message, stay in the socket.
func readWithFile(conn *net.UnixConn, b []byte) (*os.File, error) {
	oob := make([]byte, unix.CmsgSpace(4))
	n, oobn, flags, _, err := conn.ReadMsgUnix(b, oob)
	if err != nil {
		return nil, fmt.Errorf("reading a message: %w", err)
	}
	if n == 0 {
		return nil, io.EOF
	}
	file, err := takeFile(oob[:oobn])
	if err == nil && flags&unix.MSG_CTRUNC != 0 {
		err = errors.New("a message has more than one descriptor")
	}
	if err == nil && n < len(b) {
		if _, err = io.ReadFull(conn, b[n:]); err != nil {
			err = fmt.Errorf("reading a message: %w", err)
		}
	}
	if err != nil && file != nil {
		err = errors.Join(err, file.Close())
		file = nil
	}
	return file, err
}

// takeFile returns the descriptor in a control message, nil if there is none. It
// was received with close-on-exec set.
func takeFile(oob []byte) (*os.File, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	controls, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("parsing a control message: %w", err)
	}
	var files []*os.File
	for _, control := range controls {
		fds, err := unix.ParseUnixRights(&control)
		if err != nil {
			continue // no descriptors in it, so none to lose
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "vhost-user"))
		}
	}
	if len(files) == 1 {
		return files[0], nil
	}
	errs := []error{fmt.Errorf("a message has %d descriptors", len(files))}
	for _, f := range files {
		errs = append(errs, f.Close())
	}
	return nil, errors.Join(errs...)
}

// decodeUint64 reads the payload of the messages that have just a number.
func decodeUint64(b []byte) (uint64, error) {
	if len(b) != 8 {
		return 0, fmt.Errorf("its payload has %d bytes, want 8", len(b))
	}
	return binary.LittleEndian.Uint64(b), nil
}

// vringState is a queue's index with a number: its size, its position, whether
// it is enabled.
type vringState struct {
	index, value uint32
}

func decodeVringState(b []byte) (vringState, error) {
	if len(b) != 8 {
		return vringState{}, fmt.Errorf("its payload has %d bytes, want 8", len(b))
	}
	return vringState{index: binary.LittleEndian.Uint32(b), value: binary.LittleEndian.Uint32(b[4:])}, nil
}

func (s vringState) encode() []byte {
	return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, s.index), s.value)
}

// vringAddr says where a queue's ring is, in QEMU's addresses. Logging, its last
// field, is a feature that is not offered.
type vringAddr struct {
	index, flags           uint32
	desc, used, avail, log uint64
}

const vringAddrSize = 40

func decodeVringAddr(b []byte) (vringAddr, error) {
	if len(b) != vringAddrSize {
		return vringAddr{}, fmt.Errorf("its payload has %d bytes, want %d", len(b), vringAddrSize)
	}
	le := binary.LittleEndian
	return vringAddr{
		index: le.Uint32(b[0:]), flags: le.Uint32(b[4:]),
		desc: le.Uint64(b[8:]), used: le.Uint64(b[16:]), avail: le.Uint64(b[24:]), log: le.Uint64(b[32:]),
	}, nil
}

func (a vringAddr) encode() []byte {
	le := binary.LittleEndian
	b := le.AppendUint32(le.AppendUint32(nil, a.index), a.flags)
	for _, v := range []uint64{a.desc, a.used, a.avail, a.log} {
		b = le.AppendUint64(b, v)
	}
	return b
}

// regionPayload describes one memory region. The padding in front is QEMU's; it
// is kept so that encoding gives back what was decoded.
type regionPayload struct {
	padding, guest, size, user, offset uint64
}

const regionPayloadSize = 40

func decodeRegion(b []byte) (regionPayload, error) {
	if len(b) != regionPayloadSize {
		return regionPayload{}, fmt.Errorf("its payload has %d bytes, want %d", len(b), regionPayloadSize)
	}
	le := binary.LittleEndian
	return regionPayload{
		padding: le.Uint64(b[0:]), guest: le.Uint64(b[8:]), size: le.Uint64(b[16:]),
		user: le.Uint64(b[24:]), offset: le.Uint64(b[32:]),
	}, nil
}

func (r regionPayload) encode() []byte {
	var b []byte
	for _, v := range []uint64{r.padding, r.guest, r.size, r.user, r.offset} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

// configPayload asks for, or is, a part of the device's configuration space.
type configPayload struct {
	offset, flags uint32
	data          []byte
}

const (
	configHeaderSize = 12
	maxConfig        = 256 // VHOST_USER_MAX_CONFIG_SIZE
)

func decodeConfig(b []byte) (configPayload, error) {
	if len(b) < configHeaderSize || len(b) > configHeaderSize+maxConfig {
		return configPayload{}, fmt.Errorf("its payload has %d bytes", len(b))
	}
	le := binary.LittleEndian
	if size := le.Uint32(b[4:]); uint64(size) != uint64(len(b)-configHeaderSize) {
		return configPayload{}, fmt.Errorf("it is for %d bytes but has %d", size, len(b)-configHeaderSize)
	}
	return configPayload{offset: le.Uint32(b[0:]), flags: le.Uint32(b[8:]), data: b[configHeaderSize:]}, nil
}

func (c configPayload) encode() []byte {
	le := binary.LittleEndian
	b := le.AppendUint32(nil, c.offset)
	b = le.AppendUint32(b, uint32(len(c.data)))
	b = le.AppendUint32(b, c.flags)
	return append(b, c.data...)
}
