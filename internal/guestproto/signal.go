package guestproto

// Signals are the names that Signal may carry, without "SIG" (signal(7)). The
// window-change signal is none of them: it belongs to a terminal's size.
func Signals() []string {
	return []string{"HUP", "INT", "QUIT", "KILL", "USR1", "USR2", "TERM", "CONT", "STOP", "TSTP"}
}
