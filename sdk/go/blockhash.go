package kvhash

import (
	"encoding/binary"
	"encoding/hex"
	"math/big"
)

// BlockHash is one value of the chain: the digest (32 bytes for sha256*, 16 for xxhash*), or before vLLM 0.10.2 an
// integer. It is comparable and can be a map key.
type BlockHash struct {
	content string // the digest, or the integer's magnitude, big-endian
	integer bool
}

// DigestHash returns the block hash with these digest bytes.
func DigestHash(digest []byte) BlockHash { return BlockHash{content: string(digest)} }

// IntHash returns the block hash of vLLM before 0.10.2 with this value, not negative.
func IntHash(value *big.Int) BlockHash {
	return BlockHash{content: string(value.Bytes()), integer: true}
}

// IsInt says whether the hash is an integer (before 0.10.2) instead of bytes.
func (h BlockHash) IsInt() bool { return h.integer }

// Bytes returns the digest. An integer has no bytes form: the error has CodeInvalidHash.
func (h BlockHash) Bytes() ([]byte, error) {
	if h.integer {
		return nil, fault(CodeInvalidHash, "", "before vLLM 0.10.2 hashes are integers; they have no bytes form")
	}
	return []byte(h.content), nil
}

// Int returns the hash as an integer, a digest read big-endian.
func (h BlockHash) Int() *big.Int { return new(big.Int).SetBytes([]byte(h.content)) }

// Uint64 returns the low 64 bits, as events carry a hash from 0.10.2 on.
func (h BlockHash) Uint64() uint64 { return low64([]byte(h.content)) }

// Int64 returns the low 64 bits as two's complement, as a consumer that knows only int64 reads them.
func (h BlockHash) Int64() int64 { return int64(h.Uint64()) }

// External returns the value that events carry, in decimal: the low 64 bits, unsigned, or before 0.10.2 the whole
// integer.
func (h BlockHash) External() string {
	if h.integer {
		return h.Int().String()
	}
	return new(big.Int).SetUint64(h.Uint64()).String()
}

// String returns lower-case hex, or decimal for an integer.
func (h BlockHash) String() string {
	if h.integer {
		return h.Int().String()
	}
	return hex.EncodeToString([]byte(h.content))
}

// WithGroupID returns the key of vLLM's hash map: the digest, then the KV cache group's id as 4 bytes big-endian.
// The error has CodeInvalidHash.
func (h BlockHash) WithGroupID(group uint32) ([]byte, error) {
	digest, err := h.Bytes()
	if err != nil {
		return nil, err
	}
	return binary.BigEndian.AppendUint32(digest, group), nil
}

// SplitGroupID returns the digest and the group id of what WithGroupID made. The error has CodeInvalidHash.
func SplitGroupID(key []byte) (BlockHash, uint32, error) {
	if len(key) < 4 {
		return BlockHash{}, 0, fault(CodeInvalidHash, "", "expected a digest and 4 bytes, got %d bytes", len(key))
	}
	end := len(key) - 4
	return DigestHash(key[:end]), binary.BigEndian.Uint32(key[end:]), nil
}

func (h BlockHash) value() value {
	if h.integer {
		return bigInteger{h.Int()}
	}
	return octets(h.content)
}

func low64(digest []byte) uint64 {
	var last [8]byte
	copy(last[max(0, 8-len(digest)):], digest[max(0, len(digest)-8):])
	return binary.BigEndian.Uint64(last[:])
}

// CoarseView returns block hashes at a coarser block size, without hashing again: a hash covers its whole prefix,
// so that of a block of factor fine blocks is the hash of its last fine one. A tail that fills no coarse block is
// left out. The error has CodeInvalidBlockSize.
func CoarseView(hashes []BlockHash, factor int) ([]BlockHash, error) {
	if factor < 1 {
		return nil, fault(CodeInvalidBlockSize, "", "expected a factor of at least 1, got %d", factor)
	}
	view := make([]BlockHash, 0, len(hashes)/factor)
	for i := factor - 1; i < len(hashes); i += factor {
		view = append(view, hashes[i])
	}
	return view, nil
}
