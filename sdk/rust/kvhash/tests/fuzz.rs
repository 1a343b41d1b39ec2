//! A fuzz harness without a tool of its own: request lines made from good ones by cutting, joining, repeating and
//! flipping, for a short time in every test run and for `KVHASH_FUZZ_SECONDS` where that is set. No line may panic,
//! and every answer is one line that starts as an answer does.

use std::time::{Duration, Instant};

use kvhash::lines::answer_line;
use kvhash::Request;

const SEEDS: [&str; 8] = [
    r#"{"id":"1","vllm":"0.33.0","algorithm":"sha256_cbor","hash_seed":"0","block_size":2,"tokens":[1,2,3,4,151000],"lookahead":1}"#,
    r#"{"id":2,"vllm":"0.31.0","algorithm":"sha256","hash_seed":null,"block_size":3,"tokens":[0,18446744073709551615,7],"cache_salt":"é😀"}"#,
    r#"{"vllm":"0.9.2","hash_seed":"42","block_size":1,"tokens":[1,70000],"lora":{"name":"a","path":"p","id":3}}"#,
    r#"{"vllm":"0.10.0","algorithm":"sha256_cbor_64bit","hash_seed":"","block_size":2,"tokens":[4294967296,2],"decode_context_parallel_size":1}"#,
    r#"{"tokens":[1,2,3,4],"block_size":2,"multimodal":[{"identifier":"x","offset":0,"length":1},{"identifier":"y","offset":2,"length":2}]}"#,
    r#"{"tokens":[1,2],"block_size":2,"prompt_embeds":{"shape":[2,1],"dtype":"float16","data":"00 01 0203"}}"#,
    r#"{"id":[1.5,-0,1e-7,{"a":"\ud83d\ude00\u0000"}],"vllm":"v0.24rc1+x","tokens":[],"algorithm":"xxhash","hash_seed":"s"}"#,
    "{\"tokens\": [1e5, true, null, \"x\\ud800\"],\t\"hash_seed\" : 0}\r\n",
];

const PIECES: [&[u8]; 22] = [
    b"\"",
    b"\\",
    b"\\u",
    b"\\ud800",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"-",
    b"1e999",
    b"0",
    b"null",
    b"NaN",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\n",
    b"99999999999999999999999999999999999999999999",
    b"9223372036854775807",
    b"2147483647",
];

/// A small generator: the numbers need not be good, only the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit.max(1) as u64) as usize
    }

    fn mutate(&mut self, line: &mut Vec<u8>) {
        let at = self.below(line.len() + 1);
        match self.below(6) {
            0 => line.truncate(at),
            1 => {
                let piece = PIECES[self.below(PIECES.len())];
                line.splice(at..at, piece.iter().copied());
            }
            2 if at < line.len() => line[at] ^= 1 << self.below(8),
            3 => {
                let end = at + self.below(12).min(line.len() - at);
                line.drain(at..end);
            }
            4 => {
                let other = SEEDS[self.below(SEEDS.len())].as_bytes();
                let from = self.below(other.len());
                line.truncate(at);
                line.extend_from_slice(&other[from..]);
            }
            _ => {
                let end = at + self.below(30).min(line.len() - at);
                let copy = line[at..end].to_vec();
                line.splice(at..at, copy);
            }
        }
    }
}

#[test]
fn no_line_panics_and_every_line_is_answered() {
    let seconds = std::env::var("KVHASH_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2.0);
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut hashed, mut refused) = (0u64, 0u64);
    while Instant::now() < end {
        for seed in SEEDS {
            let mut line = seed.as_bytes().to_vec();
            for _ in 0..random.below(5) {
                random.mutate(&mut line);
            }
            let Some(answer) = answer_line(&line) else { continue };
            assert!(
                answer.starts_with("{\"id\":") && answer.ends_with('}') && !answer.contains('\n'),
                "{answer}"
            );
            let parsed = Request::parse(&line).is_ok();
            if answer.contains("\"block_hashes\":[") {
                assert!(parsed);
                hashed += 1;
            } else {
                refused += 1;
            }
        }
    }
    assert!(hashed > 0 && refused > 0, "{hashed} lines were hashed, {refused} refused");
}
