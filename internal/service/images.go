package service

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"strings"

	"github.com/capsem/capsem/internal/api"
	"github.com/capsem/capsem/internal/image"
)

func (s *Service) serveImages(w http.ResponseWriter, _ *http.Request) error {
	built, err := image.List(s.opts.Home.Images())
	if err != nil {
		return err
	}
	list := api.ImageList{Images: []api.Image{}}
	for _, b := range built {
		list.Images = append(list.Images, describe(b))
	}
	api.WriteJSON(w, http.StatusOK, list)
	return nil
}

func describe(b image.Stored) api.Image {
	return api.Image{
		Name: b.Ref.Name, Digest: "sha256:" + b.Ref.Digest, Kernel: b.Manifest.KernelRelease,
		SizeBytes: b.Manifest.Size(), BuiltAt: b.BuiltAt, Current: b.Current,
	}
}

// serveImageBuild has a process of its own build an image: it alone of all our
// processes fetches anything.
func (s *Service) serveImageBuild(w http.ResponseWriter, r *http.Request) error {
	var req api.ImageBuildRequest
	if err := api.ReadJSON(r, &req); err != nil {
		return err
	}
	if req.Name == "" || strings.HasPrefix(req.Name, "-") {
		return &api.Error{Code: api.CodeInvalid, Message: fmt.Sprintf("there is no image %q", req.Name), Hint: "capsem image build tiny"}
	}
	return progress(w, r, func(step func(string)) (v any, err error) {
		err = s.admin(r, "build image "+req.Name, func(ctx context.Context) error {
			v, err = s.buildImage(ctx, req.Name, step)
			return err
		})
		return v, err
	})
}

// buildImage runs `capsemd image build` and passes on what it says.
func (s *Service) buildImage(ctx context.Context, name string, step func(string)) (v api.Image, err error) {
	cmd := exec.CommandContext(ctx, s.opts.Executable, "image", "build", name)
	cmd.Env, cmd.Dir = s.opts.Env, "/"
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return v, fmt.Errorf("starting the image build: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return v, fmt.Errorf("starting the image build: %w", err)
	}
	lines := json.NewDecoder(out)
	var last api.Progress
	for lines.Decode(&last) == nil {
		if last.Step != "" {
			step(last.Step)
		}
		if last.Error != nil || last.Result != nil {
			break
		}
		last = api.Progress{}
	}
	wait := cmd.Wait()
	switch {
	case last.Error != nil:
		return v, last.Error
	case last.Result == nil:
		return v, errors.Join(fmt.Errorf("the image build ended without a result: %s", stderr.String()), wait)
	}
	if err := json.Unmarshal(last.Result, &v); err != nil {
		return v, fmt.Errorf("reading what the image build says: %w", err)
	}
	return v, nil
}
