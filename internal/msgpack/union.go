package msgpack

import (
	"fmt"
	"reflect"
)

// Member returns the name of the one member that is set of union, a pointer to a
// struct all of whose fields are pointers. It is an error if none is, as with a
// message of a kind that this program does not know, or more than one.
func Member(union any) (string, error) {
	v := reflect.ValueOf(union).Elem()
	set := -1
	for i := range v.NumField() {
		switch {
		case v.Field(i).IsNil():
		case set >= 0:
			return "", fmt.Errorf("%s with both %s and %s", v.Type(), v.Type().Field(set).Name, v.Type().Field(i).Name)
		default:
			set = i
		}
	}
	if set < 0 {
		return "", fmt.Errorf("%s without a known member", v.Type())
	}
	return v.Type().Field(set).Name, nil
}
