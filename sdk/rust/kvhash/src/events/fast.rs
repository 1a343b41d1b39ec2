//! One event as known releases write it, read in one pass; anything else is left to the careful reader.

use std::sync::LazyLock;

use super::batch::{BlockRemoved, BlockStored, Event, HashValue, Hashes, PerBlock, Span, Tokens};
use super::decode::EventSink;
use super::msgpack::{pass_integers, text_of, Head, Integer, Reader};
use crate::contract::{Contract, EventField};

/// The fields of each event in the newest release, where the array layout has its places.
#[derive(Clone, Copy)]
pub(crate) struct Places {
    pub(crate) stored: &'static [EventField],
    pub(crate) removed: &'static [EventField],
}

impl Places {
    pub(crate) fn newest() -> Self {
        static NEWEST: LazyLock<Places> = LazyLock::new(|| {
            let events = Contract::newest().events;
            Places { stored: events.block_stored, removed: events.block_removed }
        });
        *NEWEST
    }
}

/// What the hashes of one event are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Int,
    Bytes,
}

#[derive(Default)]
struct Fields<'a> {
    seen: u32,
    hashes: Option<(Hashes<'a>, Option<Form>)>,
    parent: Option<HashValue<'a>>,
    parent_form: Option<Form>,
    parent_seen: bool,
    tokens: Option<Span<'a>>,
    size: Option<u64>,
    lora_id: Option<Integer>,
    medium: Option<&'a str>,
    lora_name: Option<&'a str>,
    extra_keys: Option<PerBlock<'a>>,
    group_idx: Option<Integer>,
    spec_kind: Option<&'a str>,
    spec_window: Option<Integer>,
    locality: Option<&'a str>,
    ownership: Option<&'a str>,
    session_id: Option<&'a str>,
    lookahead: Option<PerBlock<'a>>,
    cache_salt: Option<&'a str>,
}

/// Read one event into `sink`; `None` for all that is not as known releases write it.
#[inline]
pub(crate) fn event<'a>(
    reader: &mut Reader<'a>,
    places: Places,
    sink: &mut impl EventSink<'a>,
) -> Option<()> {
    let start = reader.at;
    if let Some(event) = stored_in_order(reader) {
        sink.event(Event::Stored(event));
        return Some(());
    }
    reader.at = start;
    event_in_any_order(reader, places).map(|event| sink.event(event))
}

/// Read a map event whose fields stand in the order of the wire, as an engine writes it: no name is looked up.
///
/// It and what it calls are inlined, so that what a sink does not look at is only checked, never put together.
#[inline(always)]
fn stored_in_order<'a>(reader: &mut Reader<'a>) -> Option<BlockStored<'a>> {
    let start = reader.at;
    let mut left = map(reader)?;
    if !reader.eat(b"\xa4type\xabBlockStored\xacblock_hashes") {
        return None;
    }
    let (block_hashes, form) = hashes(reader)?;
    if !reader.eat(b"\xb1parent_block_hash") {
        return None;
    }
    let (parent_block_hash, parent_form) = parent(reader)?;
    if form.zip(parent_form).is_some_and(|(one, other)| one != other) || !reader.eat(b"\xa9token_ids") {
        return None;
    }
    let token_ids = Tokens { span: integers(reader)?, pairs: false };
    if !reader.eat(b"\xaablock_size") {
        return None;
    }
    let Some(Integer::Unsigned(block_size)) = integer(reader)? else { return None };
    left = left.checked_sub(5)?;
    macro_rules! next {
        ($name:literal, $read:expr) => {
            if left > 0 && reader.eat($name) {
                left -= 1;
                $read(reader)?
            } else {
                None
            }
        };
    }
    let lora_id = next!(b"\xa7lora_id", integer);
    let medium = next!(b"\xa6medium", text_or_nil);
    let lora_name = next!(b"\xa9lora_name", text_or_nil);
    let extra_keys = next!(b"\xaaextra_keys", extra_keys);
    let group_idx = next!(b"\xa9group_idx", integer);
    let kv_cache_spec_kind = next!(b"\xb2kv_cache_spec_kind", text_or_nil);
    let kv_cache_spec_sliding_window = next!(b"\xbckv_cache_spec_sliding_window", integer);
    let locality = next!(b"\xa8locality", text_or_nil);
    let ownership = next!(b"\xa9ownership", text_or_nil);
    let session_id = next!(b"\xaasession_id", text_or_nil);
    let lookahead_token_ids = next!(b"\xb3lookahead_token_ids", lookahead);
    let cache_salt = next!(b"\xaacache_salt", text_or_nil);
    if left > 0 {
        return None;
    }
    Some(BlockStored {
        block_hashes,
        parent_block_hash,
        token_ids,
        block_size,
        lora_id,
        medium,
        lora_name,
        extra_keys,
        group_idx,
        kv_cache_spec_kind,
        kv_cache_spec_sliding_window,
        locality,
        ownership,
        session_id,
        lookahead_token_ids,
        cache_salt,
        extra: Vec::new(),
        raw: reader.data.get(start..reader.at)?,
    })
}

