//! One algorithm of one release: a preimage in, a chain value out. The hot path is here.
//!
//! A block without extra keys is written straight into a buffer of the digest's blocks, padding included, and
//! compressed where it stands: nothing is allocated, and nothing is copied but the parent's bytes.

use sha2::block_api::compress256;
use xxhash_rust::xxh3::xxh3_128;

use crate::block_hash::BlockHash;
use crate::cbor::{self, Cbor};
use crate::contract::{Algorithm, ChainValues, Digest, Serialization};
use crate::pickle5::{self, Pickle};
use crate::value::{Serializer, Value};

/// A token id in one of the widths in which callers hold it; a signed one must not be negative.
pub trait Token: Copy + Send + Sync {
    /// The token as 64 bits.
    fn value(self) -> u64;
    /// Whether it is negative.
    fn is_negative(self) -> bool;
}

macro_rules! tokens {
    ($($type:ty),*) => { $(impl Token for $type {
        #[inline]
        fn value(self) -> u64 {
            self as u64
        }
        #[inline]
        #[allow(unused_comparisons)]
        fn is_negative(self) -> bool {
            self < 0
        }
    })* };
}
tokens!(u8, u16, u32, u64, i8, i16, i32, i64);

const SHA256_START: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

/// The shortest and longest tuple whose pickle the fast writer makes: shorter ones have opcodes of their own, longer
/// ones may not fit one frame.
const PICKLED: std::ops::RangeInclusive<usize> = 4..=4096;

/// Room for everything of a preimage but the tokens: heads, a parent of 34 bytes at most, and the slack of eight-byte
/// writes.
const OVERHEAD: usize = 96;

/// Buffers that live from block to block.
#[derive(Debug, Default, Clone)]
pub(crate) struct Scratch {
    /// The preimage of a plain block. It starts at the first cache line of this buffer: many short writes overlap in
    /// it, and one that crosses a line costs the digest's loads dearly.
    block: Vec<u8>,
    general: Vec<u8>,
}

impl Scratch {
    /// Room for a preimage of `len` bytes and its padding, at the start of a cache line.
    #[inline]
    fn room(&mut self, len: usize) -> &mut [u8] {
        const LINE: usize = 64;
        if self.block.len() < len + 2 * LINE {
            self.block.resize(len + 2 * LINE, 0);
        }
        let skip = self.block.as_ptr().align_offset(LINE).min(LINE);
        &mut self.block[skip..]
    }
}

/// SHA-256 as this crate uses it.
#[must_use]
pub fn sha256(data: &[u8]) -> [u8; 32] {
    use sha2::Digest as _;
    sha2::Sha256::digest(data).into()
}

/// An algorithm together with what its release chains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HashFunction {
    algorithm: Algorithm,
    as_int: bool,
}

impl HashFunction {
    /// The function of `algorithm` where `chain_values` are chained.
    #[must_use]
    pub const fn new(algorithm: Algorithm, chain_values: ChainValues) -> Self {
        Self { algorithm, as_int: matches!(chain_values, ChainValues::Int) }
    }

    fn keep_sha256(&self, digest: [u8; 32]) -> BlockHash {
        if !self.as_int {
            return BlockHash::Sha256(digest);
        }
        let mut kept = digest;
        if self.algorithm.low64 {
            kept[..24].fill(0);
        }
        BlockHash::Int(kept)
    }

    fn keep_xxh3(&self, digest: u128) -> BlockHash {
        let digest = digest.to_be_bytes();
        if !self.as_int {
            return BlockHash::Xxh3(digest);
        }
        let mut kept = [0; 32];
        kept[16..].copy_from_slice(&digest);
        if self.algorithm.low64 {
            kept[..24].fill(0);
        }
        BlockHash::Int(kept)
    }

    fn digest(&self, data: &[u8]) -> BlockHash {
        match self.algorithm.digest {
            Digest::Sha256 => self.keep_sha256(sha256(data)),
            Digest::Xxh3 => self.keep_xxh3(xxh3_128(data)),
        }
    }

    /// The block hash with these digest bytes; `None` where they are not as many as the algorithm gives.
    #[must_use]
    pub fn digest_of(&self, bytes: &[u8]) -> Option<BlockHash> {
        match self.algorithm.digest {
            Digest::Sha256 => bytes.try_into().ok().map(BlockHash::Sha256),
            Digest::Xxh3 => bytes.try_into().ok().map(BlockHash::Xxh3),
        }
    }

    /// Hash a text, as NONE_HASH is made from the seed.
    #[must_use]
    pub fn text(&self, text: &str) -> BlockHash {
        let mut out = Vec::new();
        match self.algorithm.serialization {
            Serialization::Cbor => Cbor::new(&mut out).text(text),
            Serialization::Pickle5 => {
                let mut writer = Pickle::new(&mut out);
                writer.text(text);
                writer.finish();
            }
        }
        self.digest(&out)
    }

    /// Hash `(parent, tokens, keys)` by the general writers; the definition.
    pub(crate) fn keyed_block<T: Token>(
        &self,
        scratch: &mut Scratch,
        parent: &BlockHash,
        tokens: &[T],
        keys: Option<&[Value]>,
    ) -> BlockHash {
        let out = &mut scratch.general;
        match self.algorithm.serialization {
            Serialization::Cbor => preimage(&mut Cbor::new(out), parent, tokens, keys),
            Serialization::Pickle5 => {
                let mut writer = Pickle::new(out);
                preimage(&mut writer, parent, tokens, keys);
                writer.finish();
            }
        }
        self.digest(&scratch.general)
    }

