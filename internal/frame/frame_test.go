package frame_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"testing/iotest"

	"github.com/capsem/capsem/internal/frame"
)

const limit = 1 << 20

// encode returns the frames as they stand on the wire.
func encode(t testing.TB, frames ...[]byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := frame.NewWriter(&out, limit)
	for _, f := range frames {
		if err := w.WriteFrame(f); err != nil {
			t.Fatal(err)
		}
	}
	return out.Bytes()
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7)
	}
	return b
}

func TestFramesArriveWholeHoweverTheStreamIsCut(t *testing.T) {
	var want [][]byte
	for _, n := range []int{0, 1, 4, 5, 1000, 4091, 4092, 4093, 72<<10 - 5, 72<<10 - 4, 72<<10 - 3, 72 << 10, 100_000, 0, 3} {
		want = append(want, pattern(n))
	}
	wire := encode(t, want...)
	for name, src := range map[string]io.Reader{
		"all at once":      bytes.NewReader(wire),
		"byte by byte":     iotest.OneByteReader(bytes.NewReader(wire)),
		"half reads":       iotest.HalfReader(bytes.NewReader(wire)),
		"EOF with data":    iotest.DataErrReader(bytes.NewReader(wire)),
		"EOF after a byte": iotest.DataErrReader(iotest.OneByteReader(bytes.NewReader(wire))),
	} {
		r := frame.NewReader(src, limit)
		for i, w := range want {
			got, err := r.Next()
			if err != nil {
				t.Fatalf("%s: frame %d: %v", name, i, err)
			}
			if !bytes.Equal(got, w) {
				t.Fatalf("%s: frame %d of %d bytes differs", name, i, len(w))
			}
		}
		for range 2 {
			if _, err := r.Next(); err != io.EOF {
				t.Errorf("%s: at the end: %v", name, err)
			}
		}
	}
}

func TestStreamThatEndsInsideAFrameIsNoCleanEnd(t *testing.T) {
	wire := encode(t, []byte("hello"))
	for n := range len(wire) {
		_, err := frame.NewReader(bytes.NewReader(wire[:n]), limit).Next()
		want := io.ErrUnexpectedEOF
		if n == 0 {
			want = io.EOF
		}
		if err != want {
			t.Errorf("after %d bytes: got %v, want %v", n, err, want)
		}
	}
}

func TestReaderAndWriterRefuseOnlyWhatIsOverTheBound(t *testing.T) {
	for _, n := range []int{limit - 1, limit, limit + 1} {
		over := n > limit
		var out bytes.Buffer
		w := frame.NewWriter(&out, limit)
		err := w.WriteFrame(make([]byte, n-5), nil, make([]byte, 5))
		var tooLarge *frame.TooLargeError
		if errors.As(err, &tooLarge) != over || over && (tooLarge.Size != int64(n) || tooLarge.Max != limit) {
			t.Errorf("writing %d bytes: %v", n, err)
		}
		if over {
			if out.Len() != 0 {
				t.Errorf("a refused frame left %d bytes on the stream", out.Len())
			}
			if err := w.WriteFrame([]byte("x")); err != nil {
				t.Errorf("after a refused frame: %v", err)
			}
		}

		wire := append(binary.BigEndian.AppendUint32(nil, uint32(n)), make([]byte, n)...)
		r := frame.NewReader(bytes.NewReader(wire), limit)
		got, err := r.Next()
		tooLarge = nil
		if errors.As(err, &tooLarge) != over || !over && len(got) != n {
			t.Errorf("reading %d bytes: %d bytes, %v", n, len(got), err)
		}
		if _, again := r.Next(); over && again != err {
			t.Errorf("after a frame over the bound: %v", again)
		}
	}
}

func TestMemoryGrowsWithWhatArrivesNotWithWhatIsDeclared(t *testing.T) {
	const declared = 256 << 20
	for _, sent := range []int{0, 10_000, 300_000} {
		head := binary.BigEndian.AppendUint32(nil, declared)
		src := io.MultiReader(bytes.NewReader(head), bytes.NewReader(make([]byte, sent)))
		r := frame.NewReader(src, declared)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := r.Next()
		runtime.ReadMemStats(&after)
		if err != io.ErrUnexpectedEOF {
			t.Fatal(err)
		}
		if grown := after.TotalAlloc - before.TotalAlloc; grown > uint64(64<<10+5*sent) {
			t.Errorf("%d bytes sent of %d declared cost %d bytes", sent, declared, grown)
		}
	}
}

