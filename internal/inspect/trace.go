package inspect

import (
	"context"

	"github.com/capsem/capsem/internal/event"
)

type traceKey struct{}

// WithTrace returns a context under which what is done belongs to ev: whoever
// makes further events on its behalf takes ev's trace, initiator and process.
func WithTrace(ctx context.Context, ev *event.Event) context.Context {
	return context.WithValue(ctx, traceKey{}, Caller{
		VM: ev.VM, Initiator: ev.Initiator, Actor: ev.Actor, Process: ev.Process, TraceID: ev.TraceID,
	})
}

// CallerFrom returns on whose behalf something is done, and reports false where
// no event stands behind ctx.
func CallerFrom(ctx context.Context) (Caller, bool) {
	c, ok := ctx.Value(traceKey{}).(Caller)
	return c, ok
}
