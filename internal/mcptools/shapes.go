package mcptools

import (
	"time"

	"github.com/capsem/capsem/internal/api"
)

// This file has the shapes that tools answer with, and how each is made of what
// the service answers.

// machine is a VM.
type machine struct {
	ID          string   `json:"id" jsonschema:"its id, which is never used again"`
	Name        string   `json:"name" jsonschema:"its name; both name and id can be given as id to other tools"`
	State       string   `json:"state" jsonschema:"creating, running, stopped, suspended, failed, deleting or deleted"`
	Reason      string   `json:"reason,omitempty" jsonschema:"why it failed or stopped"`
	Profile     string   `json:"profile" jsonschema:"the profile it was made from"`
	Image       string   `json:"image" jsonschema:"the image it boots, with its digest"`
	CPUCount    int      `json:"cpuCount" jsonschema:"how many processors it has"`
	RAMMb       int64    `json:"ramMb" jsonschema:"how much memory it has, in MiB"`
	Accelerator string   `json:"accelerator,omitempty" jsonschema:"what runs it: kvm, or tcg (slow emulation)"`
	Isolation   string   `json:"isolation,omitempty" jsonschema:"how the processes under its host process are held"`
	PID         int      `json:"pid,omitempty" jsonschema:"its host process, while it runs"`
	CreatedAt   string   `json:"createdAt" jsonschema:"when it was made"`
	StartedAt   string   `json:"startedAt,omitempty" jsonschema:"when it was last ready"`
	BootMs      int64    `json:"bootMs,omitempty" jsonschema:"how long that start took, in milliseconds"`
	Incarnation int      `json:"incarnation" jsonschema:"how often it was started"`
	Ephemeral   bool     `json:"ephemeral,omitempty" jsonschema:"whether it is deleted when it stops"`
	Notes       []string `json:"notes,omitempty" jsonschema:"what its user should know"`
	Servers     []server `json:"servers,omitempty" jsonschema:"the MCP servers that agents inside it can use"`
}

// server is an MCP server of a VM.
type server struct {
	Name   string `json:"name" jsonschema:"its name"`
	State  string `json:"state" jsonschema:"how it is"`
	Detail string `json:"detail,omitempty" jsonschema:"why it is in that state"`
	Tools  int    `json:"tools" jsonschema:"how many tools it offers"`
}

func machineOf(v api.VM) machine {
	m := machine{
		ID: v.ID, Name: v.Name, State: string(v.State), Reason: v.Reason, Profile: v.Profile, Image: v.Image,
		CPUCount: v.CPUs, RAMMb: v.MemoryBytes / mebibyte, Accelerator: v.Accelerator, Isolation: v.Isolation,
		PID: v.PID, CreatedAt: v.CreatedAt.UTC().Format(time.RFC3339), BootMs: v.BootMS, Incarnation: v.Incarnation,
		Ephemeral: v.Ephemeral, Notes: v.Notes,
	}
	if v.StartedAt != nil {
		m.StartedAt = v.StartedAt.UTC().Format(time.RFC3339)
	}
	for _, s := range v.Servers {
		m.Servers = append(m.Servers, server{Name: s.Name, State: s.State, Detail: s.Detail, Tools: s.Tools})
	}
	return m
}

// mebibyte is the unit of ramMb, in bytes.
const mebibyte = 1 << 20

