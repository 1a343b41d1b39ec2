//! Reads any published batch. Two ways with equal results: the whole batch in one pass where every event is as known
//! releases write it; and field by field, which says what is wrong and keeps unknown fields.

use std::borrow::Cow;
use std::collections::HashMap;

use super::batch::{
    BlockRemoved, BlockStored, Event, EventBatch, ExtraField, FieldName, HashValue, Hashes, Layout, PerBlock,
    Span, Tokens,
};
use super::fast::{self, Places};
use super::msgpack::{checked, split, starts_array, starts_map, text_of, Fault, Head, Integer, Read, Reader};
use super::value::{Dict, Value};
use crate::error::{Code, Error, Result};

/// The largest payload that is read, in bytes.
pub const MAX_PAYLOAD_BYTES: usize = 256 * 1024 * 1024;

/// Read the payload frame of one published message: every vLLM release's shape and SGLang's, array, map or mixed.
///
/// A field's meaning comes from its name or its place, never from its value's type. One bad event does not lose its
/// batch: it becomes an [`Event::Undecodable`] in place. Time and memory are bounded by the payload's length, whatever
/// lengths it declares; token ids and hashes stay where they are.
///
/// # Errors
/// [`Code::InvalidMsgpack`], [`Code::NestedTooDeeply`], [`Code::PayloadTooLarge`] or [`Code::InvalidBatch`] where it is
/// no batch.
pub fn decode_batch(payload: &[u8]) -> Result<EventBatch<'_>> {
    let mut events = Vec::new();
    let batch = decode_into(payload, &mut events)?;
    Ok(EventBatch { events, ..batch })
}

/// Read one event by itself: the msgpack that [`Event::raw`] gives, and its place in the batch, which paths name.
#[must_use]
pub fn decode_event(raw: &[u8], index: usize) -> Event<'_> {
    event(raw, index, Places::newest())
}

/// Takes the events of a batch one by one, for a reader that makes something of its own of each.
pub trait EventSink<'a> {
    /// The next event.
    fn event(&mut self, event: Event<'a>);
    /// What came so far is to be forgotten: the batch needs the careful reader, and its events come again from the
    /// first one on.
    fn forget(&mut self);
}

impl<'a> EventSink<'a> for Vec<Event<'a>> {
    #[inline]
    fn event(&mut self, event: Event<'a>) {
        self.push(event);
    }

    fn forget(&mut self) {
        self.clear();
    }
}

/// As [`decode_batch`], the events into `sink`: the batch comes back without them.
///
/// # Errors
/// As [`decode_batch`]; what `sink` got is to be forgotten then, too.
#[inline]
pub fn decode_into<'a>(payload: &'a [u8], sink: &mut impl EventSink<'a>) -> Result<EventBatch<'a>> {
    let places = Places::newest();
    if let Some(batch) = fast_batch(payload, places, sink) {
        return Ok(batch);
    }
    sink.forget();
    let mut batch = careful_batch(payload, places)?;
    batch.events.drain(..).for_each(|event| sink.event(event));
    Ok(batch)
}

/// Read a batch whose every event is as known releases write it, the events into `sink`; `None` for all else.
#[inline]
fn fast_batch<'a>(
    payload: &'a [u8],
    places: Places,
    sink: &mut impl EventSink<'a>,
) -> Option<EventBatch<'a>> {
    if payload.len() > MAX_PAYLOAD_BYTES {
        return None;
    }
    let mut reader = Reader::new(payload);
    let parts @ (2 | 3) = fast::array(&mut reader)? else { return None };
    let ts = fast::number(&mut reader)?;
    let count = fast::array(&mut reader)?;
    let (mut arrays, mut maps) = (false, false);
    for _ in 0..count {
        let map = starts_map(*payload.get(reader.at)?);
        maps |= map;
        arrays |= !map;
        fast::event(&mut reader, places, sink)?;
    }
    let data_parallel_rank = if parts == 3 { fast::integer(&mut reader)? } else { None };
    reader.end().ok()?;
    let layout = layout(arrays, maps);
    Some(EventBatch { ts, events: Vec::new(), data_parallel_rank, layout, extra: Vec::new() })
}

const fn layout(arrays: bool, maps: bool) -> Option<Layout> {
    match (arrays, maps) {
        (true, true) => Some(Layout::Mixed),
        (true, false) => Some(Layout::Array),
        (false, true) => Some(Layout::Map),
        (false, false) => None,
    }
}

