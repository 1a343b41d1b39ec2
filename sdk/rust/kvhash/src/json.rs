//! Strict JSON, read and refused as Python's `json.loads` does: the same values, the same words for what is wrong.
//!
//! A text may hold lone surrogates (`"\ud800"`), which the request's checks refuse later, where they know the field.

use std::collections::HashSet;
use std::fmt::Write;

use crate::error::{Code, Error, Result};
use crate::text;

/// Deeper nesting is refused.
const MAX_DEPTH: usize = 500;
/// Python reads no integer of more digits.
const MAX_DIGITS: usize = 4300;

/// A text: plain, or the code points of one that holds lone surrogates.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Text {
    Plain(String),
    Lone(Vec<u32>),
}

impl Text {
    pub(crate) fn plain(&self) -> Option<&str> {
        match self {
            Self::Plain(text) => Some(text),
            Self::Lone(_) => None,
        }
    }

    pub(crate) fn repr(&self) -> String {
        match self {
            Self::Plain(text) => text::repr(text),
            Self::Lone(points) => text::repr_points(points.iter().copied()),
        }
    }
}

/// A JSON value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    Int(i128),
    /// An integer beyond 128 bits, in decimal.
    Big(String),
    Float(f64),
    Text(Text),
    List(Vec<Json>),
    Object(Vec<(Text, Json)>),
}

impl Json {
    /// The name of the Python type that holds this value.
    pub(crate) const fn type_name(&self) -> &'static str {
        match self {
            Self::Null => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) | Self::Big(_) => "int",
            Self::Float(_) => "float",
            Self::Text(_) => "str",
            Self::List(_) => "list",
            Self::Object(_) => "dict",
        }
    }

    /// Python's `repr` of the value.
    pub(crate) fn repr(&self) -> String {
        match self {
            Self::Null => "None".into(),
            Self::Bool(value) => if *value { "True" } else { "False" }.into(),
            Self::Int(value) => value.to_string(),
            Self::Big(digits) => digits.clone(),
            Self::Float(value) => text::repr_float(*value),
            Self::Text(text) => text.repr(),
            Self::List(items) => {
                format!("[{}]", items.iter().map(Self::repr).collect::<Vec<_>>().join(", "))
            }
            Self::Object(fields) => {
                let shown: Vec<_> =
                    fields.iter().map(|(name, value)| format!("{}: {}", name.repr(), value.repr())).collect();
                format!("{{{}}}", shown.join(", "))
            }
        }
    }

    /// The value as compact JSON, as Python's `json.dumps` writes it.
    pub(crate) fn write(&self, out: &mut String) {
        match self {
            Self::Null => out.push_str("null"),
            Self::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
            Self::Int(value) => out.push_str(&value.to_string()),
            Self::Big(digits) => out.push_str(digits),
            Self::Float(value) => out.push_str(&text::repr_float(*value)),
            Self::Text(text) => write_text(text, out),
            Self::List(items) => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    if i > 0 {
                        out.push(',');
                    }
                    item.write(out);
                }
                out.push(']');
            }
            Self::Object(fields) => {
                out.push('{');
                for (i, (name, value)) in fields.iter().enumerate() {
                    if i > 0 {
                        out.push(',');
                    }
                    write_text(name, out);
                    out.push(':');
                    value.write(out);
                }
                out.push('}');
            }
        }
    }
}

fn write_text(text: &Text, out: &mut String) {
    match text {
        Text::Plain(text) => write_str(text, out),
        Text::Lone(points) => {
            out.push('"');
            for point in points {
                match char::from_u32(*point) {
                    Some(c) => write_char(c, out),
                    None => {
                        let _ = write!(out, "\\u{point:04x}");
                    }
                }
            }
            out.push('"');
        }
    }
}

/// Write a text as a JSON string.
pub(crate) fn write_str(text: &str, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        write_char(c, out);
    }
    out.push('"');
}

fn write_char(c: char, out: &mut String) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        '\u{8}' => out.push_str("\\b"),
        '\u{c}' => out.push_str("\\f"),
        c if c < ' ' => {
            let _ = write!(out, "\\u{:04x}", u32::from(c));
        }
        c => out.push(c),
    }
}

