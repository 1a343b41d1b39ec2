//! A fuzz harness without a tool of its own: request lines and event payloads made from good ones by cutting, joining,
//! repeating and flipping, for a short time in every test run and for `KVHASH_FUZZ_SECONDS` each where that is set. No
//! line and no payload may panic; every answer is one line that starts as an answer does; and what is decoded in one
//! pass is decoded alike event by event.

use std::fmt::Write;
use std::time::{Duration, Instant};

use kvhash::events::{decode_batch, decode_event, Event, Tokens};
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

/// Payloads in hex: a map store of vLLM 0.33 with look-ahead tokens, bytes hashes in arrays, SGLang's object and pairs,
/// unknown fields and tags, a batch as a map, a timestamp and nested keys.
const PAYLOADS: [&str; 7] = [
    "93cb41d954fc4020000091de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf91b7584a2265b1f505b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647394ce0001053003cd01fbccffaa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392c091a178a967726f75705f69647800b36c6f6f6b61686561645f746f6b656e5f69647392910191ccf0",
    "93cb41d954fc402000009296ab426c6f636b53746f72656491c4086162636465666768c4086162636465666768920102ca3f80000000c092ac426c6f636b52656d6f76656491c408616263646566676801",
    "92c291f690",
    "93ca3fc000009399ab426c6f636b53746f72656492fbcf8000000000000000c092920102920203 02c0a347505581aa63616368655f73616c74a17391b0416c6c426c6f636b73436c656172656492a54c617465720100",
    "83a2747301a66576656e747391 83a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739107a3666f6fd6ff00000001ac6174746e5f64705f72616e6b03",
    "92019182a474797065b0416c6c426c6f636b73436c656172656481910181c40161c0cb7ff8000000000000",
    "92cb3ff8000000000000dc0002dd00000002ab426c6f636b52656d6f766564d3fffffffffffffffb90",
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

    fn mutate(&mut self, line: &mut Vec<u8>, pieces: &[&[u8]], seeds: &[Vec<u8>]) {
        let at = self.below(line.len() + 1);
        match self.below(6) {
            0 => line.truncate(at),
            1 => {
                let piece = pieces[self.below(pieces.len())];
                line.splice(at..at, piece.iter().copied());
            }
            2 if at < line.len() => line[at] ^= 1 << self.below(8),
            3 => {
                let end = at + self.below(12).min(line.len() - at);
                line.drain(at..end);
            }
            4 => {
                let other = &seeds[self.below(seeds.len())];
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

/// Call `check` with mutated seeds until the time is over.
fn fuzz(pieces: &[&[u8]], seeds: &[Vec<u8>], mut check: impl FnMut(&[u8])) {
    let seconds = std::env::var("KVHASH_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2.0);
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    while Instant::now() < end {
        for seed in seeds {
            let mut data = seed.clone();
            for _ in 0..random.below(5) {
                random.mutate(&mut data, pieces, seeds);
            }
            check(&data);
        }
    }
}

fn assert_one_line(answer: &str) {
    assert!(answer.starts_with("{\"id\":") && answer.ends_with('}') && !answer.contains('\n'), "{answer}");
}

#[test]
fn no_line_panics_and_every_line_is_answered() {
    let (mut hashed, mut refused) = (0u64, 0u64);
    fuzz(&PIECES, &SEEDS.map(|seed| seed.as_bytes().to_vec()), |line| {
        let Some(answer) = answer_line(line) else { return };
        assert_one_line(&answer);
        let parsed = Request::parse(line).is_ok();
        if answer.contains("\"block_hashes\":[") {
            assert!(parsed);
            hashed += 1;
        } else {
            refused += 1;
        }
    });
    assert!(hashed > 0 && refused > 0, "{hashed} lines were hashed, {refused} refused");
}

const BYTES: [&[u8]; 16] = [
    b"\x90",
    b"\x91",
    b"\x80",
    b"\x81\x81",
    b"\xc0",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff",
    b"\xd4\xff\x00",
    b"\xcb\x7f\xf0\0\0\0\0\0\0",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xa2\xc3\x28",
    b"\xa5*more",
    b"\xc4\x08abcdefgh",
];

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b' ').collect();
    let digit = |byte: u8| char::from(byte).to_digit(16).unwrap() as u8;
    digits.chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}

/// Look at everything that a store shows; its tokens in blocks are its tokens.
fn look_at(event: &Event<'_>) {
    let Event::Stored(event) = event else { return };
    assert_eq!(event.block_hashes.iter().count(), event.block_hashes.len());
    let tokens = event.token_ids;
    let count = |tokens: &Tokens<'_>| tokens.iter().count() + tokens.pairs().count();
    assert_eq!(count(&tokens), tokens.len());
    let mut rest = tokens;
    let (first, second) = (rest.take_front(tokens.len() / 2), rest);
    assert_eq!(first.len() + second.len(), tokens.len());
    let shown = |tokens: &Tokens<'_>| (tokens.iter().collect::<Vec<_>>(), tokens.pairs().collect::<Vec<_>>());
    let (mut singles, mut pairs) = shown(&first);
    singles.extend(shown(&second).0);
    pairs.extend(shown(&second).1);
    assert_eq!((singles, pairs), shown(&tokens));
    for per_block in [event.extra_keys, event.lookahead_token_ids].into_iter().flatten() {
        assert_eq!(per_block.iter().count(), per_block.len());
    }
}

#[test]
fn no_payload_panics_and_events_are_read_alike_one_by_one() {
    let (mut batches, mut undecodable, mut refused) = (0u64, 0u64, 0u64);
    fuzz(&BYTES, &PAYLOADS.map(unhex), |payload| {
        match decode_batch(payload) {
            Err(_) => refused += 1,
            Ok(batch) => {
                batches += 1;
                for (i, event) in batch.events.iter().enumerate() {
                    look_at(event);
                    undecodable += u64::from(matches!(event, Event::Undecodable { .. }));
                    assert_eq!(format!("{event:?}"), format!("{:?}", decode_event(event.raw(), i)));
                }
            }
        }
        let mut line = String::from("{\"decode\":\"");
        payload.iter().for_each(|byte| write!(line, "{byte:02x}").unwrap());
        assert_one_line(&answer_line((line + "\"}").as_bytes()).unwrap());
    });
    assert!(batches > 0 && undecodable > 0 && refused > 0, "{batches} {undecodable} {refused}");
}
