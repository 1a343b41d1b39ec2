//! What each vLLM release hashes and publishes, read from one generated table.
//!
//! The table itself is `contract_table.rs`; it is made from the Python SDK's `contract.py`, the only place where a
//! release number is written by hand.

use std::fmt;
use std::sync::LazyLock;

use regex_lite::Regex;

use crate::contract_table::{NEWEST, OLDEST, ROWS};
use crate::error::{Code, Error, Result};
use crate::text;

/// A vLLM release as three numbers; a fourth, pre-release and local parts do not change the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Release {
    /// The first number.
    pub major: u32,
    /// The second number.
    pub minor: u32,
    /// The third number, 0 where it is not written.
    pub patch: u32,
}

static RELEASE: LazyLock<Option<Regex>> = LazyLock::new(|| {
    Regex::new(concat!(
        r"(?i)^v?([0-9]{1,6})\.([0-9]{1,6})(?:\.([0-9]{1,6}))?(?:\.([0-9]{1,6}))?",
        r"(?:[-_.]?(?:alpha|beta|pre|post|dev|rc|a|b)[-_.]?[0-9]{0,9}){0,4}(?:\+[a-z0-9._-]*)?$"
    ))
    .ok()
});

impl Release {
    pub(crate) const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }

    /// Read `0.31.0`, `v0.31`, `0.10.1.1`, `0.31.0rc2.dev7+g1234`.
    ///
    /// # Errors
    /// [`Code::UnknownRelease`] for what is no version.
    pub fn parse(written: &str) -> Result<Self> {
        let captures = RELEASE
            .as_ref()
            .filter(|_| written.chars().count() <= 100)
            .and_then(|regex| regex.captures(text::strip(written)));
        let number = |i: usize| -> u32 {
            captures.as_ref().and_then(|c| c.get(i)).and_then(|m| m.as_str().parse().ok()).unwrap_or(0)
        };
        if captures.is_none() {
            return Err(Error::new(
                Code::UnknownRelease,
                format!(
                    "{} is not a vLLM release; expected one such as {NEWEST} or 'latest'",
                    text::repr(written).chars().take(60).collect::<String>()
                ),
            ));
        }
        Ok(Self::new(number(1), number(2), number(3)))
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// How a preimage is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Serialization {
    /// Pickle protocol 5, as CPython's C pickler writes it.
    Pickle5,
    /// Canonical CBOR.
    Cbor,
}

/// What a preimage is hashed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Digest {
    /// SHA-256, 32 bytes.
    Sha256,
    /// XXH3, 128 bits, most significant byte first.
    Xxh3,
}

/// One value of vLLM's `--prefix-caching-hash-algo`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Algorithm {
    /// vLLM's name of it.
    pub name: &'static str,
    /// How a preimage is written.
    pub serialization: Serialization,
    /// What it is hashed with.
    pub digest: Digest,
    /// Whether only the low 64 bits of the digest are kept.
    pub low64: bool,
}

impl Algorithm {
    /// Whether the digest resists collisions made on purpose; only then may vLLM use a fixed NONE_HASH.
    #[must_use]
    pub const fn collision_resistant(&self) -> bool {
        matches!(self.digest, Digest::Sha256)
    }
}

/// What is chained from block to block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChainValues {
    /// The digest as an integer.
    Int,
    /// The digest's bytes.
    Bytes,
}

/// What of a LoRA adapter enters the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LoraKey {
    /// Its integer id.
    Id,
    /// Its name.
    Name,
    /// Its name and the path that it was loaded from.
    NameAndPath,
}

/// What of a multimodal item enters the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MultimodalKey {
    /// Its identifier.
    Identifier,
    /// Its identifier and its offset from the block's start.
    IdentifierAndOffset,
}

/// What of the prompt embeddings enters the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PromptEmbedsKey {
    /// Nothing.
    Absent,
    /// The bytes of the block's rows.
    Bytes,
    /// The SHA-256 digest of these bytes.
    Sha256,
}

/// How each event is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// An array, the tag first.
    Array,
    /// A map with a `type` key.
    Map,
}

/// A field of an event; `optional` means that a map leaves it out when it is nil.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EventField {
    /// The field's name.
    pub name: &'static str,
    /// Whether a map leaves it out when it is nil.
    pub optional: bool,
}

