//! Times the hot path against a bare SHA-256 chain over messages of the same size, alternating, medians.

use std::hint::black_box;
use std::time::Instant;

use kvhash::{BlockHasher, Settings};
use sha2::{Digest, Sha256};

fn bare(len: usize, count: usize) -> [u8; 32] {
    let mut message = vec![7u8; len];
    let mut digest = [0u8; 32];
    for _ in 0..count {
        message[3..35].copy_from_slice(&digest);
        digest = Sha256::digest(black_box(&message)).into();
    }
    digest
}

fn main() {
    let mut seed = 1u64;
    for (algorithm, vocabulary, block, len) in [
        ("sha256_cbor", 152_000u64, 16u64, 117usize),
        ("sha256", 152_000, 16, 140),
        ("sha256_cbor", 24, 16, 53),
        ("sha256_cbor", 152_000, 256, 36 + 3 + 256 * 5),
    ] {
        let tokens: Vec<u32> = (0..100_000)
            .map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                ((seed >> 33) % vocabulary) as u32
            })
            .collect();
        let hasher = BlockHasher::new(&Settings {
            algorithm,
            block_size: block,
            hash_seed: Some("0"),
            ..Settings::default()
        })
        .expect("known settings");
        let count = tokens.len() / block as usize;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..101 {
            let start = Instant::now();
            black_box(hasher.hash_tokens(&tokens));
            ours.push(start.elapsed().as_nanos() as f64 / count as f64);
            let start = Instant::now();
            black_box(bare(len, count));
            theirs.push(start.elapsed().as_nanos() as f64 / count as f64);
        }
        ours.sort_by(f64::total_cmp);
        theirs.sort_by(f64::total_cmp);
        println!(
            "{algorithm} block {block} vocabulary {vocabulary}: {:.0} ns a block, bare {:.0}, ratio {:.2}",
            ours[50],
            theirs[50],
            ours[50] / theirs[50]
        );
    }
}
