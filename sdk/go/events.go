package kvhash

import (
	"math"
	"strconv"
)

// Integer is an integer as msgpack carries it, from -2^63 to 2^64 - 1. It is comparable.
type Integer struct {
	bits     uint64
	negative bool
}

// SignedInteger returns number as an Integer.
func SignedInteger(number int64) Integer { return Integer{uint64(number), number < 0} }

// UnsignedInteger returns number as an Integer.
func UnsignedInteger(number uint64) Integer { return Integer{number, false} }

// Int64 returns the number, and false when int64 cannot hold it.
func (i Integer) Int64() (int64, bool) { return int64(i.bits), i.negative || i.bits <= math.MaxInt64 }

// Uint64 returns the number, and false when it is negative.
func (i Integer) Uint64() (uint64, bool) { return i.bits, !i.negative }

// String returns the number in decimal.
func (i Integer) String() string {
	if i.negative {
		return strconv.FormatInt(int64(i.bits), 10)
	}
	return strconv.FormatUint(i.bits, 10)
}

// HashValue is a block hash as on the wire: an integer, signed or not, or the digest's bytes. It is comparable.
type HashValue struct {
	digest  string
	number  Integer
	isBytes bool
}

// Bytes returns the digest, and false when the hash is an integer.
func (h HashValue) Bytes() ([]byte, bool) { return []byte(h.digest), h.isBytes }

// Integer returns the number, and false when the hash is bytes.
func (h HashValue) Integer() (Integer, bool) { return h.number, !h.isBytes }

// Key returns one key for a block hash in any of its wire forms: its low 64 bits, unsigned. The three forms in
// which one engine may publish a hash give the same key.
func (h HashValue) Key() uint64 {
	if h.isBytes {
		return low64([]byte(h.digest))
	}
	return h.number.bits
}

// TokenIDs are the tokens of an event: single ids, or (SGLang with EAGLE) pairs.
type TokenIDs struct {
	// Singles holds the ids; nil when Pairs has them.
	Singles []Integer
	Pairs   [][2]Integer
}

// Len returns how many ids, or pairs, there are.
func (t TokenIDs) Len() int { return max(len(t.Singles), len(t.Pairs)) }

// Uint64s returns the ids for hashing. Pairs and negative ids cannot be hashed: the error has CodeInvalidToken.
func (t TokenIDs) Uint64s() ([]uint64, error) {
	if t.Pairs != nil {
		return nil, fault(CodeInvalidToken, "$.token_ids", "the event holds pairs of tokens instead of tokens")
	}
	tokens := make([]uint64, len(t.Singles))
	for i, id := range t.Singles {
		number, ok := id.Uint64()
		if !ok {
			return nil, fault(CodeInvalidToken, "$.token_ids["+strconv.Itoa(i)+"]",
				"expected a token id, an integer from 0 to 2^64 - 1, got %s", id)
		}
		tokens[i] = number
	}
	return tokens, nil
}

// Event is what a batch may hold: *BlockStored, *BlockRemoved, *AllBlocksCleared, *UnknownEvent or
// *UndecodableEvent.
type Event interface{ isEvent() }

// BlockStored: blocks entered a cache, one hash a block, chained after ParentBlockHash (nil: they start a prompt).
// A field that the release does not have, or that the publisher left out, is nil.
type BlockStored struct {
	BlockHashes     []HashValue
	ParentBlockHash *HashValue
	// TokenIDs are those of all the blocks, BlockSize tokens each; empty for tiers that do not say.
	TokenIDs  TokenIDs
	BlockSize Integer
	LoraID    *Integer
	Medium    *string
	LoraName  *string
	// ExtraKeys holds per block nil or what else its hash covers, untagged; the values are as ExtraField.Value's.
	ExtraKeys                [][]any
	GroupIdx                 *Integer
	KVCacheSpecKind          *string
	KVCacheSpecSlidingWindow *Integer
	Locality                 *string
	Ownership                *string
	SessionID                *string
	// LookaheadTokenIDs holds per block the tokens after it that its hash covers.
	LookaheadTokenIDs [][]Integer
	// CacheSalt is SGLang's.
	CacheSalt *string
	// Extra keeps fields that are not known.
	Extra []ExtraField
}

// BlockRemoved: blocks left a cache.
type BlockRemoved struct {
	BlockHashes []HashValue
	Medium      *string
	GroupIdx    *Integer
	Locality    *string
	Ownership   *string
	Extra       []ExtraField
}

// AllBlocksCleared: the whole prefix cache was dropped, every tier and group.
type AllBlocksCleared struct{ Extra []ExtraField }

// UnknownEvent is an event whose tag is not known; Raw is its msgpack.
type UnknownEvent struct {
	Tag string
	Raw []byte
}

// UndecodableEvent is an event that cannot be read, in its place among the others of its batch.
type UndecodableEvent struct {
	// Path says where ("$.events[2].block_hashes[0]"), Message what and what would be right.
	Path, Message string
	// Tag is the event's tag where that could be read.
	Tag string
	// Raw is its msgpack.
	Raw []byte
}

// ExtraField is a field that is not known: by name from a map, by position (the tag is 0) from an array.
type ExtraField struct {
	// Name is empty for a position.
	Name     string
	Position int
	// Value is nil, a bool, float64, Integer, string, []byte, []any, WireMap or Extension.
	Value any
}

// WireMap is a map on the wire, in its order.
type WireMap []WirePair

// WirePair is one key of a WireMap with its value.
type WirePair struct{ Key, Value any }

// Extension is an extension value of msgpack; a timestamp (-1) is rounded to the microsecond and in its shortest form.
type Extension struct {
	Code int8
	Data []byte
}

func (*BlockStored) isEvent()      {}
func (*BlockRemoved) isEvent()     {}
func (*AllBlocksCleared) isEvent() {}
func (*UnknownEvent) isEvent()     {}
func (*UndecodableEvent) isEvent() {}

// EventBatch is one published message: the events of one engine step, in order.
type EventBatch struct {
	// Timestamp is in seconds since the epoch, by the engine's clock.
	Timestamp float64
	Events    []Event
	// DataParallelRank is nil where not said.
	DataParallelRank *Integer
	// Layout is how the events were written: "array", "map" or "mixed"; empty when there was none to tell by.
	Layout string
	// Extra keeps what the batch holds besides.
	Extra []ExtraField
}
