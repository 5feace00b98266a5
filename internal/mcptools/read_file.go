package mcptools

import (
	"context"
	"errors"
	"net/url"
	"strconv"

	"github.com/google/jsonschema-go/jsonschema"
)

const (
	// defaultRead and maxRead are how many bytes of a file one call returns.
	defaultRead = 1 << 20
	maxRead     = 8 << 20
)

type readFileArguments struct {
	reference
	Path     string `json:"path" jsonschema:"the file's absolute path in the VM"`
	Offset   int64  `json:"offset,omitempty" jsonschema:"the byte to start at (default: 0)"`
	Limit    int64  `json:"limit,omitempty" jsonschema:"the most bytes to return (default: 1 MiB)"`
	Encoding string `json:"encoding,omitempty" jsonschema:"how to return the content (default: utf8 where all of it is UTF-8, else base64). With utf8, content that is not UTF-8 is an error"`
}

type readFileResult struct {
	Path       string `json:"path" jsonschema:"the file's path"`
	Size       int64  `json:"size" jsonschema:"the size of the whole file in bytes; 0 also for files without a size, as in /proc"`
	Mode       string `json:"mode,omitempty" jsonschema:"its permission bits, in octal"`
	Mtime      string `json:"mtime,omitempty" jsonschema:"when it was changed"`
	Offset     int64  `json:"offset" jsonschema:"the byte at which content starts"`
	Bytes      int    `json:"bytes" jsonschema:"how many bytes of the file content holds"`
	Content    string `json:"content" jsonschema:"those bytes"`
	Encoding   string `json:"encoding" jsonschema:"how content has them: utf8 or base64"`
	Truncated  bool   `json:"truncated" jsonschema:"whether the file goes on after content"`
	NextOffset int64  `json:"nextOffset,omitempty" jsonschema:"the offset to go on with, where it does"`
}

func readFileTool() tool {
	return define(spec{
		name:  "capsem_read_file",
		title: "Read a file of a VM",
		text: `Read a regular file from a running VM, whole or a part of it. Use it rather than a command such as cat: nothing of the file is changed on the way.
Returns content and how it is encoded: utf8 where all of what is returned is UTF-8, else base64. One call returns at most 8 MiB; where the file goes on, truncated is true and nextOffset is where. A part of a text ends between characters.`,
		hints: reads,
		refine: func(p map[string]*jsonschema.Schema) {
			oneOf(p["encoding"], encodingUTF8, encodingBase64)
			between(p["limit"], 1, maxRead)
			least := 0.0
			p["offset"].Minimum = &least
			fallback(p["limit"], strconv.Itoa(defaultRead))
		},
	}, func(ctx context.Context, c *call, in readFileArguments) (readFileResult, error) {
		path, err := in.path("/files", url.Values{
			"path": {in.Path}, "offset": {strconv.FormatInt(in.Offset, 10)}, "limit": {strconv.FormatInt(in.Limit, 10)},
		})
		if err != nil {
			return readFileResult{}, err
		}
		part := &bounded{left: in.Limit}
		info, err := c.Download(ctx, path, part)
		if err != nil {
			return readFileResult{}, err
		}
		content := part.kept
		// A file without a size (in /proc) ends where less came than was asked for.
		end := in.Offset + int64(len(content))
		truncated := int64(len(content)) == in.Limit && (end < info.Size || info.Size == 0)
		if truncated && in.Encoding != encodingBase64 {
			content = wholeRunes(content)
		}
		result := readFileResult{
			Path: info.Path, Size: info.Size, Mode: info.Mode, Mtime: info.Mtime,
			Offset: in.Offset, Bytes: len(content), Truncated: truncated,
		}
		if truncated {
			result.NextOffset = in.Offset + int64(len(content))
		}
		result.Content, result.Encoding = encodeBytes(content, in.Encoding)
		if in.Encoding == encodingUTF8 && result.Encoding != encodingUTF8 {
			return result, invalid("what was read of %s is not UTF-8: read it with encoding base64", in.Path)
		}
		return result, nil
	})
}

// bounded keeps what is written to it, and no more than was asked for.
type bounded struct {
	kept []byte
	left int64
}

func (b *bounded) Write(p []byte) (int, error) {
	if b.left -= int64(len(p)); b.left < 0 {
		return 0, errors.New("more arrived than was asked for")
	}
	b.kept = append(b.kept, p...)
	return len(p), nil
}
