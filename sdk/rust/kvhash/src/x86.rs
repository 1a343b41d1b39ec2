//! What this crate does with a processor's own instructions on x86-64: SHA-256, the writing of token ids, and passing
//! over those of an event.
//!
//! This is the crate's unsafe code. A function that needs extensions is called through a value that can be had only
//! where they were found; apart from these calls there are vector loads and stores within arrays of known length.
#![allow(unsafe_code)]

use core::arch::x86_64::*;

use crate::sha256_chain::{Block, START};

#[rustfmt::skip]
const K: [u32; 64] = [
    0x428a_2f98, 0x7137_4491, 0xb5c0_fbcf, 0xe9b5_dba5, 0x3956_c25b, 0x59f1_11f1, 0x923f_82a4, 0xab1c_5ed5,
    0xd807_aa98, 0x1283_5b01, 0x2431_85be, 0x550c_7dc3, 0x72be_5d74, 0x80de_b1fe, 0x9bdc_06a7, 0xc19b_f174,
    0xe49b_69c1, 0xefbe_4786, 0x0fc1_9dc6, 0x240c_a1cc, 0x2de9_2c6f, 0x4a74_84aa, 0x5cb0_a9dc, 0x76f9_88da,
    0x983e_5152, 0xa831_c66d, 0xb003_27c8, 0xbf59_7fc7, 0xc6e0_0bf3, 0xd5a7_9147, 0x06ca_6351, 0x1429_2967,
    0x27b7_0a85, 0x2e1b_2138, 0x4d2c_6dfc, 0x5338_0d13, 0x650a_7354, 0x766a_0abb, 0x81c2_c92e, 0x9272_2c85,
    0xa2bf_e8a1, 0xa81a_664b, 0xc24b_8b70, 0xc76c_51a3, 0xd192_e819, 0xd699_0624, 0xf40e_3585, 0x106a_a070,
    0x19a4_c116, 0x1e37_6c08, 0x2748_774c, 0x34b0_bcb5, 0x391c_0cb3, 0x4ed8_aa4a, 0x5b9c_ca4f, 0x682e_6ff3,
    0x748f_82ee, 0x78a5_636f, 0x84c8_7814, 0x8cc7_0208, 0x90be_fffa, 0xa450_6ceb, 0xbef9_a3f7, 0xc671_78f2,
];

/// That this processor has the SHA extensions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sha(());

/// That this processor has the byte-wise vector extensions of AVX-512.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wide(());

impl Sha {
    /// Proof of the extensions, where there are any.
    #[inline]
    pub(crate) fn detect() -> Option<Self> {
        let there = is_x86_feature_detected!("sha")
            && is_x86_feature_detected!("ssse3")
            && is_x86_feature_detected!("sse4.1");
        there.then_some(Self(()))
    }

    /// As `sha256_chain::digest_after`.
    #[inline]
    pub(crate) fn digest_after<const AT: usize>(self, message: &[Block], parent: &mut [u8; 32]) {
        // SAFETY: a value of this type exists only where the extensions were found.
        unsafe { digest_after::<AT>(message, parent) }
    }
}

impl Wide {
    /// Proof of the extensions, where there are any.
    #[inline]
    pub(crate) fn detect() -> Option<Self> {
        let there = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("avx512vbmi2")
            && is_x86_feature_detected!("popcnt");
        there.then_some(Self(()))
    }

    /// Write the heads of sixteen tokens as canonical CBOR has them; returns how many bytes these have. What follows
    /// them in `out` is undefined.
    #[inline]
    pub(crate) fn write_cbor(self, out: &mut [u8; 2 * ROOM], tokens: &[u32; 16]) -> usize {
        // SAFETY: a value of this type exists only where the extensions were found.
        unsafe { write::<CborHeads>(out, tokens) }
    }

    /// Write sixteen tokens below 2^31 as pickle has them; else as `write_cbor`.
    #[inline]
    pub(crate) fn write_pickle(self, out: &mut [u8; 2 * ROOM], tokens: &[u32; 16]) -> usize {
        // SAFETY: a value of this type exists only where the extensions were found.
        unsafe { write::<PickleInts>(out, tokens) }
    }

    /// Pass over up to `count` msgpack integers that start at `at`; returns where it came to, and how many are left.
    /// It stops early, before an integer or something else that it leaves to its caller, and may pass the end of
    /// `data` where the integers do.
    #[inline]
    pub(crate) fn pass_integers(self, data: &[u8], at: usize, count: usize) -> (usize, usize) {
        // SAFETY: a value of this type exists only where the extensions were found.
        unsafe { pass_integers(data, at, count) }
    }
}

