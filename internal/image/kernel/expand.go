package kernel

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"

	// Not the better kept ulikunitz/xz: that allocates whatever dictionary a
	// stream asks for, up to 4 GiB, and has no x86 filter, which Linux applies
	// to an xz-compressed kernel.
	"github.com/xi2/xz"
)

// compressions are those that Linux's build system offers, by the first bytes
// of their streams; expand is nil where Capsem has no decoder.
func compressions() []compression {
	return []compression{
		{"LZ4", []byte{0x02, 0x21, 0x4c, 0x18}, expandLZ4},
		{"gzip", []byte{0x1f, 0x8b, 0x08}, expandGzip},
		{"xz", []byte{0xfd, '7', 'z', 'X', 'Z', 0x00}, expandXZ},
		{"zstd", []byte{0x28, 0xb5, 0x2f, 0xfd}, expandZstd},
		{"bzip2", []byte("BZh"), nil},
		{"LZMA", []byte{0x5d, 0x00, 0x00}, nil},
		{"LZO", []byte{0x89, 'L', 'Z', 'O'}, nil},
	}
}

type compression struct {
	name   string
	magic  []byte
	expand func(b []byte, limit int) ([]byte, error)
}

var errTooLarge = errors.New("it expands to more than its limit")

// expand decompresses b, whose compression its first bytes tell, into at most
// limit bytes.
func expand(b []byte, limit int) ([]byte, error) {
	for _, c := range compressions() {
		if !bytes.HasPrefix(b, c.magic) {
			continue
		}
		if c.expand == nil {
			return nil, fmt.Errorf("it is compressed with %s, for which Capsem has no decoder", c.name)
		}
		out, err := c.expand(b, limit)
		if err != nil {
			return nil, fmt.Errorf("decompressing %s: %w", c.name, err)
		}
		return out, nil
	}
	return nil, fmt.Errorf("no compression that Linux uses starts with % x", b[:min(len(b), 4)])
}

// lz4Block is how much of the original one block of a legacy LZ4 stream holds,
// the last one less (lib/decompress_unlz4.c, LZ4_DEFAULT_UNCOMPRESSED_CHUNK_SIZE).
const lz4Block = 8 << 20

// expandLZ4 decodes the legacy stream that `lz4 -l` writes: the magic, then
// blocks, each after its compressed size as a little-endian uint32.
func expandLZ4(b []byte, limit int) ([]byte, error) {
	b = b[4:]
	out := make([]byte, 0, min(limit, 4*len(b)))
	block := make([]byte, min(limit, lz4Block))
	for len(b) > 0 {
		if len(b) < 4 {
			return nil, io.ErrUnexpectedEOF
		}
		size := binary.LittleEndian.Uint32(b)
		b = b[4:]
		if uint64(size) > uint64(len(b)) {
			return nil, io.ErrUnexpectedEOF
		}
		n, err := lz4.UncompressBlock(b[:size], block)
		if err != nil {
			return nil, err
		}
		if n > limit-len(out) {
			return nil, errTooLarge
		}
		out, b = append(out, block[:n]...), b[size:]
	}
	return out, nil
}

func expandGzip(b []byte, limit int) ([]byte, error) {
	r, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	r.Multistream(false)
	return readAll(r, limit)
}

func expandXZ(b []byte, limit int) ([]byte, error) {
	r, err := xz.NewReader(bytes.NewReader(b), maxDictionary)
	if err != nil {
		return nil, err
	}
	r.Multistream(false)
	return readAll(r, limit)
}

func expandZstd(b []byte, limit int) ([]byte, error) {
	r, err := zstd.NewReader(bytes.NewReader(b), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxDictionary))
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return readAll(r, limit)
}

// maxDictionary bounds the window of xz and zstd streams. Linux packs its image
// with a window of 128 MiB at most (scripts/Makefile.lib, zstd -22 --ultra).
const maxDictionary = 128 << 20

func readAll(r io.Reader, limit int) ([]byte, error) {
	out, err := io.ReadAll(io.LimitReader(r, int64(limit)+1))
	if err != nil {
		return nil, err
	}
	if len(out) > limit {
		return nil, errTooLarge
	}
	return out, nil
}
