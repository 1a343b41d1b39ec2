package kvhash

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"math"
	"math/big"
	"strconv"
	"strings"
)

// MaxLineBytes is the longest request line that is read, its line end (one \n or \r\n) not counted. A blank line is
// no exception.
const MaxLineBytes = 8 * 1024 * 1024

// AnswerLines answers the request lines and event lines of in on out, one line each, in order; blank lines are
// passed over. A bad line gives an error line in its place. It returns how many lines were refused, and an error only
// when reading or writing fails.
func AnswerLines(in io.Reader, out io.Writer) (refused int, err error) {
	reader := bufio.NewReaderSize(in, 1<<16)
	for {
		line, readErr := boundedLine(reader)
		if tooLong(line) || len(bytes.Trim(line, " \t\n\r\v\f")) > 0 {
			answer, ok := AnswerLine(line)
			if !ok {
				refused++
			}
			if _, err := out.Write(append(answer, '\n')); err != nil {
				return refused, err
			}
		}
		if readErr == io.EOF {
			return refused, nil
		}
		if readErr != nil {
			return refused, readErr
		}
	}
}

func tooLong(line []byte) bool {
	return len(bytes.TrimSuffix(bytes.TrimSuffix(line, []byte("\r\n")), []byte("\n"))) > MaxLineBytes
}

// boundedLine reads one line; of a longer one only two bytes more than MaxLineBytes are kept, the rest is read past.
func boundedLine(reader *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := reader.ReadSlice('\n')
		line = append(line, part[:min(len(part), MaxLineBytes+2-len(line))]...)
		if err != bufio.ErrBufferFull {
			return line, err
		}
	}
}

// AnswerLine answers one request line ({"id":"1","vllm":...,"tokens":[...]}) or event line
// ({"id":"1","decode":"<hex payload>"}), without a line end. ok is false when the answer is an error.
func AnswerLine(line []byte) (answer []byte, ok bool) {
	identity := []byte("null")
	body, err := answerBody(line, &identity)
	out := append([]byte(`{"id":`), identity...)
	if err != nil {
		code := CodeInvalidRequest
		errors.As(err, &code)
		out = appendJSONText(append(out, `,"error":{"code":`...), string(code))
		out = appendJSONText(append(out, `,"message":`...), err.Error())
		return append(out, "}}"...), false
	}
	return append(append(append(out, ','), body...), '}'), true
}

func answerBody(line []byte, identity *[]byte) ([]byte, error) {
	if tooLong(line) {
		return nil, fault(CodeLineTooLong, "", "the line has more than the %d bytes that are read", MaxLineBytes)
	}
	v, err := parseJSON(line)
	if err != nil {
		return nil, err
	}
	fields, _ := v.(jsonObject)
	decode := false
	for _, field := range fields {
		if field.name == "id" {
			*identity = bytes.ReplaceAll(bytes.ReplaceAll(field.raw, []byte("\n"), nil), []byte("\r"), nil)
		}
		decode = decode || field.name == "decode"
	}
	if decode {
		return answerDecode(fields)
	}
	request, err := requestOf(v)
	if err != nil {
		return nil, err
	}
	answer, err := request.Answer()
	if err != nil {
		return nil, err
	}
	return answer.appendJSON(nil), nil
}

func answerDecode(fields jsonObject) ([]byte, error) {
	reader := fieldReader{fields: fields, at: "$", code: CodeInvalidRequest}
	if err := reader.allow([]string{"id", "decode"}); err != nil {
		return nil, err
	}
	content, given, err := reader.text("decode", "the payload in hex")
	if err != nil {
		return nil, err
	}
	payload, err := decodeHex(content)
	if err != nil || !given {
		return nil, fault(CodeInvalidRequest, "$.decode", "expected the payload in hex")
	}
	batch, err := DecodeBatch(payload)
	if err != nil {
		return nil, err
	}
	return append([]byte(`"batch":`), batch.AppendJSON(nil)...), nil
}

// appendJSON appends the fields of an answer line.
func (a *Answer) appendJSON(out []byte) []byte {
	out = appendJSONHash(append(out, `"none_hash":`...), a.NoneHash)
	out = append(out, `,"block_hashes":[`...)
	for i, hash := range a.BlockHashes {
		out = appendJSONHash(comma(out, i), hash)
	}
	out = append(out, `],"external":[`...)
	for i, external := range a.External {
		out = appendJSONText(comma(out, i), external)
	}
	out = append(out, `],"extra_keys":[`...)
	for i, keys := range a.ExtraKeys {
		out = comma(out, i)
		if keys == nil {
			out = append(out, "null"...)
		} else {
			out = appendJSONValue(out, []any(keys))
		}
	}
	return append(out, ']')
}

func comma(out []byte, i int) []byte {
	if i > 0 {
		return append(out, ',')
	}
	return out
}

func appendJSONHash(out []byte, hash BlockHash) []byte {
	if hash.IsInt() {
		return append(append(append(out, `{"int":"`...), hash.String()...), `"}`...)
	}
	return appendJSONText(out, hash.String())
}

// appendJSONValue appends an extra key or a value of an event: tuples as arrays, bytes as {"bytes": hex}.
func appendJSONValue(out []byte, v any) []byte {
	switch v := v.(type) {
	case nil:
		return append(out, "null"...)
	case bool:
		return strconv.AppendBool(out, v)
	case uint64:
		return strconv.AppendUint(out, v, 10)
	case *big.Int:
		return v.Append(out, 10)
	case Integer:
		return append(out, v.String()...)
	case float64:
		content := strconv.FormatFloat(v, 'g', -1, 64)
		if math.IsInf(v, 0) || math.IsNaN(v) { // JSON has no such number
			return append(appendJSONText(append(out, `{"float":`...), content), '}')
		}
		if !strings.ContainsAny(content, ".e") {
			content += ".0" // a float stays one
		}
		return append(out, content...)
	case string:
		return appendJSONText(out, v)
	case []byte:
		return append(append(append(out, `{"bytes":"`...), hex.EncodeToString(v)...), `"}`...)
	case []any:
		out = append(out, '[')
		for i, item := range v {
			out = appendJSONValue(comma(out, i), item)
		}
		return append(out, ']')
	case WireMap:
		out = append(out, '{')
		names, last := make([]string, len(v)), map[string]int{}
		for i, pair := range v {
			names[i] = wireName(pair.Key)
			last[names[i]] = i
		}
		written := 0
		for i, pair := range v {
			if last[names[i]] != i { // of a key that stands twice the last counts
				continue
			}
			out = append(appendJSONText(comma(out, written), names[i]), ':')
			out = appendJSONValue(out, pair.Value)
			written++
		}
		return append(out, '}')
	case Extension:
		out = strconv.AppendInt(append(out, `{"ext":`...), int64(v.Code), 10)
		return append(append(append(out, `,"bytes":"`...), hex.EncodeToString(v.Data)...), `"}`...)
	default:
		return append(out, "null"...)
	}
}

// wireName returns the text by which JSON names a map's key: a key that is no text by its own JSON.
func wireName(key any) string {
	if name, isText := key.(string); isText {
		return name
	}
	return string(appendJSONValue(nil, key))
}