// --- the batch, event by event ------------------------------------------------------------------------------------

fn invalid(at: &str, message: impl Into<String>) -> Error {
    Error::at(Code::InvalidBatch, at, message)
}

fn refuse(fault: &Fault, at: &str) -> Error {
    match fault {
        Fault::TooDeep => Error::at(Code::NestedTooDeeply, at, "nested too deeply"),
        fault => Error::at(Code::InvalidMsgpack, at, format!("not msgpack: {fault}")),
    }
}

fn value_at<'a>(raw: &'a [u8], at: &str) -> Result<Head<'a>> {
    checked(raw).map_err(|fault| refuse(&fault, at))
}

struct Container<'a> {
    ts: Head<'a>,
    events: Vec<&'a [u8]>,
    rank: Head<'a>,
    extra: Vec<ExtraField<'a>>,
}

pub(crate) fn careful_batch(payload: &[u8], places: Places) -> Result<EventBatch<'_>> {
    if payload.len() > MAX_PAYLOAD_BYTES {
        return Err(Error::at(
            Code::PayloadTooLarge,
            "$",
            format!("the payload has {} bytes; at most {MAX_PAYLOAD_BYTES} are read", payload.len()),
        ));
    }
    let Some(first) = payload.first() else {
        return Err(invalid("$", "the payload is empty; expected a msgpack array [ts, [events], rank]"));
    };
    let Container { ts, events, rank, extra } =
        if starts_map(*first) { map_container(payload)? } else { array_container(payload)? };
    let ts = match ts {
        Head::Float(ts) => ts,
        Head::Int(ts) => ts.float(),
        other => return Err(invalid("$.ts", format!("expected the time as a number, got {}", other.kind()))),
    };
    let data_parallel_rank = match rank {
        Head::Nil => None,
        Head::Int(rank) => Some(rank),
        other => {
            let message =
                format!("expected the data parallel rank as an integer or nil, got {}", other.kind());
            return Err(invalid("$.data_parallel_rank", message));
        }
    };
    let arrays = events.iter().any(|raw| starts_array(raw[0]));
    let maps = events.iter().any(|raw| starts_map(raw[0]));
    let events = events.iter().enumerate().map(|(i, raw)| event(raw, i, places)).collect();
    Ok(EventBatch { ts, events, data_parallel_rank, layout: layout(arrays, maps), extra })
}

fn array_container(payload: &[u8]) -> Result<Container<'_>> {
    if !starts_array(payload[0]) {
        let kind = value_at(payload, "$")?.kind();
        return Err(invalid("$", format!("expected a msgpack array [ts, [events], rank], got {kind}")));
    }
    let parts = split(payload).map_err(|fault| refuse(&fault, "$"))?;
    let [ts, events, rest @ ..] = &parts[..] else {
        let message =
            format!("expected an array [ts, [events], rank] of at least 2 elements, got {}", parts.len());
        return Err(invalid("$", message));
    };
    let rank = match rest.first() {
        Some(rank) => value_at(rank, "$.data_parallel_rank")?,
        None => Head::Nil,
    };
    let mut extra = Vec::new();
    for (i, raw) in parts.iter().enumerate().skip(3) {
        value_at(raw, &format!("$[{i}]"))?;
        extra.push(ExtraField { name: FieldName::Position(i), raw });
    }
    Ok(Container { ts: value_at(ts, "$.ts")?, events: event_list(events)?, rank, extra })
}

fn map_container(payload: &[u8]) -> Result<Container<'_>> {
    // One field may be nested too deeply for the reader; the others still count.
    let fields = match named_parts(payload, Reader::head, Reader::skip) {
        Err(Fault::TooDeep) => {
            named_parts(payload, Reader::split_head, Reader::skip_any_depth).map_err(|fault| match fault {
                Fault::Trailing(_) => Fault::Split("more bytes after the map"),
                other => other,
            })
        }
        other => other,
    };
    let mut fields = fields.map_err(|fault| refuse(&fault, "$"))?;
    for name in ["ts", "events"] {
        if !fields.has(name) {
            return Err(invalid("$", format!("the batch has no '{name}'")));
        }
    }
    let events = event_list(fields.take("events").unwrap_or_default())?;
    for field in &fields.left {
        value_at(field.raw, &format!("$.{}", field.name))?;
    }
    let mut head = |name| match fields.take(name) {
        Some(raw) => value_at(raw, "$"),
        None => Ok(Head::Nil),
    };
    let (ours, theirs, ts) = (head("data_parallel_rank")?, head("attn_dp_rank")?, head("ts")?);
    let rank = if matches!(ours, Head::Nil) { theirs } else { ours };
    Ok(Container { ts, events, rank, extra: fields.left })
}

