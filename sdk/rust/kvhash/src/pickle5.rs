//! Pickle protocol 5, byte for byte as CPython's C pickler writes a preimage.
//!
//! The rules of memo, frames and large payloads are told in the Python SDK's `serialize/pickle5.py`.

use crate::cpu::Cpu;
use crate::value::{Serializer, Tag};
use crate::Token;

const FRAME_SIZE_TARGET: usize = 64 * 1024;
const FRAME_SIZE_MIN: usize = 4;
const FRAME_HEADER: usize = 9;
const MEMOIZE: u8 = 0x94;

/// The longest opcode and operand of a token: LONG1, its length, nine bytes.
pub(crate) const MAX_INT: usize = 11;

/// For a token below 2^31, by how many of the limits 2^8 and 2^16 it reaches: opcode and width.
const INTS: [(u64, usize); 3] = [(b'K' as u64, 2), (b'M' as u64, 3), (b'J' as u64, 5)];

/// Write token ids at `at`, which needs [`MAX_INT`] bytes a token and the slack of the CBOR writer; returns the
/// position after them.
#[inline]
pub(crate) fn write_tokens<T: Token>(cpu: Cpu, out: &mut [u8], mut at: usize, tokens: &[T]) -> usize {
    let (parts, rest) = tokens.as_chunks::<16>();
    for part in parts {
        #[cfg(target_arch = "x86_64")]
        if let Some(wide) = cpu.wide {
            let copied;
            let (narrow, fit) = match T::narrow(part) {
                Some(narrow) => (narrow, narrow.iter().all(|token| *token <= 0x7fff_ffff)),
                None => {
                    copied = part.map(|token| token.value() as u32);
                    let all = part.iter().fold(0, |all, token| all | token.value());
                    (&copied, all <= 0x7fff_ffff)
                }
            };
            if let (Some(out), true) = (out[at..].first_chunk_mut(), fit) {
                at += wide.write_pickle(out, narrow);
                continue;
            }
        }
        let _ = cpu;
        at = write_each(out, at, part);
    }
    write_each(out, at, rest)
}

/// Without a branch for what vocabularies hold, as the CBOR writer.
#[inline]
fn write_each<T: Token>(out: &mut [u8], mut at: usize, tokens: &[T]) -> usize {
    for token in tokens {
        let token = token.value();
        if token > 0x7fff_ffff {
            at = write_long(out, at, token);
            continue;
        }
        let class = usize::from(token >= 0x100) + usize::from(token >= 0x1_0000);
        let (opcode, width) = INTS[class];
        out[at..at + 8].copy_from_slice(&(opcode | token << 8).to_le_bytes());
        at += width;
    }
    at
}

/// LONG1: little-endian two's complement in the fewest bytes that keep the sign.
fn write_long(out: &mut [u8], at: usize, value: u64) -> usize {
    let width = (64 - value.leading_zeros() as usize) / 8 + 1;
    out[at] = 0x8a;
    out[at + 1] = width as u8;
    out[at + 2..at + 2 + width].copy_from_slice(&u128::from(value).to_le_bytes()[..width]);
    at + 2 + width
}

/// What the memo knows an object by: the constant texts, and the one empty text and the one empty bytes.
#[derive(PartialEq, Eq, Clone, Copy)]
enum Object {
    Tag(Tag),
    EmptyText,
    EmptyBytes,
}

/// The general writer.
pub(crate) struct Pickle<'a> {
    out: &'a mut Vec<u8>,
    /// Where the open frame's header stands.
    frame: Option<usize>,
    memo: Vec<(Object, u32)>,
    numbered: u32,
}

impl<'a> Pickle<'a> {
    pub(crate) fn new(out: &'a mut Vec<u8>) -> Self {
        out.clear();
        out.extend_from_slice(b"\x80\x05");
        Self { out, frame: None, memo: Vec::new(), numbered: 0 }
    }

    pub(crate) fn finish(mut self) {
        self.write(b".");
        self.close_frame();
    }

    fn write(&mut self, data: &[u8]) {
        if self.frame.is_none() {
            self.frame = Some(self.out.len());
            self.out.extend_from_slice(&[0; FRAME_HEADER]);
        }
        self.out.extend_from_slice(data);
    }

    fn close_frame(&mut self) {
        let Some(start) = self.frame.take() else { return };
        let body = start + FRAME_HEADER;
        let len = self.out.len() - body;
        if len >= FRAME_SIZE_MIN {
            self.out[start] = 0x95;
            self.out[start + 1..body].copy_from_slice(&(len as u64).to_le_bytes());
        } else {
            self.out.drain(start..body);
        }
    }

    /// Before each value the pickler looks at the open frame and closes a full one.
    fn save(&mut self) {
        if self.frame.is_some_and(|start| self.out.len() - start - FRAME_HEADER >= FRAME_SIZE_TARGET) {
            self.close_frame();
        }
    }

    fn memoize(&mut self, object: Option<Object>) {
        if let Some(object) = object {
            self.memo.push((object, self.numbered));
        }
        self.numbered += 1;
        self.write(&[MEMOIZE]);
    }

