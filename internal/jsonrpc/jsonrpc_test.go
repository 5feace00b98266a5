package jsonrpc_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/capsem/capsem/internal/jsonrpc"
)

func parse(t testing.TB, in string) jsonrpc.Message {
	t.Helper()
	m, err := jsonrpc.Parse([]byte(in))
	if err != nil {
		t.Fatalf("parsing %.100q: %v", in, err)
	}
	return m
}

func TestMembersAreTheBytesThatCame(t *testing.T) {
	type view struct {
		Kind                              string
		ID, Method, Params, Result, Error string
	}
	tests := []struct {
		in   string
		want view
	}{
		{`{"jsonrpc":"2.0","id":1,"method":"ping"}`, view{"request", "1", "ping", "", "", ""}},
		{" \r\n{ \"method\" : \"a\\u0062\" ,\t\"id\": 1e3 , \"params\" : [ 1 , 2 ] ,\"jsonrpc\":\"2.0\" }\n ", view{"request", "1e3", "ab", "[ 1 , 2 ]", "", ""}},
		{`{"jsonrpc":"2.0","method":"notifications/progress","params":{}}`, view{"notification", "", "notifications/progress", "{}", "", ""}},
		{`{"jsonrpc":"2.0","id":"x","result":null,"vendor":[{}]}`, view{"response", `"x"`, "", "", "null", ""}},
		{`{"jsonrpc":"2.0","id":7,"error":{"code":-1,"message":"m"}}`, view{"response", "7", "", "", "", `{"code":-1,"message":"m"}`}},
		{`{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"m"}}`, view{"response", "null", "", "", "", `{"code":-32700,"message":"m"}`}},
		{`{"\u006asonrpc":"\u0032.0","i\u0064":5,"method":"m","params":{"a":{"b":1},"A2":{"b":2}}}`, view{"request", "5", "m", `{"a":{"b":1},"A2":{"b":2}}`, "", ""}},
		{`{"jsonrpc":"2.0","method":"😀\ud83d\ude00\u0000","id":0}`, view{"request", "0", "😀😀\x00", "", "", ""}},
	}
	for _, tt := range tests {
		m := parse(t, tt.in)
		got := view{m.Kind.String(), string(m.ID), m.Method, string(m.Params), string(m.Result), string(m.Error)}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.in, diff)
		}
		if want := strings.TrimSpace(tt.in); string(m.Raw) != want {
			t.Errorf("Raw is %q, want %q", m.Raw, want)
		}
	}
}

func TestIdsRoundTripByteForByte(t *testing.T) {
	for _, id := range []string{
		"0", "-0", "1e3", "1.5", "9007199254740993", "-9007199254740993", "1E+400", "123456789012345678901234567890",
		`""`, `"a"`, `"\u0061\/\""`, `"é😀"`, `"` + strings.Repeat("x", 10<<10) + `"`,
	} {
		m := parse(t, `{"jsonrpc":"2.0", "id" : `+id+` ,"method":"m"}`)
		if string(m.ID) != id {
			t.Errorf("got %s, want %s", m.ID, id)
		}
		if got := m.WithID(m.ID); !bytes.Equal(got, m.Raw) {
			t.Errorf("with its own id: %s", got)
		}
		if got, want := string(m.WithID([]byte("7"))), `{"jsonrpc":"2.0", "id" : 7 ,"method":"m"}`; got != want {
			t.Errorf("with another id: got %s, want %s", got, want)
		}
		r := parse(t, string(jsonrpc.AppendResult(nil, m.ID, []byte("{}"))))
		if string(r.ID) != id {
			t.Errorf("response: got %s, want %s", r.ID, id)
		}
	}
}

