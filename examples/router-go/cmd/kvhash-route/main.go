// Command kvhash-route follows engines and answers where each prompt should go: JSON lines in, JSON lines out.
//
//	echo '{"tokens":[1,2,3]}' | go run ./cmd/kvhash-route -hash-seed 0 \
//	    -engine a=tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 -engine b=tcp://127.0.0.1:5567,tcp://127.0.0.1:5568
//
// A line may add "cache_salt", "lora" {"name","path"}, and "queued" {engine: tokens} and "speed" {engine: tokens/s}.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand"
	"os"
	"strings"

	kvhash "github.com/kvhash/kvhash/sdk/go"

	router "github.com/kvhash/kvhash/examples/router-go"
)

type sources []router.Source

func (s *sources) String() string { return fmt.Sprint(*s) }

func (s *sources) Set(text string) error {
	name, endpoints, found := strings.Cut(text, "=")
	events, replay, _ := strings.Cut(endpoints, ",")
	if !found || name == "" || events == "" {
		return fmt.Errorf("expected NAME=EVENTS[,REPLAY], got %q", text)
	}
	*s = append(*s, router.Source{Engine: name, Events: events, Replay: replay})
	return nil
}

type question struct {
	Tokens    []uint64 `json:"tokens"`
	CacheSalt string   `json:"cache_salt"`
	Lora      *struct {
		Name string `json:"name"`
		Path string `json:"path"`
	} `json:"lora"`
	Queued map[string]float64 `json:"queued"`
	Speed  map[string]float64 `json:"speed"`
}

type answer struct {
	Engine    string                      `json:"engine,omitempty"`
	Matched   map[string]int              `json:"matched_tokens,omitempty"`
	Knowledge map[string]router.Knowledge `json:"knowledge,omitempty"`
	Error     string                      `json:"error,omitempty"`
}

func main() {
	var engines sources
	flag.Var(&engines, "engine", "NAME=EVENTS[,REPLAY]; may be given again")
	vllm := flag.String("vllm", "latest", "the engines' vLLM release")
	algorithm := flag.String("prefix-caching-hash-algo", "sha256", "")
	seed := flag.String("hash-seed", "", "PYTHONHASHSEED of the engines; left out: unset")
	blockSize := flag.Int("block-size", 16, "tokens of a block")
	flag.Parse()
	options := kvhash.Options{VLLM: *vllm, Algorithm: *algorithm, BlockSize: *blockSize}
	flag.Visit(func(given *flag.Flag) {
		if given.Name == "hash-seed" {
			options.HashSeed = seed
		}
	})
	hasher, err := kvhash.NewHasher(options)
	if err == nil && len(engines) == 0 {
		err = fmt.Errorf("expected at least one -engine")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(2)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	index := router.NewIndex()
	for _, source := range engines {
		go func() {
			if err := router.Follow(ctx, source, index); err != nil && ctx.Err() == nil {
				fmt.Fprintf(os.Stderr, "engine %s is not followed: %v\n", source.Engine, err)
				index.Remove(source.Engine)
			}
		}()
	}
	input, output := bufio.NewReaderSize(os.Stdin, 1<<20), json.NewEncoder(os.Stdout)
	for {
		line, err := input.ReadBytes('\n')
		if len(strings.TrimSpace(string(line))) > 0 {
			if output.Encode(route(line, hasher, engines, index)) != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func route(line []byte, hasher *kvhash.Hasher, engines sources, index *router.Index) answer {
	var asked question
	if err := json.Unmarshal(line, &asked); err != nil {
		return answer{Error: err.Error()}
	}
	keys := kvhash.Keys{CacheSalt: asked.CacheSalt}
	if asked.Lora != nil {
		keys.Lora = &kvhash.Lora{Name: asked.Lora.Name, Path: asked.Lora.Path}
	}
	hashes, err := hasher.HashTokens(asked.Tokens, keys)
	if err != nil {
		return answer{Error: err.Error()}
	}
	// The last token is always computed, for its logits.
	usable := min(len(hashes), max(0, len(asked.Tokens)-1)/hasher.Span())
	result := answer{Matched: map[string]int{}, Knowledge: map[string]router.Knowledge{}}
	var candidates []router.Candidate
	for _, source := range engines {
		name, speed := source.Engine, asked.Speed[source.Engine]
		if speed <= 0 {
			speed = 10_000
		}
		result.Matched[name] = index.LongestPrefix(name, hashes[:usable]) * hasher.Span()
		result.Knowledge[name] = index.Knowledge(name)
		candidates = append(candidates, router.Candidate{
			Engine: name, MatchedTokens: result.Matched[name], Knowledge: result.Knowledge[name],
			QueuedTokens: asked.Queued[name], Speed: speed,
		})
	}
	result.Engine = router.Decide(len(asked.Tokens), candidates, router.DefaultPolicy(), rand.Intn)[0].Candidate.Engine
	return result
}
