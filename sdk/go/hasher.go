package kvhash

import (
	"crypto/sha256"
	"encoding/binary"
	"math/big"
	"slices"

	"github.com/zeebo/xxh3"
)

const maxLookahead = 1 << 16

// Options are an engine's settings, as far as its block hashes depend on them. The zero value is the newest known
// release with vLLM's defaults: sha256, 16 tokens per block, PYTHONHASHSEED not set.
type Options struct {
	// VLLM is a release ("0.33.0"); empty or "latest" is the newest known.
	VLLM string
	// Algorithm is vLLM's --prefix-caching-hash-algo; empty is "sha256".
	Algorithm string
	// BlockSize is the number of tokens per block; 0 is 16.
	BlockSize int
	// HashSeed is PYTHONHASHSEED in the engine's environment; nil where it is not set. The empty text is a seed.
	HashSeed *string
	// Lookahead is the number of tokens after a block that its hash covers (drafters, from 0.33).
	Lookahead int
	// DecodeContextParallelSize makes a hash cover BlockSize times this many tokens; 0 and 1 are the same.
	DecodeContextParallelSize int
}

// Seed returns text as a value for Options.HashSeed.
func Seed(text string) *string { return &text }

// Hasher computes the block hashes of one engine's settings. It is immutable and safe for concurrent use.
type Hasher struct {
	contract  Contract
	algorithm Algorithm
	span      int
	lookahead int
	noneHash  BlockHash
}

// NewHasher checks the settings. The error is an *Error with CodeUnknownRelease, CodeUnknownAlgorithm,
// CodeAlgorithmNotInRelease, CodeAlgorithmNotReproducible, CodeInvalidBlockSize, CodeInvalidRequest,
// CodeFeatureNotInRelease, CodeInvalidSeed or CodeUnknownRoot.
func NewHasher(options Options) (*Hasher, error) {
	options = options.withDefaults()
	contract, err := ContractFor(options.VLLM)
	if err != nil {
		return nil, err
	}
	return newHasher(contract, options)
}

func (o Options) withDefaults() Options {
	if o.VLLM == "" {
		o.VLLM = "latest"
	}
	if o.Algorithm == "" {
		o.Algorithm = "sha256"
	}
	if o.BlockSize == 0 {
		o.BlockSize = 16
	}
	if o.DecodeContextParallelSize == 0 {
		o.DecodeContextParallelSize = 1
	}
	return o
}

func newHasher(contract Contract, options Options) (*Hasher, error) {
	algorithm, err := contract.Algorithm(options.Algorithm)
	if err != nil {
		return nil, err
	}
	if err := checkBlockSize(options.BlockSize, "$.block_size", "the block size"); err != nil {
		return nil, err
	}
	if err := checkBlockSize(options.DecodeContextParallelSize, "$.decode_context_parallel_size",
		"the decode context parallel size"); err != nil {
		return nil, err
	}
	if options.Lookahead < 0 || options.Lookahead > maxLookahead {
		return nil, fault(CodeInvalidRequest, "$.lookahead", "expected the look-ahead, an integer from 0 to %d, got %d",
			maxLookahead, options.Lookahead)
	}
	if options.Lookahead > 0 && !contract.Lookahead {
		return nil, fault(CodeFeatureNotInRelease, "$.lookahead",
			"vLLM %s has no look-ahead hashing; expected a look-ahead of 0", contract.Release)
	}
	hasher := &Hasher{
		contract:  contract,
		algorithm: algorithm,
		span:      options.BlockSize * options.DecodeContextParallelSize,
		lookahead: options.Lookahead,
	}
	seed := options.HashSeed
	if seed == nil && algorithm.CollisionResistant() && contract.HasDefaultSeed {
		seed = &contract.DefaultSeed
	}
	if seed == nil {
		return nil, fault(CodeUnknownRoot, "$.hash_seed",
			"vLLM %s draws NONE_HASH at random for %s when PYTHONHASHSEED is not set, so its block hashes cannot be "+
				"reproduced; set PYTHONHASHSEED in the engine's environment and give the same value as the hash seed",
			contract.Release, algorithm.Name)
	}
	if err := checkText(*seed, CodeInvalidSeed, "$.hash_seed", "the hash seed"); err != nil {
		return nil, err
	}
	hasher.noneHash = hasher.hash(hasher.serialize(nil, text(*seed)))
	return hasher, nil
}