/// How one release writes its events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EventContract {
    /// Array or map.
    pub layout: Layout,
    /// The fields of `BlockStored`, in wire order.
    pub block_stored: &'static [EventField],
    /// The fields of `BlockRemoved`, in wire order.
    pub block_removed: &'static [EventField],
    /// Whether the publisher can be set to raw bytes hashes.
    pub hash_bytes: bool,
    /// Whether a replay reply carries the topic as a live message does.
    pub replay_topic_frame: bool,
}

/// Everything about one vLLM release that decides a block hash and its published form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contract {
    /// The release that was asked for.
    pub release: Release,
    /// The names of its algorithms.
    pub algorithms: &'static [&'static str],
    /// What is chained.
    pub chain_values: ChainValues,
    /// The seed of NONE_HASH without PYTHONHASHSEED, for collision-resistant algorithms; `None` where it is random.
    pub default_seed: Option<&'static str>,
    /// What of a LoRA adapter enters the key.
    pub lora_key: LoraKey,
    /// What of a multimodal item enters the key.
    pub multimodal_key: MultimodalKey,
    /// What of the prompt embeddings enters the key.
    pub prompt_embeds_key: PromptEmbedsKey,
    /// Whether extra keys carry a tag saying what they are, in the hash.
    pub tagged_keys: bool,
    /// Whether look-ahead hashing exists.
    pub lookahead: bool,
    /// How events are written.
    pub events: EventContract,
}

impl Contract {
    /// The contract of the newest release that the table knows.
    #[must_use]
    pub fn newest() -> Self {
        Self::at(NEWEST)
    }

    /// The contract of a release, or of `latest`. One beyond the table works as the newest; [`Contract::is_beyond`]
    /// says so.
    ///
    /// # Errors
    /// [`Code::UnknownRelease`] for what is no version, or older than the oldest that can be reproduced.
    pub fn for_vllm(release: &str) -> Result<Self> {
        if text::strip(release).to_lowercase() == "latest" {
            return Ok(Self::newest());
        }
        let asked = Release::parse(release)?;
        if asked < OLDEST {
            return Err(Error::new(
                Code::UnknownRelease,
                format!(
                    "vLLM {asked} is older than {OLDEST}, the first release whose block hashes can be reproduced; \
                     expected {OLDEST} to {NEWEST}"
                ),
            ));
        }
        Ok(Self::at(asked))
    }

    fn at(release: Release) -> Self {
        let row = ROWS.iter().rev().find(|row| row.release <= release).unwrap_or(&ROWS[0]);
        Self { release, ..*row }
    }

    /// Whether the release is newer than the newest line that the table knows.
    #[must_use]
    pub fn is_beyond(&self) -> bool {
        (self.release.major, self.release.minor) > (NEWEST.major, NEWEST.minor)
    }

    /// The algorithm `name` of this release.
    ///
    /// # Errors
    /// [`Code::AlgorithmNotReproducible`], [`Code::UnknownAlgorithm`] or [`Code::AlgorithmNotInRelease`].
    pub fn algorithm(&self, name: &str) -> Result<Algorithm> {
        let expected = self.algorithms.join(", ");
        if name == "builtin" {
            return Err(Error::at(
                Code::AlgorithmNotReproducible,
                "$.algorithm",
                format!(
                    "algorithm 'builtin' is Python's own hash(), which differs by process and by build, so its \
                     block hashes cannot be reproduced; start vLLM with one of: {expected}"
                ),
            ));
        }
        let Some(algorithm) = crate::contract_table::ALGORITHMS.iter().find(|a| a.name == name) else {
            return Err(Error::at(
                Code::UnknownAlgorithm,
                "$.algorithm",
                format!("unknown algorithm {}; vLLM {} has: {expected}", text::repr(name), self.release),
            ));
        };
        if !self.algorithms.contains(&name) {
            return Err(Error::at(
                Code::AlgorithmNotInRelease,
                "$.algorithm",
                format!("vLLM {} has no algorithm {}; it has: {expected}", self.release, text::repr(name)),
            ));
        }
        Ok(*algorithm)
    }
}
