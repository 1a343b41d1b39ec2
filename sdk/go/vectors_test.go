package kvhash

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/zeebo/xxh3"
)

// The corpus: vectors/ of the repository, or the folder that KVHASH_VECTORS names. Its README says how it reads.

type vector struct {
	ID         string
	Since      string
	Result     string
	Input      json.RawMessage
	Expected   json.RawMessage
	Accepted   []json.RawMessage
	Serialized any
	Length     int               `json:"serialized_length"`
	Digests    map[string]string `json:"digests"`
	Digest     string
}

func vectorsFolder() string {
	if folder := os.Getenv("KVHASH_VECTORS"); folder != "" {
		return folder
	}
	return filepath.Join("..", "..", "vectors")
}

func readVectors(t *testing.T, kind string) []vector {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(vectorsFolder(), kind+".json"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct{ Vectors []vector }
	if err := json.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Vectors) == 0 {
		t.Fatalf("%s holds no vectors", kind)
	}
	return file.Vectors
}

// unmarshal reads JSON without losing digits.
func unmarshal(t *testing.T, data []byte, into any) {
	t.Helper()
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber()
	if err := decoder.Decode(into); err != nil {
		t.Fatalf("%v in %.200s", err, data)
	}
}

// plain makes equal JSON values equal Go values: numbers by value; nil fields and messages for people are dropped.
func plain(v any) any {
	switch v := v.(type) {
	case json.Number:
		if number, ok := new(big.Int).SetString(string(v), 10); ok {
			return number.String()
		}
		float, _ := v.Float64()
		return float
	case []any:
		items := make([]any, len(v))
		for i, item := range v {
			items[i] = plain(item)
		}
		return items
	case map[string]any:
		fields := map[string]any{}
		for name, item := range v {
			if item != nil && name != "message" && name != "id" {
				fields[name] = plain(item)
			}
		}
		return fields
	default:
		return v
	}
}

func parsed(t *testing.T, data []byte) any {
	t.Helper()
	var v any
	unmarshal(t, data, &v)
	return plain(v)
}

// stream yields the bytes of a generated input: SHA-256(seed || counter), one after the other.
type stream struct {
	seed    string
	counter uint64
	left    []byte
}

func (s *stream) token(vocabulary uint64) uint64 {
	if len(s.left) == 0 {
		sum := sha256.Sum256(binary.BigEndian.AppendUint64([]byte(s.seed), s.counter))
		s.counter, s.left = s.counter+1, sum[:]
	}
	next := binary.BigEndian.Uint32(s.left)
	s.left = s.left[4:]
	return uint64(next) % vocabulary
}

type generated struct {
	Seed       string
	Count      int
	Vocabulary uint64
}

func (g generated) tokens() []uint64 {
	source, ids := stream{seed: g.Seed}, make([]uint64, g.Count)
	for i := range ids {
		ids[i] = source.token(g.Vocabulary)
	}
	return ids
}

// checkAnswer compares an answer line with what a vector expects.
func checkAnswer(t *testing.T, v vector, answer []byte) {
	t.Helper()
	var got struct {
		Error *struct{ Code string }
	}
	unmarshal(t, answer, &got)
	var expected struct {
		Error *struct{ Codes []string }
	}
	unmarshal(t, v.Expected, &expected)
	if expected.Error != nil {
		if got.Error == nil || !slices.Contains(expected.Error.Codes, got.Error.Code) {
			t.Errorf("%s: answered %.300s, want a refusal %v", v.ID, answer, expected.Error.Codes)
		}
		return
	}
	accepted := v.Accepted
	if accepted == nil {
		accepted = []json.RawMessage{v.Expected}
	}
	for _, choice := range accepted {
		if reflect.DeepEqual(parsed(t, answer), parsed(t, choice)) {
			return
		}
	}
	t.Errorf("%s: answered\n%.600s\nwant\n%.600s", v.ID, answer, v.Expected)
}

