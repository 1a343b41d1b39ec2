//! SHA-256 of a message in place, with the parent's digest put in on the way.
//!
//! A chain of hashes is bound by latency: no message can be compressed before the one before it. What can be done is
//! to have everything else of a message ready, so that only the parent's bytes are waited for. The message is
//! therefore written while the one before it is being compressed, with zeros where the parent stands, and the parent
//! goes from register to register: through memory it would wait until short overlapping stores have left the store
//! buffer.
//!
//! The unsafe code of this crate is here: the call of functions that need a processor's SHA extensions, which is made
//! only where these were found, and unaligned loads and stores within arrays of known length.
#![allow(unsafe_code)]

use sha2::block_api::compress256;

/// A message's block of 64 bytes.
pub(crate) type Block = [u8; 64];

const START: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

/// The digest of the padded message in `blocks` with `parent` at byte `AT`, where the message has 32 zeros.
///
/// `AT` is 3 or 13, where CBOR and pickle have the parent.
///
/// # Panics
/// Where there is no block.
#[inline]
pub(crate) fn digest_after<const AT: usize>(blocks: &[Block], parent: &[u8; 32]) -> [u8; 32] {
    const { assert!(AT == 3 || AT == 13) };
    #[cfg(target_arch = "x86_64")]
    if x86::available() {
        // SAFETY: the extensions that the function needs were found.
        let [digest] = unsafe { x86::digests::<AT, 1>([blocks], [parent]) };
        return digest;
    }
    portable::<AT>(blocks, parent)
}

/// Two independent messages at once, as [`digest_after`]: the extensions' latency is longer than their occupancy.
#[inline]
pub(crate) fn digest_two_after<const AT: usize>(
    blocks: [&[Block]; 2],
    parents: [&[u8; 32]; 2],
) -> [[u8; 32]; 2] {
    const { assert!(AT == 3 || AT == 13) };
    #[cfg(target_arch = "x86_64")]
    if x86::available() {
        // SAFETY: the extensions that the function needs were found.
        return unsafe { x86::digests::<AT, 2>(blocks, parents) };
    }
    [portable::<AT>(blocks[0], parents[0]), portable::<AT>(blocks[1], parents[1])]
}

