package kvhash

import (
	"encoding/hex"
	"fmt"
	"math"
	"math/big"
	"strings"
	"unicode/utf8"
)

// Request is everything that decides the block hashes of one prompt: the engine's settings and the request's.
type Request struct {
	Options Options
	Tokens  []uint64
	Keys    Keys
}

// Answer is what a request line is answered with.
type Answer struct {
	NoneHash    BlockHash
	BlockHashes []BlockHash
	// External holds the hashes as events carry them, in decimal.
	External []string
	// ExtraKeys holds one entry a block, as hashed.
	ExtraKeys []ExtraKeys
}

// ParseRequest reads one request line:
//
//	{"vllm":"0.33.0","algorithm":"sha256_cbor","hash_seed":"0","block_size":16,"tokens":[1,2,3],
//	 "lora":{"name":"sql","path":"adapters/sql","id":3},"cache_salt":"t",
//	 "multimodal":[{"identifier":"a","offset":5,"length":40}],
//	 "prompt_embeds":{"shape":[48,4],"dtype":"float32","data":"<hex>"},
//	 "lookahead":1,"decode_context_parallel_size":1}
//
// An unknown field is refused: a misspelt cache_salt must not become a wrong hash. Every error is an *Error.
func ParseRequest(line []byte) (*Request, error) {
	v, err := parseJSON(line)
	if err != nil {
		return nil, err
	}
	return requestOf(v)
}

// Answer hashes the request. Errors as those of NewHasher and Hasher.Chain.
func (r *Request) Answer() (*Answer, error) {
	contract, err := ContractFor(r.Options.VLLM)
	if err != nil {
		return nil, err
	}
	hasher, err := newHasher(contract, r.Options)
	if err != nil {
		return nil, err
	}
	tokens := r.Tokens
	if tokens == nil {
		tokens = []uint64{}
	}
	chain, err := hasher.Chain(tokens, r.Keys)
	if err != nil {
		return nil, err
	}
	return &Answer{hasher.noneHash, chain.hashes, chain.External(), chain.ExtraKeys()}, nil
}

var requestFields = []string{
	"tokens", "vllm", "algorithm", "hash_seed", "block_size", "lookahead", "decode_context_parallel_size", "lora",
	"cache_salt", "multimodal", "prompt_embeds",
}

func requestOf(v any) (*Request, error) {
	fields, isObject := v.(jsonObject)
	if !isObject {
		return nil, fault(CodeInvalidRequest, "$", "expected a JSON object, got %s", jsonKind(v))
	}
	reader := fieldReader{fields: fields, at: "$", code: CodeInvalidRequest}
	if err := reader.allow(append([]string{"id"}, requestFields...)); err != nil {
		return nil, err
	}
	request := &Request{Options: Options{
		VLLM: "latest", Algorithm: "sha256", BlockSize: 16, DecodeContextParallelSize: 1,
	}}
	steps := []func(*fieldReader) error{
		request.readTokens, request.readSalt, request.readPromptEmbeds, request.readLora, request.readMultimodal,
	}
	for _, step := range steps {
		if err := step(&reader); err != nil {
			return nil, err
		}
	}
	if err := request.Keys.check(int64(len(request.Tokens))); err != nil {
		return nil, err
	}
	return request, request.readSettings(&reader)
}

func (r *Request) readTokens(reader *fieldReader) error {
	v, given := reader.fields.get("tokens")
	if !given {
		return fault(CodeInvalidRequest, "$.tokens", "a request needs 'tokens', a list of token ids")
	}
	items, isList := v.([]any)
	if !isList {
		return fault(CodeInvalidToken, "$.tokens", "expected a list of token ids, got %s", jsonKind(v))
	}
	r.Tokens = make([]uint64, len(items))
	for i, item := range items {
		token, isToken := item.(uint64)
		if !isToken {
			if number, isBig := item.(*big.Int); isBig && number.Sign() == 0 { // "-0"
				continue
			}
			return fault(CodeInvalidToken, fmt.Sprintf("$.tokens[%d]", i),
				"expected a token id, an integer from 0 to 2^64 - 1, got %s", jsonShown(item))
		}
		r.Tokens[i] = token
	}
	return nil
}

func (r *Request) readSalt(reader *fieldReader) (err error) {
	salt := reader.with(CodeInvalidSalt)
	r.Keys.CacheSalt, _, err = salt.text("cache_salt", "the cache salt")
	return err
}