func TestBufferOfALargeFrameIsGivenBack(t *testing.T) {
	pr, pw := io.Pipe()
	w, r := frame.NewWriter(pw, 64<<20), frame.NewReader(pr, 64<<20)
	send := func(n int) {
		t.Helper()
		done := make(chan error, 1)
		go func() { done <- w.WriteFrame(make([]byte, n)) }()
		if got, err := r.Next(); err != nil || len(got) != n {
			t.Fatal(len(got), err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	send(32 << 20)
	held := heap()
	for range 100 {
		send(10)
	}
	if after := heap(); after+(24<<20) > held {
		t.Errorf("heap was %d with the buffer and is %d after 100 small frames", held, after)
	}
}

// chunks records each write.
type chunks struct{ writes [][]byte }

func (c *chunks) Write(p []byte) (int, error) {
	c.writes = append(c.writes, bytes.Clone(p))
	return len(p), nil
}

func TestFrameOfUpTo72KiBIsOneWrite(t *testing.T) {
	for _, n := range []int{0, 1, 1024, 72<<10 - frame.HeaderSize} {
		var c chunks
		if err := frame.NewWriter(&c, limit).WriteFrame(make([]byte, n/2), make([]byte, n-n/2)); err != nil {
			t.Fatal(err)
		}
		if len(c.writes) != 1 {
			t.Errorf("%d bytes took %d writes", n, len(c.writes))
		}
	}
}

func TestPartsOfLongFramesArriveInOrder(t *testing.T) {
	parts := [][]byte{pattern(10), nil, pattern(73_800), {}, pattern(3), pattern(100_000)}
	var c bytes.Buffer
	if err := frame.NewWriter(&c, limit).WriteFrame(parts...); err != nil {
		t.Fatal(err)
	}
	got, err := frame.NewReader(&c, limit).Next()
	if err != nil || !bytes.Equal(got, bytes.Join(parts, nil)) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// brokenWriter takes n bytes and then fails, or claims success for part of a
// write.
type brokenWriter struct {
	n   int
	err error
}

func (b *brokenWriter) Write(p []byte) (int, error) {
	if len(p) <= b.n {
		b.n -= len(p)
		return len(p), nil
	}
	n := b.n
	b.n = 0
	return n, b.err
}

func TestWriterEndsAfterAFailedWrite(t *testing.T) {
	boom := errors.New("boom")
	for _, tt := range []struct{ give, want error }{{boom, boom}, {nil, io.ErrShortWrite}} {
		w := frame.NewWriter(&brokenWriter{n: 10, err: tt.give}, limit)
		if err := w.WriteFrame([]byte("12345678")); !errors.Is(err, tt.want) {
			t.Errorf("got %v, want %v", err, tt.want)
		}
		if err := w.WriteFrame(nil); !errors.Is(err, tt.want) {
			t.Errorf("later: got %v, want %v", err, tt.want)
		}
	}
}

func TestReaderPassesOnWhatTheStreamReturned(t *testing.T) {
	boom := errors.New("boom")
	r := frame.NewReader(io.MultiReader(bytes.NewReader([]byte{0, 0}), iotest.ErrReader(boom)), limit)
	if _, err := r.Next(); err != boom {
		t.Errorf("got %v", err)
	}
	if _, err := frame.NewReader(idleReader{}, limit).Next(); err != io.ErrNoProgress {
		t.Errorf("a reader without progress: %v", err)
	}
}

type idleReader struct{}

func (idleReader) Read([]byte) (int, error) { return 0, nil }

func TestFramesOfConcurrentWritersStayWhole(t *testing.T) {
	client, server := unixPair(t)
	w := frame.NewWriter(client, limit)
	const writers, each = 8, 50
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			for j := range each {
				body := bytes.Repeat([]byte{byte(i)}, 1+j*1000)
				if err := w.WriteFrame([]byte{byte(i)}, body); err != nil {
					t.Error(err)
				}
			}
		})
	}
	r := frame.NewReader(server, limit)
	next := make([]int, writers)
	for range writers * each {
		b, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		if n := bytes.Count(b, b[:1]); n != len(b) || n != 2+next[b[0]]*1000 {
			t.Fatalf("frame of writer %d is mixed or out of order", b[0])
		}
		next[b[0]]++
	}
	wg.Wait()
}

// unixPair returns the two ends of a Unix socket.
func unixPair(t testing.TB) (client, server net.Conn) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if client, err = net.Dial("unix", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if server, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close(); server.Close() })
	return client, server
}

