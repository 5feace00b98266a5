package ledger

import (
	"encoding/hex"
	"fmt"
	"runtime"

	"github.com/klauspost/compress/zstd"
	"lukechampine.com/blake3"

	"github.com/capsem/capsem/internal/event"
)

// omission says why a body's bytes are not kept.
type omission string

const (
	kept           omission = ""
	omittedBlocked omission = "blocked"
	omittedQuota   omission = "quota"
	// omittedContent is a file's: the ledger says which file, not what is in it.
	omittedContent omission = "content"
)

// minCompress is the size under which zstd saves nothing worth its time.
const minCompress = 256

// window bounds what the encoder keeps for each goroutine that compresses.
const window = 1 << 20

func newEncoder() (*zstd.Encoder, error) {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderCRC(false),
		zstd.WithEncoderConcurrency(min(runtime.GOMAXPROCS(0), 4)), zstd.WithWindowSize(window), zstd.WithLowerEncoderMem(true))
	if err != nil {
		return nil, fmt.Errorf("readying compression: %w", err)
	}
	return e, nil
}

// addRequest adds the bodies that an event carries.
func (l *Ledger) addRequest(o *op, ev *event.Event, blocked bool) {
	why := kept
	if blocked && l.options.RecordBlocked != "full" {
		why = omittedBlocked
	}
	switch {
	case ev.MCP != nil && ev.MCP.Tool != nil:
		l.addBody(o, ev, whole("request", mediaJSON, ev.MCP.Arguments), why)
	case ev.MCP != nil:
		l.addBody(o, ev, whole("request", mediaJSON, ev.MCP.Params), why)
	case ev.HTTP != nil:
		l.addBody(o, ev, whole("request", ev.HTTP.Headers["content-type"], ev.HTTP.Body), why)
	case ev.Exec != nil:
		if argv := argvJSON(ev.Exec.Argv); len(argv) > MaxText {
			l.addBody(o, ev, whole("request", mediaJSON, argv), why)
		}
	case ev.File != nil:
		l.addBody(o, ev, whole("request", "", ev.File.Content), omittedContent)
	}
}

const mediaJSON = "application/json"

// addResponse adds the body that an outcome carries.
func (l *Ledger) addResponse(o *op, ev *event.Event, out *event.Outcome, v event.Verdict) {
	why := kept
	if !shown(v) {
		why = omittedBlocked
	}
	if m := out.MCP; m != nil {
		l.addBody(o, ev, whole("response", mediaJSON, m.Message), why)
	}
	if h := out.HTTP; h != nil {
		l.addBody(o, ev, body{"response", h.Headers["content-type"], h.Body, max(int64(len(h.Body)), out.BytesReceived), h.Truncated}, why)
	}
}

// body is what an event carries in one direction. size counts the whole of it;
// truncated says that content is not the whole.
type body struct {
	direction, media string
	content          []byte
	size             int64
	truncated        bool
}

func whole(direction, media string, content []byte) body {
	return body{direction, media, content, int64(len(content)), false}
}

// addBody adds what is said about a body, and its bytes where they are kept.
func (l *Ledger) addBody(o *op, ev *event.Event, b body, why omission) {
	raw := b.content
	if len(raw) == 0 {
		return
	}
	if why == kept {
		raw = o.redact.bytes(raw)
		if len(raw) > MaxBody {
			raw, b.truncated = raw[:MaxBody], true
		}
	}
	digest := o.digest(raw)
	if why == kept {
		why = l.addBytes(o, digest, raw)
	}
	o.text(ev.ID)
	o.time(ev.Time)
	o.text(string(ev.Type), b.direction, b.media)
	o.integer(b.size)
	o.integer(truth(b.truncated))
	o.text(string(why))
	o.values = append(o.values, digest)
	o.close(insertRow(eventBodyBlobs))
}

// addBytes adds the bytes of a body, unless that takes the ledger over its
// quota.
func (l *Ledger) addBytes(o *op, digest value, raw []byte) omission {
	encoding, data := "none", raw
	if len(raw) >= minCompress {
		from := len(o.scratch)
		o.scratch = l.zstd.EncodeAll(raw, o.scratch)
		if packed := o.scratch[from:len(o.scratch):len(o.scratch)]; len(packed) < len(raw) {
			encoding, data = "zstd", packed
		}
	}
	size := int64(len(data))
	if l.bodies.Add(size) > l.options.BodyQuota {
		l.bodies.Add(-size)
		l.sayOverQuota(o)
		return omittedQuota
	}
	o.kept += size
	o.values = append(o.values, digest, value{kind: str, s: encoding}, value{kind: blob, b: data}, value{kind: integer})
	o.close(insertBody)
	return kept
}

// sayOverQuota adds the row that says so, the first time.
func (l *Ledger) sayOverQuota(o *op) {
	if !l.overQuota.CompareAndSwap(false, true) {
		return
	}
	ev, err := newEvent(event.Admin)
	if err != nil { // every body's own row still says so
		l.options.Log.Error("body quota row not written", "error", err)
		return
	}
	o.vmEvent(ev, "body_quota", fmt.Sprintf("bodies over the quota of %d bytes are kept as digest and size", l.options.BodyQuota),
		event.Done, event.Verdict{Decision: event.Allow})
}

// digest is the BLAKE3 of b, in hex.
func (o *op) digest(b []byte) value {
	sum := blake3.Sum256(b)
	return o.written(func(s []byte) []byte { return hex.AppendEncode(s, sum[:]) })
}