    /// Hash `(parent, tokens, None)`, fast.
    #[inline]
    pub(crate) fn plain_block<T: Token>(
        &self,
        scratch: &mut Scratch,
        parent: &BlockHash,
        tokens: &[T],
    ) -> BlockHash {
        let out = scratch.room(tokens.len() * pickle5::MAX_INT.max(cbor::MAX_HEAD) + OVERHEAD + 72);
        let end = match (self.algorithm.serialization, parent) {
            (_, BlockHash::Int(_)) => None,
            (Serialization::Cbor, _) => Some(write_cbor(out, parent, tokens)),
            (Serialization::Pickle5, _) if PICKLED.contains(&tokens.len()) => {
                Some(write_pickle(out, parent, tokens))
            }
            _ => None,
        };
        let Some(end) = end else {
            return self.keyed_block(scratch, parent, tokens, None);
        };
        match self.algorithm.digest {
            Digest::Xxh3 => self.keep_xxh3(xxh3_128(&out[..end])),
            Digest::Sha256 => {
                let blocks = pad_sha256(out, end);
                let mut state = SHA256_START;
                compress256(&mut state, &out.as_chunks().0[..blocks]);
                let mut digest = [0; 32];
                for (to, word) in digest.chunks_exact_mut(4).zip(state) {
                    to.copy_from_slice(&word.to_be_bytes());
                }
                self.keep_sha256(digest)
            }
        }
    }
}

fn preimage<T: Token>(
    writer: &mut impl Serializer,
    parent: &BlockHash,
    tokens: &[T],
    keys: Option<&[Value]>,
) {
    writer.open(3);
    match parent {
        BlockHash::Int(number) => writer.uint256(number),
        BlockHash::Sha256(digest) => writer.bytes(digest),
        BlockHash::Xxh3(digest) => writer.bytes(digest),
    }
    writer.open(tokens.len());
    for token in tokens {
        writer.int(token.value().into());
    }
    writer.close(tokens.len());
    match keys {
        None => writer.none(),
        Some(keys) => writer.tuple(keys),
    }
    writer.close(3);
}

/// Write a digest after its head; returns the position after it.
#[inline]
fn write_parent(out: &mut [u8], at: usize, parent: &BlockHash) -> usize {
    match parent {
        BlockHash::Sha256(digest) | BlockHash::Int(digest) => {
            out[at..at + 32].copy_from_slice(digest);
            at + 32
        }
        BlockHash::Xxh3(digest) => {
            out[at..at + 16].copy_from_slice(digest);
            at + 16
        }
    }
}

#[inline]
fn parent_len(parent: &BlockHash) -> u8 {
    if matches!(parent, BlockHash::Xxh3(_)) {
        16
    } else {
        32
    }
}

#[inline]
fn write_cbor<T: Token>(out: &mut [u8], parent: &BlockHash, tokens: &[T]) -> usize {
    out[0] = cbor::array_major() | 3;
    let at = cbor::write_head(out, 1, cbor::bytes_major(), parent_len(parent).into());
    let at = write_parent(out, at, parent);
    let at = cbor::write_head(out, at, cbor::array_major(), tokens.len() as u64);
    let at = cbor::write_tokens(out, at, tokens);
    out[at] = cbor::null();
    at + 1
}

/// PROTO, FRAME; SHORT_BINBYTES parent MEMOIZE; MARK tokens TUPLE MEMOIZE; NONE TUPLE3 MEMOIZE STOP.
#[inline]
fn write_pickle<T: Token>(out: &mut [u8], parent: &BlockHash, tokens: &[T]) -> usize {
    const BODY: usize = 11;
    out[..3].copy_from_slice(b"\x80\x05\x95");
    out[BODY] = b'C';
    out[BODY + 1] = parent_len(parent);
    let at = write_parent(out, BODY + 2, parent);
    out[at] = 0x94;
    out[at + 1] = b'(';
    let at = pickle5::write_tokens(out, at + 2, tokens);
    out[at..at + 6].copy_from_slice(b"t\x94N\x87\x94.");
    let end = at + 6;
    out[3..BODY].copy_from_slice(&((end - BODY) as u64).to_le_bytes());
    end
}

/// Pad the message that ends at `end` as SHA-256 says; returns how many blocks of 64 bytes it fills.
#[inline]
fn pad_sha256(out: &mut [u8], end: usize) -> usize {
    let blocks = (end + 9).div_ceil(64);
    let total = blocks * 64;
    out[end] = 0x80;
    out[end + 1..total - 8].fill(0);
    out[total - 8..total].copy_from_slice(&((end as u64) * 8).to_be_bytes());
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Contract;

    /// The fast writer against the general one, at every width of a token and every remainder of a block.
    #[test]
    fn the_fast_path_equals_the_definition() {
        let contract = Contract::newest();
        let values = [
            0u64,
            1,
            23,
            24,
            25,
            200,
            255,
            256,
            300,
            65_535,
            65_536,
            151_000,
            (1 << 31) - 1,
            1 << 31,
            1 << 32,
            1 << 39,
            1 << 63,
            u64::MAX,
        ];
        let mut scratch = Scratch::default();
        for name in contract.algorithms {
            let function = HashFunction::new(contract.algorithm(name).unwrap(), contract.chain_values);
            let parent = function.text("seed");
            for len in (0..200).chain([4095, 4096, 4097]) {
                let tokens: Vec<u64> = (0..len).map(|i| values[(i * 7 + len) % values.len()]).collect();
                assert_eq!(
                    function.plain_block(&mut scratch, &parent, &tokens),
                    function.keyed_block(&mut Scratch::default(), &parent, &tokens, None),
                    "{name} {len}"
                );
            }
        }
    }
}
