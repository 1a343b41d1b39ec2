package kvhash

import (
	"math"
	"math/big"
	"slices"
	"strconv"
)

const maxBlockSize = math.MaxInt32

func checkBlockSize(size int, at, what string) error {
	if size < 1 || size > maxBlockSize {
		return fault(CodeInvalidBlockSize, at, "expected %s, an integer from 1 to %d, got %d", what, maxBlockSize, size)
	}
	return nil
}

// BlockSizes are the granularities of an engine, in tokens.
type BlockSizes struct {
	// Groups holds the tokens per block of each KV cache group, context parallelism included.
	Groups []int
	// HashBlockSize is the number of tokens that a hash covers.
	HashBlockSize int
	// SchedulerBlockSize is what cache hits are aligned to.
	SchedulerBlockSize *big.Int
}

// Factor returns how many hashes a block of this group spans, for CoarseView.
func (s BlockSizes) Factor(group int) int { return s.Groups[group] / s.HashBlockSize }

// BlockSizeOptions are the settings behind the granularities besides the groups' own block sizes.
type BlockSizeOptions struct {
	// HashBlockSize overrides the greatest common divisor (vLLM's prefix_match_unit); 0 leaves it.
	HashBlockSize int
	// DecodeContextParallelSize scales every attention group; 0 and 1 are the same.
	DecodeContextParallelSize int
	// UnscaledGroups are the groups that context parallelism leaves alone (Mamba).
	UnscaledGroups []int
}

// ResolveBlockSizes returns the granularities of an engine with these KV cache groups: hashes at the greatest
// common divisor of their block sizes, hits at the least common multiple. The error has CodeInvalidBlockSize.
func ResolveBlockSizes(groups []int, options BlockSizeOptions) (BlockSizes, error) {
	if len(groups) == 0 {
		return BlockSizes{}, fault(CodeInvalidBlockSize, "$.groups", "expected at least one KV cache group")
	}
	dcp := options.DecodeContextParallelSize
	if dcp == 0 {
		dcp = 1
	}
	if err := checkBlockSize(dcp, "$.decode_context_parallel_size", "the decode context parallel size"); err != nil {
		return BlockSizes{}, err
	}
	sizes := make([]int, len(groups))
	unit, lcm := big.NewInt(0), big.NewInt(1)
	for i, size := range groups {
		if err := checkBlockSize(size, "$.groups["+strconv.Itoa(i)+"]", "the block size"); err != nil {
			return BlockSizes{}, err
		}
		if !slices.Contains(options.UnscaledGroups, i) {
			size *= dcp
		}
		sizes[i] = size
		number := big.NewInt(int64(size))
		unit.GCD(nil, nil, unit, number)
		common := new(big.Int).GCD(nil, nil, lcm, number)
		lcm.Mul(lcm, number).Div(lcm, common)
	}
	hashes := int(unit.Int64())
	if options.HashBlockSize != 0 {
		hashes = options.HashBlockSize
		if err := checkBlockSize(hashes, "$.hash_block_size", "the hash block size"); err != nil {
			return BlockSizes{}, err
		}
		for i, size := range sizes {
			if size%hashes != 0 {
				return BlockSizes{}, fault(CodeInvalidBlockSize, "$.hash_block_size",
					"the hash block size %d does not divide the %d tokens of group %d", hashes, size, i)
			}
		}
		if len(sizes) == 1 && hashes != sizes[0] {
			return BlockSizes{}, fault(CodeInvalidBlockSize, "$.hash_block_size",
				"with a single KV cache group hashes cover its block, %d tokens; got %d", sizes[0], hashes)
		}
	}
	return BlockSizes{sizes, hashes, lcm}, nil
}