/// Whether two messages at once are faster than one after the other.
pub(crate) fn pays_in_pairs() -> bool {
    #[cfg(target_arch = "x86_64")]
    return x86::available();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

fn portable<const AT: usize>(blocks: &[Block], parent: &[u8; 32]) -> [u8; 32] {
    let mut first = blocks[0];
    first[AT..AT + 32].copy_from_slice(parent);
    let mut state = START;
    compress256(&mut state, &[first]);
    compress256(&mut state, &blocks[1..]);
    let mut digest = [0; 32];
    for (to, word) in digest.chunks_exact_mut(4).zip(state) {
        to.copy_from_slice(&word.to_be_bytes());
    }
    digest
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use core::arch::x86_64::*;

    use super::{Block, START};

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

    /// Whether this processor has what the functions of this module need.
    #[inline]
    pub(super) fn available() -> bool {
        is_x86_feature_detected!("sha")
            && is_x86_feature_detected!("ssse3")
            && is_x86_feature_detected!("sse4.1")
    }

    /// A lane: the state as the instructions want it, words A B E F and C D G H.
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

    /// Four rounds in every lane, from round `4 * r` on; `i` says which words of the message they take.
    #[inline]
    #[target_feature(enable = "sha,ssse3,sse4.1")]
    fn rounds<const N: usize>(r: usize, state: &mut [State; N], w: &[[__m128i; 4]; N], i: usize) {
        let k = words([K[4 * r], K[4 * r + 1], K[4 * r + 2], K[4 * r + 3]]);
        let mut sums = [k; N];
        for lane in 0..N {
            let [abef, cdgh] = &mut state[lane];
            sums[lane] = _mm_add_epi32(w[lane][i], k);
            *cdgh = _mm_sha256rnds2_epu32(*cdgh, *abef, sums[lane]);
        }
        for lane in 0..N {
            let [abef, cdgh] = &mut state[lane];
            *abef = _mm_sha256rnds2_epu32(*abef, *cdgh, _mm_shuffle_epi32(sums[lane], 0x0e));
        }
    }

    /// Sixteen rounds in every lane, from round `4 * r` on, with the words that these need made from those before.
    #[inline]
    #[target_feature(enable = "sha,ssse3,sse4.1")]
    fn later_rounds<const N: usize>(r: usize, state: &mut [State; N], w: &mut [[__m128i; 4]; N]) {
        for i in 0..4 {
            for w in w.iter_mut() {
                let (a, b, c, d) = (w[i], w[(i + 1) % 4], w[(i + 2) % 4], w[(i + 3) % 4]);
                let sum = _mm_add_epi32(_mm_sha256msg1_epu32(a, b), _mm_alignr_epi8(d, c, 4));
                w[i] = _mm_sha256msg2_epu32(sum, d);
            }
            rounds(r + i, state, w, i);
        }
    }

    /// One block in every lane.
    #[inline]
    #[target_feature(enable = "sha,ssse3,sse4.1")]
    fn compress<const N: usize>(state: &mut [State; N], message: [[__m128i; 4]; N]) {
        let before = *state;
        let mut w = message.map(|block| block.map(|bytes| turned(bytes)));
        for i in 0..4 {
            rounds(i, state, &w, i);
        }
        later_rounds(4, state, &mut w);
        later_rounds(8, state, &mut w);
        later_rounds(12, state, &mut w);
        for (now, before) in state.iter_mut().zip(before) {
            now[0] = _mm_add_epi32(now[0], before[0]);
            now[1] = _mm_add_epi32(now[1], before[1]);
        }
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

    /// The digests of independent messages, each as `digest_after` says.
    #[target_feature(enable = "sha,ssse3,sse4.1")]
    pub(super) fn digests<const AT: usize, const N: usize>(
        messages: [&[Block]; N],
        parents: [&[u8; 32]; N],
    ) -> [[u8; 32]; N] {
        let [a, b, c, d, e, f, g, h] = START;
        let start = [words([f, e, b, a]), words([h, g, d, c])];
        let mut state = [start; N];
        compress(&mut state, core::array::from_fn(|i| first_block::<AT>(&messages[i][0], parents[i])));
        let common = messages.iter().map(|message| message.len()).min().unwrap_or(1);
        for i in 1..common {
            compress(&mut state, messages.map(|message| block(&message[i])));
        }
        for (state, message) in state.iter_mut().zip(messages) {
            for bytes in &message[common..] {
                let mut one = [*state];
                compress(&mut one, [block(bytes)]);
                [*state] = one;
            }
        }
        state.map(|[abef, cdgh]| {
            let feba = _mm_shuffle_epi32(abef, 0x1b);
            let dchg = _mm_shuffle_epi32(cdgh, 0xb1);
            let mut digest = [0; 32];
            let out = digest.as_mut_ptr().cast::<__m128i>();
            // SAFETY: the digest has 32 bytes, and the stores need no alignment.
            unsafe {
                _mm_storeu_si128(out, turned(_mm_blend_epi16(feba, dchg, 0xf0)));
                _mm_storeu_si128(out.add(1), turned(_mm_alignr_epi8(dchg, feba, 8)));
            }
            digest
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn padded(message: &[u8]) -> Vec<Block> {
        let mut bytes = message.to_vec();
        bytes.push(0x80);
        while bytes.len() % 64 != 56 {
            bytes.push(0);
        }
        bytes.extend_from_slice(&(message.len() as u64 * 8).to_be_bytes());
        bytes.as_chunks().0.to_vec()
    }

    fn messages<const AT: usize>() -> impl Iterator<Item = (Vec<Block>, [u8; 32], [u8; 32])> {
        (AT + 32..400).map(|len| {
            let mut message: Vec<u8> = (0..len).map(|i| (i * 7 + len) as u8).collect();
            let parent: [u8; 32] = std::array::from_fn(|i| (i * 31 + len * 5) as u8);
            message[AT..AT + 32].copy_from_slice(&parent);
            let digest = crate::sha256(&message);
            message[AT..AT + 32].fill(0);
            (padded(&message), parent, digest)
        })
    }

    fn agree<const AT: usize>() {
        let all: Vec<_> = messages::<AT>().collect();
        for (i, (blocks, parent, digest)) in all.iter().enumerate() {
            assert_eq!(digest_after::<AT>(blocks, parent), *digest);
            assert_eq!(portable::<AT>(blocks, parent), *digest);
            let (other, other_parent, other_digest) = &all[(i * 17 + 5) % all.len()];
            assert_eq!(
                digest_two_after::<AT>([blocks, other], [parent, other_parent]),
                [*digest, *other_digest]
            );
        }
    }

    /// Every length of a message, alone and beside another of any length, with and without the extensions.
    #[test]
    fn the_digest_with_the_parent_put_in_is_the_digest() {
        agree::<3>();
        agree::<13>();
    }
}
