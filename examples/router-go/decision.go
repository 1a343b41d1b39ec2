// Package router is the decision of kvhash-router as a small Go library: which engine gets a request, by the longest
// cached prefix weighed against load; with the index and the subscriber that it needs, on the kvhash Go SDK.
package router

import (
	"math"
	"sort"
)

// Knowledge is what is known of an engine's cache.
type Knowledge string

// Exact: the cache is known. Degraded: something was lost. Unknown: nothing can be said, so load alone decides.
const (
	Exact    Knowledge = "exact"
	Degraded Knowledge = "degraded"
	Unknown  Knowledge = "unknown"
)

// Policy holds the weights of the cost model; DefaultPolicy those of kvhash-router.
type Policy struct {
	// DegradedTrust is the share of a match that counts after a loss.
	DegradedTrust float64 `json:"degraded_trust"`
	// OverheadTokens is the work of a request with nothing to compute.
	OverheadTokens float64 `json:"overhead_tokens"`
	// RecentWeight is how much of the work that an engine was sent lately, beyond 1.25 times the least busy one's, counts
	// against its match.
	RecentWeight float64 `json:"recent_weight"`
	// TieShare and TieTokens: costs are equal within this share of the least, or this much work.
	TieShare  float64 `json:"tie_share"`
	TieTokens float64 `json:"tie_tokens"`
}

// DefaultPolicy returns kvhash-router's defaults.
func DefaultPolicy() Policy {
	return Policy{DegradedTrust: 0.5, OverheadTokens: 32, RecentWeight: 0.2, TieShare: 0.02, TieTokens: 8}
}

// even: up to so many times as busy as the least busy engine is as busy.
const even = 1.25

func (p Policy) trust(knowledge Knowledge) float64 {
	switch knowledge {
	case Exact:
		return 1
	case Degraded:
		return p.DegradedTrust
	}
	return 0
}

// Candidate is one engine that could take the request.
type Candidate struct {
	Engine string `json:"engine"`
	// MatchedTokens are the prompt's tokens that its cache holds, as far as known.
	MatchedTokens int       `json:"matched_tokens"`
	Knowledge     Knowledge `json:"knowledge"`
	// QueuedTokens is work that it has and has not done.
	QueuedTokens float64 `json:"queued_tokens"`
	// RecentTokens is work that it was sent lately, done or not; kvhash-router lets half of it fade in 10 s.
	RecentTokens float64 `json:"recent_tokens"`
	// Speed is in tokens a second.
	Speed float64 `json:"speed"`
}

// Scored is a candidate's cost, in seconds, and the uncached tokens that it is made of.
type Scored struct {
	Candidate      Candidate
	UncachedTokens float64
	Cost           float64
}

// Decide returns the candidates with their costs, the chosen one first; none for none. Pure: draw(n), which gives an
// integer from 0 to n - 1, is called only where there are equals. Two of them are drawn and the one with less queued
// work for its speed is chosen, or less recent work where that is the same.
func Decide(promptTokens int, candidates []Candidate, policy Policy, draw func(int) int) []Scored {
	if len(candidates) == 0 {
		return nil
	}
	idlest := math.Inf(1)
	for _, candidate := range candidates {
		idlest = min(idlest, candidate.RecentTokens/candidate.Speed)
	}
	scored := make([]Scored, len(candidates))
	least := 0
	for i, candidate := range candidates {
		counted := policy.trust(candidate.Knowledge) * float64(min(candidate.MatchedTokens, promptTokens))
		uncached := float64(promptTokens) - counted
		ahead := max(0, candidate.RecentTokens-even*idlest*candidate.Speed)
		spread := min(policy.RecentWeight*ahead, counted)
		work := uncached + candidate.QueuedTokens + spread + policy.OverheadTokens
		scored[i] = Scored{candidate, uncached, work / candidate.Speed}
		if scored[i].Cost < scored[least].Cost {
			least = i
		}
	}
	margin := math.Max(scored[least].Cost*policy.TieShare, policy.TieTokens/scored[least].Candidate.Speed)
	var equals []int
	for i := range scored {
		if scored[i].Cost <= scored[least].Cost+margin {
			equals = append(equals, i)
		}
	}
	chosen := equals[0]
	if len(equals) > 1 {
		chosen = ofTwo(scored, equals, draw)
	}
	ordered := make([]Scored, 0, len(scored))
	ordered = append(ordered, scored[chosen])
	for i := range scored {
		if i != chosen {
			ordered = append(ordered, scored[i])
		}
	}
	sort.SliceStable(ordered[1:], func(a, b int) bool { return ordered[1+a].Cost < ordered[1+b].Cost })
	return ordered
}

func ofTwo(scored []Scored, equals []int, draw func(int) int) int {
	first := draw(len(equals))
	second := draw(len(equals) - 1)
	if second >= first {
		second++
	}
	load := func(i int) (queued, recent float64) {
		candidate := scored[equals[i]].Candidate
		return candidate.QueuedTokens / candidate.Speed, candidate.RecentTokens / candidate.Speed
	}
	queued, recent := load(first)
	if other, otherRecent := load(second); other < queued || other == queued && otherRecent < recent {
		return equals[second]
	}
	return equals[first]
}
