//! A batch as event lines carry it: every field of each event, nil as null; a hash as `{"int": decimal}` or
//! `{"bytes": hex}`; `extra` only where there are unknown fields.

use super::batch::{
    BlockRemoved, BlockStored, Event, EventBatch, ExtraField, HashValue, Hashes, PerBlock, Tokens,
};
use super::msgpack::{timestamp, Integer};
use super::value::Value;
use crate::json::write_str;
use crate::text;

/// Append the batch as a JSON object.
pub(crate) fn write_batch(batch: &EventBatch<'_>, out: &mut String) {
    let mut object = Object::open(out);
    write_float(batch.ts, object.name("ts"));
    object.integer("data_parallel_rank", batch.data_parallel_rank);
    object.text("layout", batch.layout.map(super::Layout::as_str));
    write_list(batch.events.iter(), object.name("events"), write_event);
    object.extra(&batch.extra);
    object.close();
}

fn write_event(event: &Event<'_>, out: &mut String) {
    match event {
        Event::Stored(event) => stored(event, out),
        Event::Removed(event) => removed(event, out),
        Event::Cleared { extra, .. } => {
            let mut object = Object::open(out);
            object.text("type", Some("AllBlocksCleared"));
            object.extra(extra);
            object.close();
        }
        Event::Unknown { tag, raw } => {
            let mut object = Object::open(out);
            object.text("unknown", Some(tag));
            write_bytes(raw, object.name("raw"));
            object.close();
        }
        Event::Undecodable { path, message, raw, .. } => {
            let mut object = Object::open(out);
            object.text("undecodable", Some(path));
            object.text("message", Some(message));
            write_bytes(raw, object.name("raw"));
            object.close();
        }
    }
}

fn stored(event: &BlockStored<'_>, out: &mut String) {
    let mut object = Object::open(out);
    object.text("type", Some("BlockStored"));
    object.hashes(&event.block_hashes);
    match event.parent_block_hash {
        Some(hash) => write_hash(hash, object.name("parent_block_hash")),
        None => object.name("parent_block_hash").push_str("null"),
    }
    write_tokens(&event.token_ids, object.name("token_ids"));
    object.integer("block_size", Some(Integer::Unsigned(event.block_size)));
    object.integer("lora_id", event.lora_id);
    object.text("medium", event.medium);
    object.text("lora_name", event.lora_name);
    object.per_block("extra_keys", event.extra_keys);
    object.integer("group_idx", event.group_idx);
    object.text("kv_cache_spec_kind", event.kv_cache_spec_kind);
    object.integer("kv_cache_spec_sliding_window", event.kv_cache_spec_sliding_window);
    object.text("locality", event.locality);
    object.text("ownership", event.ownership);
    object.text("session_id", event.session_id);
    object.per_block("lookahead_token_ids", event.lookahead_token_ids);
    object.text("cache_salt", event.cache_salt);
    object.extra(&event.extra);
    object.close();
}

fn removed(event: &BlockRemoved<'_>, out: &mut String) {
    let mut object = Object::open(out);
    object.text("type", Some("BlockRemoved"));
    object.hashes(&event.block_hashes);
    object.text("medium", event.medium);
    object.integer("group_idx", event.group_idx);
    object.text("locality", event.locality);
    object.text("ownership", event.ownership);
    object.extra(&event.extra);
    object.close();
}

struct Object<'o> {
    out: &'o mut String,
    first: bool,
}

impl<'o> Object<'o> {
    fn open(out: &'o mut String) -> Self {
        out.push('{');
        Self { out, first: true }
    }

    fn close(self) {
        self.out.push('}');
    }

    /// Write a field's name; what is written next is its value.
    fn name(&mut self, name: &str) -> &mut String {
        if !self.first {
            self.out.push(',');
        }
        self.first = false;
        write_str(name, self.out);
        self.out.push(':');
        self.out
    }

    fn text(&mut self, name: &str, value: Option<&str>) {
        let out = self.name(name);
        match value {
            Some(text) => write_str(text, out),
            None => out.push_str("null"),
        }
    }

    fn integer(&mut self, name: &str, value: Option<Integer>) {
        let out = self.name(name);
        match value {
            Some(number) => *out += &number.to_string(),
            None => out.push_str("null"),
        }
    }

