//! Canonical CBOR (RFC 8949 section 4.2.1), the shapes that a preimage needs.

use crate::cpu::Cpu;
use crate::value::{Serializer, Tag};
use crate::Token;

const UINT: u8 = 0x00;
const NINT: u8 = 0x20;
const BYTES: u8 = 0x40;
const TEXT: u8 = 0x60;
const ARRAY: u8 = 0x80;
const TAG: u8 = 0xc0;
const NULL: u8 = 0xf6;

/// The longest head: one byte and a 64-bit argument.
pub(crate) const MAX_HEAD: usize = 9;

/// Write the shortest head of a data item at `at`; returns the position after it.
pub(crate) fn write_head(out: &mut [u8], at: usize, major: u8, argument: u64) -> usize {
    let bytes = argument.to_be_bytes();
    let (info, width) = match argument {
        0..=23 => {
            out[at] = major | bytes[7];
            return at + 1;
        }
        24..=0xff => (24, 1),
        0x100..=0xffff => (25, 2),
        0x1_0000..=0xffff_ffff => (26, 4),
        _ => (27, 8),
    };
    out[at] = major | info;
    out[at + 1..at + 1 + width].copy_from_slice(&bytes[8 - width..]);
    at + 1 + width
}

/// For a token below 2^32, by how many of the limits 24, 2^8 and 2^16 it reaches: the head's first byte at the top,
/// how far the token is shifted up, and the width of both.
const HEADS: [(u64, u32, usize); 4] =
    [(0, 56, 1), (0x18 << 56, 48, 2), (0x19 << 56, 40, 3), (0x1a << 56, 24, 5)];

/// Write the heads of token ids at `at`, which needs [`MAX_HEAD`] bytes a token and 128 after them; returns the
/// position after them.
#[inline]
pub(crate) fn write_tokens<T: Token>(cpu: Cpu, out: &mut [u8], mut at: usize, tokens: &[T]) -> usize {
    let (parts, rest) = tokens.as_chunks::<16>();
    for part in parts {
        #[cfg(target_arch = "x86_64")]
        if let Some(wide) = cpu.wide {
            let copied;
            let (narrow, fit) = match T::narrow(part) {
                Some(narrow) => (narrow, true),
                None => {
                    copied = part.map(|token| token.value() as u32);
                    let all = part.iter().fold(0, |all, token| all | token.value());
                    (&copied, all <= u32::MAX.into())
                }
            };
            if let (Some(out), true) = (out[at..].first_chunk_mut(), fit) {
                at += wide.write_cbor(out, narrow);
                continue;
            }
        }
        let _ = cpu;
        at = write_each(out, at, part);
    }
    write_each(out, at, rest)
}

/// Each token is written as eight bytes of which its width counts, without a branch: its heads' widths differ from
/// token to token, which a branch predictor cannot learn.
#[inline]
fn write_each<T: Token>(out: &mut [u8], mut at: usize, tokens: &[T]) -> usize {
    for token in tokens {
        let token = token.value();
        if token > 0xffff_ffff {
            at = write_head(out, at, UINT, token);
            continue;
        }
        let class = usize::from(token >= 24) + usize::from(token >= 0x100) + usize::from(token >= 0x1_0000);
        let (head, shift, width) = HEADS[class];
        out[at..at + 8].copy_from_slice(&(head | token << shift).to_be_bytes());
        at += width;
    }
    at
}

pub(crate) const fn array_major() -> u8 {
    ARRAY
}

pub(crate) const fn bytes_major() -> u8 {
    BYTES
}

pub(crate) const fn null() -> u8 {
    NULL
}

/// The general writer.
pub(crate) struct Cbor<'a> {
    out: &'a mut Vec<u8>,
}

impl<'a> Cbor<'a> {
    pub(crate) fn new(out: &'a mut Vec<u8>) -> Self {
        out.clear();
        Self { out }
    }

    fn head(&mut self, major: u8, argument: u64) {
        let mut buffer = [0; MAX_HEAD];
        let end = write_head(&mut buffer, 0, major, argument);
        self.out.extend_from_slice(&buffer[..end]);
    }

    fn bignum(&mut self, tag: u64, magnitude: &[u8]) {
        let skip = magnitude.iter().take_while(|byte| **byte == 0).count();
        self.head(TAG, tag);
        self.bytes(&magnitude[skip..]);
    }
}

impl Serializer for Cbor<'_> {
    fn none(&mut self) {
        self.out.push(NULL);
    }

    fn int(&mut self, value: i128) {
        let (major, magnitude, tag) =
            if value >= 0 { (UINT, value as u128, 2) } else { (NINT, !value as u128, 3) };
        match u64::try_from(magnitude) {
            Ok(argument) => self.head(major, argument),
            Err(_) => self.bignum(tag, &magnitude.to_be_bytes()),
        }
    }

    fn uint256(&mut self, value: &[u8; 32]) {
        let (high, low) = value.split_at(24);
        if high.iter().all(|byte| *byte == 0) {
            self.head(UINT, low.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)));
        } else {
            self.bignum(2, value);
        }
    }

    fn text(&mut self, value: &str) {
        self.head(TEXT, value.len() as u64);
        self.out.extend_from_slice(value.as_bytes());
    }

    fn tag(&mut self, value: Tag) {
        self.text(value.as_str());
    }

    fn bytes(&mut self, value: &[u8]) {
        self.head(BYTES, value.len() as u64);
        self.out.extend_from_slice(value);
    }

    fn open(&mut self, len: usize) {
        self.head(ARRAY, len as u64);
    }

    fn close(&mut self, _len: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_integer_has_its_shortest_head() {
        let mut out = Vec::new();
        for (value, written) in [
            (0, "00"),
            (23, "17"),
            (24, "1818"),
            (255, "18ff"),
            (256, "190100"),
            (65_536, "1a00010000"),
            (1 << 32, "1b0000000100000000"),
            (1 << 64, "c249010000000000000000"),
            (-1, "20"),
            (-25, "3818"),
            (-(1 << 64) - 1, "c349010000000000000000"),
        ] {
            Cbor::new(&mut out).int(value);
            assert_eq!(crate::text::hex(&out), written);
        }
    }

    #[test]
    fn tokens_are_written_as_the_general_writer_writes_them() {
        for token in [0, 1, 22, 23, 24, 25, 255, 256, 65_535, 65_536, u64::from(u32::MAX), 1 << 32, u64::MAX]
        {
            let mut fast = [0; 256];
            let end = write_each(&mut fast, 0, &[token, 7]);
            let mut slow = Vec::new();
            let mut writer = Cbor::new(&mut slow);
            writer.int(token.into());
            writer.int(7);
            assert_eq!(fast[..end], slow[..]);
        }
    }

    /// Every width in every place of sixteen.
    #[test]
    fn sixteen_tokens_are_written_as_each_is() {
        let widths = [0, 23, 24, 255, 256, 65_535, 65_536, u64::from(u32::MAX), 1 << 32];
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