func TestSteadyStateDoesNotAllocate(t *testing.T) {
	for _, size := range []int{1 << 10, 1 << 20} {
		wire := encode(t, make([]byte, size))
		src := &loop{b: wire}
		r, body := frame.NewReader(src, limit), make([]byte, size)
		w := frame.NewWriter(io.Discard, limit)
		if n := testing.AllocsPerRun(200, func() {
			if _, err := r.Next(); err != nil {
				t.Fatal(err)
			}
			if err := w.WriteFrame(body[:10], body[10:]); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("%d bytes: %v allocations", size, n)
		}
	}
}

// loop is a stream that repeats b for ever.
type loop struct {
	b  []byte
	at int
}

func (l *loop) Read(p []byte) (int, error) {
	n := copy(p, l.b[l.at:])
	l.at = (l.at + n) % len(l.b)
	return n, nil
}

// FuzzReader proves that what a Reader takes from a stream is what a Writer would
// have put there, and that the rest is an error.
func FuzzReader(f *testing.F) {
	f.Add(encode(f, []byte("one"), nil, []byte("three")), uint8(3))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff}, uint8(0))
	f.Add([]byte{0, 0, 0, 9, 1}, uint8(1))
	f.Fuzz(func(t *testing.T, in []byte, cut uint8) {
		const limit = 1 << 12
		src := io.Reader(bytes.NewReader(in))
		if cut%2 == 1 {
			src = iotest.HalfReader(src)
		}
		r := frame.NewReader(src, limit)
		var out bytes.Buffer
		w := frame.NewWriter(&out, limit)
		for {
			b, err := r.Next()
			if err != nil {
				rest := in[out.Len():]
				if !bytes.HasPrefix(in, out.Bytes()) {
					t.Fatal("written frames are not the ones that were read")
				}
				if (err == io.EOF) != (len(rest) == 0) {
					t.Fatalf("%v with %d bytes left", err, len(rest))
				}
				return
			}
			if err := w.WriteFrame(b); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// BenchmarkPipe moves bytes through a pipe of the operating system: as frames,
// and, as the floor, the same bytes by plain writes and reads.
func BenchmarkPipe(b *testing.B) {
	for _, size := range []int{1 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("size=%d/frame", size), func(b *testing.B) {
			pipe(b, size, func(pw *os.File) func([]byte) error {
				w := frame.NewWriter(pw, limit)
				return func(body []byte) error { return w.WriteFrame(body) }
			}, func(pr *os.File) func() error {
				r := frame.NewReader(pr, limit)
				return func() error { _, err := r.Next(); return err }
			})
		})
		b.Run(fmt.Sprintf("size=%d/floor", size), func(b *testing.B) {
			pipe(b, size, func(pw *os.File) func([]byte) error {
				return func(body []byte) error { _, err := pw.Write(body); return err }
			}, func(pr *os.File) func() error {
				buf := make([]byte, size)
				return func() error { _, err := io.ReadFull(pr, buf); return err }
			})
		})
	}
}

func pipe(b *testing.B, size int, writer func(*os.File) func([]byte) error, reader func(*os.File) func() error) {
	pr, pw, err := os.Pipe()
	if err != nil {
		b.Fatal(err)
	}
	defer pr.Close()
	write, read := writer(pw), reader(pr)
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	done := make(chan error, 1)
	go func() {
		defer pw.Close()
		body := make([]byte, size)
		for range b.N {
			if err := write(body); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for range b.N {
		if err := read(); err != nil {
			b.Fatal(err)
		}
	}
	if err := <-done; err != nil {
		b.Fatal(err)
	}
}
