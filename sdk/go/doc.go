// Package kvhash computes, outside vLLM, the KV-cache block hashes that vLLM computes, and reads the KV events that
// it publishes.
//
// A block hash is H(serialize((parent, tokens, extra keys))); the parent of block 0 is NONE_HASH. What differs by
// vLLM release (0.9.2 and later) is one table, generated from the Python SDK. Start with NewHasher:
//
//	hasher, err := kvhash.NewHasher(kvhash.Options{VLLM: "0.33.0", Algorithm: "sha256_cbor", HashSeed: kvhash.Seed("0")})
//	hashes, err := hasher.HashTokens(tokens, kvhash.Keys{CacheSalt: "tenant-1"})
//
// DecodeBatch reads the payload of a published message, whatever release wrote it. Every error is an *Error whose
// Code is stable and the same in every kvhash SDK.
package kvhash
