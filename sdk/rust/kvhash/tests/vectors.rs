//! The corpus in `vectors/` (or the folder that `KVHASH_VECTORS` names): every case of the kinds that a hasher and an
//! event decoder answer, with the answer that is expected, all through the line program's own function.

use std::fs;
use std::path::PathBuf;

use kvhash::lines::answer_line;
use kvhash::{sha256, BlockHash};
use serde_json::{json, Value};

fn folder() -> PathBuf {
    std::env::var_os("KVHASH_VECTORS")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../vectors"), PathBuf::from)
}

fn vectors(kind: &str) -> Vec<Value> {
    let path = folder().join(format!("{kind}.json"));
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut file: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(file["kind"], kind);
    serde_json::from_value(file["vectors"].take()).unwrap()
}

fn answer(line: &str) -> Value {
    let text = answer_line(line.as_bytes()).expect("a blank line");
    let mut answer: Value = serde_json::from_str(&text).unwrap();
    answer.as_object_mut().unwrap().remove("id");
    answer
}

/// The ids of `{"generate": {"seed", "count", "vocabulary"}}`.
fn generated(rule: &Value) -> Value {
    let seed = rule["seed"].as_str().unwrap();
    let vocabulary = rule["vocabulary"].as_u64().unwrap();
    let mut stream = (0u64..).flat_map(|counter| sha256(&[seed.as_bytes(), &counter.to_be_bytes()].concat()));
    let mut next = || {
        let bytes: [u8; 4] = std::array::from_fn(|_| stream.next().unwrap());
        u64::from(u32::from_be_bytes(bytes)) % vocabulary
    };
    (0..rule["count"].as_u64().unwrap()).map(|_| next()).collect()
}

fn expand(request: &Value) -> Value {
    let mut request = request.clone();
    if let Some(rule) = request["tokens"].get("generate") {
        request["tokens"] = generated(&rule.clone());
    }
    request
}

/// What is wrong with an answer, if anything.
fn fault(vector: &Value, got: &Value) -> Option<String> {
    let expected = &vector["expected"];
    let good = match vector["result"].as_str().unwrap() {
        "invalid" => expected["error"]["codes"].as_array().unwrap().contains(&got["error"]["code"]),
        "implementation_defined" => {
            let accepted = vector["accepted"].as_array().into_iter().flatten();
            accepted.chain([expected]).any(|answer| agrees(answer, got))
        }
        _ => agrees(expected, got),
    };
    (!good).then(|| format!("{}: got {got}", vector["id"]))
}

/// Whether an answer is the expected one: of events by their places, for whose faults each decoder has its own words.
fn agrees(expected: &Value, got: &Value) -> bool {
    fn plain(value: &Value) -> Value {
        let mut value = value.clone();
        if let Some(events) = value.pointer_mut("/batch/events").and_then(Value::as_array_mut) {
            for event in events.iter_mut().filter(|event| event.get("undecodable").is_some()) {
                event.as_object_mut().unwrap().remove("message");
            }
        }
        value
    }
    plain(expected) == plain(got)
}

fn check(kind: &str) {
    let (mut cases, mut faults) = (0, Vec::new());
    for vector in vectors(kind) {
        let input = &vector["input"];
        let lines: Vec<String> = if let Some(line) = input["line"].as_str() {
            vec![line.to_owned()]
        } else if let Some(payload) = input.get("payload") {
            vec![json!({ "decode": payload }).to_string()]
        } else {
            let request = expand(&input["request"]);
            let releases = input["vllm"].as_array().unwrap();
            let line = |release: &Value| {
                let mut request = request.clone();
                request["vllm"] = release.clone();
                request.to_string()
            };
            releases.iter().map(line).collect()
        };
        for line in lines {
            cases += 1;
            faults.extend(fault(&vector, &answer(&line)));
        }
    }
    assert!(faults.is_empty(), "{} of {cases} cases are wrong, first {}", faults.len(), faults[0]);
    assert!(cases > 0, "{kind} has no cases");
}

macro_rules! kinds {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                check(stringify!($name));
            }
        )*
    };
}

kinds!(none_hash chains extra_keys lookahead context_parallel recorded requests events);

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// The published forms of a digest: unsigned, signed, and the bytes.
#[test]
fn external() {
    for vector in vectors("external") {
        // A digest alone: keys with a group id, and integers by themselves, are no part of this crate.
        let (Some(digest), None) = (vector["input"]["digest"].as_str(), vector["input"].get("group_id"))
        else {
            continue;
        };
        let digest = unhex(digest);
        let hash = match <[u8; 32]>::try_from(&digest[..]) {
            Ok(digest) => BlockHash::Sha256(digest),
            Err(_) => BlockHash::Xxh3(digest[..].try_into().unwrap()),
        };
        let expected = &vector["expected"];
        assert_eq!(hash.external(), expected["uint64"], "{}", vector["id"]);
        assert_eq!((hash.low64() as i64).to_string(), expected["int64"], "{}", vector["id"]);
        assert_eq!(hash.to_string(), expected["bytes"], "{}", vector["id"]);
    }
}

/// Many chains into one digest, with salts and adapters among them.
#[test]
fn accumulated() {
    for vector in vectors("accumulated") {
        let input = &vector["input"];
        let number = |name: &str| input[name].as_u64().unwrap();
        let per_chain = (number("blocks") * number("block_size")) as usize;
        let rule = json!({
            "seed": input["stream"], "count": per_chain as u64 * number("chains"), "vocabulary": input["vocabulary"],
        });
        let tokens: Vec<Value> = serde_json::from_value(generated(&rule)).unwrap();
        let mut all = Vec::new();
        for (k, tokens) in tokens.chunks(per_chain).enumerate() {
            let mut request = json!({
                "vllm": input["vllm"][0], "algorithm": input["algorithm"], "block_size": input["block_size"],
                "hash_seed": k.to_string(), "tokens": tokens,
            });
            if k % 2 == 1 {
                request["cache_salt"] = json!(format!("salt-{k}"));
            }
            if k > 0 && k % 3 == 0 {
                request["lora"] = json!({"id": k, "name": format!("lora-{k}"), "path": format!("path-{k}")});
            }
            for hash in answer(&request.to_string())["block_hashes"].as_array().unwrap() {
                match hash.as_str() {
                    Some(digest) => all.extend(unhex(digest)),
                    None => all.extend(hash["int"].as_str().unwrap().bytes()),
                }
            }
        }
        let digest: String = sha256(&all).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digest, vector["digest"], "{}", vector["id"]);
    }
}

/// Each kind of the corpus is run here, or is named as one that this crate makes no claim to.
#[test]
fn no_kind_is_left_out() {
    let text = fs::read_to_string(folder().join("manifest.json")).unwrap();
    let manifest: Value = serde_json::from_str(&text).unwrap();
    let run = [
        "none_hash",
        "chains",
        "extra_keys",
        "lookahead",
        "context_parallel",
        "recorded",
        "requests",
        "events",
        "external",
        "accumulated",
    ];
    // The preimages by themselves are not public; block sizes, streams and whole engines are the Python package's.
    let others = ["serialization", "block_size", "streams", "engine", "mistakes"];
    let files = manifest["files"].as_array().unwrap();
    for file in files {
        let kind = file["path"].as_str().unwrap().trim_end_matches(".json");
        assert!(run.contains(&kind) || others.contains(&kind), "the kind {kind} is new");
    }
    assert!(files.len() >= run.len());
}
