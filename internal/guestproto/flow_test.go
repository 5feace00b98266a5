package guestproto

import (
	"strings"
	"testing"
)

func TestCreditGivesAWholeWindowAndNoByteMore(t *testing.T) {
	c := NewCredit()
	total := 0
	for total < Window {
		total += c.Take(MaxData)
	}
	if total != Window {
		t.Fatalf("took %d of a window of %d", total, Window)
	}
	got := make(chan int)
	go func() { got <- c.Take(10) }()
	if err := c.Confirm(Ack{Bytes: 3}); err != nil {
		t.Fatal(err)
	}
	if n := <-got; n != 3 {
		t.Errorf("took %d bytes after 3 were confirmed", n)
	}
}

func TestCreditRefusesAnAckOfWhatWasNotSent(t *testing.T) {
	c := NewCredit()
	c.Take(100)
	for _, n := range []int64{0, -1, 101} {
		if err := c.Confirm(Ack{Bytes: n}); err == nil {
			t.Errorf("an ack of %d for 100 bytes was taken", n)
		}
	}
	if err := c.Confirm(Ack{Bytes: 100}); err != nil {
		t.Error(err)
	}
}

func TestClosedCreditWakesWhoWaits(t *testing.T) {
	c := NewCredit()
	for range Window / MaxData {
		c.Take(MaxData)
	}
	got := make(chan int)
	go func() { got <- c.Take(1) }()
	c.Close()
	if n := <-got; n != 0 {
		t.Errorf("a closed credit gave %d", n)
	}
}

func TestIntakeRefusesTheFirstByteOverTheWindow(t *testing.T) {
	in := NewIntake()
	for range Window / MaxData {
		if err := in.Receive(&Data{Bytes: make([]byte, MaxData)}); err != nil {
			t.Fatal(err)
		}
	}
	if err := in.Receive(&Data{Bytes: []byte{0}}); err == nil {
		t.Fatal("a byte over the window was taken")
	}
	if ack := in.Consume(ackEvery); ack == nil || ack.Bytes != ackEvery {
		t.Fatalf("consuming %d bytes gave the ack %v", ackEvery, ack)
	}
	if err := in.Receive(&Data{Bytes: []byte{0}}); err != nil {
		t.Errorf("after an ack: %v", err)
	}
}

func TestIntakeRefusesDataWithoutBytesOrWithTooMany(t *testing.T) {
	in := NewIntake()
	for _, n := range []int{0, MaxData + 1} {
		if err := in.Receive(&Data{Bytes: make([]byte, n)}); err == nil {
			t.Errorf("a message of %d bytes was taken", n)
		}
	}
	if err := in.Receive(&Data{Bytes: make([]byte, MaxData)}); err != nil {
		t.Error(err)
	}
}

func TestIntakeKeepsOrderAndJoinsSmallMessages(t *testing.T) {
	in := NewIntake()
	for _, d := range []Data{{Out, []byte("a")}, {Out, []byte("b")}, {Err, []byte("c")}, {Out, []byte("d")}} {
		if err := in.Receive(&d); err != nil {
			t.Fatal(err)
		}
	}
	in.End()
	var got []string
	for d, ok := in.Next(); ok; d, ok = in.Next() {
		got = append(got, string(d.Bytes))
	}
	if s := strings.Join(got, " "); s != "ab c d" {
		t.Errorf("got %q", s)
	}
	if err := in.Receive(&Data{Bytes: []byte("late")}); err == nil {
		t.Error("data after the end was taken")
	}
}
