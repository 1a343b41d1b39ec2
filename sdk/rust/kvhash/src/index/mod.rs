//! Which blocks a rank of an engine holds, fed by its events: the fast form of the Python package's residency index.
//!
//! [`RankMap`] applies decoded batches and answers lookups; what is known of a stream (sequence numbers, losses, restarts)
//! is kept by who reads it. The rules are those of `docs/index.md`.

mod combine;
mod layer;
mod rank;

pub use layer::{Hashes, Held, Keys, Layer, Parent, Stored};
pub use rank::{
    Counts, Group, Hashing, Match, Place, RankMap, RankSettings, Signal, Tiers, MAX_BLOCK_TOKENS,
};
