package kvhash_test

import (
	"errors"
	"fmt"
	"math/big"
	"reflect"
	"slices"
	"strings"
	"testing"

	kvhash "github.com/kvhash/kvhash/sdk/go"
)

func Example() {
	hasher, err := kvhash.NewHasher(kvhash.Options{
		VLLM: "0.33.0", Algorithm: "sha256_cbor", BlockSize: 4, HashSeed: kvhash.Seed("0"),
	})
	if err != nil {
		panic(err)
	}
	hashes, err := hasher.HashTokens([]uint64{1, 2, 3, 4, 5}, kvhash.Keys{})
	if err != nil {
		panic(err)
	}
	fmt.Println(hashes[0])
	// Output: c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb
}

func ExampleNewHasher_error() {
	_, err := kvhash.NewHasher(kvhash.Options{VLLM: "0.28.0"})
	fmt.Println(errors.Is(err, kvhash.CodeUnknownRoot))
	// Output: true
}

func newHasher(t *testing.T, options kvhash.Options) *kvhash.Hasher {
	t.Helper()
	hasher, err := kvhash.NewHasher(options)
	if err != nil {
		t.Fatal(err)
	}
	return hasher
}

func count(n int) []uint64 {
	tokens := make([]uint64, n)
	for i := range tokens {
		tokens[i] = uint64(i * 7919)
	}
	return tokens
}

var salted = kvhash.Keys{
	CacheSalt: "t", Lora: &kvhash.Lora{Name: "sql", Path: "adapters/sql", ID: 3},
	Multimodal: []kvhash.MultimodalItem{{Identifier: "a", Offset: 5, Length: 40}, {Identifier: "a", Offset: 45, Length: 3}},
}

// Appending token by token gives the hashes of the whole prompt, with keys and look-ahead too; a copy is independent.
func TestAppendingEqualsHashingAtOnce(t *testing.T) {
	for _, lookahead := range []int{0, 1, 20} {
		hasher := newHasher(t, kvhash.Options{BlockSize: 16, Lookahead: lookahead})
		tokens := count(100)
		want, err := hasher.HashTokens(tokens, salted)
		if err != nil {
			t.Fatal(err)
		}
		chain, err := hasher.Chain(nil, salted)
		if err != nil {
			t.Fatal(err)
		}
		var got []kvhash.BlockHash
		for _, token := range tokens {
			if chain.NumTokens() == 50 {
				chain.Copy().Append(9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9)
			}
			got = append(got, chain.Append(token)...)
		}
		if !slices.Equal(got, want) || !slices.Equal(chain.BlockHashes(), want) {
			t.Errorf("look-ahead %d: %v, want %v", lookahead, got, want)
		}
		if wantLen := (100 - lookahead) / 16; len(want) != wantLen {
			t.Errorf("look-ahead %d: %d hashes, want %d", lookahead, len(want), wantLen)
		}
	}
}

// The published value is the low 64 bits, big-endian, not the first 8 bytes; the other forms follow from it.
func TestExternalForms(t *testing.T) {
	digest := make([]byte, 32)
	for i := range 8 {
		digest[i], digest[24+i] = byte(i), byte(0xf8+i)
	}
	hash := kvhash.DigestHash(digest)
	if hash.External() != "17940646550795321087" || hash.Int64() != -506097522914230529 {
		t.Errorf("external %s, signed %d", hash.External(), hash.Int64())
	}
	key, err := hash.WithGroupID(258)
	if err != nil || !slices.Equal(key[32:], []byte{0, 0, 1, 2}) {
		t.Errorf("key %x, %v", key, err)
	}
	if back, group, err := kvhash.SplitGroupID(key); err != nil || back != hash || group != 258 {
		t.Errorf("split %v %d %v", back, group, err)
	}
	integer := kvhash.IntHash(new(big.Int).Lsh(big.NewInt(5), 70))
	if _, err := integer.Bytes(); !errors.Is(err, kvhash.CodeInvalidHash) || integer.External() != "5902958103587056517120" {
		t.Errorf("integer: %v, %s", err, integer.External())
	}
}

// A coarser block's hash is the hash at its last fine boundary, and a view refuses sizes that are no multiple.
func TestViews(t *testing.T) {
	chain, err := newHasher(t, kvhash.Options{BlockSize: 8, DecodeContextParallelSize: 2}).Chain(count(16*5+3), kvhash.Keys{})
	if err != nil {
		t.Fatal(err)
	}
	fine := chain.BlockHashes()
	view, err := chain.View(32)
	if err != nil || !slices.Equal(view, []kvhash.BlockHash{fine[1], fine[3]}) {
		t.Errorf("view %v, %v", view, err)
	}
	if _, err := chain.View(24); !errors.Is(err, kvhash.CodeInvalidBlockSize) {
		t.Errorf("a view of 24 over 16: %v", err)
	}
	sizes, err := kvhash.ResolveBlockSizes([]int{32, 24}, kvhash.BlockSizeOptions{})
	if err != nil || sizes.HashBlockSize != 8 || sizes.SchedulerBlockSize.Int64() != 96 || sizes.Factor(0) != 4 {
		t.Errorf("sizes %v, %v", sizes, err)
	}
}

