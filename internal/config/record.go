package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"
)

// recordVersion is the version of both records. A record of another version is
// refused, never guessed at.
const recordVersion = 1

// maxRecordBytes bounds a record's file.
const maxRecordBytes = 1 << 20

// Lifecycle is the state of a VM, as the service sees it.
type Lifecycle string

// The lifecycle states.
const (
	Creating  Lifecycle = "creating"
	Running   Lifecycle = "running"
	Stopped   Lifecycle = "stopped"
	Suspended Lifecycle = "suspended"
	Failed    Lifecycle = "failed"
	// Deleting is finished by the next service after a crash.
	Deleting Lifecycle = "deleting"
)

// VMRecord is vm.json: the truth about a VM. The service alone writes it.
type VMRecord struct {
	Version int       `json:"version"`
	ID      string    `json:"id"`
	Name    string    `json:"name"`
	State   Lifecycle `json:"state"`
	// Reason says why State is what it is, where that needs saying.
	Reason    string    `json:"reason,omitempty"`
	CreatedAt time.Time `json:"created_at"`
	// Profile is the name of the profile that the VM was made from.
	Profile string `json:"profile"`
	Spec    VMSpec `json:"spec"`
	// Incarnation counts the starts of this VM, from 1.
	Incarnation int `json:"incarnation"`
	// Ephemeral VMs are deleted when they stop.
	Ephemeral bool `json:"ephemeral,omitempty"`
	// RequestKey is the caller's key of the request that created the VM.
	RequestKey string `json:"request_key,omitempty"`
}

// VMSpec is what a VM was created with, after command line and profile were put
// together. It does not change when the profile does.
type VMSpec struct {
	Image string `json:"image"`
	// ImageDigest pins the image: a start takes this one or fails.
	ImageDigest string            `json:"image_digest"`
	CPUs        int               `json:"cpus"`
	MemoryBytes int64             `json:"memory_bytes"`
	Env         map[string]string `json:"env,omitempty"`
	Accelerator string            `json:"accelerator"`
	Durability  string            `json:"durability"`
}

// Phase is how far a VM's process has come.
type Phase string

// The phases of a VM's process.
const (
	Starting Phase = "starting"
	Ready    Phase = "ready"
	Stopping Phase = "stopping"
	Exited   Phase = "exited"
)

// VMState is state.json: what a VM's process says of itself. That process alone
// writes it.
type VMState struct {
	Version     int   `json:"version"`
	Incarnation int   `json:"incarnation"`
	Phase       Phase `json:"phase"`
	// Process is who wrote this.
	Process ProcessIdentity `json:"process"`
	// ExitReason says why the process ended or is ending, "" for an orderly stop.
	ExitReason string `json:"exit_reason,omitempty"`
	// Accelerator is what runs guest code: "kvm" or "tcg".
	Accelerator string `json:"accelerator,omitempty"`
	// Isolation says what confines the processes below this one.
	Isolation string `json:"isolation,omitempty"`
	// BootMS is how long the start took until then, in milliseconds.
	BootMS int64 `json:"boot_ms,omitempty"`
	// ReadyAt is when a command would first have succeeded, zero before that.
	ReadyAt time.Time `json:"ready_at,omitzero"`
}

// WriteVMRecord replaces the record at path. It fills in Version.
func WriteVMRecord(path string, r VMRecord) error {
	r.Version = recordVersion
	if err := r.check(); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return writeRecord(path, r)
}

// ReadVMRecord reads the record at path. A missing file matches fs.ErrNotExist.
func ReadVMRecord(path string) (VMRecord, error) {
	var r VMRecord
	if err := readRecord(path, &r); err != nil {
		return VMRecord{}, err
	}
	if err := r.check(); err != nil {
		return VMRecord{}, fmt.Errorf("reading %s: %w", path, err)
	}
	return r, nil
}

func (r VMRecord) check() error {
	if !IsID(r.ID) {
		return fmt.Errorf("%q is no VM id", r.ID)
	}
	if err := CheckName(r.Name); err != nil {
		return err
	}
	states := []Lifecycle{Creating, Running, Stopped, Suspended, Failed, Deleting}
	if !slices.Contains(states, r.State) {
		return fmt.Errorf("%q is no state of a VM", r.State)
	}
	return nil
}

// WriteVMState replaces the state at path. It fills in Version.
func WriteVMState(path string, s VMState) error {
	s.Version = recordVersion
	if err := s.check(); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return writeRecord(path, s)
}

// ReadVMState reads the state at path. A missing file matches fs.ErrNotExist.
func ReadVMState(path string) (VMState, error) {
	var s VMState
	if err := readRecord(path, &s); err != nil {
		return VMState{}, err
	}
	if err := s.check(); err != nil {
		return VMState{}, fmt.Errorf("reading %s: %w", path, err)
	}
	return s, nil
}

func (s VMState) check() error {
	if !slices.Contains([]Phase{Starting, Ready, Stopping, Exited}, s.Phase) {
		return fmt.Errorf("%q is no phase of a VM's process", s.Phase)
	}
	if s.Process.PID <= 0 {
		return fmt.Errorf("process id %d is not valid", s.Process.PID)
	}
	return nil
}

func writeRecord(path string, record any) error {
	data, err := json.MarshalIndent(record, "", "  ")
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	if err := replaceFile(path, append(data, '\n')); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}

func readRecord(path string, record any) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxRecordBytes+1))
	if err != nil {
		return fmt.Errorf("reading %s: %w", path, err)
	}
	if len(data) > maxRecordBytes {
		return fmt.Errorf("reading %s: it is larger than %d bytes", path, maxRecordBytes)
	}
	if err := decodeRecord(data, record); err != nil {
		return fmt.Errorf("reading %s: %w", path, err)
	}
	return nil
}

// decodeRecord decodes one JSON object without unknown members. The version is
// checked first, so that a newer record is named as such.
func decodeRecord(data []byte, record any) error {
	var head struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return err
	}
	if head.Version != recordVersion {
		return fmt.Errorf("the record has version %d, this program knows version %d", head.Version, recordVersion)
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(record); err != nil {
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is more after the record")
	}
	return nil
}
