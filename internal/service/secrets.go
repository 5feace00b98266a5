package service

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/config"
	"github.com/capsem/capsem/internal/ledger"
)

// maxSecret is the size of one secret, in bytes.
const maxSecret = 64 << 10

func (s *Service) serveSecrets(w http.ResponseWriter, _ *http.Request) error {
	names, err := s.opts.Home.SecretStore().List()
	if err != nil {
		return err
	}
	if names == nil {
		names = []string{}
	}
	api.WriteJSON(w, http.StatusOK, api.SecretList{Names: names})
	return nil
}

func (s *Service) serveSecretSet(w http.ResponseWriter, r *http.Request) error {
	name := r.PathValue("name")
	if err := config.CheckSecretName(name); err != nil {
		return &api.Error{Code: api.CodeInvalid, Message: err.Error()}
	}
	value, err := io.ReadAll(io.LimitReader(r.Body, maxSecret+1))
	if err != nil {
		return fmt.Errorf("reading the secret: %w", err)
	}
	// A shorter one could not be kept out of the ledger without mangling words.
	if len(value) < ledger.MinSecret || len(value) > maxSecret {
		return &api.Error{Code: api.CodeInvalid, Message: fmt.Sprintf("a secret has %d to %d bytes", ledger.MinSecret, maxSecret)}
	}
	if err := s.opts.Home.SecretStore().Set(name, config.NewSecret(string(value))); err != nil {
		return err
	}
	api.WriteJSON(w, http.StatusOK, api.SecretList{Names: []string{name}})
	return nil
}

func (s *Service) serveSecretRemove(w http.ResponseWriter, r *http.Request) error {
	name := r.PathValue("name")
	if err := config.CheckSecretName(name); err != nil {
		return &api.Error{Code: api.CodeInvalid, Message: err.Error()}
	}
	err := s.opts.Home.SecretStore().Remove(name)
	if errors.Is(err, config.ErrNoSecret) {
		return &api.Error{Code: api.CodeNotFound, Message: fmt.Sprintf("there is no secret called %q", name), Hint: "capsem secret list shows their names"}
	}
	if err != nil {
		return err
	}
	api.WriteJSON(w, http.StatusOK, api.SecretList{Names: []string{name}})
	return nil
}

// serveProfiles lists the profiles that a VM can be made from, with what is
// wrong with those that do not load.
func (s *Service) serveProfiles(w http.ResponseWriter, _ *http.Request) error {
	names, err := config.ProfileNames(s.opts.Home)
	if err != nil {
		return err
	}
	list := api.ProfileList{Profiles: []api.Profile{}}
	for _, name := range append([]string{config.DefaultProfile}, names...) {
		if len(list.Profiles) > 0 && name == config.DefaultProfile {
			continue
		}
		p, err := config.LoadProfile(s.opts.Home, name)
		if err != nil {
			list.Profiles = append(list.Profiles, api.Profile{Name: name, Error: strings.TrimSpace(err.Error())})
			continue
		}
		list.Profiles = append(list.Profiles, api.Profile{
			Name: name, File: p.File, Image: p.Image, CPUs: p.CPUs, MemoryBytes: int64(p.Memory),
			Default: p.Default, Servers: len(p.Servers), Rules: len(p.Rules),
		})
	}
	api.WriteJSON(w, http.StatusOK, list)
	return nil
}