// refusals are the rows of the wire format's table of malformed input that are
// about payloads, with the id that the answer echoes.
var refusals = []struct {
	name, in string
	code     int
	detail   jsonrpc.Detail
	id       string
}{
	{"nothing", ``, -32700, jsonrpc.NotJSON, ""},
	{"white space", " \n", -32700, jsonrpc.NotJSON, ""},
	{"text", `hello`, -32700, jsonrpc.NotJSON, ""},
	{"cut off", `{"jsonrpc":"2.0","id":1,"method":"m"`, -32700, jsonrpc.NotJSON, ""},
	{"two values", `{"jsonrpc":"2.0","id":1,"method":"m"}{}`, -32700, jsonrpc.NotJSON, ""},
	{"trailing comma", `{"jsonrpc":"2.0","id":1,"method":"m",}`, -32700, jsonrpc.NotJSON, ""},
	{"trailing comma in an array", `[1,]`, -32700, jsonrpc.NotJSON, ""},
	{"comment", `{"jsonrpc":"2.0",/**/"id":1,"method":"m"}`, -32700, jsonrpc.NotJSON, ""},
	{"single quotes", `{'jsonrpc':'2.0'}`, -32700, jsonrpc.NotJSON, ""},
	{"leading zero", `{"jsonrpc":"2.0","id":01,"method":"m"}`, -32700, jsonrpc.NotJSON, ""},
	{"leading plus", `{"jsonrpc":"2.0","id":+1,"method":"m"}`, -32700, jsonrpc.NotJSON, ""},
	{"NaN", `{"jsonrpc":"2.0","id":NaN,"method":"m"}`, -32700, jsonrpc.NotJSON, ""},
	{"newline in a string", "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"a\nb\"}", -32700, jsonrpc.NotJSON, ""},
	{"bad escape", `{"jsonrpc":"2.0","id":1,"method":"\x"}`, -32700, jsonrpc.NotJSON, ""},
	{"short escape", `{"jsonrpc":"2.0","id":1,"method":"\u12"}`, -32700, jsonrpc.NotJSON, ""},
	{"byte order mark", "\ufeff{}", -32700, jsonrpc.NotJSON, ""},
	{"vertical tab as white space", "\v{}", -32700, jsonrpc.NotJSON, ""},
	{"Latin-1", "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"\xe9\"}", -32700, jsonrpc.NotUTF8, ""},
	{"overlong UTF-8", "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"\xc0\xaf\"}", -32700, jsonrpc.NotUTF8, ""},
	{"surrogate in UTF-8", "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"\xed\xa0\x80\"}", -32700, jsonrpc.NotUTF8, ""},
	{"UTF-8 cut off", "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"\xe2\x82\"}", -32700, jsonrpc.NotUTF8, ""},

	{"string", `"x"`, -32600, jsonrpc.NotObject, ""},
	{"null", `null`, -32600, jsonrpc.NotObject, ""},
	{"batch", `[{"jsonrpc":"2.0","id":1,"method":"m"}]`, -32600, jsonrpc.Batch, ""},
	{"empty batch", `[]`, -32600, jsonrpc.Batch, ""},
	{"no version", `{"id":1,"method":"m"}`, -32600, jsonrpc.Version, "1"},
	{"version 1.0", `{"jsonrpc":"1.0","id":"a","method":"m"}`, -32600, jsonrpc.Version, `"a"`},
	{"version as a number", `{"jsonrpc":2.0,"id":1,"method":"m"}`, -32600, jsonrpc.Version, "1"},
	{"method missing", `{"jsonrpc":"2.0","id":9007199254740993}`, -32600, jsonrpc.MethodMissing, "9007199254740993"},
	{"empty object", `{}`, -32600, jsonrpc.Version, ""},
	{"method empty", `{"jsonrpc":"2.0","id":-0,"method":""}`, -32600, jsonrpc.MethodEmpty, "-0"},
	{"method a number", `{"jsonrpc":"2.0","id":"","method":1}`, -32600, jsonrpc.MethodKind, `""`},
	{"method null", `{"jsonrpc":"2.0","id":1.5,"method":null}`, -32600, jsonrpc.MethodKind, "1.5"},
	{"params a string", `{"jsonrpc":"2.0","id":1,"method":"m","params":"x"}`, -32600, jsonrpc.ParamsKind, "1"},
	{"params null", `{"jsonrpc":"2.0","id":1,"method":"m","params":null}`, -32600, jsonrpc.ParamsKind, "1"},
	{"id null", `{"jsonrpc":"2.0","id":null,"method":"m"}`, -32600, jsonrpc.IDNull, ""},
	{"id a boolean", `{"jsonrpc":"2.0","id":true,"method":"m"}`, -32600, jsonrpc.IDKind, ""},
	{"id an object", `{"jsonrpc":"2.0","id":{},"method":"m"}`, -32600, jsonrpc.IDKind, ""},
	{"id an array", `{"jsonrpc":"2.0","id":[1],"method":"m"}`, -32600, jsonrpc.IDKind, ""},
	{"method and result", `{"jsonrpc":"2.0","id":1,"method":"m","result":1}`, -32600, jsonrpc.Mixed, "1"},
	{"result and error", `{"jsonrpc":"2.0","id":1,"result":1,"error":{}}`, -32600, jsonrpc.Mixed, "1"},
	{"error a string", `{"jsonrpc":"2.0","id":1,"error":"x"}`, -32600, jsonrpc.ErrorKind, "1"},
	{"result without id", `{"jsonrpc":"2.0","result":1}`, -32600, jsonrpc.IDMissing, ""},
	{"result for null", `{"jsonrpc":"2.0","id":null,"result":1}`, -32600, jsonrpc.IDNull, ""},

	{"two methods", `{"jsonrpc":"2.0","id":1,"method":"ping","method":"tools/call"}`, -32600, jsonrpc.DuplicateMember, "1"},
	{"two methods, one escaped", `{"jsonrpc":"2.0","id":1,"method":"ping","m\u0065thod":"tools/call"}`, -32600, jsonrpc.DuplicateMember, "1"},
	{"two ids", `{"jsonrpc":"2.0","id":1,"id":2,"method":"m"}`, -32600, jsonrpc.DuplicateMember, ""},
	{"two ids, one escaped", `{"jsonrpc":"2.0","\u0069d":1,"id":2,"method":"m"}`, -32600, jsonrpc.DuplicateMember, ""},
	{"two names in params", `{"jsonrpc":"2.0","id":1,"method":"m","params":{"name":"a","name":"b"}}`, -32600, jsonrpc.DuplicateMember, "1"},
	{"two names deep in arguments", `{"jsonrpc":"2.0","id":1,"method":"m","params":{"arguments":{"x":[{"y":{"z":1,"\u007a":2}}]}}}`, -32600, jsonrpc.DuplicateMember, "1"},
	{"two names in a result", `{"jsonrpc":"2.0","id":1,"result":{"content":[{"text":"a","text":"b"}]}}`, -32600, jsonrpc.DuplicateMember, "1"},
	{"two empty names", `{"jsonrpc":"2.0","id":1,"method":"m","params":{"":1,"":2}}`, -32600, jsonrpc.DuplicateMember, "1"},
	{"two names outside ASCII", `{"jsonrpc":"2.0","id":1,"method":"m","params":{"é😀":1,"\u00e9\ud83d\ude00":2}}`, -32600, jsonrpc.DuplicateMember, "1"},
	{"method in two cases", `{"jsonrpc":"2.0","id":1,"method":"ping","Method":"tools/call"}`, -32600, jsonrpc.CaseVariant, "1"},
	{"id in two cases", `{"jsonrpc":"2.0","id":1,"ID":2,"method":"m"}`, -32600, jsonrpc.CaseVariant, ""},
	{"id in the wrong case alone", `{"jsonrpc":"2.0","Id":1,"method":"m"}`, -32600, jsonrpc.CaseVariant, ""},
	{"result with a long s", `{"jsonrpc":"2.0","id":1,"method":"m","reſult":2}`, -32600, jsonrpc.CaseVariant, "1"},
	{"unknown members in two cases", `{"jsonrpc":"2.0","id":1,"method":"m","x":1,"X":2}`, -32600, jsonrpc.CaseVariant, "1"},
	{"params in two cases", `{"jsonrpc":"2.0","id":1,"method":"m","params":{"name":1,"NAME":2}}`, -32600, jsonrpc.CaseVariant, "1"},
	{"params with a Kelvin sign", `{"jsonrpc":"2.0","id":1,"method":"m","params":{"token":1,"to\u212aen":2}}`, -32600, jsonrpc.CaseVariant, "1"},
	{"lone high surrogate", `{"jsonrpc":"2.0","id":1,"method":"m","params":{"a":"\ud800"}}`, -32600, jsonrpc.LoneSurrogate, "1"},
	{"lone low surrogate", `{"jsonrpc":"2.0","id":1,"method":"m","params":{"a":"\udc00"}}`, -32600, jsonrpc.LoneSurrogate, "1"},
	{"surrogates the wrong way round", `{"jsonrpc":"2.0","id":1,"method":"m","params":["\udc00\ud800"]}`, -32600, jsonrpc.LoneSurrogate, "1"},
	{"high surrogate before an escape", `{"jsonrpc":"2.0","id":1,"method":"m","params":["\ud800\n"]}`, -32600, jsonrpc.LoneSurrogate, "1"},
	{"lone surrogate in a name", `{"jsonrpc":"2.0","id":1,"method":"m","params":{"\udfff":1}}`, -32600, jsonrpc.LoneSurrogate, "1"},
	{"lone surrogate in the id", `{"jsonrpc":"2.0","id":"\ud800","method":"m"}`, -32600, jsonrpc.LoneSurrogate, ""},
	{"too deep", `{"jsonrpc":"2.0","method":"m","params":` + nested(128) + `,"id":1}`, -32600, jsonrpc.TooDeep, "1"},
	{"much too deep", `{"jsonrpc":"2.0","method":"m","params":` + nested(1_000_000) + `,"id":1}`, -32600, jsonrpc.TooDeep, "1"},
	{"too deep and cut off", `{"jsonrpc":"2.0","id":1,"method":"m","params":` + strings.Repeat("[", 1_000_000), -32700, jsonrpc.NotJSON, ""},
	{"two faults", `{"jsonrpc":"2.0","id":1,"method":"m","params":{"a":1,"a":"\ud800"}}`, -32600, jsonrpc.DuplicateMember, "1"},
	{"two names and then no JSON", `{"jsonrpc":"2.0","id":1,"id":2,"method":"m"`, -32700, jsonrpc.NotJSON, ""},
}

