//! Reads msgpack where it lies: heads, spans and whole values, refused in the words of the Python SDK's reader.
//!
//! Time and memory are bounded by the payload's length, whatever lengths it declares.

use std::fmt;

#[cfg(target_arch = "x86_64")]
use crate::x86::Wide;

/// Deeper nesting is refused in a value that is read: in an event, or in one of a batch's other fields.
const MAX_DEPTH: u32 = 128;

/// The same for a value that is passed over; near what Python's recursion limit allows.
const MAX_SKIP_DEPTH: u32 = 900;

/// The longest array that as a key may hold other arrays.
const SHORT_KEY: usize = 16;

/// What is wrong with bytes that should be msgpack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    Truncated,
    /// A byte that starts no value, and where.
    Opcode(u8, usize),
    Trailing(usize),
    Utf8,
    /// A key that Python cannot hash; where its value ends.
    Unhashable(usize),
    /// A key that is not text where only text can be.
    Key(&'static str),
    Timestamp(&'static str, Path),
    TooDeep,
    /// From the splitter that follows any nesting.
    Split(&'static str),
    SplitOpcode(u8),
}

pub(crate) type Read<T> = std::result::Result<T, Fault>;

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => f.write_str("Input data was truncated"),
            Self::Opcode(byte, at) => {
                write!(f, "MessagePack data is malformed: invalid opcode '\\x{byte:02x}' (byte {at})")
            }
            Self::Trailing(at) => {
                write!(f, "MessagePack data is malformed: trailing characters (byte {at})")
            }
            Self::Utf8 => f.write_str("Invalid UTF-8 encoded string"),
            Self::Unhashable(at) => {
                write!(f, "MessagePack data is malformed: map keys must be hashable (byte {at})")
            }
            Self::Key(kind) => write!(f, "Expected `str`, got `{kind}` - at `key` in `$`"),
            Self::Timestamp(message, path) => write!(f, "{message}{path}"),
            Self::TooDeep => f.write_str("nested too deeply"),
            Self::Split(message) => f.write_str(message),
            Self::SplitOpcode(byte) => write!(f, "the byte 0x{byte:02x} starts no value"),
        }
    }
}

/// Where in a value a fault is, built from the inside out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Path {
    keys: String,
    steps: String,
}

impl Path {
    fn inside(mut self, step: &str) -> Self {
        self.steps.insert_str(0, step);
        self
    }

    fn inside_key(mut self) -> Self {
        self.keys += &format!("`key{}` in ", self.steps);
        self.steps.clear();
        self
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.keys.is_empty() && self.steps.is_empty() {
            return Ok(());
        }
        write!(f, " - at {}`${}`", self.keys, self.steps)
    }
}

fn within(fault: Fault, step: impl FnOnce(Path) -> Path) -> Fault {
    match fault {
        Fault::Timestamp(message, path) => Fault::Timestamp(message, step(path)),
        other => other,
    }
}

/// An integer as msgpack has it: from -2^63 to 2^64 - 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Integer {
    /// 0 and above.
    Unsigned(u64),
    /// Below 0.
    Negative(i64),
}

impl Integer {
    pub(crate) const fn of(number: i64) -> Self {
        if number < 0 {
            Self::Negative(number)
        } else {
            Self::Unsigned(number as u64)
        }
    }

    /// The number.
    #[must_use]
    pub const fn value(self) -> i128 {
        match self {
            Self::Unsigned(number) => number as i128,
            Self::Negative(number) => number as i128,
        }
    }

    /// The low 64 bits, two's complement where it is negative.
    #[must_use]
    pub const fn low64(self) -> u64 {
        match self {
            Self::Unsigned(number) => number,
            Self::Negative(number) => number as u64,
        }
    }

    pub(crate) const fn float(self) -> f64 {
        match self {
            Self::Unsigned(number) => number as f64,
            Self::Negative(number) => number as f64,
        }
    }
}

impl fmt::Display for Integer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value().fmt(f)
    }
}

/// The first bytes of a value, and all of it where it holds no others.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Head<'a> {
    Nil,
    Bool(bool),
    Int(Integer),
    Float(f64),
    Text(&'a [u8]),
    Bytes(&'a [u8]),
    Ext(i8, &'a [u8]),
    Array(usize),
    Map(usize),
}

impl Head<'_> {
    /// What Python's messages call the value.
    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Nil => "nil",
            Self::Bool(_) => "a boolean",
            Self::Int(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Text(_) => "text",
            Self::Bytes(_) => "bytes",
            Self::Ext(..) => "an extension value",
            Self::Array(_) => "an array",
            Self::Map(_) => "a map",
        }
    }
}

