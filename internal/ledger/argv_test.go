package ledger

import "testing"

func TestArgumentsOfACommandStandInTheLedgerAsTheyWereTyped(t *testing.T) {
	for _, c := range []struct {
		argv []string
		want string
	}{
		{nil, ""},
		{[]string{"sh", "-c", "a <b >&2 && c"}, `["sh","-c","a <b >&2 && c"]`},
		{[]string{"a\"\\\n", "日本", ""}, `["a\"\\\n","日本",""]`},
		{[]string{"\xff"}, `[{"base64":"/w=="}]`},
	} {
		if got := string(argvJSON(c.argv)); got != c.want {
			t.Errorf("argv %q is %s, want %s", c.argv, got, c.want)
		}
	}
}
