package child_test

import (
	"testing"

	"github.com/capsem/capsem/internal/child"
)

func TestAPipeHasRoomUntilItIsFullOrClosed(t *testing.T) {
	r, w := pipe(t)
	written := 0
	for ; child.HasRoom(w); written += child.PipeRoom {
		if written > 1<<20 {
			t.Fatal("it has room without end")
		}
		// Would block, and the test with it, if there were none.
		if _, err := w.Write(make([]byte, child.PipeRoom)); err != nil {
			t.Fatal(err)
		}
	}
	if written == 0 {
		t.Error("an empty pipe has no room")
	}
	if _, err := r.Read(make([]byte, child.PipeRoom)); err != nil {
		t.Fatal(err)
	}
	if !child.HasRoom(w) {
		t.Error("it has no room after a read")
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if child.HasRoom(w) {
		t.Error("a pipe that nobody reads has room")
	}
}
