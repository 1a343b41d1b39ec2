package router

import (
	"strings"
	"sync"

	kvhash "github.com/kvhash/kvhash/sdk/go"
)

// Index says which engine holds which prefix on its GPU. It is the small form of the Python SDK's residency index:
// one tier, full-attention groups only (an engine with others is Unknown, so load alone decides for it), copies
// counted. Safe for concurrent use.
type Index struct {
	mutex   sync.Mutex
	engines map[string]*holdings
}

type holdings struct {
	// groups: by KV cache group, a block hash's low 64 bits -> copies.
	groups  map[int64]map[uint64]int
	reasons map[string]bool
	heard   bool
}

// NewIndex returns an empty index.
func NewIndex() *Index { return &Index{engines: map[string]*holdings{}} }

func (x *Index) of(engine string) *holdings {
	held := x.engines[engine]
	if held == nil {
		held = &holdings{groups: map[int64]map[uint64]int{}, reasons: map[string]bool{}}
		x.engines[engine] = held
	}
	return held
}

// Apply takes in one batch of an engine, in the order of its sequence numbers.
func (x *Index) Apply(engine string, batch *kvhash.EventBatch) {
	x.mutex.Lock()
	defer x.mutex.Unlock()
	held := x.of(engine)
	held.heard = true
	for _, event := range batch.Events {
		switch event := event.(type) {
		case *kvhash.BlockStored:
			if !onGPU(event.Medium) {
				continue
			}
			if kind := event.KVCacheSpecKind; kind != nil && !strings.Contains(*kind, "full_attention") {
				held.reasons["group-kind"] = true
				continue
			}
			blocks := held.group(event.GroupIdx)
			for _, hash := range event.BlockHashes {
				blocks[hash.Key()]++
			}
		case *kvhash.BlockRemoved:
			if !onGPU(event.Medium) {
				continue
			}
			blocks := held.group(event.GroupIdx)
			for _, hash := range event.BlockHashes {
				if key := hash.Key(); blocks[key] > 1 {
					blocks[key]--
				} else {
					delete(blocks, key)
				}
			}
		case *kvhash.AllBlocksCleared:
			clear(held.groups)
			delete(held.reasons, "lost")
		case *kvhash.UndecodableEvent:
			held.reasons["undecodable"] = true
		}
	}
}

// An absent medium is the GPU: releases before 0.10.2 do not say it.
func onGPU(medium *string) bool { return medium == nil || strings.EqualFold(*medium, "GPU") }

func (h *holdings) group(index *kvhash.Integer) map[uint64]int {
	var number int64
	if index != nil {
		number, _ = index.Int64()
	}
	if h.groups[number] == nil {
		h.groups[number] = map[uint64]int{}
	}
	return h.groups[number]
}

// Lost says that batches of the engine will not come: its knowledge is Degraded until a clear or a restart.
func (x *Index) Lost(engine string) {
	x.mutex.Lock()
	defer x.mutex.Unlock()
	x.of(engine).reasons["lost"] = true
}

// Remove forgets the engine: it restarted, or is gone.
func (x *Index) Remove(engine string) {
	x.mutex.Lock()
	defer x.mutex.Unlock()
	delete(x.engines, engine)
}

// Knowledge returns what is known of the engine's cache.
func (x *Index) Knowledge(engine string) Knowledge {
	x.mutex.Lock()
	defer x.mutex.Unlock()
	held := x.engines[engine]
	switch {
	case held == nil || !held.heard || held.reasons["group-kind"]:
		return Unknown
	case len(held.reasons) > 0:
		return Degraded
	}
	return Exact
}

// LongestPrefix returns how many of the prompt's blocks the engine holds from the start, in every group.
func (x *Index) LongestPrefix(engine string, hashes []kvhash.BlockHash) int {
	x.mutex.Lock()
	defer x.mutex.Unlock()
	held := x.engines[engine]
	if held == nil || len(held.groups) == 0 {
		return 0
	}
	for i, hash := range hashes {
		for _, blocks := range held.groups {
			if blocks[hash.Uint64()] == 0 {
				return i
			}
		}
	}
	return len(hashes)
}
