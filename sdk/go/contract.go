package kvhash

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Release is a vLLM release as three numbers. A fourth (0.10.1.1), pre-release and local parts do not change the
// contract, and a development version counts as the release that it leads to.
type Release struct{ Major, Minor, Patch int }

// String returns the release as "0.33.0".
func (r Release) String() string { return fmt.Sprintf("%d.%d.%d", r.Major, r.Minor, r.Patch) }

// Compare returns -1, 0 or 1 as r is older than, the same as or newer than other.
func (r Release) Compare(other Release) int {
	return slices.Compare([]int{r.Major, r.Minor, r.Patch}, []int{other.Major, other.Minor, other.Patch})
}

// Oldest returns the first release whose block hashes can be reproduced.
func Oldest() Release { return oldestRelease }

// Newest returns the newest release that the table knows.
func Newest() Release { return newestRelease }

var releaseForm = regexp.MustCompile(`(?i)^v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(?:\.\d{1,6})?` +
	`(?:[-_.]?(?:a|b|rc|alpha|beta|pre|post|dev)[-_.]?\d{0,9}){0,4}(?:\+[a-z0-9._-]*)?$`)

func trim(text string) string {
	// What Python calls white space includes the four ASCII separators.
	return strings.TrimFunc(text, func(r rune) bool { return unicode.IsSpace(r) || 0x1c <= r && r <= 0x1f })
}

func isASCII(text string) bool {
	return strings.IndexFunc(text, func(r rune) bool { return r > unicode.MaxASCII }) < 0
}

// ParseRelease reads "0.31.0", "v0.31", "0.10.1.1" or "0.31.0rc2.dev7+g1234". The error has CodeUnknownRelease.
func ParseRelease(text string) (Release, error) {
	var match []string
	// Letters beyond ASCII may fold to ASCII ones.
	if form := trim(text); len(text) <= 400 && utf8.RuneCountInString(text) <= 100 && isASCII(form) {
		match = releaseForm.FindStringSubmatch(form)
	}
	if match == nil {
		return Release{}, fault(CodeUnknownRelease, "",
			"%q is not a vLLM release; expected one such as %s or \"latest\"", text, newestRelease)
	}
	var numbers [3]int
	for i := range numbers {
		if match[i+1] != "" {
			numbers[i], _ = strconv.Atoi(match[i+1])
		}
	}
	return Release{numbers[0], numbers[1], numbers[2]}, nil
}

// Algorithm is one value of vLLM's --prefix-caching-hash-algo: a serialization ("pickle5", "cbor"), a digest
// ("sha256", "xxh3_128"), and what of the digest is kept ("digest", "low64").
type Algorithm struct{ Name, Serialization, Digest, Keeps string }

// CollisionResistant says whether the digest resists collisions made on purpose; only then has vLLM a fixed
// NONE_HASH.
func (a Algorithm) CollisionResistant() bool { return a.Digest == "sha256" }

// EventField is a field of an event; a map leaves an optional one out when it is nil.
type EventField struct {
	Name     string
	Optional bool
}

// EventContract is how one release writes its events.
type EventContract struct {
	// Layout is "array" (tag first, every field written) or "map" (with a "type" key).
	Layout string
	// BlockStored and BlockRemoved list the fields in wire order.
	BlockStored, BlockRemoved []EventField
	// HashBytes says whether the publisher can be set to raw bytes hashes.
	HashBytes bool
	// ReplayTopicFrame says whether a replay reply carries the topic as a live message does.
	ReplayTopicFrame bool
}