/// Read one JSON text, called `what` in messages.
pub(crate) fn parse(data: &[u8], what: &str) -> Result<Json> {
    let text = std::str::from_utf8(data).map_err(|fault| {
        let start = fault.valid_up_to();
        let reason = match (fault.error_len(), data[start]) {
            (None, _) => "unexpected end of data",
            (_, 0x80..=0xc1 | 0xf5..) => "invalid start byte",
            _ => "invalid continuation byte",
        };
        Error::new(Code::InvalidUtf8, format!("{what} is not UTF-8: {reason} at byte {start}"))
    })?;
    let mut parser = Parser { text, bytes: data };
    let read = if text.starts_with('\u{feff}') {
        Err(Fault::Syntax("Unexpected UTF-8 BOM (decode using utf-8-sig)", 0))
    } else {
        parser.document()
    };
    read.map_err(|fault| {
        let message = match fault {
            Fault::Syntax(message, at) => {
                let before = &text[..at];
                let line = before.bytes().filter(|byte| *byte == b'\n').count() + 1;
                let start = before.rfind('\n').map_or(0, |newline| newline + 1);
                let column = before[start..].chars().count() + 1;
                if text.contains('\n') {
                    format!("{what} is not JSON: {message}, at line {line} column {column}")
                } else {
                    format!("{what} is not JSON: {message}, at column {column}")
                }
            }
            Fault::Constant(name) => format!("{name} is not JSON"),
            Fault::Twice(name) => format!("the field {} stands twice in one object", name.repr()),
            Fault::TooDeep => format!("{what} is nested too deeply"),
            Fault::Infinite(number) => format!("{number} is beyond any number"),
            Fault::TooManyDigits => format!("{what} holds a number of too many digits"),
        };
        Error::new(Code::InvalidJson, message)
    })
}

enum Fault {
    /// What was expected, and the byte position.
    Syntax(&'static str, usize),
    Constant(&'static str),
    Twice(Text),
    TooDeep,
    TooManyDigits,
    Infinite(String),
}

struct Parser<'a> {
    text: &'a str,
    bytes: &'a [u8],
}

type Read<T> = std::result::Result<T, Fault>;

impl Parser<'_> {
    fn document(&mut self) -> Read<Json> {
        let start = self.space(0);
        let (value, end) = self.value(start, 0)?;
        let end = self.space(end);
        if end < self.bytes.len() {
            return Err(Fault::Syntax("Extra data", end));
        }
        Ok(value)
    }

    fn byte(&self, at: usize) -> Option<u8> {
        self.bytes.get(at).copied()
    }

    fn space(&self, mut at: usize) -> usize {
        while matches!(self.byte(at), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            at += 1;
        }
        at
    }

    fn value(&mut self, at: usize, depth: usize) -> Read<(Json, usize)> {
        let rest = &self.bytes[at.min(self.bytes.len())..];
        let Some(first) = rest.first() else { return Err(Fault::Syntax("Expecting value", at)) };
        match first {
            b'"' => {
                let (text, end) = self.string(at + 1)?;
                Ok((Json::Text(text), end))
            }
            b'{' | b'[' if depth >= MAX_DEPTH => Err(Fault::TooDeep),
            b'{' => self.object(at + 1, depth + 1),
            b'[' => self.list(at + 1, depth + 1),
            b'n' if rest.starts_with(b"null") => Ok((Json::Null, at + 4)),
            b't' if rest.starts_with(b"true") => Ok((Json::Bool(true), at + 4)),
            b'f' if rest.starts_with(b"false") => Ok((Json::Bool(false), at + 5)),
            b'N' if rest.starts_with(b"NaN") => Err(Fault::Constant("NaN")),
            b'I' if rest.starts_with(b"Infinity") => Err(Fault::Constant("Infinity")),
            b'-' if rest.starts_with(b"-Infinity") => Err(Fault::Constant("-Infinity")),
            _ => self.number(at),
        }
    }