// Every request of the corpus is answered as it says, at the first and the last release of its range.
func TestRequestVectors(t *testing.T) {
	for _, kind := range []string{
		"none_hash", "chains", "extra_keys", "lookahead", "context_parallel", "recorded", "requests",
	} {
		t.Run(kind, func(t *testing.T) {
			asked := 0
			for _, v := range readVectors(t, kind) {
				var input struct {
					Line    *string
					Request map[string]json.RawMessage
					VLLM    []string
				}
				unmarshal(t, v.Input, &input)
				if input.Line != nil {
					answer, _ := AnswerLine([]byte(*input.Line))
					checkAnswer(t, v, answer)
					asked++
					continue
				}
				var tokens struct{ Generate *generated }
				if json.Unmarshal(input.Request["tokens"], &tokens) == nil && tokens.Generate != nil {
					input.Request["tokens"], _ = json.Marshal(tokens.Generate.tokens())
				}
				for _, release := range input.VLLM {
					input.Request["vllm"], _ = json.Marshal(release)
					line, err := json.Marshal(input.Request)
					if err != nil {
						t.Fatal(err)
					}
					answer, _ := AnswerLine(line)
					checkAnswer(t, v, answer)
					asked++
				}
			}
			if asked < 50 {
				t.Errorf("%d questions of kind %s, want more", asked, kind)
			}
		})
	}
}

// An event batch decodes to what the corpus says; a hostile one is refused or keeps its good events.
func TestEventVectors(t *testing.T) {
	for _, v := range readVectors(t, "events") {
		var input struct{ Payload string }
		unmarshal(t, v.Input, &input)
		answer, _ := AnswerLine([]byte(`{"id":"1","decode":"` + input.Payload + `"}`))
		checkAnswer(t, v, answer)
	}
}

func valueOf(t *testing.T, data json.RawMessage, same map[int]*ref) value {
	t.Helper()
	if bytes.Equal(data, []byte("null")) {
		return nil
	}
	if data[0] == '[' {
		var items []json.RawMessage
		unmarshal(t, data, &items)
		values := make(tuple, len(items))
		for i, item := range items {
			values[i] = valueOf(t, item, same)
		}
		return values
	}
	var one struct {
		Int    *string
		Text   string
		Bytes  *string
		Same   *int
		Repeat *string
		Count  int
		Tokens *generated
	}
	unmarshal(t, data, &one)
	switch {
	case one.Int != nil:
		number, _ := new(big.Int).SetString(*one.Int, 10)
		if number.IsUint64() {
			return uinteger(number.Uint64())
		}
		return bigInteger{number}
	case one.Bytes != nil:
		content, err := hex.DecodeString(*one.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		return octets(content)
	case one.Same != nil:
		if same[*one.Same] == nil {
			same[*one.Same] = &ref{text(one.Text)}
		}
		return same[*one.Same]
	case one.Repeat != nil:
		return text(strings.Repeat(*one.Repeat, one.Count))
	case one.Tokens != nil:
		var ids tuple
		for _, id := range one.Tokens.tokens() {
			ids = append(ids, uinteger(id))
		}
		return ids
	default:
		return text(one.Text)
	}
}

// Every head width, frame boundary and back-reference is written byte for byte.
func TestSerializationVectors(t *testing.T) {
	for _, v := range readVectors(t, "serialization") {
		var input struct {
			Serialization string
			Value         json.RawMessage
		}
		unmarshal(t, v.Input, &input)
		write := appendCBOR
		if input.Serialization == "pickle5" {
			write = appendPickle5
		}
		got := write(nil, valueOf(t, input.Value, map[int]*ref{}))
		if wanted, given := v.Serialized.(string); given && wanted != hex.EncodeToString(got) {
			t.Errorf("%s: serialized %.200x, want %.400s", v.ID, got, wanted)
		}
		sum, wide := sha256.Sum256(got), xxh3.Hash128(got).Bytes()
		digests := map[string]string{"sha256": hex.EncodeToString(sum[:]), "xxh3_128": hex.EncodeToString(wide[:])}
		if len(got) != v.Length || !reflect.DeepEqual(digests, v.Digests) {
			t.Errorf("%s: %d bytes, digests %v, want %d, %v", v.ID, len(got), digests, v.Length, v.Digests)
		}
	}
}

// The published forms of a hash, and the key with a group id.
func TestExternalVectors(t *testing.T) {
	for _, v := range readVectors(t, "external") {
		var input struct {
			Digest  string
			Int     *string
			GroupID *uint32 `json:"group_id"`
		}
		unmarshal(t, v.Input, &input)
		digest, _ := hex.DecodeString(input.Digest)
		hash := DigestHash(digest)
		if input.Int != nil {
			number, _ := new(big.Int).SetString(*input.Int, 10)
			hash = IntHash(number)
		}
		got := map[string]any{"uint64": hash.External()}
		if input.GroupID != nil {
			key, err := hash.WithGroupID(*input.GroupID)
			if err != nil {
				t.Fatal(err)
			}
			got = map[string]any{"with_group_id": hex.EncodeToString(key)}
		} else if input.Int == nil {
			got["int64"], got["bytes"] = strconv.FormatInt(hash.Int64(), 10), hash.String()
		}
		if want := parsed(t, v.Expected); !reflect.DeepEqual(any(got), want) {
			t.Errorf("%s: %v, want %v", v.ID, got, want)
		}
	}
}

// Coarser views of a chain, and the block sizes of an engine.
func TestBlockSizeVectors(t *testing.T) {
	for _, v := range readVectors(t, "block_size") {
		var input struct {
			Factor   *int
			Hashes   []json.RawMessage
			Groups   []int
			Override *int  `json:"hash_block_size"`
			Ranks    int   `json:"decode_context_parallel_size"`
			Unscaled []int `json:"unscaled_groups"`
		}
		unmarshal(t, v.Input, &input)
		var got any
		var err error
		if input.Factor != nil {
			hashes := make([]BlockHash, len(input.Hashes))
			for i, raw := range input.Hashes {
				hashes[i] = hashOf(t, raw)
			}
			var view []BlockHash
			view, err = CoarseView(hashes, *input.Factor)
			shown := []byte(`{"hashes":[`)
			for i, hash := range view {
				shown = appendJSONHash(comma(shown, i), hash)
			}
			got = parsed(t, append(shown, `]}`...))
		} else {
			if input.Ranks == 0 {
				continue // a Go field that is left out is 0, so 0 ranks mean one here
			}
			options := BlockSizeOptions{DecodeContextParallelSize: input.Ranks, UnscaledGroups: input.Unscaled}
			if input.Override != nil {
				options.HashBlockSize = *input.Override
			}
			var sizes BlockSizes
			sizes, err = ResolveBlockSizes(input.Groups, options)
			if err == nil {
				groups, _ := json.Marshal(sizes.Groups)
				got = parsed(t, fmt.Appendf(nil, `{"groups":%s,"hash_block_size":%d,"scheduler_block_size":%d}`,
					groups, sizes.HashBlockSize, sizes.SchedulerBlockSize))
			}
		}
		if v.Result == "invalid" {
			if !errors.Is(err, CodeInvalidBlockSize) {
				t.Errorf("%s: %v, want a refusal", v.ID, err)
			}
		} else if want := parsed(t, v.Expected); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, %v, want %v", v.ID, got, err, want)
		}
	}
}