#[inline(never)]
fn event_in_any_order<'a>(reader: &mut Reader<'a>, places: Places) -> Option<Event<'a>> {
    let mut fields = Fields::default();
    let start = reader.at;
    let stored = match reader.head().ok()? {
        Head::Map(count) => {
            let count = count.checked_sub(1)?;
            if text(reader)? != b"type" {
                return None;
            }
            let stored = match text(reader)? {
                b"BlockStored" => true,
                b"BlockRemoved" => false,
                b"AllBlocksCleared" => return cleared(count, reader, start),
                _ => return None,
            };
            for _ in 0..count {
                let name = text(reader)?;
                fields.take(name, stored, reader)?;
            }
            stored
        }
        Head::Array(count) => {
            let count = count.checked_sub(1)?;
            let (stored, names) = match text(reader)? {
                b"BlockStored" => (true, places.stored),
                b"BlockRemoved" => (false, places.removed),
                b"AllBlocksCleared" => return cleared(count, reader, start),
                _ => return None,
            };
            for field in names.get(..count)? {
                fields.take(field.name.as_bytes(), stored, reader)?;
            }
            stored
        }
        _ => return None,
    };
    fields.event(stored, reader.data.get(start..reader.at)?)
}

fn cleared<'a>(fields: usize, reader: &Reader<'a>, start: usize) -> Option<Event<'a>> {
    let raw = reader.data.get(start..reader.at)?;
    (fields == 0).then_some(Event::Cleared { extra: Vec::new(), raw })
}

#[inline(always)]
pub(super) fn array(reader: &mut Reader<'_>) -> Option<usize> {
    let [first, rest @ ..] = reader.data.get(reader.at..)? else { return None };
    let (count, width) = match *first {
        0x90..=0x9f => ((first & 0x0f).into(), 1),
        0xdc => (u16::from_be_bytes(*rest.first_chunk()?).into(), 3),
        0xdd => (u32::from_be_bytes(*rest.first_chunk()?) as usize, 5),
        _ => return None,
    };
    reader.at += width;
    Some(count)
}

#[inline(always)]
fn map(reader: &mut Reader<'_>) -> Option<usize> {
    let [first, rest @ ..] = reader.data.get(reader.at..)? else { return None };
    let (count, width) = match *first {
        0x80..=0x8f => ((first & 0x0f).into(), 1),
        0xde => (u16::from_be_bytes(*rest.first_chunk()?).into(), 3),
        0xdf => (u32::from_be_bytes(*rest.first_chunk()?) as usize, 5),
        _ => return None,
    };
    reader.at += width;
    Some(count)
}

#[inline(always)]
fn text<'a>(reader: &mut Reader<'a>) -> Option<&'a [u8]> {
    let first = *reader.data.get(reader.at)?;
    if first & 0xe0 == 0xa0 {
        let start = reader.at + 1;
        let text = reader.data.get(start..start + usize::from(first & 0x1f))?;
        reader.at = start + text.len();
        return Some(text);
    }
    match reader.head() {
        Ok(Head::Text(text)) => Some(text),
        _ => None,
    }
}