// Contract is everything about one vLLM release that decides a block hash, its published form and its events.
// It is read from a table that is generated from the Python SDK's; do not change one.
type Contract struct {
	Release Release
	// Algorithms lists the reproducible algorithms by vLLM's names.
	Algorithms []string
	// ChainValues is "int" (the digest as an integer is chained) or "bytes".
	ChainValues string
	// DefaultSeed is the seed of NONE_HASH without PYTHONHASHSEED for collision-resistant algorithms; without
	// one (HasDefaultSeed false) NONE_HASH is random.
	HasDefaultSeed bool
	DefaultSeed    string
	// LoraKey is "id", "name" or "name_and_path".
	LoraKey string
	// MultimodalKey is "identifier" or "identifier_and_offset".
	MultimodalKey string
	// PromptEmbedsKey is "absent", "bytes" or "sha256".
	PromptEmbedsKey string
	// TaggedKeys says whether extra keys carry a tag in the hash; events never do.
	TaggedKeys bool
	// Lookahead says whether a hash can cover tokens after its block.
	Lookahead bool
	Events    EventContract
}

// ContractFor returns the contract of a vLLM release, "latest" for the newest known one. A release newer than the
// table works as the newest; Known then says false. The error has CodeUnknownRelease.
func ContractFor(vllm string) (Contract, error) {
	if strings.ToLower(trim(vllm)) == "latest" {
		return contractAt(newestRelease), nil
	}
	release, err := ParseRelease(vllm)
	if err != nil {
		return Contract{}, err
	}
	if release.Compare(oldestRelease) < 0 {
		return Contract{}, fault(CodeUnknownRelease, "",
			"vLLM %s is older than %s, the first release whose block hashes can be reproduced; expected %s to %s",
			release, oldestRelease, oldestRelease, newestRelease)
	}
	return contractAt(release), nil
}

func contractAt(release Release) Contract {
	var contract Contract
	for _, row := range contractTable {
		if row.Release.Compare(release) <= 0 {
			contract = row
		}
	}
	contract.Release = release
	contract.Algorithms = slices.Clone(contract.Algorithms)
	contract.Events.BlockStored = slices.Clone(contract.Events.BlockStored)
	contract.Events.BlockRemoved = slices.Clone(contract.Events.BlockRemoved)
	return contract
}

// Known says whether the table covers the release; false means that it is newer and read as the newest known.
func (c Contract) Known() bool { return c.Release.Compare(newestRelease) <= 0 }

// Algorithm returns the algorithm of that name. The error has CodeUnknownAlgorithm, CodeAlgorithmNotInRelease or
// CodeAlgorithmNotReproducible.
func (c Contract) Algorithm(name string) (Algorithm, error) {
	expected := strings.Join(c.Algorithms, ", ")
	if name == "builtin" {
		return Algorithm{}, fault(CodeAlgorithmNotReproducible, "$.algorithm",
			"algorithm 'builtin' is Python's own hash(), which differs by process and by build, so its block hashes "+
				"cannot be reproduced; start vLLM with one of: %s", expected)
	}
	i := slices.IndexFunc(algorithmTable, func(a Algorithm) bool { return a.Name == name })
	if i < 0 {
		return Algorithm{}, fault(CodeUnknownAlgorithm, "$.algorithm", "unknown algorithm %q; vLLM %s has: %s",
			name, c.Release, expected)
	}
	if !slices.Contains(c.Algorithms, name) {
		return Algorithm{}, fault(CodeAlgorithmNotInRelease, "$.algorithm", "vLLM %s has no algorithm %q; it has: %s",
			c.Release, name, expected)
	}
	return algorithmTable[i], nil
}

// Change says what one release changed.
type Change struct {
	Since   Release
	Summary string
}

// ChangesBetween returns what changed after the older of two releases up to the newer one, oldest first. The
// error has CodeUnknownRelease.
func ChangesBetween(one, other string) ([]Change, error) {
	first, err := ContractFor(one)
	if err != nil {
		return nil, err
	}
	last, err := ContractFor(other)
	if err != nil {
		return nil, err
	}
	if first.Release.Compare(last.Release) > 0 {
		first, last = last, first
	}
	var changes []Change
	for _, change := range changeTable {
		if change.Since.Compare(first.Release) > 0 && change.Since.Compare(last.Release) <= 0 {
			changes = append(changes, change)
		}
	}
	return changes, nil
}
