package ledger

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/capsem/capsem/internal/event"
)

// benchCall makes call n: two bodies of 1 KiB that no other call has.
func benchCall(b *testing.B, n int) (*event.Event, event.Outcome) {
	text := strings.Repeat(fmt.Sprintf("line %d of some text that a tool might see; ", n), 40)[:1000]
	ev := toolCallEvent(b, fmt.Sprintf(`{"n":%d,"text":%q}`, n, text))
	return ev, response(fmt.Sprintf(`{"content":[{"type":"text","text":"%d %s"}]}`, n, text))
}

// BenchmarkToolCall is one full tool call: intent, outcome, two bodies of 1 KiB.
// "ours" is the ledger. "floor" is the same inserts and updates through the same
// connection in batches of as many calls, without digests, compression, or
// anything else that the ledger does; "sql" is that floor through database/sql.
func BenchmarkToolCall(b *testing.B) {
	for _, callers := range []int{1, 10, 50, 200} {
		b.Run(fmt.Sprintf("ours/callers=%d", callers), func(b *testing.B) { benchOurs(b, callers) })
		b.Run(fmt.Sprintf("floor/callers=%d", callers), func(b *testing.B) { benchFloor(b, callers) })
		b.Run(fmt.Sprintf("sql/callers=%d", callers), func(b *testing.B) { benchSQL(b, callers) })
	}
}

func benchOurs(b *testing.B, callers int) {
	l := openTest(b, Options{})
	events := make([]*event.Event, b.N)
	outcomes := make([]event.Outcome, b.N)
	for i := range events {
		events[i], outcomes[i] = benchCall(b, i)
	}
	b.ReportAllocs()
	cpu := cpuTime(b)
	b.ResetTimer()
	var next sync.Mutex
	i := 0
	var wait sync.WaitGroup
	for range callers {
		wait.Go(func() {
			for {
				next.Lock()
				n := i
				i++
				next.Unlock()
				if n >= b.N {
					return
				}
				r, err := l.Begin(context.Background(), events[n], allow())
				if err == nil {
					err = l.End(context.Background(), r, outcomes[n], allow())
				}
				if err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wait.Wait()
	b.StopTimer()
	reportCalls(b, cpuTime(b)-cpu)
	b.ReportMetric(float64(2*b.N)/float64(l.writer.commits), "ops/commit")
}

// cpuTime is what this process has used so far. On a machine that others use
// too, it says more than the wall clock.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func reportCalls(b *testing.B, cpu time.Duration) {
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "calls/s")
	b.ReportMetric(float64(cpu.Microseconds())/float64(b.N), "cpu-µs/op")
}

// floorRows are the rows of one call, at its begin and at its end.
func floorRows(b *testing.B, n int) (intent, outcome *op) {
	ev, out := benchCall(b, n)
	intent, outcome = newOp(), newOp()
	intent.intent(toolCalls, ev, event.Pending, allow())
	floorBody(intent, ev, "request", ev.MCP.Arguments)
	outcome.outcome(&receipt{table: toolCalls, id: int64(n + 1), event: ev}, &out, allow())
	floorBody(outcome, ev, "response", out.MCP.Message)
	return intent, outcome
}

func floorBody(o *op, ev *event.Event, direction string, body json.RawMessage) {
	digest := value{kind: str, s: strings.Repeat("0", 32) + strings.ReplaceAll(newDigest(ev, direction), "-", "")}
	o.values = append(o.values, digest, value{kind: str, s: "none"}, value{kind: blob, b: body}, value{kind: integer})
	o.close(insertBody)
	o.text(ev.ID)
	o.time(ev.Time)
	o.text(string(ev.Type), direction, mediaJSON)
	o.integer(int64(len(body)))
	o.integer(0)
	o.nulls(1)
	o.values = append(o.values, digest)
	o.close(insertRow(eventBodyBlobs))
}

// newDigest is as unlike its neighbours as a real one: the end of a UUIDv7 is random.
func newDigest(ev *event.Event, direction string) string {
	return ev.ID[24:] + ev.ID[:24] + direction[:1]
}

func benchFloor(b *testing.B, batch int) {
	l := openTest(b, Options{})
	if err := l.Close(); err != nil {
		b.Fatal(err)
	}
	conn, err := openConn(l.path)
	if err != nil {
		b.Fatal(err)
	}
	defer conn.close()
	if err := conn.configure(); err != nil {
		b.Fatal(err)
	}
	if err := conn.prepareAll(); err != nil {
		b.Fatal(err)
	}
	run := func(stmt int, values []value) error {
		_, err := conn.run(stmt, values)
		return err
	}
	benchBatches(b, batch, run)
}

// benchBatches commits the intents of a batch, then its outcomes.
func benchBatches(b *testing.B, batch int, run func(stmt int, values []value) error) {
	intents, outcomes := make([]*op, b.N), make([]*op, b.N)
	for i := range intents {
		intents[i], outcomes[i] = floorRows(b, i)
	}
	write := func(ops []*op) {
		err := run(begin, nil)
		for _, o := range ops {
			for _, r := range o.rows {
				if err == nil {
					err = run(r.stmt, o.values[r.from:r.to])
				}
			}
		}
		if err == nil {
			err = run(commit, nil)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	b.ReportAllocs()
	cpu := cpuTime(b)
	b.ResetTimer()
	for from := 0; from < b.N; from += batch {
		to := min(from+batch, b.N)
		write(intents[from:to])
		write(outcomes[from:to])
	}
	b.StopTimer()
	reportCalls(b, cpuTime(b)-cpu)
}

func benchSQL(b *testing.B, batch int) {
	l := openTest(b, Options{})
	if err := l.Close(); err != nil {
		b.Fatal(err)
	}
	db, err := sql.Open("sqlite", "file:"+filepath.ToSlash(l.path)+"?_journal_mode=WAL&_synchronous=NORMAL&_pragma=cache_size(-8192)&_pragma=wal_autocheckpoint(4096)")
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := db.Close(); err != nil {
			b.Error(err)
		}
	}()
	db.SetMaxOpenConns(1)
	ctx := context.Background()
	conn, err := db.Conn(ctx)
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := conn.Close(); err != nil {
			b.Error(err)
		}
	}()
	stmts := make([]*sql.Stmt, rollback)
	texts := map[int]string{
		insertRow(toolCalls): Tables()[toolCalls].insertSQL(), finishRow(toolCalls): Tables()[toolCalls].finishSQL(),
		insertRow(eventBodyBlobs): Tables()[eventBodyBlobs].insertSQL(), insertBody: insertBodySQL, begin: "BEGIN IMMEDIATE", commit: "COMMIT",
	}
	for i, text := range texts {
		if stmts[i], err = conn.PrepareContext(ctx, text); err != nil {
			b.Fatal(err)
		}
	}
	benchBatches(b, batch, func(stmt int, values []value) error {
		args := make([]any, len(values))
		for i, v := range values {
			switch v.kind {
			case integer:
				args[i] = v.n
			case str:
				args[i] = v.s
			case bytesText:
				args[i] = string(v.b)
			case blob:
				args[i] = v.b
			}
		}
		_, err := stmts[stmt].ExecContext(ctx, args...)
		return err
	})
}

// BenchmarkBegin is the wait of one caller for the row of intent.
func BenchmarkBegin(b *testing.B) {
	for _, d := range []Durability{Process, Power} {
		b.Run(string(d), func(b *testing.B) {
			l := openTest(b, Options{Durability: d})
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				ev := toolCallEvent(b, `{"a":1}`)
				ev.Time = time.Now()
				b.StartTimer()
				if _, err := l.Begin(context.Background(), ev, allow()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
