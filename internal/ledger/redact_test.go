package ledger

import "testing"

func TestTextForALogHasNoSecrets(t *testing.T) {
	r, err := NewRedactor("hunter2-hunter2")
	if err != nil {
		t.Fatal(err)
	}
	if got := r.Text(`login with "hunter2\u002dhunter2" failed`); got != `login with "[redacted]" failed` {
		t.Errorf("got %s", got)
	}
	var none *Redactor
	if got := none.Text("as it is"); got != "as it is" {
		t.Errorf("got %s", got)
	}
}
