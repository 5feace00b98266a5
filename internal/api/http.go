package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
)

// WriteJSON answers with a value. A caller that went away is not an error of
// the server's.
func WriteJSON(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		status, b = http.StatusInternalServerError, []byte(`{"error":{"code":"failed","message":"the answer cannot be encoded"}}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if _, err := w.Write(append(b, '\n')); err != nil {
		return // nobody is there to be told
	}
}

// WriteError answers with err: an *Error as it is, anything else as a failure.
func WriteError(w http.ResponseWriter, err error) {
	e := AsError(err)
	WriteJSON(w, e.Code.Status(), ErrorBody{Error: e})
}

// AsError returns the *Error in err's tree, or err's text as a failure.
func AsError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return &Error{Code: CodeFailed, Message: err.Error()}
}

// ReadJSON decodes a request's body strictly into v. An empty body leaves v as
// it is.
func ReadJSON(r *http.Request, v any) error {
	dec := json.NewDecoder(io.LimitReader(r.Body, MaxBody+1))
	dec.DisallowUnknownFields()
	switch err := dec.Decode(v); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil && dec.InputOffset() >= MaxBody:
		return &Error{Code: CodeTooLarge, Message: fmt.Sprintf("the request has more than %d bytes", MaxBody)}
	case err != nil:
		return &Error{Code: CodeInvalid, Message: "reading the request: " + err.Error()}
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return &Error{Code: CodeInvalid, Message: "the request has something after its JSON value"}
	}
	return nil
}
