package upstream

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/capsem/capsem/internal/event"
	"github.com/capsem/capsem/internal/jsonrpc"
)

// Bounds of a list.
const (
	// MaxPages is how many pages of a list are fetched.
	MaxPages = 200
	// MaxTools is how many tools a server may have, and MaxToolBytes how many
	// bytes they may be.
	MaxTools     = 10000
	MaxToolBytes = 16 << 20
	// pageTimeout bounds the answer to one page.
	pageTimeout = 60 * time.Second
)

// ListTools fetches all pages of the server's tools. Each is the object that the
// server sent, byte for byte. The error is that of Call, or an *event.Error for a
// list that is no list.
func (u *Upstream) ListTools(ctx context.Context) ([]json.RawMessage, error) {
	var (
		tools []json.RawMessage
		size  int
		seen  = make(map[string]bool)
	)
	var params []byte
	for range MaxPages {
		page, cursor, err := u.toolPage(ctx, params)
		if err != nil {
			return nil, err
		}
		for _, tool := range page {
			size += len(tool)
		}
		tools = append(tools, page...)
		switch {
		case len(tools) > MaxTools || size > MaxToolBytes:
			return nil, u.badList("it has more than %d tools or %d bytes of them", MaxTools, MaxToolBytes)
		case cursor == nil:
			return tools, nil
		case seen[string(cursor)]:
			return nil, u.badList("its pages go round in a circle")
		}
		seen[string(cursor)] = true
		params = fmt.Appendf(nil, `{"cursor":%s}`, cursor)
	}
	return nil, u.badList("it has more than %d pages", MaxPages)
}

// toolPage fetches one page and the cursor of the next, as it stands, nil for
// none.
func (u *Upstream) toolPage(ctx context.Context, params []byte) (tools []json.RawMessage, cursor json.RawMessage, err error) {
	answer, err := u.Call(ctx, "tools/list", params, pageTimeout)
	if err != nil {
		return nil, nil, err
	}
	m, err := jsonrpc.Parse(answer)
	if err != nil {
		return nil, nil, u.badList("%v", err)
	}
	if m.Error != nil {
		if e, ok := jsonrpc.ParseError(m.Error); ok {
			return nil, nil, &event.Error{Code: int(e.Code), Message: e.Message, Data: e.Data}
		}
		return nil, nil, u.badList("it answered with an error that is none")
	}
	list, ok := jsonrpc.Member(m.Result, "tools")
	if !ok || list[0] != '[' {
		return nil, nil, u.badList("its result has no array tools")
	}
	for tool := range jsonrpc.Elements(list) {
		if tool[0] != '{' {
			return nil, nil, u.badList("one of its tools is no object")
		}
		tools = append(tools, tool)
	}
	cursor, ok = jsonrpc.Member(m.Result, "nextCursor")
	if !ok || cursor[0] != '"' || string(cursor) == `""` {
		return tools, nil, nil
	}
	return tools, cursor, nil
}

func (u *Upstream) badList(format string, args ...any) *event.Error {
	return u.failure(jsonrpc.CodeInternal, "server %s: its tools cannot be listed: %s", u.Name(), fmt.Sprintf(format, args...))
}