// Contract returns what the release hashes.
func (h *Hasher) Contract() Contract { return h.contract }

// NoneHash returns NONE_HASH, the parent of block 0.
func (h *Hasher) NoneHash() BlockHash { return h.noneHash }

// Span returns how many tokens one hash covers.
func (h *Hasher) Span() int { return h.span }

func (h *Hasher) serialize(out []byte, preimage value) []byte {
	if h.algorithm.Serialization == "cbor" {
		return appendCBOR(out, preimage)
	}
	return appendPickle5(out, preimage)
}

// hash returns what of the digest of serialized bytes goes into the chain.
func (h *Hasher) hash(serialized []byte) BlockHash {
	var digest []byte
	if h.algorithm.Digest == "sha256" {
		sum := sha256.Sum256(serialized)
		digest = sum[:]
	} else {
		sum := xxh3.Hash128(serialized)
		digest = binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, sum.Hi), sum.Lo)
	}
	if h.contract.ChainValues != "int" {
		return DigestHash(digest)
	}
	if h.algorithm.Keeps == "low64" {
		digest = digest[len(digest)-8:]
	}
	return IntHash(new(big.Int).SetBytes(digest))
}

// block hashes one block into the chain; scratch is reused by the next one.
func (h *Hasher) block(scratch []byte, parent BlockHash, tokens []uint64, keys tuple) (BlockHash, []byte) {
	if h.algorithm.Serialization == "cbor" {
		scratch = appendCBORHead(scratch[:0], cborArray, 3)
		scratch = appendCBOR(scratch, parent.value())
		scratch = appendCBORHead(scratch, cborArray, uint64(len(tokens)))
		for _, token := range tokens {
			scratch = appendCBORHead(scratch, cborUint, token)
		}
		if keys == nil {
			scratch = append(scratch, cborNull)
		} else {
			scratch = appendCBOR(scratch, keys)
		}
		return h.hash(scratch), scratch
	}
	ids := make(tuple, len(tokens))
	for i, token := range tokens {
		ids[i] = uinteger(token)
	}
	var slot value
	if keys != nil {
		slot = keys
	}
	scratch = appendPickle5(scratch[:0], tuple{parent.value(), ids, slot})
	return h.hash(scratch), scratch
}

// HashTokens returns the hash of every full block of a whole prompt. Errors as Chain's.
func (h *Hasher) HashTokens(tokens []uint64, keys Keys) ([]BlockHash, error) {
	chain, err := h.Chain(tokens, keys)
	if err != nil {
		return nil, err
	}
	return chain.hashes, nil
}

// Chain starts the chain of one request; more tokens follow with Append. tokens is the whole prompt: multimodal
// items must lie within it and prompt embeddings must have a row for each of its tokens. nil: the prompt comes by
// Append, and neither can be checked here. The error is an *Error with CodeInvalidLora, CodeInvalidSalt,
// CodeInvalidMultimodal or CodeInvalidPromptEmbeds.
func (h *Hasher) Chain(tokens []uint64, keys Keys) (*Chain, error) {
	numTokens := int64(len(tokens))
	if tokens == nil {
		numTokens = -1
	}
	if err := keys.check(numTokens); err != nil {
		return nil, err
	}
	if keys.Lora != nil {
		if _, err := keys.Lora.key(h.contract); err != nil {
			return nil, err
		}
		lora := *keys.Lora
		keys.Lora = &lora
	}
	keys.Multimodal = slices.Clone(keys.Multimodal)
	chain := &Chain{hasher: h, keys: keys, keyed: h.lookahead > 0 || !keys.empty()}
	chain.Append(tokens...)
	return chain, nil
}

// Chain is the growing chain of one request: tokens in, hashes of the blocks that became full out. Tokens of
// hashed blocks are not kept. Not safe for concurrent use.
type Chain struct {
	hasher    *Hasher
	keys      Keys
	keyed     bool
	hashes    []BlockHash
	blockKeys []tuple // one per hash, when keyed
	pending   []uint64
	firstItem int
	scratch   []byte
}