// outcome is how a command ended.
type outcome struct {
	ExitCode       int    `json:"exitCode" jsonschema:"the command's exit code; 128+N where signal N ended it, 127 where there is no such program"`
	Stdout         string `json:"stdout" jsonschema:"what it wrote to stdout"`
	StdoutEncoding string `json:"stdoutEncoding" jsonschema:"utf8, or base64 where stdout is not all UTF-8"`
	StdoutBytes    int64  `json:"stdoutBytes" jsonschema:"how many bytes it wrote to stdout, also where not all are here"`
	Stderr         string `json:"stderr" jsonschema:"what it wrote to stderr"`
	StderrEncoding string `json:"stderrEncoding" jsonschema:"utf8, or base64 where stderr is not all UTF-8"`
	StderrBytes    int64  `json:"stderrBytes" jsonschema:"how many bytes it wrote to stderr, also where not all are here"`
	Truncated      bool   `json:"truncated" jsonschema:"whether some output is left out"`
	Signal         string `json:"signal,omitempty" jsonschema:"the signal that ended it"`
	TimedOut       bool   `json:"timedOut,omitempty" jsonschema:"whether it was ended because its time was over"`
	Leaked         bool   `json:"leaked,omitempty" jsonschema:"whether a process that it left behind still holds its output"`
	Message        string `json:"message,omitempty" jsonschema:"why it could not be started"`
	DurationMs     int64  `json:"durationMs" jsonschema:"how long it ran, in milliseconds"`
	EventID        string `json:"eventId" jsonschema:"its event in the VM's ledger"`
}

func outcomeOf(r api.ExecResult, encoding string) outcome {
	o := outcome{
		ExitCode: r.ExitCode, Signal: r.Signal, TimedOut: r.TimedOut, Leaked: r.Leaked, Message: r.Message,
		StdoutBytes: r.StdoutBytes, StderrBytes: r.StderrBytes,
		Truncated:  r.Truncated || int64(len(r.Stdout)) < r.StdoutBytes || int64(len(r.Stderr)) < r.StderrBytes,
		DurationMs: r.DurationUS / 1000, EventID: r.EventID,
	}
	o.Stdout, o.StdoutEncoding = encodeStream(r.Stdout, r.StdoutBytes, encoding)
	o.Stderr, o.StderrEncoding = encodeStream(r.Stderr, r.StderrBytes, encoding)
	return o
}

// encodeStream encodes a stream of which there were total bytes.
func encodeStream(b []byte, total int64, encoding string) (value, how string) {
	if int64(len(b)) < total && encoding != encodingBase64 {
		b = wholeRunes(b)
	}
	return encodeBytes(b, encoding)
}

// moment is one thing that happened in a VM.
type moment struct {
	Timestamp     string `json:"timestamp" jsonschema:"when it happened"`
	Layer         string `json:"layer" jsonschema:"what kind of thing it is"`
	EventID       string `json:"eventId" jsonschema:"its id in the ledger"`
	TraceID       string `json:"traceId,omitempty" jsonschema:"what belongs together has one trace"`
	InitiatorKind string `json:"initiatorKind,omitempty" jsonschema:"what caused it: person, host_agent, guest_agent ..."`
	InitiatorID   string `json:"initiatorId,omitempty" jsonschema:"which of those"`
	Process       string `json:"process,omitempty" jsonschema:"what the guest's process said its name was"`
	Subject       string `json:"subject" jsonschema:"what it is about: a tool, a command, a URL, a rule"`
	Status        string `json:"status,omitempty" jsonschema:"how it ended"`
	Decision      string `json:"decision,omitempty" jsonschema:"what the rules decided"`
	Rule          string `json:"rule,omitempty" jsonschema:"the rule that decided"`
	Detail        string `json:"detail,omitempty" jsonschema:"more about it"`
	DurationMs    int64  `json:"durationMs,omitempty" jsonschema:"how long it took, in milliseconds"`
}

func momentOf(e api.TimelineEntry) moment {
	return moment{
		Timestamp: e.Timestamp, Layer: e.Layer, EventID: e.EventID, TraceID: e.TraceID,
		InitiatorKind: e.InitiatorKind, InitiatorID: e.InitiatorID, Process: e.Process,
		Subject: e.Subject, Status: e.Status, Decision: e.Decision, Rule: e.Rule, Detail: e.Detail,
		DurationMs: e.DurationUS / 1000,
	}
}