/// The fields of the map that `payload` is, their values not looked into.
fn named_parts<'a>(
    payload: &'a [u8],
    head: impl Fn(&mut Reader<'a>) -> Read<Head<'a>>,
    skip: impl Fn(&mut Reader<'a>) -> Read<()>,
) -> Read<Fields<'a>> {
    let mut reader = Reader::new(payload);
    let mut fields = Fields::default();
    let Head::Map(count) = reader.head()? else { return Ok(fields) };
    for _ in 0..count {
        let name = match head(&mut reader)? {
            Head::Text(name) => text_of(name)?,
            Head::Nil => return Err(Fault::Key("None")),
            Head::Bool(_) => return Err(Fault::Key("bool")),
            Head::Int(_) => return Err(Fault::Key("int")),
            Head::Float(_) => return Err(Fault::Key("float")),
            Head::Bytes(_) => return Err(Fault::Key("bytes")),
            Head::Ext(..) => return Err(Fault::Key("ext")),
            Head::Array(_) => return Err(Fault::Key("array")),
            Head::Map(_) => return Err(Fault::Key("object")),
        };
        let start = reader.at;
        skip(&mut reader)?;
        fields.put(Cow::Borrowed(name), &payload[start..reader.at]);
    }
    reader.end()?;
    Ok(fields)
}

fn event_list(raw: &[u8]) -> Result<Vec<&[u8]>> {
    let at = "$.events";
    if !raw.first().is_some_and(|first| starts_array(*first)) {
        return Err(invalid(at, format!("expected a list of events, got {}", value_at(raw, at)?.kind())));
    }
    split(raw).map_err(|fault| refuse(&fault, at))
}

// --- one event, field by field ------------------------------------------------------------------------------------

/// What is wrong with one event, and where.
struct BadField {
    message: String,
    path: String,
}

type Field<T> = std::result::Result<T, BadField>;

fn expected<T>(what: &str, got: &Head<'_>, path: String) -> Field<T> {
    Err(BadField { message: format!("expected {what}, got {}", got.kind()), path })
}

fn event<'a>(raw: &'a [u8], i: usize, places: Places) -> Event<'a> {
    let mut reader = Reader::new(raw);
    let mut read = Vec::new();
    if fast::event(&mut reader, places, &mut read).is_some() && reader.at == raw.len() {
        if let Some(event) = read.pop() {
            return event;
        }
    }
    let at = format!("$.events[{i}]");
    let mut tag = None;
    careful_event(raw, &at, places, &mut tag).unwrap_or_else(|fault| Event::Undecodable {
        path: fault.path,
        message: fault.message,
        tag,
        raw,
    })
}

fn careful_event<'a>(
    raw: &'a [u8],
    at: &str,
    places: Places,
    read_tag: &mut Option<&'a str>,
) -> Field<Event<'a>> {
    let head = checked(raw).map_err(|fault| BadField {
        message: match fault {
            Fault::TooDeep => "nested too deeply".into(),
            fault => format!("not msgpack: {fault}"),
        },
        path: at.into(),
    })?;
    let (tag, fields) = match head {
        Head::Map(count) => named_map(raw, count, at)?,
        Head::Array(count) => named_array(raw, count, at, places)?,
        other => return expected("an event, a map or an array", &other, at.into()),
    };
    *read_tag = Some(tag);
    let taker = Taker { fields, at, form: None };
    match tag {
        "BlockStored" => taker.stored(raw).map(Event::Stored),
        "BlockRemoved" => taker.removed(raw).map(Event::Removed),
        "AllBlocksCleared" => Ok(Event::Cleared { extra: taker.fields.left, raw }),
        _ => Ok(Event::Unknown { tag, raw }),
    }
}

/// Fields by name, in the order in which they came; of one that stands twice the last value counts.
#[derive(Default)]
struct Fields<'a> {
    left: Vec<ExtraField<'a>>,
    places: HashMap<Cow<'a, str>, usize>,
}

impl<'a> Fields<'a> {
    fn put(&mut self, name: Cow<'a, str>, raw: &'a [u8]) {
        match self.places.get(&name).and_then(|place| self.left.get_mut(*place)) {
            Some(field) => field.raw = raw,
            None => {
                self.places.insert(name.clone(), self.left.len());
                self.left.push(ExtraField { name: FieldName::Name(name), raw });
            }
        }
    }

