// Command kvhash-route follows engines and answers where each prompt should go: JSON lines in, JSON lines out.
//
//	echo '{"tokens":[1,2,3]}' | go run ./cmd/kvhash-route -hash-seed 0 \
//	    -engine a=tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 -engine b=tcp://127.0.0.1:5567,tcp://127.0.0.1:5568
//
// A line may add "cache_salt", "lora" {"name","path"}, "queued" and "recent" {engine: tokens}, and "speed"
// {engine: tokens/s}.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	kvhash "github.com/kvhash/kvhash/sdk/go"

	router "github.com/kvhash/kvhash/examples/router-go"
)

type sources []router.Source

func (s *sources) String() string { return fmt.Sprint(*s) }

func (s *sources) Set(text string) error {
	name, endpoints, found := strings.Cut(text, "=")
	events, replay, _ := strings.Cut(endpoints, ",")
	if !found || name == "" || events == "" || strings.Count(endpoints, ",") > 1 {
		return fmt.Errorf("expected NAME=EVENTS[,REPLAY], got %q", text)
	}
	for _, endpoint := range strings.Split(endpoints, ",") {
		if err := connectable(endpoint); err != nil {
			return err
		}
	}
	for _, other := range *s {
		if other.Engine == name {
			return fmt.Errorf("two engines are named %q", name)
		}
	}
	*s = append(*s, router.Source{Engine: name, Events: events, Replay: replay})
	return nil
}

// connectable says why nothing can be connected to an endpoint.
func connectable(endpoint string) error {
	if path, found := strings.CutPrefix(endpoint, "ipc://"); found && path != "" {
		// The system's own limit, less the zero behind the path.
		if longest := len(syscall.RawSockaddrUnix{}.Path) - 1; len(path) > longest {
			return fmt.Errorf("expected a path of at most %d bytes after ipc://, got %.60q...", longest, path)
		}
		return nil
	}
	address, found := strings.CutPrefix(endpoint, "tcp://")
	host, port, err := net.SplitHostPort(address)
	number, wrong := strconv.ParseUint(port, 10, 16)
	if !found || err != nil || host == "" || host == "*" || wrong != nil || number == 0 {
		return fmt.Errorf("expected tcp://HOST:PORT or ipc://PATH that can be connected to, got %q", endpoint)
	}
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
	Recent map[string]float64 `json:"recent"`
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
	wait := flag.Duration("wait", 6*time.Second, "the longest wait for the engines' replays before the first answer")
	flag.Parse()
	options := kvhash.Options{VLLM: *vllm, Algorithm: *algorithm, BlockSize: *blockSize}
	flag.Visit(func(given *flag.Flag) {
		if given.Name == "hash-seed" {
			options.HashSeed = seed
		}
	})
	hasher, err := kvhash.NewHasher(options)
	if err == nil && *blockSize < 1 {
		err = fmt.Errorf("expected a -block-size of at least 1, got %d", *blockSize)
	}
	if err == nil && len(engines) == 0 {
		err = fmt.Errorf("expected at least one -engine")
	}
	if err == nil && *wait < 0 {
		err = fmt.Errorf("expected a -wait of at least 0, got %v", *wait)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(2)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	index := router.NewIndex()
	ready := make(chan string, 2*len(engines))
	for _, source := range engines {
		source.Ready = func() { ready <- source.Engine }
		go func() {
			defer source.Ready() // one that cannot be followed is not waited for
			if err := router.Follow(ctx, source, index); err != nil && ctx.Err() == nil {
				fmt.Fprintf(os.Stderr, "engine %s is not followed: %v\n", source.Engine, err)
				index.Remove(source.Engine)
			}
		}()
	}
	waitFor(ready, len(engines), *wait)
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

// waitFor returns when so many engines are ready, or the longest wait is over.
func waitFor(ready <-chan string, count int, longest time.Duration) {
	deadline, seen := time.After(longest), map[string]bool{}
	for len(seen) < count {
		select {
		case engine := <-ready:
			seen[engine] = true
		case <-deadline:
			return
		}
	}
}

// read returns a line's question. A field that is not known is refused: it may be one that changes the hashes.
func read(line []byte) (question, error) {
	var asked question
	decoder := json.NewDecoder(bytes.NewReader(line))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&asked); err != nil {
		return asked, err
	}
	if _, err := decoder.Token(); err != io.EOF {
		return asked, errors.New("expected one JSON object a line")
	}
	return asked, nil
}

func route(line []byte, hasher *kvhash.Hasher, engines sources, index *router.Index) answer {
	asked, err := read(line)
	if err != nil {
		return answer{Error: err.Error()}
	}
	if len(asked.Tokens) == 0 {
		return answer{Error: "expected at least one token in \"tokens\""}
	}
	for engine, speed := range asked.Speed {
		if speed <= 0 {
			return answer{Error: fmt.Sprintf("expected a speed above 0 for %q, got %g", engine, speed)}
		}
	}
	for what, each := range map[string]map[string]float64{"queued": asked.Queued, "recent": asked.Recent} {
		for engine, tokens := range each {
			if tokens < 0 {
				return answer{Error: fmt.Sprintf("expected %s tokens of at least 0 for %q, got %g", what, engine, tokens)}
			}
		}
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
		if speed == 0 {
			speed = 10_000
		}
		result.Matched[name] = index.LongestPrefix(name, hashes[:usable]) * hasher.Span()
		result.Knowledge[name] = index.Knowledge(name)
		candidates = append(candidates, router.Candidate{
			Engine: name, MatchedTokens: result.Matched[name], Knowledge: result.Knowledge[name],
			QueuedTokens: asked.Queued[name], RecentTokens: asked.Recent[name], Speed: speed,
		})
	}
	result.Engine = router.Decide(len(asked.Tokens), candidates, router.DefaultPolicy(), rand.Intn)[0].Candidate.Engine
	return result
}
