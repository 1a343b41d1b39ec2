//! SHA-256 of a message in place, with the parent's digest put in on the way.
//!
//! A chain of hashes is bound by latency: no message can be compressed before the one before it. What can be done is
//! to have everything else of a message ready, so that only the parent's bytes are waited for. The message is
//! therefore written while the one before it is being compressed, with zeros where the parent stands, and the parent
//! goes from register to register: through memory it would wait until short overlapping stores have left the store
//! buffer.

use sha2::block_api::compress256;

use crate::cpu::Cpu;

/// A message's block of 64 bytes.
pub(crate) type Block = [u8; 64];

pub(crate) const START: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

/// Replace the parent by the digest of its message: padded, with 32 zeros at byte `AT`, where the parent stands.
///
/// `AT` is 3 or 13, where CBOR and pickle have the parent.
///
/// # Panics
/// Where the message has no block.
#[inline]
pub(crate) fn digest_after<const AT: usize>(cpu: Cpu, message: &[Block], parent: &mut [u8; 32]) {
    const { assert!(AT == 3 || AT == 13) };
    #[cfg(target_arch = "x86_64")]
    if let Some(sha) = cpu.sha {
        return sha.digest_after::<AT>(message, parent);
    }
    let _ = cpu;
    *parent = portable::<AT>(message, parent);
}

#[inline(never)]
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

    fn agree<const AT: usize>(cpu: Cpu) {
        for (blocks, parent, digest) in messages::<AT>() {
            let mut seen = parent;
            digest_after::<AT>(cpu, &blocks, &mut seen);
            assert_eq!(seen, digest);
        }
    }

    /// Every length of a message, with and without the extensions.
    #[test]
    fn the_digest_with_the_parent_put_in_is_the_digest() {
        for cpu in [Cpu::detect(), Cpu::none()] {
            agree::<3>(cpu);
            agree::<13>(cpu);
        }
    }
}
