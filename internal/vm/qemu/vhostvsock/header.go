package vhostvsock

import "encoding/binary"

// headerSize is the length of a packet's header in bytes
// (struct virtio_vsock_hdr, VIRTIO 1.2 §5.10.6).
const headerSize = 44

// typeStream is the only socket type that the device offers.
const typeStream = 1

// opcode says what a packet means (VIRTIO 1.2 §5.10.6).
type opcode uint16

const (
	opRequest       opcode = 1
	opResponse      opcode = 2
	opReset         opcode = 3
	opShutdown      opcode = 4
	opData          opcode = 5
	opCreditUpdate  opcode = 6
	opCreditRequest opcode = 7
)

// The flags of a shutdown packet. Both are hints that never go away again.
const (
	shutdownReceive uint32 = 1 // the sender will not receive any more
	shutdownSend    uint32 = 2 // the sender will not send any more
	shutdownBoth           = shutdownReceive | shutdownSend
)

// header is what stands in front of each packet, little-endian on the ring.
type header struct {
	srcCID, dstCID   uint64
	srcPort, dstPort uint32
	length           uint32 // bytes of payload
	typ              uint16
	op               opcode
	flags            uint32
	bufAlloc         uint32 // the sender's receive buffer, in bytes
	fwdCnt           uint32 // bytes that the sender's reader has taken, modulo 2³²
}

// decodeHeader reads a header. Every input is a header; whether it makes sense
// is for the receiver to judge.
func decodeHeader(b *[headerSize]byte) header {
	le := binary.LittleEndian
	return header{
		srcCID:   le.Uint64(b[0:]),
		dstCID:   le.Uint64(b[8:]),
		srcPort:  le.Uint32(b[16:]),
		dstPort:  le.Uint32(b[20:]),
		length:   le.Uint32(b[24:]),
		typ:      le.Uint16(b[28:]),
		op:       opcode(le.Uint16(b[30:])),
		flags:    le.Uint32(b[32:]),
		bufAlloc: le.Uint32(b[36:]),
		fwdCnt:   le.Uint32(b[40:]),
	}
}

// encode writes the header as it stands on the ring.
func (h *header) encode(b *[headerSize]byte) {
	le := binary.LittleEndian
	le.PutUint64(b[0:], h.srcCID)
	le.PutUint64(b[8:], h.dstCID)
	le.PutUint32(b[16:], h.srcPort)
	le.PutUint32(b[20:], h.dstPort)
	le.PutUint32(b[24:], h.length)
	le.PutUint16(b[28:], h.typ)
	le.PutUint16(b[30:], uint16(h.op))
	le.PutUint32(b[32:], h.flags)
	le.PutUint32(b[36:], h.bufAlloc)
	le.PutUint32(b[40:], h.fwdCnt)
}