    /// Text or bytes: the opcodes for the three widths of a length.
    fn object(&mut self, content: &[u8], opcodes: [u8; 3], object: Option<Object>) {
        self.save();
        if let Some((_, number)) = self.memo.iter().find(|(known, _)| Some(*known) == object) {
            let number = *number;
            match u8::try_from(number) {
                Ok(number) => self.write(&[b'h', number]),
                Err(_) => {
                    self.write(b"j");
                    self.write(&number.to_le_bytes());
                }
            }
            return;
        }
        if content.len() >= FRAME_SIZE_TARGET {
            self.close_frame();
            if let Ok(len) = u32::try_from(content.len()) {
                self.out.push(opcodes[1]);
                self.out.extend_from_slice(&len.to_le_bytes());
            } else {
                self.out.push(opcodes[2]);
                self.out.extend_from_slice(&(content.len() as u64).to_le_bytes());
            }
            self.out.extend_from_slice(content);
        } else {
            match u8::try_from(content.len()) {
                Ok(len) => self.write(&[opcodes[0], len]),
                Err(_) => {
                    self.write(&[opcodes[1]]);
                    self.write(&(content.len() as u32).to_le_bytes());
                }
            }
            self.write(content);
        }
        self.memoize(object);
    }
}

impl Serializer for Pickle<'_> {
    fn none(&mut self) {
        self.save();
        self.write(b"N");
    }

    fn int(&mut self, value: i128) {
        self.save();
        let mut buffer = [0; 24];
        let end = if (0..1 << 31).contains(&value) {
            write_each(&mut buffer, 0, &[value as u64])
        } else if let Ok(value) = i32::try_from(value) {
            buffer[0] = b'J';
            buffer[1..5].copy_from_slice(&value.to_le_bytes());
            5
        } else {
            let magnitude = if value < 0 { !value } else { value } as u128;
            let width = (128 - magnitude.leading_zeros() as usize) / 8 + 1;
            buffer[0] = 0x8a;
            buffer[1] = width as u8;
            let sign = if value < 0 { 0xff } else { 0 };
            buffer[2..].fill(sign);
            buffer[2..18].copy_from_slice(&value.to_le_bytes());
            2 + width
        };
        self.write(&buffer[..end]);
    }

    fn uint256(&mut self, value: &[u8; 32]) {
        let skip = value.iter().take_while(|byte| **byte == 0).count();
        if skip >= 17 {
            let number = value[16..].iter().fold(0, |number, byte| number << 8 | i128::from(*byte));
            self.int(number);
            return;
        }
        self.save();
        let mut payload = [0; 33];
        for (to, from) in payload.iter_mut().zip(value.iter().rev()) {
            *to = *from;
        }
        let width = 32 - skip + usize::from(value[skip] >= 0x80);
        self.write(&[0x8a, width as u8]);
        self.write(&payload[..width]);
    }

    fn text(&mut self, value: &str) {
        self.object(value.as_bytes(), [0x8c, b'X', 0x8d], value.is_empty().then_some(Object::EmptyText));
    }

    fn tag(&mut self, value: Tag) {
        self.object(value.as_str().as_bytes(), [0x8c, b'X', 0x8d], Some(Object::Tag(value)));
    }

    fn bytes(&mut self, value: &[u8]) {
        self.object(value, [b'C', b'B', 0x8e], value.is_empty().then_some(Object::EmptyBytes));
    }

    fn open(&mut self, len: usize) {
        self.save();
        match len {
            0 => self.write(b")"),
            1..=3 => {}
            _ => self.write(b"("),
        }
    }

    fn close(&mut self, len: usize) {
        match len {
            0 => return,
            1..=3 => self.write(&[0x84 + len as u8]),
            _ => self.write(b"t"),
        }
        self.memoize(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `pickle.dumps(value, 5)` gives in CPython.
    #[test]
    fn integers_and_tuples_are_written_as_cpython_writes_them() {
        let mut out = Vec::new();
        for (value, written) in [
            (255, "80054bff2e"),
            (256, "80059504000000000000004d00012e"),
            (-1, "80059506000000000000004affffffff2e"),
            (1 << 31, "80059508000000000000008a0500000080002e"),
            (-(1 << 31) - 1, "80059508000000000000008a05ffffff7fff2e"),
        ] {
            let mut writer = Pickle::new(&mut out);
            writer.int(value);
            writer.finish();
            assert_eq!(crate::text::hex(&out), written);
        }
        let mut writer = Pickle::new(&mut out);
        writer.open(0);
        writer.close(0);
        writer.finish();
        assert_eq!(crate::text::hex(&out), "8005292e");
    }

    #[test]
    fn wide_integers_are_written_alike_by_both_ways() {
        for number in [0u64, 127, 128, 1 << 31, 1 << 39, (1 << 39) - 1, 1 << 63, u64::MAX] {
            let (mut one, mut two) = (Vec::new(), Vec::new());
            let mut wide = [0; 32];
            wide[24..].copy_from_slice(&number.to_be_bytes());
            let mut writer = Pickle::new(&mut one);
            writer.uint256(&wide);
            writer.finish();
            let mut buffer = [0; 16];
            let end = write_each(&mut buffer, 0, &[number]);
            let mut writer = Pickle::new(&mut two);
            writer.int(number.into());
            writer.finish();
            assert_eq!(one, two);
            assert_eq!(two[two.len() - 1 - end..two.len() - 1], buffer[..end]);
        }
    }

    /// Every width in every place of sixteen.
    #[test]
    fn sixteen_tokens_are_written_as_each_is() {
        let widths = [0, 255, 256, 65_535, 65_536, (1 << 31) - 1, 1 << 31];
        for start in 0..widths.len() {
            for step in 0..widths.len() {
                let tokens: [u64; 37] = std::array::from_fn(|i| {
                    widths[(start + i * step + i / 5) % (widths.len() - usize::from(i % 3 > 0))]
                });
                let (mut each, mut all) = ([0; 512], [0; 512]);
                let end = write_each(&mut each, 0, &tokens);
                for cpu in [Cpu::detect(), Cpu::none()] {
                    assert_eq!(write_tokens(cpu, &mut all, 0, &tokens), end);
                    assert_eq!(all[..end], each[..end]);
                }
            }
        }
    }
}
