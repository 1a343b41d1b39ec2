package router

import (
	"encoding/json"
	"math"
	"os"
	"testing"

	kvhash "github.com/kvhash/kvhash/sdk/go"
)

// The Python router's decisions, written by tests/router/test_go.py: the Go ones are the same.
func TestDecisionsAreThoseOfThePythonRouter(t *testing.T) {
	data, err := os.ReadFile("testdata/decisions.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		PromptTokens int         `json:"prompt_tokens"`
		Candidates   []Candidate `json:"candidates"`
		Policy       Policy      `json:"policy"`
		Draws        []int       `json:"draws"`
		Engines      []string    `json:"engines"`
		Costs        []float64   `json:"costs"`
	}
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	if len(cases) < 100 {
		t.Fatalf("only %d cases", len(cases))
	}
	for i, one := range cases {
		draws := one.Draws
		draw := func(count int) int {
			number := draws[0] % count
			draws = draws[1:]
			return number
		}
		scored := Decide(one.PromptTokens, one.Candidates, one.Policy, draw)
		if len(scored) != len(one.Engines) {
			t.Fatalf("case %d: %d scored, want %d", i, len(scored), len(one.Engines))
		}
		for place, got := range scored {
			if got.Candidate.Engine != one.Engines[place] {
				t.Errorf("case %d, place %d: %s, want %s", i, place, got.Candidate.Engine, one.Engines[place])
			}
			if math.Abs(got.Cost-one.Costs[place]) > 1e-9*one.Costs[place] {
				t.Errorf("case %d, place %d: cost %g, want %g", i, place, got.Cost, one.Costs[place])
			}
		}
	}
}

func TestDecidesNothingWithoutCandidates(t *testing.T) {
	if Decide(10, nil, DefaultPolicy(), nil) != nil {
		t.Error("chose an engine of none")
	}
}

func number(n int64) *kvhash.Integer { value := kvhash.SignedInteger(n); return &value }

func text(s string) *string { return &s }

func wire(t *testing.T, hashes []kvhash.BlockHash) []kvhash.HashValue {
	t.Helper()
	payload := []byte{0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x91, 0x92, 0xac}
	payload = append(payload, "BlockRemoved"...)
	payload = append(payload, 0x90|byte(len(hashes)))
	for _, hash := range hashes {
		payload = append(payload, 0xcf)
		for shift := 56; shift >= 0; shift -= 8 {
			payload = append(payload, byte(hash.Uint64()>>shift))
		}
	}
	batch, err := kvhash.DecodeBatch(append(payload, 0xc0))
	if err != nil {
		t.Fatal(err)
	}
	return batch.Events[0].(*kvhash.BlockRemoved).BlockHashes
}

func chain(t *testing.T, keys kvhash.Keys) []kvhash.BlockHash {
	t.Helper()
	hasher, err := kvhash.NewHasher(kvhash.Options{BlockSize: 4, HashSeed: kvhash.Seed("0")})
	if err != nil {
		t.Fatal(err)
	}
	hashes, err := hasher.HashTokens([]uint64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, keys)
	if err != nil {
		t.Fatal(err)
	}
	return hashes
}

func TestIndexCountsCopiesAndKeepsGroupsAndMediaApart(t *testing.T) {
	hashes := chain(t, kvhash.Keys{})
	values := wire(t, hashes)
	index := NewIndex()
	apply := func(events ...kvhash.Event) { index.Apply("a", &kvhash.EventBatch{Events: events}) }
	want := func(blocks int, what string) {
		t.Helper()
		if got := index.LongestPrefix("a", hashes); got != blocks {
			t.Errorf("%s: %d blocks, want %d", what, got, blocks)
		}
	}
	if index.Knowledge("a") != Unknown {
		t.Error("an engine that was never heard of is not unknown")
	}
	apply(&kvhash.BlockStored{BlockHashes: values, Medium: text("GPU")})
	want(3, "stored")
	apply(&kvhash.BlockStored{BlockHashes: values[:1], Medium: text("gpu")}, &kvhash.BlockRemoved{BlockHashes: values[:1]})
	want(3, "one of two copies removed")
	apply(&kvhash.BlockRemoved{BlockHashes: values[1:2], Medium: text("CPU")})
	want(3, "removed from another medium")
	apply(&kvhash.BlockStored{BlockHashes: values[:2], GroupIdx: number(1)})
	want(2, "a second group holds less")
	apply(&kvhash.BlockRemoved{BlockHashes: values[:1], GroupIdx: number(1)})
	want(0, "the first block gone from a group")
	if salted := chain(t, kvhash.Keys{CacheSalt: "x"}); index.LongestPrefix("a", salted) != 0 {
		t.Error("a salted prompt matches an unsalted one")
	}
	index.Lost("a")
	if index.Knowledge("a") != Degraded {
		t.Error("a loss does not degrade")
	}
	apply(&kvhash.AllBlocksCleared{})
	want(0, "cleared")
	if index.Knowledge("a") != Exact {
		t.Error("a clear does not heal a loss")
	}
	apply(&kvhash.BlockStored{BlockHashes: values, KVCacheSpecKind: text("sliding_window")})
	if index.Knowledge("a") != Unknown {
		t.Error("a group that is not understood counts")
	}
}