// Events publish untagged keys, whatever the hash holds.
func TestEventExtraKeysAreUntagged(t *testing.T) {
	chain, err := newHasher(t, kvhash.Options{BlockSize: 16, Lookahead: 1}).Chain(count(49), salted)
	if err != nil {
		t.Fatal(err)
	}
	got := chain.EventExtraKeys()
	want := kvhash.ExtraKeys{"sql", []any{"a", big.NewInt(-11)}}
	if !reflect.DeepEqual(got[1], want) || !reflect.DeepEqual(got[0][2], "t") {
		t.Errorf("%v, want block 1 %v", got, want)
	}
}

// One bad event does not lose its batch, unknown tags and fields are kept, and what is no batch is a typed error.
func TestOneBadEventDoesNotLoseTheBatch(t *testing.T) {
	payload := "\x92\x01\x94" + // [1, four events]
		"\x92\xacBlockRemoved\x91\x07" + "\x91\xa3New" + "\x92\xacBlockRemoved\x91\xc3" +
		"\x83\xa4type\xb0AllBlocksCleared\xa1x\x02\xa1y\xc0"
	batch, err := kvhash.DecodeBatch([]byte(payload))
	if err != nil {
		t.Fatal(err)
	}
	if removed := batch.Events[0].(*kvhash.BlockRemoved); removed.BlockHashes[0].Key() != 7 || batch.Layout != "mixed" {
		t.Errorf("%+v, layout %s", removed, batch.Layout)
	}
	if unknown := batch.Events[1].(*kvhash.UnknownEvent); unknown.Tag != "New" {
		t.Errorf("%+v", unknown)
	}
	if bad := batch.Events[2].(*kvhash.UndecodableEvent); bad.Path != "$.events[2].block_hashes[0]" {
		t.Errorf("%+v", bad)
	}
	if cleared := batch.Events[3].(*kvhash.AllBlocksCleared); len(cleared.Extra) != 2 {
		t.Errorf("%+v", cleared)
	}
	for bad, code := range map[string]kvhash.Code{
		"": kvhash.CodeInvalidBatch, "\x92\x01": kvhash.CodeInvalidMsgpack, "\x93\xc0\x90\xc0": kvhash.CodeInvalidBatch,
		"\x92\x01\xdd\xff\xff\xff\xff":                          kvhash.CodeInvalidMsgpack,
		"\x93\x01\x90" + strings.Repeat("\x91", 1<<20) + "\xc0": kvhash.CodeNestedTooDeeply,
	} {
		if _, err := kvhash.DecodeBatch([]byte(bad)); !errors.Is(err, code) {
			t.Errorf("%.20q: %v, want %s", bad, err, code)
		}
	}
}

// Each line is answered in order, a bad one by its error; blank lines are passed over.
func TestAnswerLines(t *testing.T) {
	in := "{\"id\":1,\"tokens\":[]}\n\n{\"id\":2,\"tokens\":[true]}\n{\"id\":3,\"decode\":\"920190\"}"
	var out strings.Builder
	refused, err := kvhash.AnswerLines(strings.NewReader(in), &out)
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if err != nil || refused != 1 || len(lines) != 3 {
		t.Fatal(refused, err, out.String())
	}
	for i, part := range []string{`"block_hashes":[]`, `"code":"invalid-token"`, `"batch":{"ts":1.0,`} {
		if !strings.HasPrefix(lines[i], fmt.Sprintf(`{"id":%d,`, i+1)) || !strings.Contains(lines[i], part) {
			t.Errorf("line %d: %s", i, lines[i])
		}
	}
}

func BenchmarkHashTokens(b *testing.B) {
	tokens := count(1 << 14)
	for _, algorithm := range []string{"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"} {
		hasher, err := kvhash.NewHasher(kvhash.Options{Algorithm: algorithm, HashSeed: kvhash.Seed("0")})
		if err != nil {
			b.Fatal(err)
		}
		b.Run(algorithm, func(b *testing.B) {
			b.SetBytes(int64(len(tokens)))
			for range b.N {
				if _, err := hasher.HashTokens(tokens, kvhash.Keys{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// A map and an extension value in an unknown field can be read by name, and of a key that stands twice the last counts.
func TestUnknownFieldsHoldMapsAndExtensions(t *testing.T) {
	payload := []byte("\x92\xcb\x00\x00\x00\x00\x00\x00\x00\x00\x91\x83\xa4type\xb0AllBlocksCleared" +
		"\xa1m\x82\xa1k\x01\xa1k\x02\xa1x\xd4\x05\x07")
	batch, err := kvhash.DecodeBatch(payload)
	if err != nil {
		t.Fatal(err)
	}
	extra := batch.Events[0].(*kvhash.AllBlocksCleared).Extra
	if got := extra[0].Value.(kvhash.WireMap); len(got) != 2 || got[1].Key != "k" || got[1].Value != kvhash.UnsignedInteger(2) {
		t.Errorf("the map is %v", got)
	}
	if got := extra[1].Value.(kvhash.Extension); got.Code != 5 || string(got.Data) != "\x07" {
		t.Errorf("the extension value is %v", got)
	}
	line := string(batch.AppendJSON(nil))
	if want := `"extra":{"m":{"k":2},"x":{"ext":5,"bytes":"07"}}`; !strings.Contains(line, want) {
		t.Errorf("%s does not hold %s", line, want)
	}
}
