//! The events: one type for each, with every field of every vLLM release and of SGLang, borrowed from the payload.
//!
//! Lists stay as they lie in the payload; iterating over one decodes it. A field that a release does not have, or that
//! the publisher left out, is `None`.

use std::fmt;

use super::msgpack::{pass_integers, Head, Integer, Reader};
use super::value::Value;

/// A block hash as on the wire: a 64-bit integer, signed or not, or the digest's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HashValue<'a> {
    /// An integer.
    Int(Integer),
    /// A digest, 8 to 64 bytes.
    Bytes(&'a [u8]),
}

impl<'a> HashValue<'a> {
    /// One key for a hash in any of its forms: its low 64 bits, unsigned; of bytes, the last 8, big-endian.
    #[must_use]
    pub fn key(self) -> u64 {
        match self {
            Self::Int(number) => number.low64(),
            Self::Bytes(bytes) => bytes.last_chunk().map_or(0, |last| u64::from_be_bytes(*last)),
        }
    }

    pub(crate) fn read(reader: &mut Reader<'a>) -> Option<Self> {
        match reader.head() {
            Ok(Head::Int(number)) => Some(Self::Int(number)),
            Ok(Head::Bytes(bytes)) => Some(Self::Bytes(bytes)),
            _ => None,
        }
    }
}

/// A list where it lies: the bytes behind its head, at least.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span<'a> {
    pub(crate) body: &'a [u8],
    pub(crate) count: usize,
}

impl fmt::Debug for Span<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} items", self.count)
    }
}

/// The block hashes of an event, decoded when iterated over.
#[derive(Debug, Clone, Copy)]
pub struct Hashes<'a>(pub(crate) Span<'a>);

impl<'a> Hashes<'a> {
    /// How many hashes there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.0.count
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.count == 0
    }

    /// The bytes behind the list's head, from which [`Hashes::from_body`] makes the list again.
    #[must_use]
    pub const fn body(&self) -> &'a [u8] {
        self.0.body
    }

    /// The list of `count` hashes in the bytes of one that was decoded; of other bytes it may be shorter.
    #[must_use]
    pub const fn from_body(body: &'a [u8], count: usize) -> Self {
        Self(Span { body, count })
    }

    /// Take the first hash off the list.
    #[inline]
    pub fn take_first(&mut self) -> Option<HashValue<'a>> {
        let count = self.0.count.checked_sub(1)?;
        let mut reader = Reader::new(self.0.body);
        let first = HashValue::read(&mut reader)?;
        self.0 = Span { body: &self.0.body[reader.at..], count };
        Some(first)
    }

    /// The hashes, in order.
    pub fn iter(&self) -> impl Iterator<Item = HashValue<'a>> + use<'a> {
        let mut reader = Reader::new(self.0.body);
        (0..self.0.count).map_while(move |_| HashValue::read(&mut reader))
    }
}

/// The token ids of an event, decoded when iterated over: tokens, or with SGLang's EAGLE pairs of tokens.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a> {
    pub(crate) span: Span<'a>,
    pub(crate) pairs: bool,
}

impl<'a> Tokens<'a> {
    /// How many tokens, or pairs of tokens, there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.span.count
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.span.count == 0
    }

    /// Whether these are pairs (SGLang with EAGLE): then [`Tokens::pairs`] gives them.
    #[must_use]
    pub const fn bigram(&self) -> bool {
        self.pairs
    }

    /// The tokens; none where these are pairs.
    pub fn iter(&self) -> impl Iterator<Item = Integer> + use<'a> {
        let mut reader = Reader::new(self.span.body);
        let count = if self.pairs { 0 } else { self.span.count };
        (0..count).map_while(move |_| integer(&mut reader))
    }

    /// The pairs; none where these are tokens.
    pub fn pairs(&self) -> impl Iterator<Item = [Integer; 2]> + use<'a> {
        let mut reader = Reader::new(self.span.body);
        let count = if self.pairs { self.span.count } else { 0 };
        (0..count).map_while(move |_| {
            reader.head().ok()?;
            Some([integer(&mut reader)?, integer(&mut reader)?])
        })
    }

    /// The bytes behind the list's head, from which [`Tokens::from_body`] makes the list again.
    #[must_use]
    pub const fn body(&self) -> &'a [u8] {
        self.span.body
    }

    /// The list of `count` tokens, or pairs, in the bytes of one that was decoded; of other bytes it may be shorter.
    #[must_use]
    pub const fn from_body(body: &'a [u8], count: usize, pairs: bool) -> Self {
        Self { span: Span { body, count }, pairs }
    }

    /// Take the first `count` tokens, or pairs, off the list, or all where there are not so many.
    pub fn take_front(&mut self, count: usize) -> Self {
        let count = count.min(self.span.count);
        let body = self.span.body;
        let at = if count == self.span.count {
            body.len()
        } else if self.pairs {
            let mut reader = Reader::new(body);
            (0..count).for_each(|_| drop(reader.skip()));
            reader.at
        } else {
            pass_integers(body, 0, count).unwrap_or(body.len())
        };
        let (front, rest) = body.split_at(at.min(body.len()));
        self.span = Span { body: rest, count: self.span.count - count };
        Self { span: Span { body: front, count }, pairs: self.pairs }
    }
}

fn integer(reader: &mut Reader<'_>) -> Option<Integer> {
    match reader.head() {
        Ok(Head::Int(number)) => Some(number),
        _ => None,
    }
}

/// A list per block: extra keys, or look-ahead tokens; decoded when iterated over.
#[derive(Debug, Clone, Copy)]
pub struct PerBlock<'a>(pub(crate) Span<'a>);