    fn has(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    fn take(&mut self, name: &str) -> Option<&'a [u8]> {
        let place = self.places.remove(name)?;
        for other in self.places.values_mut() {
            *other -= usize::from(*other > place);
        }
        Some(self.left.remove(place).raw)
    }
}

/// The raw value at the reader, which was checked.
fn raw_value<'a>(reader: &mut Reader<'a>) -> &'a [u8] {
    let start = reader.at;
    // It was checked: it ends where it did then.
    let _ = reader.skip();
    &reader.data[start..reader.at]
}

fn named_map<'a>(raw: &'a [u8], count: usize, at: &str) -> Field<(&'a str, Fields<'a>)> {
    let mut reader = Reader::new(raw);
    let _ = reader.head();
    let mut fields = Fields::default();
    let mut bad_name = None;
    for _ in 0..count {
        let key = raw_value(&mut reader);
        let value = raw_value(&mut reader);
        match Reader::new(key).head() {
            Ok(Head::Text(name)) => fields.put(Cow::Borrowed(text_of(name).unwrap_or_default()), value),
            Ok(other) => {
                bad_name.get_or_insert(other);
            }
            Err(_) => {}
        }
    }
    let Some(tag) = fields.take("type") else {
        return Err(BadField { message: "the event has no 'type'".into(), path: at.into() });
    };
    let tag = tag_of(tag, || format!("{at}.type"))?;
    match bad_name {
        Some(name) => expected("field names as text", &name, at.into()),
        None => Ok((tag, fields)),
    }
}

fn tag_of(raw: &[u8], path: impl FnOnce() -> String) -> Field<&str> {
    match head_of(raw) {
        Head::Text(tag) => Ok(text_of(tag).unwrap_or_default()),
        other => expected("the event's type as text", &other, path()),
    }
}

/// The head of a value that was checked.
fn head_of(raw: &[u8]) -> Head<'_> {
    Reader::new(raw).head().unwrap_or(Head::Nil)
}

fn named_array<'a>(raw: &'a [u8], count: usize, at: &str, places: Places) -> Field<(&'a str, Fields<'a>)> {
    let mut reader = Reader::new(raw);
    let _ = reader.head();
    if count == 0 {
        return Err(BadField { message: "expected an event, got an empty array".into(), path: at.into() });
    }
    let tag = tag_of(raw_value(&mut reader), || format!("{at}[0]"))?;
    let names = match tag {
        "BlockStored" => places.stored,
        "BlockRemoved" => places.removed,
        _ => &[],
    };
    let mut fields = Fields::default();
    let mut beyond = Vec::new();
    let mut named: Option<&'a [u8]> = None;
    for i in 1..count {
        let value = raw_value(&mut reader);
        match names.get(i - 1) {
            // SGLang's array puts an object of named fields here. Its names say what they are, so nothing is guessed.
            Some(field) if field.name == "lora_name" && tag == "BlockStored" && starts_map(value[0]) => {
                named = Some(value);
            }
            Some(field) => fields.put(Cow::Borrowed(field.name), value),
            None => beyond.push(ExtraField { name: FieldName::Position(i), raw: value }),
        }
    }
    if let Some(named) = named {
        for (name, raw) in named_object(named) {
            fields.put(name, raw);
        }
    }
    fields.left.append(&mut beyond);
    Ok((tag, fields))
}

/// The pairs of a map that was checked, as Python's dict of them, the keys as text.
fn named_object(raw: &[u8]) -> Vec<(Cow<'_, str>, &[u8])> {
    let mut reader = Reader::new(raw);
    let Ok(Head::Map(count)) = reader.head() else { return Vec::new() };
    let mut names = Dict::default();
    let mut values = Vec::new();
    for _ in 0..count {
        let key = Value::read(&mut reader);
        // The dict keeps a number for each value, which stays the last one's.
        names.insert(key, Value::Int(Integer::Unsigned(values.len() as u64)));
        values.push(raw_value(&mut reader));
    }
    let place = |value: Value<'_>| match value {
        Value::Int(place) => place.low64() as usize,
        _ => 0,
    };
    names
        .pairs
        .into_iter()
        .map(|(key, value)| {
            let name = match key {
                Value::Text(name) => Cow::Borrowed(name),
                other => Cow::Owned(other.name()),
            };
            (name, values[place(value)])
        })
        .collect()
}