    fn hashes(&mut self, hashes: &Hashes<'_>) {
        write_list(hashes.iter(), self.name("block_hashes"), write_hash);
    }

    fn per_block(&mut self, name: &str, value: Option<PerBlock<'_>>) {
        let out = self.name(name);
        match value {
            Some(blocks) => write_list(blocks.iter(), out, |value, out| write_value(&value, out)),
            None => out.push_str("null"),
        }
    }

    fn extra(&mut self, fields: &[ExtraField<'_>]) {
        if !fields.is_empty() {
            let pairs = fields.iter().map(|field| (field.name.to_string(), field.value()));
            write_named(pairs, self.name("extra"));
        }
    }
}

/// Write pairs by name; of a name that stands twice the last value counts, at the first one's place.
fn write_named<'a>(pairs: impl Iterator<Item = (String, Value<'a>)>, out: &mut String) {
    let mut places = std::collections::HashMap::new();
    let mut kept: Vec<(String, Value<'a>)> = Vec::new();
    for (name, value) in pairs {
        let place = *places.entry(name.clone()).or_insert(kept.len());
        match kept.get_mut(place) {
            Some(pair) => pair.1 = value,
            None => kept.push((name, value)),
        }
    }
    let mut object = Object::open(out);
    for (name, value) in &kept {
        write_value(value, object.name(name));
    }
    object.close();
}

fn write_list<T>(items: impl Iterator<Item = T>, out: &mut String, mut write: impl FnMut(T, &mut String)) {
    out.push('[');
    for (i, item) in items.enumerate() {
        if i > 0 {
            out.push(',');
        }
        write(item, out);
    }
    out.push(']');
}

fn write_hash(hash: HashValue<'_>, out: &mut String) {
    match hash {
        HashValue::Int(number) => {
            *out += "{\"int\":\"";
            *out += &number.to_string();
            *out += "\"}";
        }
        HashValue::Bytes(bytes) => write_bytes(bytes, out),
    }
}

fn write_bytes(bytes: &[u8], out: &mut String) {
    *out += "{\"bytes\":\"";
    *out += &text::hex(bytes);
    *out += "\"}";
}

fn write_tokens(tokens: &Tokens<'_>, out: &mut String) {
    let number = |number: Integer, out: &mut String| *out += &number.to_string();
    if tokens.bigram() {
        write_list(tokens.pairs(), out, |pair, out| write_list(pair.into_iter(), out, number));
    } else {
        write_list(tokens.iter(), out, number);
    }
}

fn write_float(value: f64, out: &mut String) {
    if value.is_finite() {
        *out += &text::repr_float(value);
    } else {
        // JSON has no such numbers.
        let name = if value.is_nan() {
            "NaN"
        } else if value > 0.0 {
            "+Inf"
        } else {
            "-Inf"
        };
        *out += &format!("{{\"float\":\"{name}\"}}");
    }
}

fn write_value(value: &Value<'_>, out: &mut String) {
    match value {
        Value::Nil => out.push_str("null"),
        Value::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        Value::Int(value) => *out += &value.to_string(),
        Value::Float(value) => write_float(*value, out),
        Value::Text(value) => write_str(value, out),
        Value::Bytes(value) => write_bytes(value, out),
        Value::List(items) => write_list(items.iter(), out, write_value),
        Value::Map(pairs) => {
            write_named(pairs.iter().map(|(key, value)| (key.name(), value.clone())), out);
        }
        Value::Extension(code, data) => {
            *out += &format!("{{\"ext\":{code},\"bytes\":\"");
            match timestamp(data) {
                Ok(moment) if *code == -1 => *out += &text::hex(&moment_bytes(moment)),
                _ => *out += &text::hex(data),
            }
            *out += "\"}";
        }
    }
}

/// The shortest form of a timestamp of this second and microsecond.
fn moment_bytes((seconds, micros): (i64, u32)) -> Vec<u8> {
    let nanoseconds = micros * 1000;
    match u64::try_from(seconds) {
        Ok(seconds) if seconds >> 34 == 0 => {
            let bits = u64::from(nanoseconds) << 34 | seconds;
            u32::try_from(bits)
                .map_or_else(|_| bits.to_be_bytes().to_vec(), |bits| bits.to_be_bytes().to_vec())
        }
        _ => [&nanoseconds.to_be_bytes()[..], &seconds.to_be_bytes()].concat(),
    }
}
