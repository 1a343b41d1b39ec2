package kvhash

import (
	"bytes"
	"fmt"
	"math/big"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// Strict JSON: UTF-8, no field twice, no NaN, integers exact, bounded nesting. encoding/json replaces lone surrogates
// and keeps the last of two equal fields, and either would give a silently wrong hash; so it is read here.

const (
	maxJSONDepth  = 500
	maxJSONDigits = 4300
)

type jsonField struct {
	name  string
	value any
	raw   []byte
}

// jsonObject holds the fields in order. Other values are nil, bool, float64, uint64, *big.Int (where
// uint64 cannot hold it), string and []any; a string
// with a lone surrogate is no valid UTF-8.
type jsonObject []jsonField

func (o jsonObject) get(name string) (any, bool) {
	for _, field := range o {
		if field.name == name {
			return field.value, true
		}
	}
	return nil, false
}

func jsonKind(v any) string {
	switch v.(type) {
	case nil:
		return "null"
	case bool:
		return "a boolean"
	case float64:
		return "a float"
	case uint64, *big.Int:
		return "an integer"
	case string:
		return "text"
	case []any:
		return "an array"
	default:
		return "an object"
	}
}

type jsonReader struct {
	data     []byte
	position int
	depth    int
}

func parseJSON(data []byte) (any, error) {
	for i := 0; i < len(data); {
		r, size := utf8.DecodeRune(data[i:])
		if r == utf8.RuneError && size == 1 {
			return nil, fault(CodeInvalidUTF8, "", "the line is not UTF-8, at byte %d", i)
		}
		i += size
	}
	reader := jsonReader{data: data}
	v, err := reader.value()
	if err != nil {
		return nil, err
	}
	reader.space()
	if reader.position != len(data) {
		return nil, reader.fault("more after the value")
	}
	return v, nil
}

func (r *jsonReader) fault(what string) error {
	column := utf8.RuneCount(r.data[:min(r.position, len(r.data))]) + 1
	return fault(CodeInvalidJSON, "", "the line is not JSON: %s, at column %d", what, column)
}

func (r *jsonReader) peek() byte {
	if r.position < len(r.data) {
		return r.data[r.position]
	}
	return 0
}

func (r *jsonReader) space() {
	for r.position < len(r.data) && bytes.IndexByte([]byte(" \t\n\r"), r.data[r.position]) >= 0 {
		r.position++
	}
}

func (r *jsonReader) value() (any, error) {
	r.space()
	switch c := r.peek(); {
	case c == '{' || c == '[':
		if r.depth++; r.depth > maxJSONDepth {
			return nil, fault(CodeInvalidJSON, "", "the line is nested too deeply")
		}
		defer func() { r.depth-- }()
		if c == '{' {
			return r.object()
		}
		return r.array()
	case c == '"':
		return r.text()
	case c == '-' || '0' <= c && c <= '9':
		return r.number()
	}
	for word, v := range map[string]any{"null": nil, "true": true, "false": false} {
		if bytes.HasPrefix(r.data[r.position:], []byte(word)) {
			r.position += len(word)
			return v, nil
		}
	}
	return nil, r.fault("expected a value")
}

func (r *jsonReader) array() (any, error) {
	r.position++
	items := []any{}
	if r.space(); r.peek() == ']' {
		r.position++
		return items, nil
	}
	for {
		item, err := r.value()
		if err != nil {
			return nil, err
		}
		items = append(items, item)
		r.space()
		switch r.peek() {
		case ',':
			r.position++
		case ']':
			r.position++
			return items, nil
		default:
			return nil, r.fault("expected ',' or ']'")
		}
	}
}

func (r *jsonReader) object() (any, error) {
	r.position++
	fields := jsonObject{}
	names := map[string]bool{}
	if r.space(); r.peek() == '}' {
		r.position++
		return fields, nil
	}
	twice := ""
	for {
		if r.space(); r.peek() != '"' {
			return nil, r.fault("expected a field's name")
		}
		name, err := r.text()
		if err != nil {
			return nil, err
		}
		if r.space(); r.peek() != ':' {
			return nil, r.fault("expected ':'")
		}
		r.position++
		r.space()
		start := r.position
		v, err := r.value()
		if err != nil {
			return nil, err
		}
		if names[name] {
			twice = name
		}
		names[name] = true
		fields = append(fields, jsonField{name, v, r.data[start:r.position]})
		r.space()
		switch r.peek() {
		case ',':
			r.position++
		case '}':
			r.position++
			if len(names) != len(fields) {
				return nil, fault(CodeInvalidJSON, "", "the field %q stands twice in one object", twice)
			}
			return fields, nil
		default:
			return nil, r.fault("expected ',' or '}'")
		}
	}
}

func (r *jsonReader) text() (string, error) {
	r.position++
	var out []byte
	for {
		if r.position >= len(r.data) {
			return "", r.fault("unterminated text")
		}
		switch c := r.data[r.position]; {
		case c == '"':
			r.position++
			return string(out), nil
		case c < 0x20:
			return "", r.fault("a control character in text")
		case c != '\\':
			out = append(out, c)
			r.position++
		default:
			r.position++
			escaped := r.peek()
			if at := bytes.IndexByte([]byte(`"\/bfnrt`), escaped); escaped != 0 && at >= 0 {
				out = append(out, "\"\\/\b\f\n\r\t"[at])
				r.position++
				continue
			}
			if escaped != 'u' {
				return "", r.fault("an unknown escape")
			}
			unit, err := r.unit()
			if err != nil {
				return "", err
			}
			if 0xd800 <= unit && unit < 0xdc00 && bytes.HasPrefix(r.data[r.position:], []byte(`\u`)) {
				back := r.position
				r.position++
				low, err := r.unit()
				if err != nil {
					return "", err
				}
				if pair := utf16.DecodeRune(unit, low); pair != utf8.RuneError {
					out = utf8.AppendRune(out, pair)
					continue
				}
				r.position = back
			}
			if utf16.IsSurrogate(unit) {
				// As UTF-8 would write it if it could; that it is invalid says so where the text is used.
				out = append(out, 0xe0|byte(unit>>12), 0x80|byte(unit>>6)&0xbf, 0x80|byte(unit)&0xbf)
				continue
			}
			out = utf8.AppendRune(out, unit)
		}
	}
}

// unit reads the four digits of an escape; the position is at its 'u'.
func (r *jsonReader) unit() (rune, error) {
	r.position++
	if r.position+4 > len(r.data) {
		return 0, r.fault("an escape is cut off")
	}
	number, err := strconv.ParseUint(string(r.data[r.position:r.position+4]), 16, 16)
	if err != nil {
		return 0, r.fault("an escape that is not hex")
	}
	r.position += 4
	return rune(number), nil
}

func (r *jsonReader) digits() int {
	start := r.position
	for r.position < len(r.data) && '0' <= r.data[r.position] && r.data[r.position] <= '9' {
		r.position++
	}
	return r.position - start
}

func (r *jsonReader) number() (any, error) {
	start := r.position
	if r.peek() == '-' {
		r.position++
	}
	if r.peek() == '0' {
		r.position++
	} else if r.digits() == 0 {
		return nil, r.fault("expected a value")
	}
	end, isFloat := r.position, false
	if r.peek() == '.' {
		r.position++
		if r.digits() > 0 {
			end, isFloat = r.position, true
		}
	}
	r.position = end
	if c := r.peek(); c == 'e' || c == 'E' {
		r.position++
		if c := r.peek(); c == '+' || c == '-' {
			r.position++
		}
		if r.digits() > 0 {
			end, isFloat = r.position, true
		}
	}
	r.position = end
	content := string(r.data[start:end])
	if isFloat {
		number, err := strconv.ParseFloat(content, 64)
		if err != nil {
			return nil, r.fault("a number beyond what a float holds")
		}
		return number, nil
	}
	if number, err := strconv.ParseUint(content, 10, 64); err == nil {
		return number, nil
	}
	if len(content) > maxJSONDigits+1 || len(content) > maxJSONDigits && content[0] != '-' {
		return nil, fault(CodeInvalidJSON, "", "the line holds a number of too many digits")
	}
	number, _ := new(big.Int).SetString(content, 10)
	return number, nil
}

// appendJSONText appends text as JSON; what is no UTF-8 in it becomes U+FFFD.
func appendJSONText(out []byte, content string) []byte {
	out = append(out, '"')
	for _, r := range content {
		switch {
		case r == '"' || r == '\\':
			out = append(out, '\\', byte(r))
		case r < 0x20 || r == 0x7f || r == 0x2028 || r == 0x2029:
			out = fmt.Appendf(out, `\u%04x`, r)
		default:
			out = utf8.AppendRune(out, r)
		}
	}
	return append(out, '"')
}