impl<'a> PerBlock<'a> {
    /// How many blocks there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.0.count
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.count == 0
    }

    /// What belongs to each block: a [`Value::List`], or [`Value::Nil`].
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let mut reader = Reader::new(self.0.body);
        (0..self.0.count).map(move |_| Value::read(&mut reader))
    }
}

/// How the events of a batch were written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Arrays, the tag first.
    Array,
    /// Maps with a `type`.
    Map,
    /// Both in one batch.
    Mixed,
}

impl Layout {
    /// The layout's name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Array => "array",
            Self::Map => "map",
            Self::Mixed => "mixed",
        }
    }
}

/// A field that is not known: its name in a map, or its position in an array (the tag is 0).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FieldName<'a> {
    /// A name.
    Name(std::borrow::Cow<'a, str>),
    /// A position.
    Position(usize),
}

impl fmt::Display for FieldName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Position(position) => position.fmt(f),
        }
    }
}

/// What a batch or an event holds besides the known fields.
#[derive(Debug, Clone)]
pub struct ExtraField<'a> {
    /// The field's name or position.
    pub name: FieldName<'a>,
    pub(crate) raw: &'a [u8],
}

impl<'a> ExtraField<'a> {
    /// The field's value.
    #[must_use]
    pub fn value(&self) -> Value<'a> {
        Value::of(self.raw)
    }
}

/// Blocks entered a cache: one hash a block, chained after `parent_block_hash` (`None`: a prompt's start).
#[derive(Debug, Clone)]
pub struct BlockStored<'a> {
    /// One hash a block.
    pub block_hashes: Hashes<'a>,
    /// The hash before the first one.
    pub parent_block_hash: Option<HashValue<'a>>,
    /// The tokens of all the blocks; empty for tiers that do not say.
    pub token_ids: Tokens<'a>,
    /// Tokens per block.
    pub block_size: u64,
    /// The adapter's id.
    pub lora_id: Option<Integer>,
    /// The tier.
    pub medium: Option<&'a str>,
    /// The adapter's name.
    pub lora_name: Option<&'a str>,
    /// Per block nil or what else its hash covers, untagged.
    pub extra_keys: Option<PerBlock<'a>>,
    /// The KV cache group.
    pub group_idx: Option<Integer>,
    /// The kind of the group's KV cache.
    pub kv_cache_spec_kind: Option<&'a str>,
    /// The group's sliding window, in tokens.
    pub kv_cache_spec_sliding_window: Option<Integer>,
    /// Where the blocks are, seen from the engine.
    pub locality: Option<&'a str>,
    /// Whose the blocks are.
    pub ownership: Option<&'a str>,
    /// The session that stored them.
    pub session_id: Option<&'a str>,
    /// Per block the tokens after it that its hash covers.
    pub lookahead_token_ids: Option<PerBlock<'a>>,
    /// SGLang's cache salt.
    pub cache_salt: Option<&'a str>,
    /// Fields that are not known.
    pub extra: Vec<ExtraField<'a>>,
    /// The event's msgpack.
    pub raw: &'a [u8],
}

/// Blocks left a cache.
#[derive(Debug, Clone)]
pub struct BlockRemoved<'a> {
    /// The hashes of the blocks.
    pub block_hashes: Hashes<'a>,
    /// The tier.
    pub medium: Option<&'a str>,
    /// The KV cache group.
    pub group_idx: Option<Integer>,
    /// Where the blocks were, seen from the engine.
    pub locality: Option<&'a str>,
    /// Whose the blocks were.
    pub ownership: Option<&'a str>,
    /// Fields that are not known.
    pub extra: Vec<ExtraField<'a>>,
    /// The event's msgpack.
    pub raw: &'a [u8],
}

/// What stands in a batch's list.
#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant)] // nearly all are the large one
pub enum Event<'a> {
    /// Blocks entered a cache.
    Stored(BlockStored<'a>),
    /// Blocks left a cache.
    Removed(BlockRemoved<'a>),
    /// The whole prefix cache was dropped, every tier and group.
    Cleared {
        /// Fields that are not known.
        extra: Vec<ExtraField<'a>>,
        /// Its msgpack.
        raw: &'a [u8],
    },
    /// An event whose tag is not known.
    Unknown {
        /// Its tag.
        tag: &'a str,
        /// Its msgpack.
        raw: &'a [u8],
    },
    /// An event that cannot be read, in its place among the others of its batch.
    Undecodable {
        /// Where in the batch, such as `$.events[2].block_hashes[0]`.
        path: String,
        /// What is wrong and what would be right.
        message: String,
        /// Its tag, where that could be read.
        tag: Option<&'a str>,
        /// Its msgpack.
        raw: &'a [u8],
    },
}

impl<'a> Event<'a> {
    /// The event's msgpack.
    #[must_use]
    pub const fn raw(&self) -> &'a [u8] {
        match self {
            Self::Stored(event) => event.raw,
            Self::Removed(event) => event.raw,
            Self::Cleared { raw, .. } | Self::Unknown { raw, .. } | Self::Undecodable { raw, .. } => raw,
        }
    }
}

/// One published message: the events of one engine step, in order.
#[derive(Debug, Clone)]
pub struct EventBatch<'a> {
    /// Seconds since the epoch, by the engine's clock.
    pub ts: f64,
    /// The events.
    pub events: Vec<Event<'a>>,
    /// The engine's data parallel rank; `None` where it is not said.
    pub data_parallel_rank: Option<Integer>,
    /// How the events were written; `None` where there was none to tell it by.
    pub layout: Option<Layout>,
    /// What the batch holds besides, by name or position.
    pub extra: Vec<ExtraField<'a>>,
}