impl<'a> Fields<'a> {
    #[inline]
    fn take(&mut self, name: &[u8], stored: bool, reader: &mut Reader<'a>) -> Option<()> {
        let place = match name {
            b"block_hashes" => {
                self.hashes = Some(hashes(reader)?);
                0
            }
            b"parent_block_hash" if stored => {
                (self.parent, self.parent_form) = parent(reader)?;
                self.parent_seen = true;
                1
            }
            b"token_ids" if stored => {
                self.tokens = Some(integers(reader)?);
                2
            }
            b"block_size" if stored => {
                let Some(Integer::Unsigned(size)) = integer(reader)? else { return None };
                self.size = Some(size);
                3
            }
            b"lora_id" if stored => {
                self.lora_id = integer(reader)?;
                4
            }
            b"medium" => {
                self.medium = text_or_nil(reader)?;
                5
            }
            b"lora_name" if stored => {
                self.lora_name = text_or_nil(reader)?;
                6
            }
            b"extra_keys" if stored => {
                self.extra_keys = extra_keys(reader)?;
                7
            }
            b"group_idx" => {
                self.group_idx = integer(reader)?;
                8
            }
            b"kv_cache_spec_kind" if stored => {
                self.spec_kind = text_or_nil(reader)?;
                9
            }
            b"kv_cache_spec_sliding_window" if stored => {
                self.spec_window = integer(reader)?;
                10
            }
            b"locality" => {
                self.locality = text_or_nil(reader)?;
                11
            }
            b"ownership" => {
                self.ownership = text_or_nil(reader)?;
                12
            }
            b"session_id" if stored => {
                self.session_id = text_or_nil(reader)?;
                13
            }
            b"lookahead_token_ids" if stored => {
                self.lookahead = lookahead(reader)?;
                14
            }
            b"cache_salt" if stored => {
                self.cache_salt = text_or_nil(reader)?;
                15
            }
            _ => return None,
        };
        // Of a field that stands twice the careful reader knows which one counts.
        let bit = 1 << place;
        let again = self.seen & bit != 0;
        self.seen |= bit;
        (!again).then_some(())
    }

    #[inline]
    fn event(self, stored: bool, raw: &'a [u8]) -> Option<Event<'a>> {
        let (block_hashes, form) = self.hashes?;
        if !stored {
            return Some(Event::Removed(BlockRemoved {
                block_hashes,
                medium: self.medium,
                group_idx: self.group_idx,
                locality: self.locality,
                ownership: self.ownership,
                extra: Vec::new(),
                raw,
            }));
        }
        if !self.parent_seen || form.zip(self.parent_form).is_some_and(|(one, other)| one != other) {
            return None;
        }
        Some(Event::Stored(BlockStored {
            block_hashes,
            parent_block_hash: self.parent,
            token_ids: Tokens { span: self.tokens?, pairs: false },
            block_size: self.size?,
            lora_id: self.lora_id,
            medium: self.medium,
            lora_name: self.lora_name,
            extra_keys: self.extra_keys,
            group_idx: self.group_idx,
            kv_cache_spec_kind: self.spec_kind,
            kv_cache_spec_sliding_window: self.spec_window,
            locality: self.locality,
            ownership: self.ownership,
            session_id: self.session_id,
            lookahead_token_ids: self.lookahead,
            cache_salt: self.cache_salt,
            extra: Vec::new(),
            raw,
        }))
    }
}

#[inline(always)]
fn hash<'a>(reader: &mut Reader<'a>) -> Option<(HashValue<'a>, Form)> {
    if reader.eat(b"\xcf") {
        let number = u64::from_be_bytes(*reader.data.get(reader.at..)?.first_chunk()?);
        reader.at += 8;
        return Some((HashValue::Int(Integer::Unsigned(number)), Form::Int));
    }
    match reader.head().ok()? {
        Head::Int(number) => Some((HashValue::Int(number), Form::Int)),
        Head::Bytes(bytes) if (8..=64).contains(&bytes.len()) => Some((HashValue::Bytes(bytes), Form::Bytes)),
        _ => None,
    }
}

