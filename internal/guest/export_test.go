package guest

// DropControl closes the control connection, as a suspended machine does.
func DropControl(g *Guest) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.current != nil {
		g.current.close()
	}
}
