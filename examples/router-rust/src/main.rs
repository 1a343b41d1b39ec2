//! `kvhash-route` follows engines and answers where each prompt should go: JSON lines in, JSON lines out.
//!
//! A line has "tokens", and may add "cache_salt", "lora" {"name", "path"}, "queued" and "recent" {engine: tokens} and
//! "speed" {engine: tokens a second}.

use std::collections::{BTreeMap, HashSet};
use std::io::{BufRead, Write};
use std::process::ExitCode;
use std::sync::{mpsc, Arc};
use std::time::{Duration, Instant};

use kvhash::{BlockHasher, Lora, RequestKeys, Settings};
use kvhash_router::{decide, follow, Candidate, EngineSettings, Index, Knowledge, Policy, Source};
use serde::{Deserialize, Serialize};

const USAGE: &str = "\
Usage: kvhash-route --engine NAME=EVENTS[,REPLAY]... [OPTIONS]

Answers where each prompt should go: JSON lines in, JSON lines out.

  --engine NAME=EVENTS[,REPLAY]   an engine's endpoints; may be given again
  --vllm RELEASE                  the engines' vLLM release (latest)
  --prefix-caching-hash-algo A    (sha256)
  --hash-seed SEED                PYTHONHASHSEED of the engines; left out: unset
  --block-size N                  tokens of a block (16)
  --max-blocks N                  blocks to remember of an engine; left out: all
  --wait SECONDS                  the longest wait for the engines' replays before the first answer (6)

  echo '{\"tokens\":[1,2,3]}' | kvhash-route --hash-seed 0 --engine a=tcp://127.0.0.1:5557,tcp://127.0.0.1:5558
";

/// One replay, and the wait for an engine to be there.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(5);
/// A day: a longer wait is a mistake.
const LONGEST_WAIT: Duration = Duration::from_secs(86_400);
/// The speed of an engine of which none is said, in tokens a second.
const SPEED: f64 = 10_000.0;

