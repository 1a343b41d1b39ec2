//! The decision of kvhash-router as a small library: which engine gets a request, by the longest cached prefix weighed
//! against load; with the index and the subscriber that it needs, on the kvhash crate.
//!
//! ```
//! use kvhash_router::{decide, Candidate, Knowledge, Policy};
//!
//! let engine = |engine: &str, matched_tokens| Candidate {
//!     engine: engine.to_owned(),
//!     matched_tokens,
//!     knowledge: Knowledge::Exact,
//!     queued_tokens: 0.0,
//!     recent_tokens: 0.0,
//!     speed: 10_000.0,
//! };
//! let scored = decide(1_000, &[engine("a", 0), engine("b", 960)], &Policy::default(), &mut |_| 0);
//! assert_eq!(scored[0].candidate.engine, "b");
//! ```

mod decision;
mod follow;
mod index;

pub use decision::{decide, Candidate, Knowledge, Policy, Scored};
pub use follow::{follow, Source};
pub use index::{EngineSettings, Index};