func (r *Request) readLora(reader *fieldReader) error {
	lora, err := reader.object("lora", CodeInvalidLora, "name", "path", "id")
	if lora == nil || err != nil {
		return err
	}
	r.Keys.Lora = &Lora{}
	for name, to := range map[string]*string{"name": &r.Keys.Lora.Name, "path": &r.Keys.Lora.Path} {
		content, given, err := lora.text(name, "the adapter's "+name)
		if err != nil {
			return err
		}
		if given && content == "" {
			return fault(CodeInvalidLora, "$.lora."+name, "the adapter's %s is empty", name)
		}
		*to = content
	}
	if v, _ := lora.fields.get("id"); v == nil {
		return nil
	}
	r.Keys.Lora.ID, err = lora.integer("id", "the adapter's id", 1, math.MaxInt64)
	return err
}

func (r *Request) readMultimodal(reader *fieldReader) error {
	v, _ := reader.fields.get("multimodal")
	if v == nil {
		return nil
	}
	items, isList := v.([]any)
	if !isList {
		return fault(CodeInvalidMultimodal, "$.multimodal", "expected a list of items, got %s", jsonKind(v))
	}
	for i, item := range items {
		fields, err := objectReader(item, fmt.Sprintf("$.multimodal[%d]", i), CodeInvalidMultimodal,
			"identifier", "offset", "length")
		if err != nil {
			return err
		}
		if err := fields.need("identifier", "offset", "length"); err != nil {
			return err
		}
		var read MultimodalItem
		identifier, given, err := fields.text("identifier", "the identifier")
		if err != nil {
			return err
		}
		if !given {
			return fault(CodeInvalidMultimodal, fields.at+".identifier", "expected the identifier as text, got null")
		}
		read.Identifier = identifier
		if read.Offset, err = fields.integer("offset", "the offset", 0, math.MaxInt64); err != nil {
			return err
		}
		if read.Length, err = fields.integer("length", "the length", 1, math.MaxInt64); err != nil {
			return err
		}
		r.Keys.Multimodal = append(r.Keys.Multimodal, read)
	}
	return nil
}

func (r *Request) readPromptEmbeds(reader *fieldReader) error {
	fields, err := reader.object("prompt_embeds", CodeInvalidPromptEmbeds, "shape", "dtype", "data")
	if fields == nil || err != nil {
		return err
	}
	if err := fields.need("shape", "dtype", "data"); err != nil {
		return err
	}
	var embeds PromptEmbeds
	v, _ := fields.fields.get("shape")
	shape, isList := v.([]any)
	if !isList || len(shape) != 2 {
		return fault(CodeInvalidPromptEmbeds, fields.at+".shape", "expected [rows, hidden size], got %s", jsonShown(v))
	}
	embeds.Rows, err = integerOf(shape[0], fields.at+".shape[0]", "the number of rows", 0, math.MaxInt64, fields.code)
	if err != nil {
		return err
	}
	embeds.Hidden, err = integerOf(shape[1], fields.at+".shape[1]", "the hidden size", 1, math.MaxInt64, fields.code)
	if err != nil {
		return err
	}
	if embeds.Dtype, _, err = fields.text("dtype", "the dtype"); err != nil {
		return err
	}
	data, given, err := fields.text("data", "the rows in hex")
	if err != nil {
		return err
	}
	if !given {
		return fault(CodeInvalidPromptEmbeds, fields.at+".data", "expected the rows in hex, got null")
	}
	if embeds.Data, err = decodeHex(data); err != nil {
		return fault(CodeInvalidPromptEmbeds, fields.at+".data", "the data is not hex")
	}
	r.Keys.PromptEmbeds = &embeds
	return embeds.check(int64(len(r.Tokens)))
}

// decodeHex reads pairs of digits, with white space between pairs.
func decodeHex(content string) ([]byte, error) {
	const space = " \t\n\r\v\f"
	if !strings.ContainsAny(content, space) {
		return hex.DecodeString(content)
	}
	var out []byte
	for _, run := range strings.FieldsFunc(content, func(r rune) bool { return strings.ContainsRune(space, r) }) {
		part, err := hex.DecodeString(run)
		if err != nil {
			return nil, err
		}
		out = append(out, part...)
	}
	return out, nil
}