struct Options {
    sources: Vec<Source>,
    vllm: String,
    algorithm: String,
    seed: Option<String>,
    block_size: u64,
    max_blocks: Option<usize>,
    wait: Duration,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    tokens: Vec<u32>,
    #[serde(default)]
    cache_salt: Option<String>,
    #[serde(default)]
    lora: Option<Adapter>,
    #[serde(default)]
    queued: BTreeMap<String, f64>,
    #[serde(default)]
    recent: BTreeMap<String, f64>,
    #[serde(default)]
    speed: BTreeMap<String, f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Adapter {
    name: String,
    #[serde(default)]
    path: Option<String>,
}

#[derive(Debug, Default, Serialize)]
struct Answer {
    #[serde(skip_serializing_if = "String::is_empty")]
    engine: String,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    matched_tokens: BTreeMap<String, u64>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    knowledge: BTreeMap<String, Knowledge>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

fn main() -> ExitCode {
    let options = match options(lexopt::Parser::from_env()) {
        Ok(Some(options)) => options,
        Ok(None) => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(error) => return refuse(&error.to_string()),
    };
    let hasher = BlockHasher::new(&Settings {
        vllm: &options.vllm,
        algorithm: &options.algorithm,
        block_size: options.block_size,
        hash_seed: options.seed.as_deref(),
        ..Settings::default()
    });
    let hasher = match hasher {
        Ok(hasher) => hasher,
        Err(error) => return refuse(&error.to_string()),
    };
    let settings = EngineSettings { hasher: Some(hasher.clone()), max_blocks: options.max_blocks };
    let index = Arc::new(Index::new(settings));
    let names: Vec<String> = options.sources.iter().map(|source| source.engine.clone()).collect();
    let ready = start(options.sources, &index);
    wait_for(&ready, names.len(), options.wait);
    let mut output = std::io::stdout().lock();
    for line in std::io::stdin().lock().split(b'\n') {
        let line = match line {
            Ok(line) if line.trim_ascii().is_empty() => continue,
            Ok(line) => line,
            Err(error) => return refuse(&format!("standard input cannot be read: {error}")),
        };
        let answer = route(&line, &hasher, &names, &index)
            .unwrap_or_else(|error| Answer { error: Some(error), ..Answer::default() });
        let text = serde_json::to_string(&answer).expect("an answer has nothing but names and numbers");
        if writeln!(output, "{text}").and_then(|()| output.flush()).is_err() {
            break; // nobody reads any longer
        }
    }
    ExitCode::SUCCESS
}

fn refuse(message: &str) -> ExitCode {
    eprintln!("error: {message}");
    ExitCode::from(2)
}

fn options(mut parser: lexopt::Parser) -> Result<Option<Options>, lexopt::Error> {
    use lexopt::prelude::*;

    let mut options = Options {
        sources: Vec::new(),
        vllm: "latest".into(),
        algorithm: "sha256".into(),
        seed: None,
        block_size: 16,
        max_blocks: None,
        wait: Duration::from_secs(6),
    };
    while let Some(argument) = parser.next()? {
        match argument {
            Long("engine") => {
                let source = parser.value()?.parse_with(source)?;
                if options.sources.iter().any(|other| other.engine == source.engine) {
                    return Err(format!("two engines are named {:?}", source.engine).into());
                }
                options.sources.push(source);
            }
            Long("vllm") => options.vllm = parser.value()?.string()?,
            Long("prefix-caching-hash-algo") => options.algorithm = parser.value()?.string()?,
            Long("hash-seed") => options.seed = Some(parser.value()?.string()?),
            Long("block-size") => options.block_size = parser.value()?.parse()?,
            Long("max-blocks") => {
                let bound: usize = parser.value()?.parse()?;
                if bound == 0 {
                    return Err("expected --max-blocks of at least 1, got 0".into());
                }
                options.max_blocks = Some(bound);
            }
            Long("wait") => {
                let seconds: f64 = parser.value()?.parse()?;
                options.wait = Duration::try_from_secs_f64(seconds)
                    .ok()
                    .filter(|&wait| wait <= LONGEST_WAIT)
                    .ok_or_else(|| format!("expected --wait in seconds, from 0 to 86400, got {seconds}"))?;
            }
            Short('h') | Long("help") => return Ok(None),
            other => return Err(other.unexpected()),
        }
    }
    if options.sources.is_empty() {
        return Err("expected at least one --engine NAME=EVENTS[,REPLAY]".into());
    }
    Ok(Some(options))
}

fn source(text: &str) -> Result<Source, String> {
    let (name, endpoints) = text.split_once('=').unwrap_or_default();
    let endpoints: Vec<&str> = endpoints.split(',').collect();
    if name.is_empty() || endpoints[0].is_empty() || endpoints.len() > 2 {
        return Err(format!("expected NAME=EVENTS[,REPLAY], got {text:?}"));
    }
    if let Some(wrong) = endpoints.iter().find(|endpoint| !connectable(endpoint)) {
        return Err(format!(
            "expected tcp://HOST:PORT or ipc://PATH that can be connected to, got {wrong:?}"
        ));
    }
    Ok(Source {
        engine: name.to_owned(),
        events: endpoints[0].to_owned(),
        replay: endpoints.get(1).map(|&endpoint| endpoint.to_owned()),
        replay_timeout: REPLAY_TIMEOUT,
    })
}

fn connectable(endpoint: &str) -> bool {
    if let Some(path) = endpoint.strip_prefix("ipc://") {
        return !path.is_empty() && is_short(path);
    }
    let Some((host, port)) = endpoint.strip_prefix("tcp://").and_then(|address| address.rsplit_once(':'))
    else {
        return false;
    };
    !matches!(host, "" | "*") && port.parse::<u16>().is_ok_and(|port| port > 0)
}

/// Whether a path fits into a Unix socket's address.
#[cfg(unix)]
fn is_short(path: &str) -> bool {
    std::os::unix::net::SocketAddr::from_pathname(path).is_ok()
}

#[cfg(not(unix))]
fn is_short(_: &str) -> bool {
    true
}

/// Follow the sources in a thread of their own; each one's name comes once what it published before is there.
fn start(sources: Vec<Source>, index: &Arc<Index>) -> mpsc::Receiver<String> {
    let (ready, said) = mpsc::channel();
    let index = Arc::clone(index);
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime for the sockets");
        let tasks = tokio::task::LocalSet::new();
        for source in sources {
            let (index, ready) = (Arc::clone(&index), ready.clone());
            tasks.spawn_local(async move {
                let name = source.engine.clone();
                let said = || drop(ready.send(name.clone()));
                if let Err(error) = follow(source, &index, said).await {
                    eprintln!("engine {name} is not followed: {error}");
                    said(); // one that cannot be followed is not waited for
                }
            });
        }
        drop(ready);
        runtime.block_on(tasks);
    });
    said
}

/// Return when so many engines are ready, or the longest wait is over.
fn wait_for(ready: &mpsc::Receiver<String>, count: usize, longest: Duration) {
    let deadline = Instant::now() + longest;
    let mut seen = HashSet::new();
    while seen.len() < count {
        match ready.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(name) => drop(seen.insert(name)),
            Err(_) => return,
        }
    }
}