/// How many bytes an integer has by its first byte; 0 where that starts none.
pub(crate) const INT_WIDTH: [u8; 256] = {
    let mut widths = [0; 256];
    let mut first = 0;
    while first < 256 {
        widths[first] = match first {
            0x00..=0x7f | 0xe0..=0xff => 1,
            0xcc | 0xd0 => 2,
            0xcd | 0xd1 => 3,
            0xce | 0xd2 => 5,
            0xcf | 0xd3 => 9,
            _ => 0,
        };
        first += 1;
    }
    widths
};

/// From where the vector instructions are worth their while.
const MANY: usize = 8;

/// Where `count` integers end that start at `at`; `None` where there are not so many, or something else among them.
#[inline]
pub(crate) fn pass_integers(data: &[u8], at: usize, count: usize) -> Option<usize> {
    #[cfg(target_arch = "x86_64")]
    if count >= MANY {
        if let Some(wide) = Wide::detect() {
            let (at, left) = wide.pass_integers(data, at, count);
            return pass_one_by_one(data, at, left);
        }
    }
    pass_one_by_one(data, at, count)
}

#[inline]
fn pass_one_by_one(data: &[u8], mut at: usize, mut left: usize) -> Option<usize> {
    while left > 0 {
        // Each step waits for the one before it. Of the unsigned integers, nearly all token ids, the width is one
        // shift, and the second one's head is in the word that was loaded for the first.
        while left > 1 {
            let Some(word) = data.get(at..).and_then(|rest| rest.first_chunk()) else { break };
            let word = u64::from_le_bytes(*word);
            let width = 1u32 << (word & 3);
            // Past a number of 8 bytes this is nonsense, and is not used.
            let next = word.wrapping_shr(8 * width + 8);
            if word & 0xfc != 0xcc || next & 0xfc != 0xcc || width == 8 {
                break;
            }
            at += 2 + width as usize + (1 << (next & 3));
            left -= 2;
        }
        if left == 0 {
            break;
        }
        let width = INT_WIDTH[usize::from(*data.get(at)?)];
        if width == 0 {
            return None;
        }
        at += usize::from(width);
        left -= 1;
    }
    (at <= data.len()).then_some(at)
}

pub(crate) const fn starts_array(first: u8) -> bool {
    matches!(first, 0x90..=0x9f | 0xdc | 0xdd)
}

pub(crate) const fn starts_map(first: u8) -> bool {
    matches!(first, 0x80..=0x8f | 0xde | 0xdf)
}