func (r *Request) readSettings(reader *fieldReader) error {
	o := &r.Options
	if v, given := reader.fields.get("vllm"); given {
		release, isText := v.(string)
		if !isText {
			return fault(CodeInvalidRequest, "$.vllm", "expected the vLLM release as text, got %s", jsonKind(v))
		}
		if err := checkText(release, CodeInvalidRequest, "$.vllm", "the vLLM release"); err != nil {
			return err
		}
		o.VLLM = release
	}
	contract, err := ContractFor(o.VLLM)
	if err != nil {
		return err
	}
	if v, given := reader.fields.get("algorithm"); given {
		name, isText := v.(string)
		if !isText {
			return fault(CodeUnknownAlgorithm, "$.algorithm", "the algorithm must be text, got %s", jsonKind(v))
		}
		o.Algorithm = name
	}
	if _, err := contract.Algorithm(o.Algorithm); err != nil {
		return err
	}
	settings := []struct {
		name, what string
		code       Code
		minimum    int64
		maximum    int64
		to         *int
	}{
		{"block_size", "the block size", CodeInvalidBlockSize, 1, maxBlockSize, &o.BlockSize},
		{"decode_context_parallel_size", "the decode context parallel size", CodeInvalidBlockSize, 1, maxBlockSize,
			&o.DecodeContextParallelSize},
		{"lookahead", "the look-ahead", CodeInvalidRequest, 0, maxLookahead, &o.Lookahead},
	}
	for _, setting := range settings {
		if v, _ := reader.fields.get(setting.name); v == nil {
			continue
		}
		field := reader.with(setting.code)
		number, err := field.integer(setting.name, setting.what, setting.minimum, setting.maximum)
		if err != nil {
			return err
		}
		*setting.to = int(number)
	}
	if o.Lookahead > 0 && !contract.Lookahead {
		return nil // newHasher says it, before it looks at the seed
	}
	seed := reader.with(CodeInvalidSeed)
	content, given, err := seed.text("hash_seed", "the hash seed")
	if given {
		o.HashSeed = &content
	}
	return err
}

// fieldReader takes checked fields from one JSON object.
type fieldReader struct {
	fields jsonObject
	at     string
	code   Code
}

func (f fieldReader) with(code Code) fieldReader { return fieldReader{f.fields, f.at, code} }

func objectReader(v any, at string, code Code, allowed ...string) (*fieldReader, error) {
	fields, isObject := v.(jsonObject)
	if !isObject {
		return nil, fault(code, at, "expected an object, got %s", jsonKind(v))
	}
	reader := &fieldReader{fields, at, code}
	return reader, reader.allow(allowed)
}

func (f fieldReader) object(name string, code Code, allowed ...string) (*fieldReader, error) {
	v, _ := f.fields.get(name)
	if v == nil {
		return nil, nil
	}
	return objectReader(v, f.at+"."+name, code, allowed...)
}

func (f fieldReader) allow(allowed []string) error {
	for _, field := range f.fields {
		known := false
		for _, name := range allowed {
			known = known || name == field.name
		}
		if !known {
			return fault(f.code, f.at, "unknown field %q; expected one of: %s", field.name, strings.Join(allowed, ", "))
		}
	}
	return nil
}

func (f fieldReader) need(names ...string) error {
	for _, name := range names {
		if _, given := f.fields.get(name); !given {
			return fault(f.code, f.at, "needs %q", name)
		}
	}
	return nil
}

// text returns the field's text; given is false when it is missing or null.
func (f fieldReader) text(name, what string) (content string, given bool, err error) {
	v, _ := f.fields.get(name)
	if v == nil {
		return "", false, nil
	}
	at := f.at + "." + name
	content, isText := v.(string)
	if !isText {
		return "", true, fault(f.code, at, "expected %s as text, got %s", what, jsonKind(v))
	}
	return content, true, checkText(content, f.code, at, what)
}

func (f fieldReader) integer(name, what string, minimum, maximum int64) (int64, error) {
	v, _ := f.fields.get(name)
	return integerOf(v, f.at+"."+name, what, minimum, maximum, f.code)
}

func integerOf(v any, at, what string, minimum, maximum int64, code Code) (int64, error) {
	number := int64(-1)
	switch v := v.(type) {
	case uint64:
		if v <= math.MaxInt64 {
			number = int64(v)
		}
	case *big.Int:
		if v.Sign() == 0 { // "-0"
			number = 0
		}
	default:
		return 0, fault(code, at, "expected %s as an integer, got %s", what, jsonKind(v))
	}
	if number < minimum || number > maximum {
		return 0, fault(code, at, "expected %s, an integer from %d to %d, got %s", what, minimum, maximum, jsonShown(v))
	}
	return number, nil
}

func jsonShown(v any) string {
	switch v := v.(type) {
	case uint64, bool, float64:
		return fmt.Sprint(v)
	case *big.Int:
		if v.BitLen() < 128 {
			return v.String()
		}
		return "a larger integer"
	case string:
		if len(v) < 40 && utf8.ValidString(v) {
			return fmt.Sprintf("%q", v)
		}
	}
	return jsonKind(v)
}