// Append adds token ids and returns the hashes of the blocks that these completed.
func (c *Chain) Append(tokens ...uint64) []BlockHash {
	span, lookahead := c.hasher.span, c.hasher.lookahead
	waiting := tokens
	if len(c.pending) > 0 {
		c.pending = append(c.pending, tokens...)
		waiting = c.pending
	}
	before := len(c.hashes)
	parent := c.hasher.noneHash
	if before > 0 {
		parent = c.hashes[before-1]
	}
	for len(waiting)-lookahead >= span {
		block := waiting[:span]
		waiting = waiting[span:]
		var keys tuple
		if c.keyed {
			keys = c.extraKeys(len(c.hashes), waiting[:lookahead])
			c.blockKeys = append(c.blockKeys, keys)
		}
		parent, c.scratch = c.hasher.block(c.scratch, parent, block, keys)
		c.hashes = append(c.hashes, parent)
	}
	c.pending = append([]uint64(nil), waiting...)
	return slices.Clone(c.hashes[before:])
}

func (c *Chain) extraKeys(index int, following []uint64) tuple {
	start := int64(index) * int64(c.hasher.span)
	for c.firstItem < len(c.keys.Multimodal) && c.keys.Multimodal[c.firstItem].end() <= start {
		c.firstItem++
	}
	end := start + int64(c.hasher.span+len(following))
	keys := c.keys.block(c.hasher.contract, start, end, c.firstItem)
	if c.hasher.lookahead == 0 {
		return keys
	}
	slot := make(tuple, 0, 1+len(following))
	if keys == nil {
		slot = append(slot, nil)
	} else {
		slot = append(slot, keys)
	}
	for _, token := range following {
		slot = append(slot, uinteger(token))
	}
	return slot
}

// Hasher returns the settings that the chain was started with.
func (c *Chain) Hasher() *Hasher { return c.hasher }

// Len returns how many blocks have a hash.
func (c *Chain) Len() int { return len(c.hashes) }

// NumTokens returns how many tokens the chain has, hashed or not.
func (c *Chain) NumTokens() int { return len(c.hashes)*c.hasher.span + len(c.pending) }

// BlockHashes returns the hashes so far, one a full block.
func (c *Chain) BlockHashes() []BlockHash { return slices.Clone(c.hashes) }

// External returns the hashes as events carry them, in decimal; see BlockHash.External.
func (c *Chain) External() []string {
	external := make([]string, len(c.hashes))
	for i, hash := range c.hashes {
		external[i] = hash.External()
	}
	return external
}

// View returns the hashes at a coarser block size, a multiple of the hasher's span. The error has
// CodeInvalidBlockSize.
func (c *Chain) View(blockSize int) ([]BlockHash, error) {
	if err := checkBlockSize(blockSize, "$.block_size", "the block size"); err != nil {
		return nil, err
	}
	if blockSize%c.hasher.span != 0 {
		return nil, fault(CodeInvalidBlockSize, "$.block_size",
			"a view needs a multiple of the %d tokens of a hash, got %d", c.hasher.span, blockSize)
	}
	return CoarseView(c.hashes, blockSize/c.hasher.span)
}

// ExtraKeys returns the extra keys of every hashed block as hashed; with a look-ahead each is the block's keys (or
// nil) and the tokens after it.
func (c *Chain) ExtraKeys() []ExtraKeys {
	return c.exportKeys(func(keys tuple) tuple { return keys })
}

// EventExtraKeys returns the extra keys of every hashed block as events publish them: untagged, without look-ahead
// tokens.
func (c *Chain) EventExtraKeys() []ExtraKeys {
	return c.exportKeys(func(keys tuple) tuple {
		if c.hasher.lookahead > 0 {
			keys, _ = keys[0].(tuple)
		}
		return untag(keys, c.hasher.contract)
	})
}

func (c *Chain) exportKeys(form func(tuple) tuple) []ExtraKeys {
	all := make([]ExtraKeys, len(c.hashes))
	for i, keys := range c.blockKeys {
		all[i] = exportTuple(form(keys))
	}
	return all
}

// Copy returns an independent chain in the same state, to go on from a shared prefix.
func (c *Chain) Copy() *Chain {
	other := *c
	other.hashes = slices.Clone(c.hashes)
	other.blockKeys = slices.Clone(c.blockKeys)
	other.pending = slices.Clone(c.pending)
	other.scratch = nil
	return &other
}
