//! Request lines and event lines: one JSON object a line in, one a line out. One bad line gives one error line.
//!
//! ```
//! let line = br#"{"id":"1","vllm":"0.33.0","hash_seed":"0","algorithm":"md5","tokens":[]}"#;
//! let answer = kvhash::lines::answer_line(line).unwrap();
//! assert!(answer.starts_with(r#"{"id":"1","error":{"code":"unknown-algorithm","#));
//! ```

use crate::block_hash::BlockHash;
use crate::error::{Code, Error, Result};
use crate::events::{decode_batch, write_batch};
use crate::json::{self, Json, Text};
use crate::request::{from_hex, Request};
use crate::text;
use crate::value::Value;

/// The longest request line, in bytes, its end (one `\n` or `\r\n`) not counted.
pub const MAX_LINE_BYTES: usize = 8 * 1024 * 1024;

/// Answer one line, without a newline behind it; `None` for a blank one. The length is looked at first: a blank line
/// of more than [`MAX_LINE_BYTES`] is refused as any other.
#[must_use]
pub fn answer_line(line: &[u8]) -> Option<String> {
    let ending = if line.ends_with(b"\r\n") { 2 } else { usize::from(line.ends_with(b"\n")) };
    if line.len() - ending > MAX_LINE_BYTES {
        return Some(answer_too_long());
    }
    if line.iter().all(|byte| byte.is_ascii_whitespace() || *byte == 0x0b) {
        return None;
    }
    let mut identity = Json::Null;
    let answered = answer(line, &mut identity);
    Some(match answered {
        Ok(body) => {
            let mut out = String::from("{\"id\":");
            identity.write(&mut out);
            out + &body
        }
        Err(error) => error_line(&identity, &error),
    })
}

/// The answer to a line that was not read because it has more than [`MAX_LINE_BYTES`].
#[must_use]
pub fn answer_too_long() -> String {
    let message = format!(
        "the line has more than the {MAX_LINE_BYTES} bytes that are read (raise the limit to hash it)"
    );
    error_line(&Json::Null, &Error::new(Code::LineTooLong, message))
}

fn error_line(identity: &Json, error: &Error) -> String {
    let mut out = String::from("{\"id\":");
    identity.write(&mut out);
    out += ",\"error\":{\"code\":\"";
    out += error.code.as_str();
    out += "\",\"message\":";
    json::write_str(&error.to_string(), &mut out);
    out + "}}"
}

fn answer(line: &[u8], identity: &mut Json) -> Result<String> {
    let value = json::parse(line, "the line")?;
    if let Json::Object(fields) = &value {
        let id = fields.iter().find(|(name, _)| *name == Text::Plain("id".into()));
        *identity = id.map_or(Json::Null, |(_, id)| id.clone());
        if let Some((_, payload)) = fields.iter().find(|(name, _)| name.plain() == Some("decode")) {
            return answer_event(fields, payload);
        }
    }
    let request = Request::from_json(value)?;
    let hasher = request.hasher()?;
    let mut chain = hasher.chain(request.keys().clone())?;
    chain.append(request.tokens());
    let mut out = String::from(",\"none_hash\":");
    write_hash(&hasher.none_hash(), &mut out);
    out += ",\"block_hashes\":";
    write_list(chain.hashes(), &mut out, write_hash);
    out += ",\"external\":";
    write_list(chain.hashes(), &mut out, |hash, out| {
        out.push('"');
        *out += &hash.external();
        out.push('"');
    });
    out += ",\"extra_keys\":";
    write_list(&chain.extra_keys(), &mut out, |keys, out| match keys {
        None => out.push_str("null"),
        Some(keys) => write_list(keys, out, write_value),
    });
    out.push('}');
    Ok(out)
}

/// The answer to `{"id":..,"decode":"<payload hex>"}`, without `id`.
fn answer_event(fields: &[(Text, Json)], payload: &Json) -> Result<String> {
    if let Some((name, _)) = fields.iter().find(|(name, _)| !matches!(name.plain(), Some("id" | "decode"))) {
        let message = format!("unknown field {}; expected: id, decode", name.repr());
        return Err(Error::at(Code::InvalidRequest, "$", message));
    }
    let Json::Text(text) = payload else {
        let message = format!("expected the payload as hex, got {}", payload.type_name());
        return Err(Error::at(Code::InvalidRequest, "$.decode", message));
    };
    let payload = text
        .plain()
        .and_then(from_hex)
        .ok_or_else(|| Error::at(Code::InvalidRequest, "$.decode", "the payload is not hex"))?;
    let mut out = String::from(",\"batch\":");
    write_batch(&decode_batch(&payload)?, &mut out);
    out.push('}');
    Ok(out)
}

fn write_list<T>(items: &[T], out: &mut String, mut write: impl FnMut(&T, &mut String)) {
    out.push('[');
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            out.push(',');
        }
        write(item, out);
    }
    out.push(']');
}

fn write_hash(hash: &BlockHash, out: &mut String) {
    match hash.digest() {
        Some(digest) => {
            out.push('"');
            *out += &text::hex(digest);
            out.push('"');
        }
        None => {
            *out += "{\"int\":\"";
            *out += &hash.external();
            *out += "\"}";
        }
    }
}

fn write_value(value: &Value, out: &mut String) {
    match value {
        Value::None => out.push_str("null"),
        Value::Int(number) => *out += &number.to_string(),
        Value::Text(text) => json::write_str(text, out),
        Value::Tag(tag) => json::write_str(tag.as_str(), out),
        Value::Bytes(bytes) => {
            *out += "{\"bytes\":\"";
            *out += &text::hex(bytes);
            *out += "\"}";
        }
        Value::Tuple(items) => write_list(items, out, write_value),
    }
}
