package kvhash

import "math/big"

// A value is a part of a preimage: nil, integer, text, octets, tuple, or *ref.
//
// Pickle writes an object that it has met before as a back-reference, so equal values give different bytes
// depending on whether they are the same object. Here a text or octets is a fresh object at every place where it
// stands, and a *ref is one object wherever that same pointer stands. CBOR has no identity; there a *ref is its
// value.
type value any

type (
	text     string
	octets   string
	tuple    []value
	uinteger uint64
	// bigInteger holds an integer of any size and sign: a chain value before 0.10.2, or a negative offset.
	bigInteger struct{ *big.Int }
)

// ref is one text object that may stand in several places of one preimage. From vLLM 0.31 the tag "mm" is such an
// object: it is one constant in vLLM's code, while two equal image identifiers came over the wire as two objects.
type ref struct{ text text }

var (
	tagLora         = &ref{"lora"}
	tagMultimodal   = &ref{"mm"}
	tagCacheSalt    = &ref{"cache_salt"}
	tagPromptEmbeds = &ref{"prompt_embeds"}
)

func signed(number int64) value {
	if number >= 0 {
		return uinteger(number)
	}
	return bigInteger{big.NewInt(number)}
}
