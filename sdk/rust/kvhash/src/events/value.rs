//! A msgpack value of any kind: what extra keys and unknown fields hold.

use std::collections::HashMap;
use std::fmt::Write;

use super::msgpack::{text_of, timestamp, Head, Integer, Reader};
use crate::text;

/// A value of an event's extra keys or of a field that is not known.
#[derive(Debug, Clone, PartialEq)]
pub enum Value<'a> {
    /// nil.
    Nil,
    /// A boolean.
    Bool(bool),
    /// An integer.
    Int(Integer),
    /// A float, of 32 or 64 bits.
    Float(f64),
    /// A text.
    Text(&'a str),
    /// Bytes.
    Bytes(&'a [u8]),
    /// An array.
    List(Vec<Value<'a>>),
    /// A map; of a key that stands twice the last value counts, at the first one's place.
    Map(Vec<(Value<'a>, Value<'a>)>),
    /// An extension value: its type and its data.
    Extension(i8, &'a [u8]),
}

impl<'a> Value<'a> {
    /// Read a value that was checked; what cannot be read is nil, which does not happen.
    pub(crate) fn read(reader: &mut Reader<'a>) -> Self {
        match reader.head() {
            Err(_) | Ok(Head::Nil) => Self::Nil,
            Ok(Head::Bool(value)) => Self::Bool(value),
            Ok(Head::Int(value)) => Self::Int(value),
            Ok(Head::Float(value)) => Self::Float(value),
            Ok(Head::Text(value)) => Self::Text(text_of(value).unwrap_or_default()),
            Ok(Head::Bytes(value)) => Self::Bytes(value),
            Ok(Head::Ext(code, data)) => Self::Extension(code, data),
            Ok(Head::Array(count)) => Self::List((0..count).map(|_| Self::read(reader)).collect()),
            Ok(Head::Map(count)) => {
                let mut pairs = Dict::default();
                for _ in 0..count {
                    let key = Self::read(reader);
                    pairs.insert(key, Self::read(reader));
                }
                Self::Map(pairs.pairs)
            }
        }
    }

    pub(crate) fn of(raw: &'a [u8]) -> Self {
        Self::read(&mut Reader::new(raw))
    }

    /// A key's name as Python's `str` gives it.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Text(text) => (*text).to_owned(),
            other => other.repr(),
        }
    }

    fn repr(&self) -> String {
        match self {
            Self::Nil => "None".into(),
            Self::Bool(value) => if *value { "True" } else { "False" }.into(),
            Self::Int(value) => value.to_string(),
            Self::Float(value) if value.is_nan() => "nan".into(),
            Self::Float(value) if value.is_infinite() => if *value > 0.0 { "inf" } else { "-inf" }.into(),
            Self::Float(value) => text::repr_float(*value),
            Self::Text(value) => text::repr(value),
            Self::Bytes(value) => repr_bytes(value),
            Self::List(items) => {
                let comma = if items.len() == 1 { "," } else { "" };
                format!("({}{comma})", items.iter().map(Self::repr).collect::<Vec<_>>().join(", "))
            }
            Self::Map(_) | Self::Extension(..) => "extension".into(),
        }
    }

    /// Write what is equal in keys that Python holds for equal.
    fn identity(&self, nans: &mut u64, out: &mut Vec<u8>) {
        let mut write = |mark: u8, data: &[u8]| {
            out.push(mark);
            out.extend_from_slice(&data.len().to_le_bytes());
            out.extend_from_slice(data);
        };
        match self {
            Self::Nil | Self::Map(_) => write(b'n', &[]),
            Self::Bool(value) => write(b'i', &i128::from(*value).to_le_bytes()),
            Self::Int(value) => write(b'i', &value.value().to_le_bytes()),
            Self::Float(value) if value.is_nan() => {
                *nans += 1;
                write(b'?', &nans.to_le_bytes());
            }
            // Beyond the integers of msgpack nothing else can be equal.
            Self::Float(value) if value.fract() == 0.0 && value.abs() < 1e30 => {
                write(b'i', &(*value as i128).to_le_bytes());
            }
            Self::Float(value) => write(b'f', &value.to_le_bytes()),
            Self::Text(value) => write(b's', value.as_bytes()),
            Self::Bytes(value) => write(b'b', value),
            Self::Extension(code, data) => {
                let (seconds, micros) = timestamp(data).unwrap_or_default();
                write(b'x', &[*code as u8]);
                write(b'x', &seconds.to_le_bytes());
                write(b'x', &micros.to_le_bytes());
            }
            Self::List(items) => {
                write(b'(', &items.len().to_le_bytes());
                for item in items {
                    item.identity(nans, out);
                }
            }
        }
    }
}

fn repr_bytes(bytes: &[u8]) -> String {
    let quote = if bytes.contains(&b'\'') && !bytes.contains(&b'"') { b'"' } else { b'\'' };
    let mut out = format!("b{}", char::from(quote));
    for byte in bytes {
        // Writing to a String cannot fail.
        let _ = match byte {
            b'\\' => out.write_str("\\\\"),
            b'\n' => out.write_str("\\n"),
            b'\r' => out.write_str("\\r"),
            b'\t' => out.write_str("\\t"),
            _ if *byte == quote => write!(out, "\\{}", char::from(quote)),
            b' '..=b'~' => out.write_char(char::from(*byte)),
            _ => write!(out, "\\x{byte:02x}"),
        };
    }
    out.push(char::from(quote));
    out
}

/// Pairs as a Python dict keeps them.
#[derive(Default)]
pub(crate) struct Dict<'a> {
    pub(crate) pairs: Vec<(Value<'a>, Value<'a>)>,
    places: HashMap<Vec<u8>, usize>,
    nans: u64,
}

impl<'a> Dict<'a> {
    pub(crate) fn insert(&mut self, key: Value<'a>, value: Value<'a>) {
        let mut identity = Vec::new();
        key.identity(&mut self.nans, &mut identity);
        let place = *self.places.entry(identity).or_insert(self.pairs.len());
        match self.pairs.get_mut(place) {
            Some(pair) => pair.1 = value,
            None => self.pairs.push((key, value)),
        }
    }
}