func hashOf(t *testing.T, raw json.RawMessage) BlockHash {
	t.Helper()
	if raw[0] == '{' {
		var integer struct{ Int string }
		unmarshal(t, raw, &integer)
		number, _ := new(big.Int).SetString(integer.Int, 10)
		return IntHash(number)
	}
	var content string
	unmarshal(t, raw, &content)
	digest, err := hex.DecodeString(content)
	if err != nil {
		t.Fatal(err)
	}
	return DigestHash(digest)
}

// A hundred thousand blocks of each algorithm, with salts and adapters, end in one digest.
func TestAccumulatedVectors(t *testing.T) {
	for _, v := range readVectors(t, "accumulated") {
		var input struct {
			Algorithm  string
			VLLM       []string
			Chains     int
			Blocks     int
			BlockSize  int `json:"block_size"`
			Stream     string
			Vocabulary uint64
		}
		unmarshal(t, v.Input, &input)
		for _, release := range input.VLLM {
			source, total := stream{seed: input.Stream}, sha256.New()
			for k := range input.Chains {
				hasher, err := NewHasher(Options{
					VLLM: release, Algorithm: input.Algorithm, BlockSize: input.BlockSize, HashSeed: Seed(strconv.Itoa(k)),
				})
				if err != nil {
					t.Fatal(err)
				}
				tokens := make([]uint64, input.Blocks*input.BlockSize)
				for i := range tokens {
					tokens[i] = source.token(input.Vocabulary)
				}
				var keys Keys
				if k%2 == 1 {
					keys.CacheSalt = fmt.Sprintf("salt-%d", k)
				}
				if k > 0 && k%3 == 0 {
					keys.Lora = &Lora{Name: fmt.Sprintf("lora-%d", k), Path: fmt.Sprintf("path-%d", k), ID: int64(k)}
				}
				hashes, err := hasher.HashTokens(tokens, keys)
				if err != nil {
					t.Fatal(err)
				}
				for _, hash := range hashes {
					if hash.IsInt() {
						total.Write([]byte(hash.String()))
					} else {
						digest, _ := hash.Bytes()
						total.Write(digest)
					}
				}
			}
			if got := hex.EncodeToString(total.Sum(nil)); got != v.Digest {
				t.Errorf("%s: %s, want %s", v.ID, got, v.Digest)
			}
		}
	}
}
