//! Which engine holds which prefix, on the crate's residency index: tiers, groups, copies, orphans are its rules.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvhash::events::EventBatch;
use kvhash::index::{Hashes, Hashing, RankMap, RankSettings, Signal, Tiers};
use kvhash::{BlockHash, BlockHasher};

use crate::decision::Knowledge;

/// Media that count, in the order in which an engine looks. A medium that is not here scores nothing.
const MEDIA: [(&str, usize); 5] = [("GPU", 0), ("CPU", 1), ("CPU_PINNED", 1), ("DISK", 2), ("STORAGE", 2)];

/// What is told of the engines; all alike.
#[derive(Default)]
pub struct EngineSettings {
    /// How they hash: lets blocks be placed whose events leave others out.
    pub hasher: Option<BlockHasher>,
    /// Blocks of one engine, beyond which its oldest chains are dropped from their ends; `None`: no bound.
    pub max_blocks: Option<usize>,
}

/// The residency of many engines, fed by their events. Safe for concurrent use.
pub struct Index {
    settings: EngineSettings,
    engines: Mutex<HashMap<String, Engine>>,
}

struct Engine {
    map: RankMap,
    /// Why it is not known exactly.
    faults: BTreeSet<&'static str>,
    /// The data parallel rank of its batches, once one came.
    rank: Option<Option<i128>>,
}

impl Index {
    /// An index of which no engine was heard.
    #[must_use]
    pub fn new(settings: EngineSettings) -> Self {
        Self { settings, engines: Mutex::default() }
    }

    // A panic while it was locked leaves counts that may be off by one event, and nothing worse.
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Engine>> {
        self.engines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new_engine(&self) -> Engine {
        let tiers = Tiers::new(MEDIA.iter().map(|&(name, tier)| (name.to_owned(), tier)).collect());
        let hashing = self.settings.hasher.as_ref().map(|hasher| Hashing {
            function: hasher.function(),
            none_hash: hasher.none_hash(),
            span: hasher.span(),
        });
        let settings = RankSettings { hashing, ..RankSettings::default() };
        Engine { map: RankMap::new(tiers, settings), faults: BTreeSet::new(), rank: None }
    }

    /// Apply one batch of an engine, in the order of its sequence numbers.
    pub fn apply(&self, engine: &str, batch: &EventBatch<'_>) {
        let mut engines = self.lock();
        let engine = engines.entry(engine.to_owned()).or_insert_with(|| self.new_engine());
        let rank = batch.data_parallel_rank.map(|rank| rank.value());
        if *engine.rank.get_or_insert(rank) != rank {
            // Two caches behind one name: a prompt that each holds a part of is held by neither.
            engine.faults.insert("several-ranks");
        }
        for signal in engine.map.apply(batch) {
            match signal {
                Signal::Cleared => engine.faults.clear(),
                fault => drop(engine.faults.insert(fault.name())),
            }
        }
        if let Some(bound) = self.settings.max_blocks {
            // A hundredth below it, so that not every store evicts.
            let beyond = engine.map.len().saturating_sub(bound);
            let mut left = if beyond > 0 { beyond + bound / 100 } else { 0 };
            while left > 0 {
                engine.faults.insert("evicted");
                match engine.map.evict(left) {
                    0 => break,
                    dropped => left -= dropped.min(left),
                }
            }
        }
    }

    /// Say that batches of the engine will not come: it is `Degraded` until a clear or a restart.
    pub fn lost(&self, engine: &str) {
        let mut engines = self.lock();
        engines.entry(engine.to_owned()).or_insert_with(|| self.new_engine()).faults.insert("lost");
    }

    /// Forget the engine: it restarted, or is gone.
    pub fn remove(&self, engine: &str) {
        self.lock().remove(engine);
    }

    /// What is known of the engine's cache: `Exact` means as of its last batch applied.
    #[must_use]
    pub fn knowledge(&self, engine: &str) -> Knowledge {
        match self.lock().get(engine) {
            Some(engine) if engine.rank.is_some() && !engine.faults.contains("several-ranks") => {
                if engine.faults.is_empty() {
                    Knowledge::Exact
                } else {
                    Knowledge::Degraded
                }
            }
            _ => Knowledge::Unknown,
        }
    }

    /// Why the engine is not known exactly; empty where it is, or was never heard of.
    #[must_use]
    pub fn faults(&self, engine: &str) -> Vec<&'static str> {
        self.lock().get(engine).map(|engine| engine.faults.iter().copied().collect()).unwrap_or_default()
    }

    /// How many of the prompt's tokens the engine need not compute; the last one always is.
    #[must_use]
    pub fn matched_tokens(&self, engine: &str, hashes: &[BlockHash], num_tokens: u64) -> u64 {
        let engines = self.lock();
        let Some(engine) = engines.get(engine) else { return 0 };
        engine.map.longest_prefix(&Prompt(hashes), Some(num_tokens), 0).usable_tokens
    }
}

struct Prompt<'a>(&'a [BlockHash]);

impl Hashes for Prompt<'_> {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn key(&self, index: usize) -> u64 {
        self.0[index].low64()
    }

    fn differs(&self, index: usize, digest: &[u8]) -> bool {
        self.0[index].digest().is_some_and(|known| known.len() == digest.len() && known != digest)
    }
}
