//! One algorithm of one release: a preimage in, a chain value out. The hot path is here.
//!
//! A block without extra keys is written straight into a buffer of the digest's blocks, padding included, and
//! compressed where it stands: nothing is allocated, and nothing is copied but the parent's bytes. A run of such
//! blocks is written one ahead, see [`crate::sha256_chain`].

use xxhash_rust::xxh3::xxh3_128;

use crate::block_hash::BlockHash;
use crate::cbor::{self, Cbor};
use crate::contract::{Algorithm, ChainValues, Digest, Serialization};
use crate::cpu::Cpu;
use crate::pickle5::{self, Pickle};
use crate::sha256_chain::digest_after;
use crate::value::{Serializer, Value};

/// A token id in one of the widths in which callers hold it; a signed one must not be negative.
pub trait Token: Copy + Send + Sync {
    /// The token as 64 bits.
    fn value(self) -> u64;
    /// Whether it is negative.
    fn is_negative(self) -> bool;
    /// Sixteen tokens as 32 bits each, where they are held so.
    #[inline]
    fn narrow(_tokens: &[Self; 16]) -> Option<&[u32; 16]> {
        None
    }
}

macro_rules! tokens {
    ($($type:ty $(: $narrow:item)?),*) => { $(impl Token for $type {
        $(#[inline] $narrow)?
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
tokens!(u8, u16, u32: fn narrow(tokens: &[u32; 16]) -> Option<&[u32; 16]> { Some(tokens) }, u64, i8, i16, i32, i64);

/// The blocks of a prompt, one after the other, from wherever their tokens are.
pub trait Blocks {
    /// How the tokens are held.
    type Token: Token;
    /// The tokens of the next block, all blocks of one length; `None` after the last.
    fn next_block(&mut self) -> Option<&[Self::Token]>;
}

impl<T: Token> Blocks for std::slice::ChunksExact<'_, T> {
    type Token = T;
    #[inline]
    fn next_block(&mut self) -> Option<&[T]> {
        self.next()
    }
}

/// The shortest and longest tuple whose pickle the fast writer makes: shorter ones have opcodes of their own, longer
/// ones may not fit one frame.
const PICKLED: std::ops::RangeInclusive<usize> = 4..=4096;

/// Room for everything of a preimage but the tokens: heads, a parent of 34 bytes at most, padding, and the slack of
/// writes that are wider than what they write.
const OVERHEAD: usize = 96 + 72 + 128;

/// Room for a preimage and its padding. It starts at the first cache line of its buffer: many short writes overlap
/// in it, and one that crosses a line costs the digest's loads dearly.
#[derive(Debug, Default, Clone)]
struct Preimage(Vec<u8>);

impl Preimage {
    #[inline]
    fn room(&mut self, len: usize) -> &mut [u8] {
        const LINE: usize = 64;
        if self.0.len() < len + 2 * LINE {
            self.0.resize(len + 2 * LINE, 0);
        }
        let skip = self.0.as_ptr().align_offset(LINE).min(LINE);
        &mut self.0[skip..]
    }

    /// Room for a plain block of so many tokens.
    #[inline]
    fn plain(&mut self, tokens: usize) -> &mut [u8] {
        self.room(tokens * pickle5::MAX_INT.max(cbor::MAX_HEAD) + OVERHEAD)
    }
}

/// Buffers that live from block to block.
#[derive(Debug, Default, Clone)]
pub(crate) struct Scratch {
    /// A preimage, and the one after it.
    plain: [Preimage; 2],
    general: Vec<u8>,
}

/// SHA-256 as this crate uses it.
#[must_use]
pub fn sha256(data: &[u8]) -> [u8; 32] {
    use sha2::Digest as _;
    sha2::Sha256::digest(data).into()
}

/// SHA-256 and nothing else: a chain of messages of these lengths, padded beforehand, each with the digest before it
/// inside. No chain of block hashes can be faster on this processor; benchmarks compare with it.
#[doc(hidden)]
#[must_use]
pub fn sha256_floor(lengths: &[usize]) -> [u8; 32] {
    let cpu = Cpu::detect();
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let mut message = Preimage::default();
    let out = message.room(longest + OVERHEAD);
    out.fill(0x17);
    out[3..35].fill(0);
    let mut hash = Aligned([0; 32]);
    for length in lengths {
        let blocks = (length.max(&35) + 9).div_ceil(64);
        digest_after::<3>(cpu, std::hint::black_box(&out.as_chunks().0[..blocks]), &mut hash.0);
    }
    hash.0
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

    /// Hash a run of blocks of `span` tokens that have no extra keys: `parent` is the hash before them and becomes
    /// the last one of them.
    pub(crate) fn plain_run<B: Blocks>(
        &self,
        scratch: &mut Scratch,
        parent: &mut BlockHash,
        span: usize,
        blocks: &mut B,
        sink: &mut impl FnMut(BlockHash),
    ) {
        let by_sha256 = matches!(self.algorithm.digest, Digest::Sha256);
        match (self.algorithm.serialization, &mut *parent) {
            (Serialization::Cbor, BlockHash::Sha256(parent)) if by_sha256 => {
                run::<CborForm, B>(scratch, parent, span, blocks, sink)
            }
            (Serialization::Pickle5, BlockHash::Sha256(parent)) if by_sha256 && PICKLED.contains(&span) => {
                run::<PickleForm, B>(scratch, parent, span, blocks, sink)
            }
            _ => {
                while let Some(tokens) = blocks.next_block() {
                    *parent = self.other_block(scratch, parent, tokens);
                    sink(*parent);
                }
            }
        }
    }

    /// Hash `(parent, tokens, None)` of the algorithms that do not chain SHA-256 digests.
    #[inline]
    fn other_block<T: Token>(&self, scratch: &mut Scratch, parent: &BlockHash, tokens: &[T]) -> BlockHash {
        let BlockHash::Xxh3(digest) = parent else {
            return self.keyed_block(scratch, parent, tokens, None);
        };
        let out = scratch.plain[0].plain(tokens.len());
        let end = match self.algorithm.serialization {
            Serialization::Cbor => plain::<CborForm, T>(out, digest, tokens),
            Serialization::Pickle5 if PICKLED.contains(&tokens.len()) => {
                plain::<PickleForm, T>(out, digest, tokens)
            }
            Serialization::Pickle5 => return self.keyed_block(scratch, parent, tokens, None),
        };
        self.keep_xxh3(xxh3_128(&out[..end]))
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

/// How a preimage without extra keys is written: what stands before the parent, and what follows it.
trait Form {
    /// Where a parent of 32 bytes stands.
    const PARENT: usize;
    /// Write what comes before the tokens of a block of `span`, but for the parent of `parent` bytes; returns where
    /// the parent and where the tokens stand.
    fn start(out: &mut [u8], parent: usize, span: usize) -> (usize, usize);
    /// Write the tokens and what follows; returns the preimage's length.
    fn rest<T: Token>(cpu: Cpu, out: &mut [u8], at: usize, tokens: &[T]) -> usize;
}

struct CborForm;

impl Form for CborForm {
    const PARENT: usize = 3;

    fn start(out: &mut [u8], parent: usize, span: usize) -> (usize, usize) {
        out[0] = cbor::array_major() | 3;
        let at = cbor::write_head(out, 1, cbor::bytes_major(), parent as u64);
        (at, cbor::write_head(out, at + parent, cbor::array_major(), span as u64))
    }

    #[inline]
    fn rest<T: Token>(cpu: Cpu, out: &mut [u8], at: usize, tokens: &[T]) -> usize {
        let at = cbor::write_tokens(cpu, out, at, tokens);
        out[at] = cbor::null();
        at + 1
    }
}

struct PickleForm;

/// Where the frame of a pickle begins, after PROTO, FRAME and the frame's length.
const FRAME: usize = 11;

impl Form for PickleForm {
    const PARENT: usize = FRAME + 2;

    /// PROTO, FRAME; SHORT_BINBYTES parent MEMOIZE; MARK.
    fn start(out: &mut [u8], parent: usize, _span: usize) -> (usize, usize) {
        out[..3].copy_from_slice(b"\x80\x05\x95");
        out[FRAME] = b'C';
        out[FRAME + 1] = parent as u8;
        let at = Self::PARENT + parent;
        out[at] = 0x94;
        out[at + 1] = b'(';
        (Self::PARENT, at + 2)
    }

    /// Tokens TUPLE MEMOIZE; NONE TUPLE3 MEMOIZE STOP; and the frame's length.
    #[inline]
    fn rest<T: Token>(cpu: Cpu, out: &mut [u8], at: usize, tokens: &[T]) -> usize {
        let at = pickle5::write_tokens(cpu, out, at, tokens);
        out[at..at + 6].copy_from_slice(b"t\x94N\x87\x94.");
        let end = at + 6;
        out[3..FRAME].copy_from_slice(&((end - FRAME) as u64).to_le_bytes());
        end
    }
}

/// A whole preimage of a chain of XXH3 digests; returns its length.
#[inline]
fn plain<F: Form, T: Token>(out: &mut [u8], parent: &[u8; 16], tokens: &[T]) -> usize {
    let (at, tokens_at) = F::start(out, parent.len(), tokens.len());
    out[at..at + parent.len()].copy_from_slice(parent);
    F::rest(Cpu::detect(), out, tokens_at, tokens)
}

/// A digest that crosses no cache line: it is read as soon as it is written.
#[repr(align(32))]
struct Aligned([u8; 32]);

/// The blocks' digests, each preimage written while the one before it is compressed.
#[inline]
fn run<F: Form, B: Blocks>(
    scratch: &mut Scratch,
    parent: &mut [u8; 32],
    span: usize,
    blocks: &mut B,
    sink: &mut impl FnMut(BlockHash),
) {
    let Some(tokens) = blocks.next_block() else { return };
    let cpu = Cpu::detect();
    let [mut now, mut next] = scratch.plain.each_mut().map(|preimage| {
        let out = preimage.plain(span);
        out[..64].fill(0);
        let (_, tokens_at) = F::start(out, parent.len(), span);
        (out, tokens_at)
    });
    let write = |(out, at): &mut (&mut [u8], usize), tokens: &[B::Token]| {
        let end = F::rest(cpu, out, *at, tokens);
        pad_sha256(out, end)
    };
    let mut filled = write(&mut now, tokens);
    let mut hash = Aligned(*parent);
    loop {
        let then = blocks.next_block().map(|tokens| write(&mut next, tokens));
        let message = &now.0.as_chunks().0[..filled];
        match F::PARENT {
            3 => digest_after::<3>(cpu, message, &mut hash.0),
            _ => digest_after::<13>(cpu, message, &mut hash.0),
        }
        sink(BlockHash::Sha256(hash.0));
        let Some(then) = then else { break };
        filled = then;
        std::mem::swap(&mut now, &mut next);
    }
    *parent = hash.0;
}

/// Pad the message that ends at `end` as SHA-256 says; returns how many blocks of 64 bytes it fills.
#[inline]
fn pad_sha256(out: &mut [u8], end: usize) -> usize {
    let blocks = (end + 9).div_ceil(64);
    let total = blocks * 64;
    out[end] = 0x80;
    out[end + 1..end + 73].fill(0); // More than the padding has, of a length that is known.
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
            for len in (1..200).chain([4095, 4096, 4097]) {
                let tokens: Vec<u64> = (0..len * 4).map(|i| values[(i * 7 + len) % values.len()]).collect();
                let (mut hash, mut hashes) = (parent, Vec::new());
                let mut blocks = tokens.chunks_exact(len);
                function.plain_run(&mut scratch, &mut hash, len, &mut blocks, &mut |hash| hashes.push(hash));
                let mut expected = parent;
                for (block, hash) in tokens.chunks_exact(len).zip(&hashes) {
                    expected = function.keyed_block(&mut Scratch::default(), &expected, block, None);
                    assert_eq!(*hash, expected, "{name} {len}");
                }
                assert_eq!((hashes.len(), hash), (4, expected), "{name} {len}");
            }
        }
    }
}
