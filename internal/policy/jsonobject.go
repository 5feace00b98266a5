package policy

import (
	"encoding/json"
	"reflect"

	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"cel.dev/cel-go/common/types/traits"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/capsem/capsem/internal/jsonrpc"
)

// maxLookups is how many members are looked up in the bytes before an object is
// converted whole.
const maxLookups = 8

// object is a JSON object of which rules usually read one member or two: only
// those are converted. It serves one judgement, on one goroutine, and implements
// CEL's map.
type object struct {
	raw json.RawMessage
	// found are the members looked up so far; a nil value is one that is not there.
	found []lookup
	// whole is the converted object, nil until something needs it.
	whole traits.Mapper
}

type lookup struct {
	name  string
	value ref.Val
}

// lazyObject makes a map of a JSON object. Everything else, and an object that
// two readers could understand differently, is an error value.
func lazyObject(raw json.RawMessage) ref.Val {
	// IsValid refuses duplicate names and invalid UTF-8.
	if v := jsontext.Value(raw); !v.IsValid() || v.Kind() != jsontext.KindBeginObject {
		return jsonObject(raw) // which says what is wrong
	}
	return &object{raw: raw}
}

// FindStringKey returns a member. It is called by CEL.
func (o *object) FindStringKey(name string) (any, bool) {
	v := o.member(name)
	return v, v != nil
}

// member returns a member, nil if there is none. What cannot be converted is an
// error value.
func (o *object) member(name string) ref.Val {
	for _, l := range o.found {
		if l.name == name {
			return l.value
		}
	}
	if len(o.found) >= maxLookups {
		v, _ := o.all().Find(types.String(name))
		return v
	}
	var v ref.Val
	if raw, ok := jsonrpc.Member(o.raw, name); ok {
		v = jsonScalar(raw)
	}
	o.found = append(o.found, lookup{name, v})
	return v
}

// jsonScalar is jsonValue without a decoder for what needs none. The value was
// found valid before.
func jsonScalar(raw json.RawMessage) ref.Val {
	if s, ok := jsonrpc.String(raw); ok {
		return types.String(s)
	}
	return jsonValue(raw)
}

// all converts the whole object. That it can be read is known; if it cannot be, the
// panic makes the judgement fail.
func (o *object) all() traits.Mapper {
	if o.whole == nil {
		v := jsonObject(o.raw)
		m, ok := v.(traits.Mapper)
		if !ok {
			panic(v)
		}
		o.whole = m
	}
	return o.whole
}

// The rest of the file is CEL's interface of a map.

// Find returns the value under a key, and whether there is one.
func (o *object) Find(key ref.Val) (ref.Val, bool) {
	if name, ok := key.(types.String); ok {
		v := o.member(string(name))
		return v, v != nil
	}
	return o.all().Find(key)
}

// Get returns the value under a key, or an error value.
func (o *object) Get(key ref.Val) ref.Val {
	if v, ok := o.Find(key); ok {
		return v
	}
	return o.all().Get(key)
}

// Contains says whether there is a value under a key.
func (o *object) Contains(key ref.Val) ref.Val {
	if name, ok := key.(types.String); ok {
		return types.Bool(o.member(string(name)) != nil)
	}
	return o.all().Contains(key)
}

// Iterator iterates over the keys.
func (o *object) Iterator() traits.Iterator { return o.all().Iterator() }

// Size is the number of members.
func (o *object) Size() ref.Val { return o.all().Size() }

// ConvertToNative converts the map to a Go value.
func (o *object) ConvertToNative(t reflect.Type) (any, error) { return o.all().ConvertToNative(t) }

// ConvertToType converts the map to another type of CEL.
func (o *object) ConvertToType(t ref.Type) ref.Val { return o.all().ConvertToType(t) }

// Equal compares the map with another value.
func (o *object) Equal(other ref.Val) ref.Val {
	if same, ok := other.(*object); ok {
		other = same.all()
	}
	return o.all().Equal(other)
}

// Type is CEL's type of maps.
func (o *object) Type() ref.Type { return types.MapType }

// Value is the Go value of the map.
func (o *object) Value() any { return o.all().Value() }
