//! Decisions are the Python router's, and the index follows the rules.

use kvhash::events::decode_batch;
use kvhash::{BlockHash, BlockHasher, RequestKeys, Settings};
use kvhash_router::{decide, Candidate, EngineSettings, Index, Knowledge, Policy};
use serde::Deserialize;
use serde_json::{json, Value};

#[derive(Deserialize)]
struct Case {
    prompt_tokens: u64,
    candidates: Vec<Candidate>,
    policy: Policy,
    draws: Vec<usize>,
    engines: Vec<String>,
    costs: Vec<f64>,
}

/// The file holds decisions of the Python router (tests/router/test_go.py writes it); these are the same.
#[test]
fn decisions_are_those_of_the_python_router() {
    let text = std::fs::read_to_string("../router-go/testdata/decisions.json").unwrap();
    let cases: Vec<Case> = serde_json::from_str(&text).unwrap();
    assert!(cases.len() >= 100, "only {} cases", cases.len());
    for (i, case) in cases.iter().enumerate() {
        let mut draws = case.draws.iter();
        let mut draw = |count| draws.next().unwrap() % count;
        let scored = decide(case.prompt_tokens, &case.candidates, &case.policy, &mut draw);
        let engines: Vec<&str> = scored.iter().map(|one| one.candidate.engine.as_str()).collect();
        assert_eq!(engines, case.engines, "case {i}");
        for (got, want) in scored.iter().zip(&case.costs) {
            assert!((got.cost - want).abs() <= 1e-9 * want, "case {i}: cost {}, want {want}", got.cost);
        }
    }
}

/// Of no engines none is chosen, and nothing is drawn.
#[test]
fn decides_nothing_without_candidates() {
    assert!(decide(10, &[], &Policy::default(), &mut |_| panic!("drawn")).is_empty());
}

fn chain(salt: Option<&str>) -> Vec<BlockHash> {
    let settings = Settings { block_size: 4, hash_seed: Some("0"), ..Settings::default() };
    let keys = RequestKeys { cache_salt: salt.map(Into::into), ..RequestKeys::default() };
    let mut chain = BlockHasher::new(&settings).unwrap().chain(keys).unwrap();
    chain.append(&(1..=12u32).collect::<Vec<_>>()).to_vec()
}

fn keys(hashes: &[BlockHash]) -> Vec<u64> {
    hashes.iter().map(BlockHash::low64).collect()
}

fn stored(hashes: &[BlockHash], parent: Option<&BlockHash>, fields: Value) -> Value {
    let mut event = json!({
        "type": "BlockStored",
        "block_hashes": keys(hashes),
        "parent_block_hash": parent.map(BlockHash::low64),
        "token_ids": vec![1; hashes.len() * 4],
        "block_size": 4,
    });
    event.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    event
}

fn removed(hashes: &[BlockHash], fields: Value) -> Value {
    let mut event = json!({"type": "BlockRemoved", "block_hashes": keys(hashes)});
    event.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    event
}

fn apply(index: &Index, rank: Option<u32>, events: &[Value]) {
    let payload = rmp_serde::to_vec(&json!([1.5, events, rank])).unwrap();
    index.apply("a", &decode_batch(&payload).unwrap());
}

/// Copies are counted; media and groups are apart; a salted prompt never matches an unsalted one.
#[test]
fn copies_media_and_groups_count_as_the_index_says() {
    let hashes = chain(None);
    let index = Index::new(EngineSettings::default());
    let matched = |hashes: &[BlockHash]| index.matched_tokens("a", hashes, 100);
    assert_eq!(index.knowledge("a"), Knowledge::Unknown);
    apply(&index, None, &[stored(&hashes, None, json!({"medium": "GPU"}))]);
    assert_eq!(matched(&hashes), 12);
    assert_eq!(index.matched_tokens("a", &hashes, 12), 8, "the last token is computed");
    apply(
        &index,
        None,
        &[stored(&hashes[..1], None, json!({"medium": "gpu"})), removed(&hashes[..1], json!({}))],
    );
    assert_eq!(matched(&hashes), 12, "one of two copies is removed");
    apply(&index, None, &[removed(&hashes[1..2], json!({"medium": "CPU"}))]);
    assert_eq!(matched(&hashes), 12, "removed from another medium");
    apply(&index, None, &[stored(&hashes[..2], None, json!({"group_idx": 1}))]);
    assert_eq!(matched(&hashes), 8, "a second group holds less");
    apply(&index, None, &[removed(&hashes[..1], json!({"group_idx": 1}))]);
    assert_eq!(matched(&hashes), 0, "the first block is gone from a group");
    assert_eq!(matched(&chain(Some("x"))), 0, "a salted prompt");
    assert_eq!(index.knowledge("a"), Knowledge::Exact);
}

/// A tier below the GPU carries on where the GPU ends.
#[test]
fn lower_tiers_carry_on() {
    let hashes = chain(None);
    let index = Index::new(EngineSettings::default());
    apply(&index, None, &[stored(&hashes[..1], None, json!({"medium": "GPU"}))]);
    apply(&index, None, &[stored(&hashes[1..], Some(&hashes[0]), json!({"medium": "CPU"}))]);
    assert_eq!(index.matched_tokens("a", &hashes, 100), 12);
}

/// A loss degrades until a clear; what cannot be read does too; two caches behind one name are unknown.
#[test]
fn knowledge_is_never_better_than_what_came() {
    let hashes = chain(None);
    let index = Index::new(EngineSettings::default());
    apply(&index, Some(0), &[stored(&hashes, None, json!({}))]);
    index.lost("a");
    assert_eq!((index.knowledge("a"), index.faults("a")), (Knowledge::Degraded, vec!["lost"]));
    apply(&index, Some(0), &[json!({"type": "AllBlocksCleared"})]);
    assert_eq!(index.knowledge("a"), Knowledge::Exact);
    assert_eq!(index.matched_tokens("a", &hashes, 100), 0);
    apply(&index, Some(0), &[json!({"type": "BlockStored"})]);
    assert_eq!((index.knowledge("a"), index.faults("a")), (Knowledge::Degraded, vec!["undecodable"]));
    apply(&index, Some(1), &[]);
    assert_eq!(index.knowledge("a"), Knowledge::Unknown);
    index.remove("a");
    assert_eq!((index.knowledge("a"), index.faults("a")), (Knowledge::Unknown, vec![]));
}

/// Beyond the bound the oldest chains go from their ends, and it is said.
#[test]
fn the_bound_holds_and_is_said() {
    let hashes = chain(None);
    let index = Index::new(EngineSettings { max_blocks: Some(2), ..EngineSettings::default() });
    apply(&index, None, &[stored(&hashes, None, json!({}))]);
    assert_eq!((index.knowledge("a"), index.faults("a")), (Knowledge::Degraded, vec!["evicted"]));
    assert_eq!(index.matched_tokens("a", &hashes, 100), 8);
}