/// Takes one event's fields one by one, checked; what is left over is the rest.
struct Taker<'a, 'b> {
    fields: Fields<'a>,
    at: &'b str,
    /// What the hashes met so far are.
    form: Option<&'static str>,
}

impl<'a> Taker<'a, '_> {
    fn stored(mut self, raw: &'a [u8]) -> Field<BlockStored<'a>> {
        let block_hashes = self.hashes("block_hashes")?;
        let parent_block_hash = self.parent("parent_block_hash")?;
        Ok(BlockStored {
            block_hashes,
            parent_block_hash,
            token_ids: self.tokens("token_ids")?,
            block_size: self.size("block_size")?,
            lora_id: self.integer("lora_id")?,
            medium: self.text("medium")?,
            lora_name: self.text("lora_name")?,
            extra_keys: self.extra_keys("extra_keys")?,
            group_idx: self.integer("group_idx")?,
            kv_cache_spec_kind: self.text("kv_cache_spec_kind")?,
            kv_cache_spec_sliding_window: self.integer("kv_cache_spec_sliding_window")?,
            locality: self.text("locality")?,
            ownership: self.text("ownership")?,
            session_id: self.text("session_id")?,
            lookahead_token_ids: self.lookahead("lookahead_token_ids")?,
            cache_salt: self.text("cache_salt")?,
            extra: self.fields.left,
            raw,
        })
    }

    fn removed(mut self, raw: &'a [u8]) -> Field<BlockRemoved<'a>> {
        Ok(BlockRemoved {
            block_hashes: self.hashes("block_hashes")?,
            medium: self.text("medium")?,
            group_idx: self.integer("group_idx")?,
            locality: self.text("locality")?,
            ownership: self.text("ownership")?,
            extra: self.fields.left,
            raw,
        })
    }

    fn path(&self, name: &str) -> String {
        format!("{}.{name}", self.at)
    }

    fn required(&mut self, name: &str) -> Field<&'a [u8]> {
        self.fields.take(name).ok_or_else(|| BadField {
            message: format!("the event has no '{name}'"),
            path: self.at.to_owned(),
        })
    }

    fn integer(&mut self, name: &str) -> Field<Option<Integer>> {
        match self.fields.take(name).map_or(Head::Nil, head_of) {
            Head::Nil => Ok(None),
            Head::Int(number) => Ok(Some(number)),
            other => expected("an integer or nil", &other, self.path(name)),
        }
    }

    fn text(&mut self, name: &str) -> Field<Option<&'a str>> {
        match self.fields.take(name).map_or(Head::Nil, head_of) {
            Head::Nil => Ok(None),
            Head::Text(text) => Ok(Some(text_of(text).unwrap_or_default())),
            other => expected("text or nil", &other, self.path(name)),
        }
    }

    fn size(&mut self, name: &str) -> Field<u64> {
        match head_of(self.required(name)?) {
            Head::Int(Integer::Unsigned(size)) => Ok(size),
            Head::Int(number) => Err(BadField {
                message: format!("expected a size of at least 0, got {number}"),
                path: self.path(name),
            }),
            other => expected("an integer", &other, self.path(name)),
        }
    }

    /// The items of a list, and where they begin.
    fn list(&self, raw: &'a [u8], what: &str, name: &str) -> Field<(usize, Reader<'a>)> {
        let mut reader = Reader::new(raw);
        match reader.head().unwrap_or(Head::Nil) {
            Head::Array(count) => Ok((count, reader)),
            other => expected(&format!("a list of {what}"), &other, self.path(name)),
        }
    }

    fn hashes(&mut self, name: &str) -> Field<Hashes<'a>> {
        let raw = self.required(name)?;
        let (count, mut reader) = self.list(raw, "block hashes", name)?;
        let body = &raw[reader.at..];
        for i in 0..count {
            let item = raw_value(&mut reader);
            self.hash(item, |taker| format!("{}[{i}]", taker.path(name)))?;
        }
        Ok(Hashes(Span { body, count }))
    }

    fn parent(&mut self, name: &str) -> Field<Option<HashValue<'a>>> {
        let raw = self.required(name)?;
        match head_of(raw) {
            Head::Nil => Ok(None),
            _ => self.hash(raw, |taker| taker.path(name)).map(Some),
        }
    }

    fn hash(&mut self, raw: &'a [u8], path: impl Fn(&Self) -> String) -> Field<HashValue<'a>> {
        let head = head_of(raw);
        let hash = match head {
            Head::Int(number) => HashValue::Int(number),
            Head::Bytes(bytes) => HashValue::Bytes(bytes),
            other => return expected("a block hash, an integer or bytes", &other, path(self)),
        };
        if let HashValue::Bytes(bytes) = hash {
            if !(8..=64).contains(&bytes.len()) {
                return Err(BadField {
                    message: format!("expected a block hash of 8 to 64 bytes, got {}", bytes.len()),
                    path: path(self),
                });
            }
        }
        let form = *self.form.get_or_insert(head.kind());
        if form != head.kind() {
            return Err(BadField {
                message: format!("got {} where the other hashes of the event are {form}", head.kind()),
                path: path(self),
            });
        }
        Ok(hash)
    }

    fn tokens(&mut self, name: &str) -> Field<Tokens<'a>> {
        let raw = self.required(name)?;
        let (count, mut reader) = self.list(raw, "token ids", name)?;
        let body = &raw[reader.at..];
        let pairs = count > 0 && body.first().is_some_and(|first| starts_array(*first));
        for i in 0..count {
            let item = raw_value(&mut reader);
            let good = if pairs { is_pair(item) } else { matches!(head_of(item), Head::Int(_)) };
            if !good {
                let what = if pairs { "a pair of token ids" } else { "a token id" };
                return expected(what, &head_of(item), format!("{}[{i}]", self.path(name)));
            }
        }
        Ok(Tokens { span: Span { body, count }, pairs })
    }

    fn lookahead(&mut self, name: &str) -> Field<Option<PerBlock<'a>>> {
        let Some(raw) = self.fields.take(name).filter(|raw| raw[0] != 0xc0) else { return Ok(None) };
        let (count, mut reader) = self.list(raw, "token ids per block", name)?;
        let body = &raw[reader.at..];
        for i in 0..count {
            let item = raw_value(&mut reader);
            let mut tokens = Reader::new(item);
            let inner = match tokens.head().unwrap_or(Head::Nil) {
                Head::Array(inner) => inner,
                other => return expected("a list of token ids", &other, format!("{}[{i}]", self.path(name))),
            };
            for j in 0..inner {
                let token = head_of(raw_value(&mut tokens));
                if !matches!(token, Head::Int(_)) {
                    return expected("a token id", &token, format!("{}[{i}][{j}]", self.path(name)));
                }
            }
        }
        Ok(Some(PerBlock(Span { body, count })))
    }

    fn extra_keys(&mut self, name: &str) -> Field<Option<PerBlock<'a>>> {
        let Some(raw) = self.fields.take(name).filter(|raw| raw[0] != 0xc0) else { return Ok(None) };
        let (count, mut reader) = self.list(raw, "extra keys per block", name)?;
        let body = &raw[reader.at..];
        for i in 0..count {
            let item = head_of(raw_value(&mut reader));
            if !matches!(item, Head::Nil | Head::Array(_)) {
                return expected("a list of keys or nil", &item, format!("{}[{i}]", self.path(name)));
            }
        }
        Ok(Some(PerBlock(Span { body, count })))
    }
}

fn is_pair(raw: &[u8]) -> bool {
    let mut reader = Reader::new(raw);
    matches!(reader.head(), Ok(Head::Array(2)))
        && (0..2).all(|_| matches!(head_of(raw_value(&mut reader)), Head::Int(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ways give the same, for every event of every shape in the corpus of the repository's tests.
    #[test]
    fn the_two_ways_agree_on_a_plain_batch() {
        let payload = b"\x93\xca\x3f\x80\x00\x00\x91\x96\xabBlockStored\x92\x01\xcd\x01\x00\xc0\x92\x05\x06\x01\xc0\x00";
        let places = Places::newest();
        let mut events = Vec::new();
        let fast = fast_batch(payload, places, &mut events).unwrap();
        let fast = EventBatch { events, ..fast };
        let careful = careful_batch(payload, places).unwrap();
        assert_eq!(format!("{fast:?}"), format!("{careful:?}"));
        let Event::Stored(event) = &fast.events[0] else { panic!("{fast:?}") };
        assert_eq!(event.block_hashes.iter().map(HashValue::key).collect::<Vec<_>>(), [1, 256]);
        assert_eq!(event.token_ids.iter().map(Integer::low64).collect::<Vec<_>>(), [5, 6]);
    }
}