    fn object(&mut self, at: usize, depth: usize) -> Read<(Json, usize)> {
        let mut fields: Vec<(Text, Json)> = Vec::new();
        let mut at = self.space(at);
        if self.byte(at) == Some(b'}') {
            return Ok((Json::Object(fields), at + 1));
        }
        loop {
            if self.byte(at) != Some(b'"') {
                return Err(Fault::Syntax("Expecting property name enclosed in double quotes", at));
            }
            let (name, end) = self.string(at + 1)?;
            at = self.space(end);
            if self.byte(at) != Some(b':') {
                return Err(Fault::Syntax("Expecting ':' delimiter", at));
            }
            let (value, end) = self.value(self.space(at + 1), depth)?;
            fields.push((name, value));
            at = self.space(end);
            match self.byte(at) {
                Some(b'}') => break,
                Some(b',') => at = self.space(at + 1),
                _ => return Err(Fault::Syntax("Expecting ',' delimiter", at)),
            }
        }
        let mut seen = HashSet::new();
        let mut again = HashSet::new();
        for (name, _) in &fields {
            if !seen.insert(name) {
                again.insert(name);
            }
        }
        match fields.iter().find(|(name, _)| again.contains(name)) {
            Some((name, _)) => Err(Fault::Twice(name.clone())),
            None => Ok((Json::Object(fields), at + 1)),
        }
    }

    fn list(&mut self, at: usize, depth: usize) -> Read<(Json, usize)> {
        let mut items = Vec::new();
        let mut at = self.space(at);
        if self.byte(at) == Some(b']') {
            return Ok((Json::List(items), at + 1));
        }
        loop {
            let (value, end) = self.value(at, depth)?;
            items.push(value);
            at = self.space(end);
            match self.byte(at) {
                Some(b']') => return Ok((Json::List(items), at + 1)),
                Some(b',') => at = self.space(at + 1),
                _ => return Err(Fault::Syntax("Expecting ',' delimiter", at)),
            }
        }
    }

    fn digits(&self, mut at: usize) -> usize {
        while self.byte(at).is_some_and(|byte| byte.is_ascii_digit()) {
            at += 1;
        }
        at
    }

    fn number(&self, start: usize) -> Read<(Json, usize)> {
        let whole = start + usize::from(self.byte(start) == Some(b'-'));
        let mut end = match self.byte(whole) {
            Some(b'0') => whole + 1,
            Some(b'1'..=b'9') => self.digits(whole),
            _ => return Err(Fault::Syntax("Expecting value", start)),
        };
        let mut float = false;
        if self.byte(end) == Some(b'.') && self.digits(end + 1) > end + 1 {
            float = true;
            end = self.digits(end + 1);
        }
        if matches!(self.byte(end), Some(b'e' | b'E')) {
            let exponent = end + 1 + usize::from(matches!(self.byte(end + 1), Some(b'+' | b'-')));
            let after = self.digits(exponent);
            if after > exponent {
                float = true;
                end = after;
            }
        }
        let written = &self.text[start..end];
        if float {
            return match written.parse::<f64>() {
                Ok(number) if number.is_finite() => Ok((Json::Float(number), end)),
                _ => Err(Fault::Infinite(written.chars().take(20).collect())),
            };
        }
        if end - whole > MAX_DIGITS {
            return Err(Fault::TooManyDigits);
        }
        Ok((written.parse().map_or_else(|_| Json::Big(written.to_owned()), Json::Int), end))
    }