#[derive(Debug, Clone)]
pub(crate) struct Reader<'a> {
    pub(crate) data: &'a [u8],
    pub(crate) at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) const fn new(data: &'a [u8]) -> Self {
        Self { data, at: 0 }
    }

    /// Whether these bytes stand next; they are passed over then.
    #[inline]
    pub(crate) fn eat<const N: usize>(&mut self, bytes: &[u8; N]) -> bool {
        let here = self.data.get(self.at..).and_then(|rest| rest.first_chunk::<N>()) == Some(bytes);
        self.at += if here { N } else { 0 };
        here
    }

    #[inline]
    fn bytes(&mut self, count: usize) -> Read<&'a [u8]> {
        let taken = self.data.get(self.at..).and_then(|rest| rest.get(..count)).ok_or(Fault::Truncated)?;
        self.at += count;
        Ok(taken)
    }

    #[inline]
    fn array<const N: usize>(&mut self) -> Read<[u8; N]> {
        let taken = self.data.get(self.at..).and_then(|rest| rest.first_chunk()).ok_or(Fault::Truncated)?;
        self.at += N;
        Ok(*taken)
    }

    #[inline]
    fn length(&mut self, width: u8) -> Read<usize> {
        Ok(match width {
            0 => self.array::<1>()?[0].into(),
            1 => u16::from_be_bytes(self.array()?).into(),
            _ => u32::from_be_bytes(self.array()?) as usize,
        })
    }

    /// Read a head; the contents of texts, bytes and numbers are there in full.
    #[inline]
    pub(crate) fn head(&mut self) -> Read<Head<'a>> {
        let Some(&first) = self.data.get(self.at) else { return Err(Fault::Truncated) };
        self.at += 1;
        Ok(match first {
            0x00..=0x7f => Head::Int(Integer::Unsigned(first.into())),
            0x80..=0x8f => Head::Map((first & 0x0f).into()),
            0x90..=0x9f => Head::Array((first & 0x0f).into()),
            0xa0..=0xbf => Head::Text(self.bytes((first & 0x1f).into())?),
            0xc0 => Head::Nil,
            0xc1 => return Err(Fault::Opcode(first, self.at - 1)),
            0xc2 | 0xc3 => Head::Bool(first == 0xc3),
            0xc4..=0xc6 => {
                let length = self.length(first - 0xc4)?;
                Head::Bytes(self.bytes(length)?)
            }
            0xc7..=0xc9 => {
                let length = self.length(first - 0xc7)?;
                self.extension(length)?
            }
            0xca => Head::Float(f32::from_be_bytes(self.array()?).into()),
            0xcb => Head::Float(f64::from_be_bytes(self.array()?)),
            0xcc => Head::Int(Integer::Unsigned(self.array::<1>()?[0].into())),
            0xcd => Head::Int(Integer::Unsigned(u16::from_be_bytes(self.array()?).into())),
            0xce => Head::Int(Integer::Unsigned(u32::from_be_bytes(self.array()?).into())),
            0xcf => Head::Int(Integer::Unsigned(u64::from_be_bytes(self.array()?))),
            0xd0 => Head::Int(Integer::of(i8::from_be_bytes(self.array()?).into())),
            0xd1 => Head::Int(Integer::of(i16::from_be_bytes(self.array()?).into())),
            0xd2 => Head::Int(Integer::of(i32::from_be_bytes(self.array()?).into())),
            0xd3 => Head::Int(Integer::of(i64::from_be_bytes(self.array()?))),
            0xd4..=0xd8 => self.extension(1 << (first - 0xd4))?,
            0xd9..=0xdb => {
                let length = self.length(first - 0xd9)?;
                Head::Text(self.bytes(length)?)
            }
            0xdc | 0xdd => Head::Array(self.length(first - 0xdb)?),
            0xde | 0xdf => Head::Map(self.length(first - 0xdd)?),
            0xe0..=0xff => Head::Int(Integer::of((first as i8).into())),
        })
    }

    fn extension(&mut self, length: usize) -> Read<Head<'a>> {
        let code = i8::from_be_bytes(self.array()?);
        Ok(Head::Ext(code, self.bytes(length)?))
    }

    /// Pass over one value; its texts are not looked at.
    pub(crate) fn skip(&mut self) -> Read<()> {
        self.skip_from(0)
    }

    fn skip_from(&mut self, depth: u32) -> Read<()> {
        let items = match self.head()? {
            Head::Array(count) => count as u64,
            Head::Map(count) => 2 * count as u64,
            _ => return Ok(()),
        };
        if depth >= MAX_SKIP_DEPTH {
            return Err(Fault::TooDeep);
        }
        (0..items).try_for_each(|_| self.skip_from(depth + 1))
    }

    /// The same as `head`, with the faults of what is passed over without recursion.
    pub(crate) fn split_head(&mut self) -> Read<Head<'a>> {
        self.head().map_err(split_fault)
    }

    /// Pass over one value without recursion, however deeply it is nested.
    pub(crate) fn skip_any_depth(&mut self) -> Read<()> {
        let mut left = 1u64;
        while left > 0 {
            left -= 1;
            left += match self.head().map_err(split_fault)? {
                Head::Array(count) => count as u64,
                Head::Map(count) => 2 * count as u64,
                _ => 0,
            };
        }
        Ok(())
    }

    /// Pass over one value, checked as Python's reader does when it builds it. Returns whether it could be a key.
    pub(crate) fn check(&mut self) -> Read<bool> {
        self.check_from(0)
    }

    /// The same of a value that lies within `depth` others.
    pub(crate) fn check_from(&mut self, depth: u32) -> Read<bool> {
        match self.head()? {
            Head::Text(text) => {
                text_of(text)?;
                Ok(true)
            }
            Head::Ext(-1, data) => match timestamp(data) {
                Ok(_) => Ok(true),
                Err(message) => Err(Fault::Timestamp(message, Path::default())),
            },
            Head::Ext(..) => Ok(false),
            Head::Array(_) | Head::Map(_) if depth >= MAX_DEPTH => Err(Fault::TooDeep),
            Head::Array(count) => {
                let mut hashable = true;
                for i in 0..count {
                    // In a key Python's reader makes tuples of arrays, but not of those inside a long one.
                    hashable &= count <= SHORT_KEY
                        || !self.data.get(self.at).is_some_and(|first| starts_array(*first));
                    hashable &= self
                        .check_from(depth + 1)
                        .map_err(|fault| within(fault, |path| path.inside(&format!("[{i}]"))))?;
                }
                Ok(hashable)
            }
            Head::Map(count) => {
                for _ in 0..count {
                    let hashable =
                        self.check_from(depth + 1).map_err(|fault| within(fault, Path::inside_key))?;
                    self.check_from(depth + 1).map_err(|fault| within(fault, |path| path.inside("[...]")))?;
                    if !hashable {
                        return Err(Fault::Unhashable(self.at));
                    }
                }
                Ok(false)
            }
            _ => Ok(true),
        }
    }

    /// That nothing stands behind what was read.
    pub(crate) fn end(&self) -> Read<()> {
        if self.at == self.data.len() {
            Ok(())
        } else {
            Err(Fault::Trailing(self.at))
        }
    }
}