/// The state as the instructions want it: words A B E F and C D G H.
type State = [__m128i; 2];

#[inline]
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn words(values: [u32; 4]) -> __m128i {
    let [a, b, c, d] = values.map(|value| value as i32);
    _mm_set_epi32(d, c, b, a)
}

/// Turns the four bytes of each word round.
#[inline]
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn turned(bytes: __m128i) -> __m128i {
    _mm_shuffle_epi8(bytes, _mm_set_epi64x(0x0c0d_0e0f_0809_0a0b, 0x0405_0607_0001_0203))
}

#[inline]
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn load(bytes: &[u8; 16]) -> __m128i {
    // SAFETY: the sixteen bytes are there, and the load needs no alignment.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

/// Four rounds, from round `4 * r` on, with their words of the message.
#[inline]
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn rounds(r: usize, [abef, cdgh]: &mut State, w: __m128i) {
    let sum = _mm_add_epi32(w, words([K[4 * r], K[4 * r + 1], K[4 * r + 2], K[4 * r + 3]]));
    *cdgh = _mm_sha256rnds2_epu32(*cdgh, *abef, sum);
    *abef = _mm_sha256rnds2_epu32(*abef, *cdgh, _mm_shuffle_epi32(sum, 0x0e));
}

/// Sixteen rounds, from round `4 * r` on, with the words that these need made from those before.
#[inline]
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn later_rounds(r: usize, state: &mut State, w: &mut [__m128i; 4]) {
    for i in 0..4 {
        let (a, b, c, d) = (w[i], w[(i + 1) % 4], w[(i + 2) % 4], w[(i + 3) % 4]);
        let sum = _mm_add_epi32(_mm_sha256msg1_epu32(a, b), _mm_alignr_epi8(d, c, 4));
        w[i] = _mm_sha256msg2_epu32(sum, d);
        rounds(r + i, state, w[i]);
    }
}

#[inline]
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn compress(state: &mut State, message: [__m128i; 4]) {
    let before = *state;
    let mut w = message.map(|bytes| turned(bytes));
    for (i, w) in w.iter().enumerate() {
        rounds(i, state, *w);
    }
    later_rounds(4, state, &mut w);
    later_rounds(8, state, &mut w);
    later_rounds(12, state, &mut w);
    state[0] = _mm_add_epi32(state[0], before[0]);
    state[1] = _mm_add_epi32(state[1], before[1]);
}

#[inline]
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn block(block: &Block) -> [__m128i; 4] {
    let (parts, _) = block.as_chunks::<16>();
    core::array::from_fn(|i| load(&parts[i]))
}

/// The first block with the parent's bytes in it.
#[inline]
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn first_block<const AT: usize>(bytes: &Block, parent: &[u8; 32]) -> [__m128i; 4] {
    // The shifts count in bytes and want a constant that is the instruction's: one row each for what is used.
    let (halves, _) = parent.as_chunks::<16>();
    let (low, high) = (load(&halves[0]), load(&halves[1]));
    let placed = match AT {
        3 => [_mm_slli_si128(low, 3), _mm_alignr_epi8(high, low, 13), _mm_srli_si128(high, 13)],
        13 => [_mm_slli_si128(low, 13), _mm_alignr_epi8(high, low, 3), _mm_srli_si128(high, 3)],
        _ => unreachable!(),
    };
    let [a, b, c, d] = block(bytes);
    [_mm_or_si128(a, placed[0]), _mm_or_si128(b, placed[1]), _mm_or_si128(c, placed[2]), d]
}

/// As `sha256_chain::digest_after`.
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn digest_after<const AT: usize>(message: &[Block], parent: &mut [u8; 32]) {
    let [a, b, c, d, e, f, g, h] = START;
    let mut state = [words([f, e, b, a]), words([h, g, d, c])];
    compress(&mut state, first_block::<AT>(&message[0], parent));
    for bytes in &message[1..] {
        compress(&mut state, block(bytes));
    }
    let [abef, cdgh] = state;
    let feba = _mm_shuffle_epi32(abef, 0x1b);
    let dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    let out = parent.as_mut_ptr().cast::<__m128i>();
    // SAFETY: a parent has 32 bytes, and the stores need no alignment.
    unsafe {
        _mm_storeu_si128(out, turned(_mm_blend_epi16(feba, dchg, 0xf0)));
        _mm_storeu_si128(out.add(1), turned(_mm_alignr_epi8(dchg, feba, 8)));
    }
}

/// Room for the bytes of eight tokens: they are stored as one vector.
pub(crate) const ROOM: usize = 64;

/// How an integer of 32 bits is written: a first byte and some of the others, at most eight in all.
trait Ints {
    /// Where the bytes of eight integers of 64 bits go; the first byte's place is left empty.
    const PLACES: [u8; 8];
    /// For each class, the smallest integer in it, its first byte, and which of the eight bytes are written (`0xff`).
    const CLASSES: [(u32, u8, u64); 4];
}

/// Class by class: the integer itself, `0x18` and one byte, `0x19` and two, `0x1a` and four, big-endian.
struct CborHeads;
impl Ints for CborHeads {
    const PLACES: [u8; 8] = [0x80, 3, 2, 1, 0, 0x80, 0x80, 0x80];
    const CLASSES: [(u32, u8, u64); 4] = [
        (0, 0, 0x00_00_00_ff_00_00_00_00),
        (24, 0x18, 0x00_00_00_ff_00_00_00_ff),
        (0x100, 0x19, 0x00_00_00_ff_ff_00_00_ff),
        (0x1_0000, 0x1a, 0x00_00_00_ff_ff_ff_ff_ff),
    ];
}

/// BININT1 and one byte, BININT2 and two, BININT and four, little-endian; the first two classes are one.
struct PickleInts;
impl Ints for PickleInts {
    const PLACES: [u8; 8] = [0x80, 0, 1, 2, 3, 0x80, 0x80, 0x80];
    const CLASSES: [(u32, u8, u64); 4] = [
        (0, b'K', 0x00_00_00_00_00_00_ff_ff),
        (0, b'K', 0x00_00_00_00_00_00_ff_ff),
        (0x100, b'M', 0x00_00_00_00_00_ff_ff_ff),
        (0x1_0000, b'J', 0x00_00_00_ff_ff_ff_ff_ff),
    ];
}

/// Each integer takes eight bytes of a vector: its first byte and its others in their places. The bytes that its
/// class does not write are then squeezed out of the whole vector.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt")]
fn write<I: Ints>(out: &mut [u8; 2 * ROOM], tokens: &[u32; 16]) -> usize {
    let (halves, _) = tokens.as_chunks::<8>();
    let at = eight::<I>(out.first_chunk_mut().unwrap_or_else(|| unreachable!()), &halves[0]);
    // Eight integers of at most eight bytes leave room for another vector.
    let Some(rest) = out[at..].first_chunk_mut() else { unreachable!() };
    at + eight::<I>(rest, &halves[1])
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt")]
fn eight<I: Ints>(out: &mut [u8; ROOM], tokens: &[u32; 8]) -> usize {
    let [one, two, three, four] = I::CLASSES;
    let vector = |value: u64| _mm512_set1_epi64(value as i64);
    // SAFETY: the eight integers are there, and the load needs no alignment.
    let tokens = unsafe { _mm256_loadu_si256(tokens.as_ptr().cast()) };
    let lanes = _mm512_cvtepu32_epi64(tokens);
    let from = |class: (u32, u8, u64)| _mm256_cmpge_epu32_mask(tokens, _mm256_set1_epi32(class.0 as i32));
    let (of_two, of_three, of_four) = (from(two), from(three), from(four));
    let mut written = vector(one.2);
    let mut first = vector(one.1.into());
    for (class, mask) in [(two, of_two), (three, of_three), (four, of_four)] {
        written = _mm512_mask_mov_epi64(written, mask, vector(class.2));
        first = _mm512_mask_mov_epi64(first, mask, vector(class.1.into()));
    }
    // The places count within each group of 16 bytes, so the second lane of a group adds eight.
    let low = u64::from_le_bytes(I::PLACES);
    let high = u64::from_le_bytes(I::PLACES.map(|place| if place & 0x80 == 0 { place + 8 } else { place }));
    let places = _mm512_broadcast_i32x4(_mm_set_epi64x(high as i64, low as i64));
    let bytes = _mm512_or_si512(_mm512_shuffle_epi8(lanes, places), first);
    let kept = _mm512_movepi8_mask(written);
    let squeezed = _mm512_maskz_compress_epi8(kept, bytes);
    // SAFETY: `out` has 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), squeezed) };
    kept.count_ones() as usize
}

/// How many msgpack integers of up to 32 bits there are at least in a vector of 64 bytes.
const PER_STEP: usize = 12;

/// Of all 64 places at once: where the integer ends that may start there. Which of the places do start one is then a
/// walk from the first of them, in strides of one, two, four and eight integers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt")]
fn pass_integers(data: &[u8], mut at: usize, mut count: usize) -> (usize, usize) {
    /// The last place of the vector: where every stride ends that leaves it, or that nothing known starts.
    const OUT: u32 = 63;
    let places = {
        let places: [u8; 64] = core::array::from_fn(|i| i as u8);
        // SAFETY: the 64 bytes are there, and the load needs no alignment.
        unsafe { _mm512_loadu_si512(places.as_ptr().cast()) }
    };
    // By the lower half of a first byte from 0xcc to 0xd3.
    let long = _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 5, 9, 0, 0, 0, 0, 0, 0, 0, 0, 2, 3, 5, 9));
    let byte = |value: u8| _mm512_set1_epi8(value as i8);
    while count > 0 {
        let Some(rest) = data.get(at..) else { break };
        let there = u64::MAX.checked_shr(64 - rest.len().min(64) as u32).unwrap_or(0);
        // SAFETY: only the bytes that are there are loaded, and the load needs no alignment.
        let bytes = unsafe { _mm512_maskz_loadu_epi8(there, rest.as_ptr().cast()) };
        let is_long = _mm512_cmplt_epu8_mask(_mm512_sub_epi8(bytes, byte(0xcc)), byte(8));
        let is_short = _mm512_cmpge_epi8_mask(bytes, byte(0xe0));
        let width = _mm512_mask_shuffle_epi8(byte(64), is_long, long, _mm512_and_si512(bytes, byte(0x0f)));
        let width = _mm512_mask_mov_epi8(width, is_short, byte(1));
        let one = _mm512_min_epu8(_mm512_add_epi8(places, width), byte(OUT as u8));
        let two = _mm512_permutexvar_epi8(one, one);
        let four = _mm512_permutexvar_epi8(two, two);
        let eight = _mm512_permutexvar_epi8(four, four);
        let step = count.min(PER_STEP);
        let mut place = if step & 8 != 0 { eight } else { _mm512_setzero_si512() };
        for (bit, stride) in [(4, four), (2, two), (1, one)] {
            if step & bit != 0 {
                place = _mm512_permutexvar_epi8(place, stride);
            }
        }
        let place = _mm_cvtsi128_si32(_mm512_castsi512_si128(place)) as u32 & 0xff;
        if place >= OUT {
            break;
        }
        at += place as usize;
        count -= step;
    }
    (at, count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::INT_WIDTH;

    /// Where the integers end one by one, up to the first that is none or starts past the end.
    fn one_by_one(data: &[u8], count: usize) -> Vec<usize> {
        let mut ends = vec![0];
        while ends.len() <= count {
            let at = ends[ends.len() - 1];
            match data.get(at).map_or(0, |first| INT_WIDTH[usize::from(*first)]) {
                0 => break,
                width => ends.push(at + usize::from(width)),
            }
        }
        ends
    }

    /// Bytes of every kind, number and cut: it comes to where the integers one by one come to, or stops before.
    #[test]
    fn integers_are_passed_over_as_one_by_one() {
        let Some(wide) = Wide::detect() else { return };
        let mut seed = 1u64;
        let mut random = move |below: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as usize % below
        };
        let heads = b"\xcc\xcd\xce\xd0\xd1\xd2\x00\x7f\xe0\xff\xcf\xd3\xc0\xc1\x80\xdf\xd4\xcb";
        let mut all = 0;
        for _ in 0..30_000 {
            let (count, kinds) = (random(40), [6, 10, 12, heads.len()][random(4)]);
            let mut data = Vec::new();
            for _ in 0..count {
                data.push(heads[random(kinds)]);
                let more = INT_WIDTH[usize::from(data[data.len() - 1])].saturating_sub(1);
                (0..more).for_each(|_| data.push(random(256) as u8));
            }
            data.truncate(data.len().saturating_sub(random(3) * random(9)));
            (0..random(2) * random(70)).for_each(|_| data.push(random(256) as u8));
            let ends = one_by_one(&data, count);
            let (at, left) = wide.pass_integers(&data, 0, count);
            match ends.get(count - left) {
                Some(end) => assert_eq!(at, *end),
                None => assert!(at > data.len() && ends[ends.len() - 1] >= data.len()),
            }
            // Nothing stops it where no integer is longer than 32 bits.
            assert!(left == 0 || kinds > 10 || ends.len() <= count || data.len() > ends[count]);
            all += usize::from(left == 0 && ends.len() > count);
        }
        assert!(all > 5000);
    }
}