// nested returns n arrays and objects in each other.
func nested(n int) string {
	return strings.Repeat(`{"":[`, n/2) + strings.Repeat("[", n%2) + strings.Repeat("]", n%2) + strings.Repeat("]}", n/2)
}

func TestMalformedMessagesAreRefusedAsTheWireFormatSays(t *testing.T) {
	for _, tt := range refusals {
		t.Run(tt.name, func(t *testing.T) {
			_, err := jsonrpc.Parse([]byte(tt.in))
			var e *jsonrpc.Error
			if !errors.As(err, &e) {
				t.Fatalf("got error %v", err)
			}
			if e.Code != tt.code || e.Detail != tt.detail || string(e.ID) != tt.id {
				t.Errorf("got %d %s id %q at %d, want %d %s id %q", e.Code, e.Detail, e.ID, e.Offset, tt.code, tt.detail, tt.id)
			}
			answer := parse(t, string(e.Response()))
			want := tt.id
			if want == "" {
				want = "null"
			}
			if string(answer.ID) != want || answer.Error == nil {
				t.Errorf("answer %s", answer.Raw)
			}
			if eo, ok := jsonrpc.ParseError(answer.Error); !ok || eo.Code != int64(tt.code) || eo.Message != e.Error() {
				t.Errorf("answer's error is %+v", eo)
			}
		})
	}
}

