package service

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/ledger"
)

// sealedRecord is the deleted VM's record beside its ledger.
const sealedRecord = "vm.json"

// seal closes the ledger of a VM that is about to go, and moves it to where
// those of deleted VMs are kept, with the VM's record beside it. A VM that
// never had a ledger leaves none; one that is damaged is kept as it was found, for
// whoever can still read it.
func (s *Service) seal(ctx context.Context, m *machine) error {
	home, id := s.opts.Home, m.id
	from, to := home.Ledger(id), home.SealedLedger(id)
	if _, err := os.Stat(from); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	l, err := ledger.Open(ctx, from, ledger.Options{Log: s.log})
	if err == nil {
		err = l.Seal(ctx)
	}
	parts := []string{""}
	switch {
	case errors.Is(err, ledger.ErrDamaged):
		s.log.Error("keeping a damaged ledger as it is", "vm", id, "error", err)
		parts = []string{"-wal", "-shm", ""}
	case errors.Is(err, ledger.ErrSealed):
	case err != nil:
		return err
	}
	if err := os.MkdirAll(home.SealedFolder(id), 0o700); err != nil {
		return fmt.Errorf("making the folder of sealed ledgers: %w", err)
	}
	record, _ := m.snapshot()
	if err := config.WriteVMRecord(filepath.Join(home.SealedFolder(id), sealedRecord), record); err != nil {
		return err
	}
	for _, part := range parts { // the ledger itself last: it says that there is something to do
		if err := os.Rename(from+part, to+part); err != nil && (part == "" || !errors.Is(err, fs.ErrNotExist)) {
			return fmt.Errorf("moving the sealed ledger: %w", err)
		}
	}
	return nil
}

// deletedVM finds a deleted VM by id, or the last deleted of a name.
func (s *Service) deletedVM(ref string) (api.VM, bool) {
	home := s.opts.Home
	if config.IsID(ref) {
		r, err := config.ReadVMRecord(filepath.Join(home.SealedFolder(ref), sealedRecord))
		return deletedView(r), err == nil
	}
	entries, err := os.ReadDir(home.Ledgers())
	if err != nil {
		return api.VM{}, false
	}
	var newest config.VMRecord
	for _, e := range entries {
		r, err := config.ReadVMRecord(filepath.Join(home.SealedFolder(e.Name()), sealedRecord))
		if err == nil && r.Name == ref && r.CreatedAt.After(newest.CreatedAt) {
			newest = r
		}
	}
	return deletedView(newest), newest.ID != ""
}

func deletedView(r config.VMRecord) api.VM {
	return api.VM{
		ID: r.ID, Name: r.Name, State: api.StateDeleted, Profile: r.Profile, Image: r.Spec.Image,
		CreatedAt: r.CreatedAt, CPUs: r.Spec.CPUs, MemoryBytes: r.Spec.MemoryBytes, Incarnation: r.Incarnation,
	}
}