fn split_fault(fault: Fault) -> Fault {
    match fault {
        Fault::Opcode(byte, _) => Fault::SplitOpcode(byte),
        _ => Fault::Split("truncated"),
    }
}

pub(crate) fn text_of(bytes: &[u8]) -> Read<&str> {
    std::str::from_utf8(bytes).map_err(|_| Fault::Utf8)
}

/// Seconds since the epoch, and microseconds.
pub(crate) fn timestamp(data: &[u8]) -> std::result::Result<(i64, u32), &'static str> {
    let (seconds, nanoseconds) = if let Ok(data) = <[u8; 4]>::try_from(data) {
        (u32::from_be_bytes(data).into(), 0)
    } else if let Ok(data) = <[u8; 8]>::try_from(data) {
        let bits = u64::from_be_bytes(data);
        ((bits & 0x3_ffff_ffff) as i64, (bits >> 34) as u32)
    } else if let Some((nanoseconds, Ok(seconds))) =
        data.split_first_chunk::<4>().map(|(head, tail)| (*head, <[u8; 8]>::try_from(tail)))
    {
        (i64::from_be_bytes(seconds), u32::from_be_bytes(nanoseconds))
    } else {
        return Err("Invalid MessagePack timestamp");
    };
    if nanoseconds > 999_999_999 {
        return Err("Invalid MessagePack timestamp: nanoseconds out of range");
    }
    // Rounded to microseconds, which may carry into the next second.
    let range = -62_135_596_800..=253_402_300_799;
    let micros = (nanoseconds + 500) / 1000;
    let carry = micros == 1_000_000;
    if !range.contains(&seconds) || (carry && !range.contains(&(seconds + 1))) {
        return Err("Timestamp is out of range ");
    }
    Ok(if carry { (seconds + 1, 0) } else { (seconds, micros) })
}

/// Check the one value that `data` is, and return its head.
pub(crate) fn checked(data: &[u8]) -> Read<Head<'_>> {
    let mut reader = Reader::new(data);
    // Of two faults the nesting is told, wherever the other stands.
    reader.check().and_then(|_| reader.end()).map_err(|fault| {
        if nests_past(data, MAX_DEPTH as usize) {
            Fault::TooDeep
        } else {
            fault
        }
    })?;
    Reader::new(data).head()
}

/// Whether more than `limit` arrays and maps lie within each other, as far as `data` can be read.
fn nests_past(data: &[u8], limit: usize) -> bool {
    let mut reader = Reader::new(data);
    let mut left = vec![1u64];
    while let Some(items) = left.last_mut() {
        if *items == 0 {
            left.pop();
            continue;
        }
        *items -= 1;
        let count = match reader.head() {
            Ok(Head::Array(count)) => count as u64,
            Ok(Head::Map(count)) => 2 * count as u64,
            Ok(_) => continue,
            Err(_) => return false,
        };
        if left.len() > limit {
            return true;
        }
        left.push(count);
    }
    false
}

/// The elements of the array that `data` is, each as its own bytes, none of them looked into.
pub(crate) fn split(data: &[u8]) -> Read<Vec<&[u8]>> {
    // One element may be nested too deeply for the reader; the others still count.
    match split_by(data, Reader::skip) {
        Err(Fault::TooDeep) => split_by(data, Reader::skip_any_depth).map_err(|fault| match fault {
            Fault::Trailing(_) => Fault::Split("more bytes after the array"),
            other => other,
        }),
        other => other,
    }
}

fn split_by<'a>(data: &'a [u8], skip: impl Fn(&mut Reader<'a>) -> Read<()>) -> Read<Vec<&'a [u8]>> {
    let mut reader = Reader::new(data);
    let Head::Array(count) = reader.head()? else { return Ok(Vec::new()) };
    let mut parts = Vec::new();
    for _ in 0..count {
        let start = reader.at;
        skip(&mut reader)?;
        parts.push(&data[start..reader.at]);
    }
    reader.end()?;
    Ok(parts)
}
