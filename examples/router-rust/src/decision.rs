//! The cost model: a pure function of the candidates.

use serde::{Deserialize, Serialize};

/// What is known of an engine's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Knowledge {
    /// The cache is known.
    Exact,
    /// Something was lost.
    Degraded,
    /// Nothing can be said, so load alone decides.
    Unknown,
}

/// The weights of the cost model; the default is that of kvhash-router.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Policy {
    /// The share of a match that counts after a loss.
    pub degraded_trust: f64,
    /// The work of a request with nothing to compute, in tokens.
    pub overhead_tokens: f64,
    /// How much of the work that an engine was sent lately, beyond 1.25 times the least busy one's, counts against its
    /// match.
    pub recent_weight: f64,
    /// Costs within this share of the least are equal.
    pub tie_share: f64,
    /// Costs within this much work of the least are equal, in tokens.
    pub tie_tokens: f64,
}

/// Up to so many times as busy as the least busy engine is as busy.
const EVEN: f64 = 1.25;

impl Default for Policy {
    fn default() -> Self {
        Self {
            degraded_trust: 0.5,
            overhead_tokens: 32.0,
            recent_weight: 0.2,
            tie_share: 0.02,
            tie_tokens: 8.0,
        }
    }
}

impl Policy {
    const fn trust(&self, knowledge: Knowledge) -> f64 {
        match knowledge {
            Knowledge::Exact => 1.0,
            Knowledge::Degraded => self.degraded_trust,
            Knowledge::Unknown => 0.0,
        }
    }
}

/// One engine that could take the request.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Candidate {
    /// Its name.
    pub engine: String,
    /// The prompt's tokens that its cache holds, as far as known.
    pub matched_tokens: u64,
    /// How far that can be trusted.
    pub knowledge: Knowledge,
    /// Work that it has and has not done.
    pub queued_tokens: f64,
    /// Work that it was sent lately, done or not; kvhash-router lets half of it fade in 10 s.
    pub recent_tokens: f64,
    /// Tokens a second, above 0.
    pub speed: f64,
}

/// A candidate and what it would cost.
#[derive(Debug, Clone, PartialEq)]
pub struct Scored {
    /// The engine.
    pub candidate: Candidate,
    /// The tokens to compute.
    pub uncached_tokens: f64,
    /// Estimated seconds to the first token.
    pub cost: f64,
}

/// The candidates with their costs, the chosen one first; none for none.
///
/// Pure: `draw(n)`, which gives an integer from 0 to n - 1, is called only where there are equals. Two of them are drawn
/// and the one with less queued work for its speed is chosen, or less recent work where that is the same.
pub fn decide(
    prompt_tokens: u64,
    candidates: &[Candidate],
    policy: &Policy,
    draw: &mut dyn FnMut(usize) -> usize,
) -> Vec<Scored> {
    let idlest = candidates.iter().map(|one| one.recent_tokens / one.speed).fold(f64::INFINITY, f64::min);
    let mut scored: Vec<Scored> =
        candidates.iter().map(|one| score(prompt_tokens, one, policy, idlest)).collect();
    let Some(least) = scored.iter().min_by(|a, b| a.cost.total_cmp(&b.cost)) else { return scored };
    let margin = (least.cost * policy.tie_share).max(policy.tie_tokens / least.candidate.speed);
    let bound = least.cost + margin;
    let equals: Vec<usize> = (0..scored.len()).filter(|&i| scored[i].cost <= bound).collect();
    let chosen = scored.remove(if equals.len() > 1 { of_two(&scored, &equals, draw) } else { equals[0] });
    scored.sort_by(|a, b| a.cost.total_cmp(&b.cost)); // stable: equals stay in the order in which they were given
    scored.insert(0, chosen);
    scored
}

fn score(prompt_tokens: u64, candidate: &Candidate, policy: &Policy, idlest: f64) -> Scored {
    let counted = policy.trust(candidate.knowledge) * candidate.matched_tokens.min(prompt_tokens) as f64;
    let uncached = prompt_tokens as f64 - counted;
    let ahead = (candidate.recent_tokens - EVEN * idlest * candidate.speed).max(0.0);
    let spread = (policy.recent_weight * ahead).min(counted);
    let work = uncached + candidate.queued_tokens + spread + policy.overhead_tokens;
    Scored { candidate: candidate.clone(), uncached_tokens: uncached, cost: work / candidate.speed }
}

fn of_two(scored: &[Scored], equals: &[usize], draw: &mut dyn FnMut(usize) -> usize) -> usize {
    let first = draw(equals.len());
    let mut second = draw(equals.len() - 1);
    if second >= first {
        second += 1;
    }
    let load = |i: usize| {
        let one = &scored[equals[i]].candidate;
        (one.queued_tokens / one.speed, one.recent_tokens / one.speed)
    };
    equals[if load(second) < load(first) { second } else { first }]
}