    /// Read a string whose opening quote stands just before `start`.
    fn string(&self, start: usize) -> Read<(Text, usize)> {
        let unterminated = Fault::Syntax("Unterminated string starting at", start - 1);
        let mut out = String::new();
        let mut lone: Option<Vec<u32>> = None;
        let mut at = start;
        loop {
            let chunk = at;
            loop {
                match self.byte(at) {
                    None => return Err(unterminated),
                    Some(b'"' | b'\\') => break,
                    Some(0..=0x1f) => return Err(Fault::Syntax("Invalid control character at", at)),
                    Some(_) => at += 1,
                }
            }
            let piece = &self.text[chunk..at];
            match &mut lone {
                None => out.push_str(piece),
                Some(points) => points.extend(piece.chars().map(u32::from)),
            }
            if self.bytes[at] == b'"' {
                return Ok((lone.map_or(Text::Plain(out), Text::Lone), at + 1));
            }
            let (point, end) = match self.byte(at + 1) {
                None => return Err(unterminated),
                Some(b'u') => self.unicode_escape(at)?,
                Some(escape) => {
                    let c = match escape {
                        b'"' | b'\\' | b'/' => escape,
                        b'b' => 8,
                        b'f' => 12,
                        b'n' => b'\n',
                        b'r' => b'\r',
                        b't' => b'\t',
                        _ => return Err(Fault::Syntax("Invalid \\escape", at)),
                    };
                    (c.into(), at + 2)
                }
            };
            at = end;
            match (&mut lone, char::from_u32(point)) {
                (None, Some(c)) => out.push(c),
                (None, None) => {
                    lone = Some(out.chars().map(u32::from).chain([point]).collect());
                }
                (Some(points), _) => points.push(point),
            }
        }
    }

    /// Read `\uXXXX` at `at`, with its partner where it is the first of a surrogate pair.
    fn unicode_escape(&self, at: usize) -> Read<(u32, usize)> {
        let invalid = "Invalid \\uXXXX escape";
        let digits = at + 2;
        // Python wants one more character behind the digits before it looks at them.
        if self.text[digits..].chars().take(5).count() < 5 {
            return Err(Fault::Syntax(invalid, at + 1));
        }
        let first = self.hex4(digits).ok_or(Fault::Syntax(invalid, at + 1))?;
        let end = digits + 4;
        // Its look at a second escape wants six characters and one more, too.
        if (0xd800..0xdc00).contains(&first)
            && self.bytes[end..].starts_with(b"\\u")
            && self.text[end..].chars().take(7).count() == 7
        {
            let second = self.hex4(end + 2).ok_or(Fault::Syntax(invalid, end + 1))?;
            if (0xdc00..0xe000).contains(&second) {
                return Ok((0x1_0000 + ((first - 0xd800) << 10) + (second - 0xdc00), end + 6));
            }
        }
        Ok((first, end))
    }

    fn hex4(&self, at: usize) -> Option<u32> {
        self.bytes
            .get(at..at + 4)?
            .iter()
            .try_fold(0, |number, byte| char::from(*byte).to_digit(16).map(|digit| number << 4 | digit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(line: &str) -> String {
        parse(line.as_bytes(), "the line").unwrap_err().message
    }

    /// What `kvhash.request.parse_json` says of the same texts.
    #[test]
    fn faults_are_said_in_pythons_words() {
        assert_eq!(fault(""), "the line is not JSON: Expecting value, at column 1");
        assert_eq!(fault("[1,]\n"), "the line is not JSON: Expecting value, at line 1 column 4");
        assert_eq!(fault("{\"a\" 1}"), "the line is not JSON: Expecting ':' delimiter, at column 6");
        assert_eq!(fault("{\"é\":1 2}"), "the line is not JSON: Expecting ',' delimiter, at column 8");
        assert_eq!(fault("01"), "the line is not JSON: Extra data, at column 2");
        assert_eq!(fault("\"\\x\""), "the line is not JSON: Invalid \\escape, at column 2");
        assert_eq!(fault("\"a"), "the line is not JSON: Unterminated string starting at, at column 1");
        assert_eq!(fault("{\"a\":1,\"a\":2}"), "the field 'a' stands twice in one object");
        assert_eq!(fault("[NaN]"), "NaN is not JSON");
        assert_eq!(fault(&"9".repeat(4301)), "the line holds a number of too many digits");
        assert_eq!(fault(&"[".repeat(2000)), "the line is nested too deeply");
        assert_eq!(
            parse(b"\xff", "the line").unwrap_err().message,
            "the line is not UTF-8: invalid start byte at byte 0"
        );
    }

    #[test]
    fn surrogates_are_joined_or_kept() {
        assert_eq!(parse(br#""\ud83d\ude00""#, "").unwrap(), Json::Text(Text::Plain("\u{1f600}".into())));
        assert_eq!(parse(br#""a\ud83dz""#, "").unwrap(), Json::Text(Text::Lone(vec![0x61, 0xd83d, 0x7a])));
    }
}
