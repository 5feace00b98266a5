package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/capsem/capsem/internal/guestproto"
)

// floorHost answers frames with themselves, after the rows of the intent were
// committed, a process has copied them, and the rows of the outcome were
// committed. One goroutine commits all that has arrived as one batch, intents
// and outcomes of whichever connection, and sends a batch on with one write:
// there is no way to do less with the same processes and the same SQL.
type floorHost struct {
	hop   *hop
	sql   *rawLedger
	queue chan *floorCall
	// atHop are the calls whose bytes the process has, in order.
	atHop chan *floorCall
	tasks sync.WaitGroup
	stop  context.CancelFunc

	mu  sync.Mutex
	err error
}

// floorCall is one frame on its way.
type floorCall struct {
	conn  net.Conn
	frame []byte
	row   rawCall
	begun bool
}

// floorQueue is how many calls wait at most.
const floorQueue = 1024

func (l *lab) openFloorHost(ctx context.Context) (*floorHost, error) {
	f := &floorHost{queue: make(chan *floorCall, floorQueue), atHop: make(chan *floorCall, floorQueue)}
	var err error
	if f.sql, err = newRaw(ctx, l.dir); err != nil {
		return nil, err
	}
	if f.hop, err = l.openHop(ctx); err != nil {
		return nil, errors.Join(err, f.sql.close())
	}
	ctx, f.stop = context.WithCancel(ctx)
	f.tasks.Go(func() { f.note(f.commit(ctx)) })
	f.tasks.Go(func() { f.note(f.receive(ctx)) })
	return f, nil
}

func (f *floorHost) note(err error) {
	if err == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = errors.Join(f.err, err)
}

func (f *floorHost) failure() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

// dial opens a connection of the kind that a fake machine has.
func (f *floorHost) dial(context.Context) (net.Conn, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("making a socketpair: %w", err)
	}
	var ends [2]net.Conn
	for i, fd := range fds {
		file := os.NewFile(uintptr(fd), "socketpair")
		ends[i], err = net.FileConn(file)
		if err := errors.Join(err, file.Close()); err != nil {
			return nil, err
		}
	}
	f.tasks.Go(func() { f.note(errors.Join(f.read(ends[1]), ends[1].Close())) })
	return ends[0], nil
}

// read queues a connection's frames.
func (f *floorHost) read(conn net.Conn) error {
	r := bufio.NewReaderSize(conn, 64<<10)
	if _, err := guestproto.ReadMeta(r); err != nil {
		return err
	}
	for {
		frame, err := readFrame(r)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		f.queue <- &floorCall{conn: conn, frame: frame, row: rawCall{arguments: frame[loadHeader:], response: frame[loadHeader:]}}
	}
}

// loadHeader is where a frame of package drive has its payload.
const loadHeader = 4 + guestproto.MCPHeader + len("bench")

func readFrame(r *bufio.Reader) ([]byte, error) {
	head, err := r.Peek(4)
	if err != nil {
		return nil, err
	}
	frame := make([]byte, 4+binary.BigEndian.Uint32(head))
	_, err = io.ReadFull(r, frame)
	return frame, err
}

// commit writes what is queued in batches, and sends it on.
func (f *floorHost) commit(ctx context.Context) error {
	for {
		var batch []*floorCall
		select {
		case c := <-f.queue:
			batch = append(batch, c)
		case <-ctx.Done():
			return nil
		}
		for more := true; more; {
			select {
			case c := <-f.queue:
				batch = append(batch, c)
			default:
				more = false
			}
		}
		if err := f.write(ctx, batch); err != nil {
			return err
		}
		if err := f.send(batch); err != nil {
			return err
		}
	}
}

func (f *floorHost) write(ctx context.Context, batch []*floorCall) error {
	if err := f.sql.begin(ctx); err != nil {
		return err
	}
	for _, c := range batch {
		step := f.sql.intent
		if c.begun {
			step = f.sql.outcome
		}
		if err := step(ctx, &c.row); err != nil {
			return err
		}
	}
	return f.sql.commit(ctx)
}

// send gives intents to the process, and answers outcomes.
func (f *floorHost) send(batch []*floorCall) error {
	var toHop []byte
	answers := map[net.Conn][]byte{}
	for _, c := range batch {
		if c.begun {
			answers[c.conn] = append(answers[c.conn], c.frame...)
			continue
		}
		c.begun = true
		f.atHop <- c
		toHop = append(toHop, c.frame...)
	}
	for conn, b := range answers {
		if _, err := conn.Write(b); err != nil {
			return fmt.Errorf("answering: %w", err)
		}
	}
	if len(toHop) == 0 {
		return nil
	}
	_, err := f.hop.in.Write(toHop)
	return err
}

// receive takes what the process has copied.
func (f *floorHost) receive(ctx context.Context) error {
	r := bufio.NewReaderSize(f.hop.out, 64<<10)
	for {
		frame, err := readFrame(r)
		if ctx.Err() != nil || errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		c := <-f.atHop
		c.frame = frame
		f.queue <- c
	}
}

// close ends everything; the connections must be closed.
func (f *floorHost) close() error {
	f.stop()
	err := f.hop.close()
	f.tasks.Wait()
	return errors.Join(err, f.failure(), f.sql.close())
}
