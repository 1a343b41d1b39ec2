//! One event as known releases write it, read in one pass; anything else is left to the careful reader.

use super::batch::{BlockRemoved, BlockStored, Event, HashValue, Hashes, PerBlock, Span, Tokens};
use super::msgpack::{text_of, Head, Integer, Reader, INT_WIDTH};
use crate::contract::{Contract, EventField};

/// The fields of each event in the newest release, where the array layout has its places.
#[derive(Clone, Copy)]
pub(crate) struct Places {
    pub(crate) stored: &'static [EventField],
    pub(crate) removed: &'static [EventField],
}

impl Places {
    pub(crate) fn newest() -> Self {
        let events = Contract::newest().events;
        Self { stored: events.block_stored, removed: events.block_removed }
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

/// Read one event; `None` for all that is not as known releases write it.
#[inline]
pub(crate) fn event<'a>(reader: &mut Reader<'a>, places: Places) -> Option<Event<'a>> {
    let mut fields = Fields::default();
    let stored = match reader.head().ok()? {
        Head::Map(count) => {
            let count = count.checked_sub(1)?;
            if text(reader)? != b"type" {
                return None;
            }
            let stored = match text(reader)? {
                b"BlockStored" => true,
                b"BlockRemoved" => false,
                b"AllBlocksCleared" => return cleared(count),
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
                b"AllBlocksCleared" => return cleared(count),
                _ => return None,
            };
            for field in names.get(..count)? {
                fields.take(field.name.as_bytes(), stored, reader)?;
            }
            stored
        }
        _ => return None,
    };
    fields.event(stored)
}

fn cleared<'a>(fields: usize) -> Option<Event<'a>> {
    (fields == 0).then_some(Event::Cleared { extra: Vec::new() })
}

#[inline]
fn text<'a>(reader: &mut Reader<'a>) -> Option<&'a [u8]> {
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
                self.parent = parent(reader)?;
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
                self.extra_keys = per_block(reader, |reader| match reader.data.get(reader.at)? {
                    0xc0 => {
                        reader.at += 1;
                        Some(())
                    }
                    0x90..=0x9f | 0xdc | 0xdd => reader.check().ok().map(drop),
                    _ => None,
                })?;
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
                self.lookahead = per_block(reader, |reader| integers(reader).map(drop))?;
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
    fn event(self, stored: bool) -> Option<Event<'a>> {
        let (block_hashes, form) = self.hashes?;
        if !stored {
            return Some(Event::Removed(BlockRemoved {
                block_hashes,
                medium: self.medium,
                group_idx: self.group_idx,
                locality: self.locality,
                ownership: self.ownership,
                extra: Vec::new(),
            }));
        }
        let parent_form = self.parent.map(|hash| match hash {
            HashValue::Int(_) => Form::Int,
            HashValue::Bytes(_) => Form::Bytes,
        });
        if !self.parent_seen || form.zip(parent_form).is_some_and(|(one, other)| one != other) {
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
        }))
    }
}

#[inline]
fn hash<'a>(reader: &mut Reader<'a>) -> Option<(HashValue<'a>, Form)> {
    match reader.head().ok()? {
        Head::Int(number) => Some((HashValue::Int(number), Form::Int)),
        Head::Bytes(bytes) if (8..=64).contains(&bytes.len()) => Some((HashValue::Bytes(bytes), Form::Bytes)),
        _ => None,
    }
}

#[inline]
fn hashes<'a>(reader: &mut Reader<'a>) -> Option<(Hashes<'a>, Option<Form>)> {
    let Ok(Head::Array(count)) = reader.head() else { return None };
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

fn parent<'a>(reader: &mut Reader<'a>) -> Option<Option<HashValue<'a>>> {
    if reader.data.get(reader.at) == Some(&0xc0) {
        reader.at += 1;
        return Some(None);
    }
    hash(reader).map(|(hash, _)| Some(hash))
}

/// A list of integers, passed over.
#[inline]
pub(crate) fn integers<'a>(reader: &mut Reader<'a>) -> Option<Span<'a>> {
    let Ok(Head::Array(count)) = reader.head() else { return None };
    let start = reader.at;
    let mut at = start;
    for _ in 0..count {
        let width = INT_WIDTH[usize::from(*reader.data.get(at)?)];
        if width == 0 {
            return None;
        }
        at += usize::from(width);
    }
    let body = reader.data.get(start..at)?;
    reader.at = at;
    Some(Span { body, count })
}

fn integer(reader: &mut Reader<'_>) -> Option<Option<Integer>> {
    match reader.head().ok()? {
        Head::Nil => Some(None),
        Head::Int(number) => Some(Some(number)),
        _ => None,
    }
}

fn text_or_nil<'a>(reader: &mut Reader<'a>) -> Option<Option<&'a str>> {
    match reader.head().ok()? {
        Head::Nil => Some(None),
        Head::Text(text) => text_of(text).ok().map(Some),
        _ => None,
    }
}

fn per_block<'a>(
    reader: &mut Reader<'a>,
    item: impl Fn(&mut Reader<'a>) -> Option<()>,
) -> Option<Option<PerBlock<'a>>> {
    match reader.head().ok()? {
        Head::Nil => Some(None),
        Head::Array(count) => {
            let start = reader.at;
            for _ in 0..count {
                item(reader)?;
            }
            Some(Some(PerBlock(Span { body: reader.data.get(start..reader.at)?, count })))
        }
        _ => None,
    }
}