#[inline(always)]
fn hashes<'a>(reader: &mut Reader<'a>) -> Option<(Hashes<'a>, Option<Form>)> {
    let count = array(reader)?;
    let start = reader.at;
    let mut form = None;
    for _ in 0..count {
        let (_, this) = hash(reader)?;
        if form.is_some_and(|form| form != this) {
            return None;
        }
        form = Some(this);
    }
    Some((Hashes(Span { body: reader.data.get(start..reader.at)?, count }), form))
}

#[inline(always)]
fn parent<'a>(reader: &mut Reader<'a>) -> Option<(Option<HashValue<'a>>, Option<Form>)> {
    if reader.eat(b"\xc0") {
        return Some((None, None));
    }
    hash(reader).map(|(hash, form)| (Some(hash), Some(form)))
}

/// A list of integers, passed over.
#[inline(always)]
fn integers<'a>(reader: &mut Reader<'a>) -> Option<Span<'a>> {
    let count = array(reader)?;
    let start = reader.at;
    let end = pass_integers(reader.data, start, count)?;
    reader.at = end;
    Some(Span { body: reader.data.get(start..end)?, count })
}

#[inline(always)]
pub(super) fn integer(reader: &mut Reader<'_>) -> Option<Option<Integer>> {
    match *reader.data.get(reader.at)? {
        0xc0 => {
            reader.at += 1;
            return Some(None);
        }
        first @ 0..=0x7f => {
            reader.at += 1;
            return Some(Some(Integer::Unsigned(first.into())));
        }
        _ => {}
    }
    match reader.head() {
        Ok(Head::Int(number)) => Some(Some(number)),
        _ => None,
    }
}

/// A time: a float, or an integer.
#[inline(always)]
pub(super) fn number(reader: &mut Reader<'_>) -> Option<f64> {
    if reader.eat(b"\xcb") {
        let number = f64::from_be_bytes(*reader.data.get(reader.at..)?.first_chunk()?);
        reader.at += 8;
        return Some(number);
    }
    match reader.head() {
        Ok(Head::Float(number)) => Some(number),
        Ok(Head::Int(number)) => Some(number.float()),
        _ => None,
    }
}

#[inline(always)]
fn text_or_nil<'a>(reader: &mut Reader<'a>) -> Option<Option<&'a str>> {
    if reader.eat(b"\xc0") {
        return Some(None);
    }
    let text = match text(reader)? {
        // What nearly all texts of events are is known to be UTF-8.
        b"GPU" => "GPU",
        b"full_attention" => "full_attention",
        other => text_of(other).ok()?,
    };
    Some(Some(text))
}

#[inline(always)]
fn extra_keys<'a>(reader: &mut Reader<'a>) -> Option<Option<PerBlock<'a>>> {
    per_block(reader, |reader| match reader.data.get(reader.at)? {
        0xc0 => {
            reader.at += 1;
            Some(())
        }
        // In the event, in the list of all blocks' keys.
        0x90..=0x9f | 0xdc | 0xdd => reader.check_from(2).ok().map(drop),
        _ => None,
    })
}

fn lookahead<'a>(reader: &mut Reader<'a>) -> Option<Option<PerBlock<'a>>> {
    per_block(reader, |reader| integers(reader).map(drop))
}

#[inline(always)]
fn per_block<'a>(
    reader: &mut Reader<'a>,
    item: impl Fn(&mut Reader<'a>) -> Option<()>,
) -> Option<Option<PerBlock<'a>>> {
    if reader.eat(b"\xc0") {
        return Some(None);
    }
    let count = array(reader)?;
    let start = reader.at;
    for _ in 0..count {
        item(reader)?;
    }
    Some(Some(PerBlock(Span { body: reader.data.get(start..reader.at)?, count })))
}
