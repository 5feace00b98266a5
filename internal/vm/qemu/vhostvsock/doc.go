// Package vhostvsock is a virtio-vsock device served in this process.
//
// QEMU hands the device's rings to whoever answers on a vhost-user socket; here
// that is us. So a guest's connections end in ordinary net.Conn values of this
// program: there is no kernel module, no root, no context id that is global to
// the host, and no neighbour who could scan our ports. Serve takes our end of a
// socketpair whose other end QEMU was given by descriptor, and returns a Device
// with Listen and Dial.
//
// The guest owns the rings, and may be hostile; so may a QEMU that the guest has
// taken over, which owns the socket. What the package promises in face of that:
//
//   - Every index, length and address is checked against the memory that was
//     shared, each is read once, and no descriptor chain is walked for more steps
//     than the ring is long. Memory is only mapped from files that are sealed
//     against shrinking, so that no access can fault.
//   - What breaks the rules of the ring or of vhost-user stops the device, with
//     an error that says which rule; what breaks the rules of one connection
//     resets that connection.
//   - Everything that a guest can make us keep is bounded by a constant of this
//     package: connections (MaxGuestConns), bytes received and not yet read
//     (BufferSize for each), refusals not yet delivered (maxRefusals).
//   - A guest that does not read, or lies about its credit, can block writers of
//     its own connections and nobody else. Write copies straight into the guest's
//     receive buffers, so nothing piles up here; deadlines and Close unblock it.
//
// A QEMU that was taken over shares its eventfds with us, and can arrange that
// interrupting the guest blocks. That stalls this device, which serves nobody
// but that QEMU's guest, until the process that holds the device ends.
//
// The code follows a packet's path: message.go decodes what QEMU says,
// session.go acts on it, memory.go holds the mapped guest memory, virtqueue.go
// walks the rings, header.go is the packet's header, fromguest.go and toguest.go
// move packets, conn.go and listener.go are what callers see.
//
// One mutex, Device.mu, guards the rings, the mapping and the state of all
// connections. The work done under it is a copy of at most a batch of packets;
// in return a packet's credit fields are always consistent, and memory cannot be
// unmapped under a copy.
//
// References: the vhost-user protocol (QEMU, docs/interop/vhost-user.rst) and
// VIRTIO 1.2, sections 2.7 (split virtqueues) and 5.10 (socket device).
package vhostvsock