func TestRefusedMessagesSayWhatTheyWouldHaveBeen(t *testing.T) {
	_, err := jsonrpc.Parse([]byte(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"a":1,"a":2}}`))
	var e *jsonrpc.Error
	if !errors.As(err, &e) || e.Kind != jsonrpc.Request || e.Method != "tools/call" {
		t.Errorf("got %+v", e)
	}
	_, err = jsonrpc.Parse([]byte(`{"jsonrpc":"2.0","id":1,"result":{"a":1,"a":2}}`))
	if !errors.As(err, &e) || e.Kind != jsonrpc.Response {
		t.Errorf("got %+v", e)
	}
}

func TestNestingIsAcceptedUpToItsBound(t *testing.T) {
	for n := 125; n <= 127; n++ { // the message is one level itself
		parse(t, `{"jsonrpc":"2.0","id":1,"method":"m","params":`+nested(n)+`}`)
	}
}

func TestSameNamesInDifferentObjectsAreFine(t *testing.T) {
	parse(t, `{"jsonrpc":"2.0","id":1,"method":"m","params":{"a":{"a":{"a":1},"b":{"a":1}},"b":[{"a":1},{"a":2}],"id":1,"method":2}}`)
	// Below params, case distinguishes: arguments are the server's business.
	parse(t, `{"jsonrpc":"2.0","id":1,"method":"m","params":{"arguments":{"x":1,"X":2}}}`)
}

func TestClashesAreFoundInObjectsOfAnySize(t *testing.T) {
	for _, n := range []int{1, 2, 15, 16, 17, 18, 63, 64, 65, 1000, 50_000} {
		members := make([]string, n)
		for i := range members {
			members[i] = fmt.Sprintf(`"Name%d":{"x":1,"y":[{"x":1}]}`, i)
		}
		message := func(members ...string) string {
			return `{"jsonrpc":"2.0","id":1,"method":"m","params":{` + strings.Join(members, ",") + `}}`
		}
		parse(t, message(members...))
		for _, at := range []int{0, n / 2, n - 1} {
			for extra, want := range map[string]jsonrpc.Detail{
				fmt.Sprintf(`"Name%d":1`, at):      jsonrpc.DuplicateMember,
				fmt.Sprintf(`"N\u0061me%d":1`, at): jsonrpc.DuplicateMember,
				fmt.Sprintf(`"nAME%d":1`, at):      jsonrpc.CaseVariant,
			} {
				_, err := jsonrpc.Parse([]byte(message(append(slices.Clone(members), extra)...)))
				var e *jsonrpc.Error
				if !errors.As(err, &e) || e.Detail != want {
					t.Errorf("%d members and %s: got %v, want %s", n, extra, err, want)
				}
			}
		}
	}
}

func TestOneStringInsideParamsIsReplacedAndNothingElse(t *testing.T) {
	const in = `{ "jsonrpc" : "2.0","params":{ "x":[1, {"name":"no"}], "n\u0061me" : "srv__tool" ,"arguments":{"name":"keep\u0020"},"_meta":{"progressToken": 5}} , "id": 1.0, "method":"tools/call", "future": 1 }`
	m := parse(t, in)
	rename, ok := m.SetParam(jsonrpc.Quote(`to"ol`), "name")
	if !ok {
		t.Fatal("params.name was not found")
	}
	token, ok := m.SetParam([]byte("17"), "_meta", "progressToken")
	if !ok {
		t.Fatal("params._meta.progressToken was not found")
	}
	got := string(jsonrpc.Splice(m.Raw, token, m.SetID([]byte(`42`)), rename))
	want := strings.NewReplacer(`"srv__tool"`, `"to\"ol"`, `: 5}`, `: 17}`, `1.0`, `42`).Replace(in)
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if string(m.Raw) != in {
		t.Error("the message itself was changed")
	}
	for _, path := range [][]string{{"nam"}, {"x", "name"}, {"arguments", "name", "y"}, {"Name"}} {
		if _, ok := m.SetParam(nil, path...); ok {
			t.Errorf("%q was found", path)
		}
	}
	n := parse(t, `{"jsonrpc":"2.0","method":"m"}`)
	if _, ok := n.SetParam(nil, "x"); ok {
		t.Error("a member of absent params was found")
	}
	if got := n.WithID([]byte("1")); !bytes.Equal(got, n.Raw) {
		t.Errorf("a notification was given an id: %s", got)
	}
}