fn route(line: &[u8], hasher: &BlockHasher, engines: &[String], index: &Index) -> Result<Answer, String> {
    let asked: Question = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    if asked.tokens.is_empty() {
        return Err("expected at least one token in \"tokens\"".into());
    }
    if let Some((engine, speed)) = asked.speed.iter().find(|(_, &speed)| speed <= 0.0) {
        return Err(format!("expected a speed above 0 for {engine:?}, got {speed}"));
    }
    for (what, tokens) in [("queued", &asked.queued), ("recent", &asked.recent)] {
        if let Some((engine, number)) = tokens.iter().find(|(_, &number)| number < 0.0) {
            return Err(format!("expected {what} tokens of at least 0 for {engine:?}, got {number}"));
        }
    }
    let keys = RequestKeys {
        lora: asked.lora.map(|lora| Lora {
            name: Some(lora.name.into()),
            path: lora.path.map(Into::into),
            id: None,
        }),
        cache_salt: asked.cache_salt.filter(|salt| !salt.is_empty()).map(Into::into),
        ..RequestKeys::default()
    };
    let mut chain = hasher.chain(keys).map_err(|error| error.to_string())?;
    let hashes = chain.append(&asked.tokens);
    let tokens = asked.tokens.len() as u64;
    let mut answer = Answer::default();
    let candidates: Vec<Candidate> = engines
        .iter()
        .map(|engine| {
            let matched_tokens = index.matched_tokens(engine, hashes, tokens);
            let knowledge = index.knowledge(engine);
            answer.matched_tokens.insert(engine.clone(), matched_tokens);
            answer.knowledge.insert(engine.clone(), knowledge);
            Candidate {
                engine: engine.clone(),
                matched_tokens,
                knowledge,
                queued_tokens: asked.queued.get(engine).copied().unwrap_or(0.0),
                recent_tokens: asked.recent.get(engine).copied().unwrap_or(0.0),
                speed: asked.speed.get(engine).copied().unwrap_or(SPEED),
            }
        })
        .collect();
    let scored = decide(tokens, &candidates, &Policy::default(), &mut |count| rand::random_range(0..count));
    answer.engine.clone_from(&scored[0].candidate.engine);
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str]) -> Result<Option<Options>, lexopt::Error> {
        options(lexopt::Parser::from_args(arguments))
    }

    /// Endpoints that nothing can be connected to, and names that are taken, are refused.
    #[test]
    fn engines_that_cannot_be_followed_are_refused() {
        for wrong in [
            "a",
            "=tcp://h:5",
            "a=",
            "a=h:5",
            "a=tcp://*:5",
            "a=tcp://h",
            "a=tcp://h:0",
            "a=tcp://h:99999",
            "a=ipc://",
            "a=tcp://h:5,",
            "a=tcp://h:5,tcp://*:6",
            "a=tcp://h:5,tcp://h:6,tcp://h:7",
            &format!("a=ipc://{}", "x".repeat(500)),
            &format!("a=tcp://h:5,ipc://{}", "x".repeat(500)),
        ] {
            assert!(parsed(&["--engine", wrong]).is_err(), "{wrong} is accepted");
        }
        let right =
            ["--engine", "a=tcp://h:5", "--engine", "b=tcp://[::1]:5,tcp://h:6", "--engine", "c=ipc:///x"];
        assert_eq!(parsed(&right).unwrap().unwrap().sources.len(), 3);
        assert!(parsed(&["--engine", "a=tcp://h:5", "--engine", "a=tcp://h:9"]).is_err());
        assert!(parsed(&[]).is_err());
        for wrong in ["-1", "nan", "inf", "1e15"] {
            assert!(parsed(&["--engine", "a=tcp://h:5", "--wait", wrong]).is_err(), "{wrong} is accepted");
        }
    }

    /// A question that says nothing, or nonsense, is answered with what would be right.
    #[test]
    fn questions_that_say_nothing_are_refused() {
        let settings = Settings { hash_seed: Some("0"), ..Settings::default() };
        let hasher = BlockHasher::new(&settings).unwrap();
        let index = Index::new(EngineSettings::default());
        let engines = ["a".to_owned()];
        for wrong in [
            "{}",
            r#"{"tokens":[]}"#,
            "[]",
            r#"{"tokens":[-1]}"#,
            r#"{"tokens":[1],"speed":{"a":-1}}"#,
            r#"{"tokens":[1],"speed":{"a":0}}"#,
            r#"{"tokens":[1],"queued":{"a":-1}}"#,
            r#"{"tokens":[1],"recent":{"a":-1}}"#,
            r#"{"tokens":[1],"cache_sat":"x"}"#,
        ] {
            assert!(route(wrong.as_bytes(), &hasher, &engines, &index).is_err(), "{wrong} is accepted");
        }
        assert!(route(b"{\"tokens\":[1],\"cache_salt\":\"\xff\"}", &hasher, &engines, &index).is_err());
        let answer = route(br#"{"tokens":[1],"speed":{"a":2}}"#, &hasher, &engines, &index).unwrap();
        assert_eq!(answer.engine, "a");
        assert_eq!(answer.knowledge["a"], Knowledge::Unknown);
    }

    /// The first answer waits for replays, but not for ever, and a name said twice is one.
    #[test]
    fn the_wait_for_replays_ends() {
        let (sender, said) = mpsc::channel();
        let say = |name: &str| sender.send(name.to_owned()).unwrap();
        say("a");
        say("a");
        let began = Instant::now();
        wait_for(&said, 2, Duration::from_millis(50));
        assert!(began.elapsed() >= Duration::from_millis(50));
        say("a");
        say("b");
        wait_for(&said, 2, Duration::from_secs(3600));
    }
}
