//! The forms a block hash takes: in the chain, and published in events.

use std::fmt;

use crate::text;

/// One block's hash: what is chained, and what events publish a part of.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockHash {
    /// A SHA-256 digest.
    Sha256([u8; 32]),
    /// An XXH3 digest of 128 bits, most significant byte first.
    Xxh3([u8; 16]),
    /// An integer, big-endian (before vLLM 0.10.2).
    Int([u8; 32]),
}

impl BlockHash {
    /// The digest's bytes; `None` for an integer.
    #[must_use]
    pub fn digest(&self) -> Option<&[u8]> {
        match self {
            Self::Sha256(digest) => Some(digest),
            Self::Xxh3(digest) => Some(digest),
            Self::Int(_) => None,
        }
    }

    /// The low 64 bits, as events carry them from vLLM 0.10.2 on.
    #[must_use]
    pub fn low64(&self) -> u64 {
        let bytes: &[u8] = match self {
            Self::Sha256(bytes) | Self::Int(bytes) => bytes,
            Self::Xxh3(bytes) => bytes,
        };
        bytes[bytes.len() - 8..].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    /// The published integer in decimal: the low 64 bits, or (before vLLM 0.10.2) the whole integer.
    #[must_use]
    pub fn external(&self) -> String {
        match self {
            Self::Int(bytes) => decimal(bytes),
            _ => self.low64().to_string(),
        }
    }
}

impl fmt::Display for BlockHash {
    /// Lower-case hex of a digest, decimal of an integer.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.digest() {
            Some(digest) => f.write_str(&text::hex(digest)),
            None => f.write_str(&self.external()),
        }
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockHash({self})")
    }
}

/// A 256-bit big-endian integer in decimal.
fn decimal(bytes: &[u8; 32]) -> String {
    const STEP: u64 = 1_000_000_000;
    let mut limbs: Vec<u32> =
        bytes.chunks_exact(4).map(|c| c.iter().fold(0, |n, b| n << 8 | u32::from(*b))).collect();
    let mut groups = Vec::new();
    while limbs.iter().any(|limb| *limb != 0) {
        let mut rest = 0u64;
        for limb in &mut limbs {
            let current = rest << 32 | u64::from(*limb);
            *limb = (current / STEP) as u32;
            rest = current % STEP;
        }
        groups.push(rest);
    }
    let mut groups = groups.into_iter().rev();
    let mut out = groups.next().unwrap_or(0).to_string();
    for group in groups {
        out += &format!("{group:09}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_published_whole_and_digests_by_their_low_bits() {
        assert_eq!(
            BlockHash::Int([0xff; 32]).external(),
            "115792089237316195423570985008687907853269984665640564039457584007913129639935"
        );
        assert_eq!(BlockHash::Int([0; 32]).external(), "0");
        let mut one = [0; 32];
        one[27] = 1;
        assert_eq!(BlockHash::Int(one).external(), "4294967296");
        assert_eq!(BlockHash::Sha256([0xff; 32]).external(), "18446744073709551615");
        assert_eq!(BlockHash::Xxh3([0xab; 16]).to_string(), "ab".repeat(16));
    }
}