func TestEditsThatDoNotFitPanic(t *testing.T) {
	for _, edits := range [][]jsonrpc.Edit{
		{{Start: 0, End: 11}}, {{Start: -1, End: 2}}, {{Start: 3, End: 2}}, {{Start: 0, End: 5}, {Start: 4, End: 6}},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%v was made", edits)
				}
			}()
			jsonrpc.Splice([]byte("0123456789"), edits...)
		}()
	}
}

func TestMembersAndElementsComeInOrder(t *testing.T) {
	var got []string
	for name, value := range jsonrpc.Members([]byte(` { "b" : [1, "}"] ,"a\"\\":{"x":"]\"{"}, "":null,"é":-1.5e3} `)) {
		got = append(got, name+"="+string(value))
	}
	for value := range jsonrpc.Elements([]byte(` [ {"a":[1]} , "," ,true,[] ] `)) {
		got = append(got, string(value))
	}
	want := []string{`b=[1, "}"]`, `a"\={"x":"]\"{"}`, "=null", "é=-1.5e3", `{"a":[1]}`, `","`, "true", "[]"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, none := range []string{"", " ", "{}", "[]", "1", `"x"`, "null"} {
		for name := range jsonrpc.Members([]byte(none)) {
			t.Errorf("%q has a member %q", none, name)
		}
		for value := range jsonrpc.Elements([]byte(none)) {
			t.Errorf("%q has an element %s", none, value)
		}
	}
	for range jsonrpc.Elements([]byte("[1,2]")) {
		break // a consumer that stops early
	}
}

func TestLookalikesAreMembersThatOnlyCaseDistinguishes(t *testing.T) {
	for in, want := range map[string]string{
		`{"name":"x","arguments":{}}`:  "",
		`{"name":"x","Arguments":{}}`:  "Arguments",
		`{"NAM\u0045":"x"}`:            "NAME",
		`{"argument\u017f":{}}`:        "argumentſ",
		`{"arguments2":{},"nam":1}`:    "",
		`{"x":{"Name":1},"name":{}}`:   "",
		`{"name":1,"Name":2}`:          "Name",
		`["Name"]`:                     "",
		`{"n":1,"b":[{"NAME":1}]}    `: "",
	} {
		if got, ok := jsonrpc.Lookalike([]byte(in), "name", "arguments"); got != want || ok != (want != "") {
			t.Errorf("%s: got %q, %v", in, got, ok)
		}
	}
}

func TestTextIsEveryNameAndStringOnALine(t *testing.T) {
	for in, want := range map[string]string{
		`{"a":"\u0065vil","b":[1,true,"x\ny",{"c\u0064":null}],"\ud83d\ude00":"\"\\"}`: "a\nevil\nb\nx\ny\ncd\n😀\n\"\\",
		`{}`:           "",
		`""`:           "",
		`["","",""]`:   "\n\n",
		`{"":""}`:      "\n",
		`[1,2]`:        "",
		`"one"`:        "one",
		`["\\\"","b"]`: "\\\"\nb",
	} {
		if got := jsonrpc.Text([]byte(in)); got != want {
			t.Errorf("%s: got %q, want %q", in, got, want)
		}
	}
}

func TestLineBreaksBetweenTokensBecomeSpaces(t *testing.T) {
	in := []byte("{\r\n  \"jsonrpc\": \"2.0\",\n\t\"id\": 1,\r \"method\": \"a\\nb\"\n}")
	got := jsonrpc.Line(in)
	if want := "{    \"jsonrpc\": \"2.0\", \t\"id\": 1,  \"method\": \"a\\nb\" }"; string(got) != want {
		t.Errorf("got %q", got)
	}
	if !bytes.Contains(in, []byte("\n")) {
		t.Error("the message itself was changed")
	}
	one := []byte(`{"a":1}`)
	if got := jsonrpc.Line(one); &got[0] != &one[0] {
		t.Error("a message on one line was copied")
	}
}

func TestQuotedStringsAreReadBack(t *testing.T) {
	var all strings.Builder
	for r := range rune(0x3000) {
		all.WriteRune(r)
	}
	all.WriteString("😀\u2028")
	for _, s := range []string{"", "a", all.String()} {
		q := jsonrpc.Quote(s)
		if got, ok := jsonrpc.String(q); !ok || got != s {
			t.Errorf("got %q, want %q", got, s)
		}
		var std string
		if err := json.Unmarshal(q, &std); err != nil || std != s {
			t.Errorf("encoding/json reads %q, %v", std, err)
		}
	}
	if got := string(jsonrpc.Quote("a\xffb")); got != "\"a\ufffdb\"" {
		t.Errorf("got %s", got)
	}
	for _, not := range []string{"", `"`, `x`, `"a"b`, `"a\"`, `1`, `""""`} {
		if s, ok := jsonrpc.String([]byte(not)); ok {
			t.Errorf("%s is a string %q", not, s)
		}
	}
}

func TestBuiltMessagesParse(t *testing.T) {
	for _, tt := range []struct {
		got  []byte
		want string
	}{
		{jsonrpc.AppendRequest([]byte("x"), []byte("1"), `a"b`, []byte("[]"))[1:], `{"jsonrpc":"2.0","id":1,"method":"a\"b","params":[]}`},
		{jsonrpc.AppendNotification(nil, "n", nil), `{"jsonrpc":"2.0","method":"n"}`},
		{jsonrpc.AppendResult(nil, []byte(`"x"`), []byte(`{"a":1}`)), `{"jsonrpc":"2.0","id":"x","result":{"a":1}}`},
		{jsonrpc.AppendResult(nil, []byte(`"x"`), nil), `{"jsonrpc":"2.0","id":"x","result":null}`},
		{jsonrpc.AppendError(nil, nil, -32603, "no\n", nil), `{"jsonrpc":"2.0","id":null,"error":{"code":-32603,"message":"no\n"}}`},
		{jsonrpc.AppendError(nil, []byte("2"), 1, "m", []byte("{}")), `{"jsonrpc":"2.0","id":2,"error":{"code":1,"message":"m","data":{}}}`},
	} {
		if string(tt.got) != tt.want {
			t.Errorf("got %s, want %s", tt.got, tt.want)
		}
		parse(t, string(tt.got))
	}
}

func TestErrorsOfServersAreRead(t *testing.T) {
	got, ok := jsonrpc.ParseError([]byte(`{"data":{"x":[1]},"message":"m\u0021","code":-32002}`))
	want := jsonrpc.ErrorObject{Code: -32002, Message: "m!", Data: []byte(`{"x":[1]}`)}
	if diff := cmp.Diff(want, got); !ok || diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, in := range []string{`{}`, `{"code":1}`, `{"message":"m"}`, `{"code":"1","message":"m"}`, `{"code":1.5,"message":"m"}`, `{"code":null,"message":"m"}`, `{"code":1,"message":2}`, `[]`} {
		if e, ok := jsonrpc.ParseError([]byte(in)); ok {
			t.Errorf("%s is %+v", in, e)
		}
	}
}

func TestParsingAllocatesOnlyTheMethod(t *testing.T) {
	in := []byte(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a__b","arguments":{"x":[1,2,{"y\n":"z"}]},"_meta":{"progressToken":1}}}`)
	if n := testing.AllocsPerRun(100, func() {
		if _, err := jsonrpc.Parse(in); err != nil {
			t.Fatal(err)
		}
	}); n > 1 {
		t.Errorf("%v allocations", n)
	}
}
