package mcptools

import (
	"bytes"
	"context"
	"net/url"

	"github.com/google/jsonschema-go/jsonschema"
)

type writeFileArguments struct {
	reference
	Path     string `json:"path" jsonschema:"the file's absolute path in the VM"`
	Content  string `json:"content" jsonschema:"what to write"`
	Encoding string `json:"encoding,omitempty" jsonschema:"how content is given (default: utf8)"`
	Mode     string `json:"mode,omitempty" jsonschema:"permission bits in octal, as 0755 (default: those the file has, 0644 for a new one)"`
	Append   bool   `json:"append,omitempty" jsonschema:"add to the end of the file instead of replacing it"`
}

type writeFileResult struct {
	Path   string `json:"path" jsonschema:"the file's path"`
	Size   int64  `json:"size" jsonschema:"its size now, in bytes"`
	Mode   string `json:"mode,omitempty" jsonschema:"its permission bits, in octal"`
	SHA256 string `json:"sha256,omitempty" jsonschema:"the digest of what was written"`
	Bytes  int    `json:"bytes" jsonschema:"how many bytes were written"`
}

func writeFileTool() tool {
	return define(spec{
		name:  "capsem_write_file",
		title: "Write a file of a VM",
		text: `Write a file in a running VM: replace it in one step, or with append add to it. Folders that are missing are made. Use it rather than a shell command: nothing of the content is changed on the way; give encoding base64 for what is not text.
Returns the file's size. What a call can carry is about 12 MiB of content; write more in parts with append.`,
		hints: hints{destructive: true},
		refine: func(p map[string]*jsonschema.Schema) {
			oneOf(p["encoding"], encodingUTF8, encodingBase64)
			p["mode"].Pattern = "^0?[0-7]{3,4}$"
		},
	}, func(ctx context.Context, c *call, in writeFileArguments) (writeFileResult, error) {
		content, err := decodeBytes("content", in.Content, in.Encoding)
		if err != nil {
			return writeFileResult{}, err
		}
		query := url.Values{"path": {in.Path}, "parents": {"true"}}
		if in.Mode != "" {
			query.Set("mode", in.Mode)
		}
		if in.Append {
			query.Set("append", "true")
		}
		path, err := in.path("/files", query)
		if err != nil {
			return writeFileResult{}, err
		}
		info, err := c.Upload(ctx, path, bytes.NewReader(content), int64(len(content)))
		return writeFileResult{Path: info.Path, Size: info.Size, Mode: info.Mode, SHA256: info.SHA256, Bytes: len(content)}, err
	})
}
