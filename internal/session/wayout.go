package session

import (
	"maps"
	"net"
	"strings"

	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/egress"
	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/launch"
)

// proxyURL is where a jail has its way out.
const proxyURL = "http://" + launch.ProxyAddress

// jailed reports whether the host lets servers be put into jails that have no
// network but a proxy. Otherwise they run, if the profile accepts that, in the
// host's network, where nothing listens at the proxy's address.
func (s *Session) jailed() bool { return strings.HasPrefix(s.launcher.Isolation(), launch.Strict) }

// proxyEnvironment tells a server's programs of its proxy, in every way that is
// in use: curl reads the lower-case names alone, some libraries the others alone,
// npm its own, and node from 22.21 on asks for a variable that turns it on.
func proxyEnvironment() map[string]string {
	return map[string]string{
		"HTTP_PROXY": proxyURL, "HTTPS_PROXY": proxyURL, "http_proxy": proxyURL, "https_proxy": proxyURL,
		"npm_config_proxy": proxyURL, "npm_config_https_proxy": proxyURL, "NODE_USE_ENV_PROXY": "1",
	}
}

// withProxy is env and what tells of the proxy; what env says itself stands.
func withProxy(env map[string]string) map[string]string {
	all := proxyEnvironment()
	maps.Copy(all, env)
	return all
}

// wayOut is the proxy of one server, for as many lives as the server has.
//
// What the server's process asks of the network outside of a call's own words is
// nobody's act in the VM: several calls may be in flight, and it may ask between
// them. What caused it is that the profile deploys this server, so its initiator
// is a deployment, with the server's name, and each request is a trace of its own.
func (s *Session) wayOut(c config.Server) *egress.Proxy {
	return egress.NewProxy(egress.ProxyOptions{
		Gate: s.gate, Server: c.Name, Allow: c.Reach(), Log: s.log.With("server", c.Name),
		Caller: s.caller(event.Initiator{Kind: event.Deployment, ID: "server:" + c.Name}),
	})
}

// open serves a jail's listener until its program has ended, which closes it, or
// the servers end.
func (set *servers) open(one *server, l net.Listener) {
	if one.proxy == nil || l == nil {
		return
	}
	set.wg.Go(func() {
		if err := one.proxy.Serve(set.ctx, l); err != nil {
			set.s.log.Error("serving a way out", "server", one.name, "error", err)
		}
	})
}
