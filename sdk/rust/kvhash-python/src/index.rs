//! The residency of one rank, for `kvhash.index`: what it holds lives here, what is known of its stream in Python.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use kvhash::events::decode_batch;
use kvhash::index::{Group, Hashes, Hashing, Match, Parent, Place, RankSettings, Signal, Tiers};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyInt, PyList, PyString, PyTuple};

use crate::hashing::Engine;

/// Parents as Python has them; a key is not negative.
const ROOT: i128 = -1;
const UNPLACED: i128 = -2;

/// Number, sizes by tier, smallest, kind, window, chunk.
type GroupValues = (i128, Vec<u64>, u64, Option<String>, u64, u64);
/// Key, copies, parent, digest, whether a chunk ends here.
type BlockValues<'py> = (u64, u32, i128, Option<Bound<'py, PyBytes>>, bool);

fn group_of((number, sizes, smallest, kind, window, chunk): GroupValues) -> (i128, Group) {
    (number, Group { sizes, smallest, kind, window, chunk })
}

/// What one rank of an engine holds.
#[pyclass(frozen, module = "kvhash._native")]
pub(crate) struct RankMap(Mutex<kvhash::index::RankMap>);

/// How often a lookup looks again at a map that is locked before it sleeps: some tens of microseconds.
const SPINS: u32 = 1000;

impl RankMap {
    // A panic while it was locked leaves counts that may be off by one event, and nothing worse.
    fn lock(&self) -> MutexGuard<'_, kvhash::index::RankMap> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock, unless another thread holds it.
    fn lock_if_free(&self) -> Option<MutexGuard<'_, kvhash::index::RankMap>> {
        match self.0.try_lock() {
            Ok(held) => Some(held),
            Err(TryLockError::Poisoned(held)) => Some(held.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The lock, after a wait; one batch takes less time than to sleep and be woken.
    fn lock_soon(&self) -> MutexGuard<'_, kvhash::index::RankMap> {
        for _ in 0..SPINS {
            if let Some(held) = self.lock_if_free() {
                return held;
            }
            std::hint::spin_loop();
        }
        self.lock()
    }

    fn apply_one(&self, payload: &[u8]) -> Result<Vec<Signal>, String> {
        let batch = decode_batch(payload).map_err(|error| error.to_string())?;
        Ok(self.lock().apply(&batch))
    }
}

fn names(signals: &[Signal]) -> Vec<&'static str> {
    signals.iter().map(|signal| signal.name()).collect()
}

#[pymethods]
impl RankMap {
    #[new]
    fn new(media: Vec<(String, usize)>) -> Self {
        Self(Mutex::new(kvhash::index::RankMap::new(Tiers::new(media), RankSettings::default())))
    }

    #[pyo3(signature = (*, tokens_per_hash, groups, use_eagle, offload_chunk_blocks, reports_reuse, hashing))]
    fn configure(
        &self,
        tokens_per_hash: u64,
        groups: Vec<GroupValues>,
        use_eagle: bool,
        offload_chunk_blocks: u64,
        reports_reuse: bool,
        hashing: Option<PyRef<'_, Engine>>,
    ) {
        let hashing = hashing.map(|engine| {
            let hasher = engine.hasher();
            Hashing { function: hasher.function(), none_hash: hasher.none_hash(), span: hasher.span() }
        });
        let groups = groups.into_iter().map(group_of).collect();
        self.lock().configure(RankSettings {
            tokens_per_hash,
            groups,
            use_eagle,
            offload_chunk_blocks,
            reports_reuse,
            hashing,
        });
    }

    /// Apply a batch as it was published; returns what bears on the trust in it, in order.
    fn apply(&self, py: Python<'_>, payload: &Bound<'_, PyBytes>) -> PyResult<Vec<&'static str>> {
        let payload = payload.as_bytes();
        let signals = py.detach(|| self.apply_one(payload)).map_err(PyValueError::new_err)?;
        Ok(names(&signals))
    }

    fn clear(&self) {
        self.lock().clear();
    }

    fn restart(&self) {
        self.lock().restart();
    }

    fn evict(&self, count: usize) -> usize {
        self.lock().evict(count)
    }

    #[getter]
    fn size(&self) -> usize {
        self.lock().len()
    }

    #[getter]
    fn fullest(&self) -> usize {
        self.lock().fullest()
    }

    #[getter]
    fn unit(&self) -> u64 {
        self.lock().unit()
    }

    /// Bytes in use for blocks, whole digests left out.
    #[getter]
    fn memory(&self) -> usize {
        self.lock().places().map(|(_, layer)| layer.memory()).sum()
    }

    fn counts(&self) -> Vec<(&'static str, u64)> {
        self.lock().counts.named().into()
    }

    fn unknown_media(&self) -> Vec<(String, u64)> {
        self.lock().unknown_media().to_vec()
    }

    fn count_medium(&self, name: &str, count: u64) {
        self.lock().count_medium(name, count);
    }

    fn groups(&self) -> Vec<GroupValues> {
        let map = self.lock();
        let values = map.groups().iter().map(|(number, group)| {
            (*number, group.sizes.clone(), group.smallest, group.kind.clone(), group.window, group.chunk)
        });
        values.collect()
    }

    fn set_group(&self, values: GroupValues) {
        let (number, group) = group_of(values);
        self.lock().set_group(number, group);
    }

    /// Tier, remote, group, blocks, reachable blocks, conflicts, collisions of each place.
    fn places(&self) -> Vec<(usize, bool, i128, usize, u64, u64, u64)> {
        let map = self.lock();
        let values = map.places().map(|(place, layer)| {
            let Place { tier, remote, group } = *place;
            (tier, remote, group, layer.len(), layer.reachable, layer.conflicts, layer.collisions)
        });
        values.collect()
    }

    /// The blocks of a place and their depths, the one held longest first.
    fn dump<'py>(
        &self,
        py: Python<'py>,
        tier: usize,
        remote: bool,
        group: i128,
    ) -> Vec<(BlockValues<'py>, u32)> {
        let map = self.lock();
        let wanted = Place { tier, remote, group };
        let Some((_, layer)) = map.places().find(|(place, _)| **place == wanted) else { return Vec::new() };
        let values = layer.iter().map(|block| {
            let parent = match block.parent {
                Parent::Root => ROOT,
                Parent::Unplaced => UNPLACED,
                Parent::Key(key) => key.into(),
            };
            let digest = block.digest.map(|digest| PyBytes::new(py, &digest));
            ((block.key, block.copies, parent, digest, block.ends_chunk), block.depth)
        });
        values.collect()
    }

    fn restore(&self, tier: usize, remote: bool, group: i128, blocks: Vec<BlockValues<'_>>) -> PyResult<()> {
        let mut map = self.lock();
        let layer = map.layer(Place { tier, remote, group });
        for (key, copies, parent, digest, ends_chunk) in blocks {
            let parent = match parent {
                ROOT => Parent::Root,
                UNPLACED => Parent::Unplaced,
                other => u64::try_from(other)
                    .map(Parent::Key)
                    .map_err(|_| PyValueError::new_err(format!("a block has the parent {other}")))?,
            };
            layer.store(key, parent, digest.as_ref().map(|digest| digest.as_bytes()), ends_chunk);
            layer.set_copies(key, copies);
        }
        Ok(())
    }

    fn beginnings(&self, tier: usize, remote: bool, group: i128) -> Vec<(u64, u64, u32, u64)> {
        let map = self.lock();
        let wanted = Place { tier, remote, group };
        let found = map.places().find(|(place, _)| **place == wanted).map(|(_, layer)| layer.beginnings());
        found.unwrap_or_default()
    }
}

/// What batches said of one rank: its number, the time of the last, and what bears on the trust in it.
type Told<'py> = (Bound<'py, PyAny>, f64, Vec<&'static str>);

/// Apply batches to the maps of one engine's ranks, the interpreter left to others meanwhile.
///
/// `ranks`: (number, map) of each. Returns how many were applied, by how many blocks the maps grew by it, and what they
/// said. It stops before one that cannot be read, and before one of a rank that is not there.
#[pyfunction]
pub(crate) fn apply_payloads<'py>(
    py: Python<'py>,
    ranks: Vec<(Bound<'py, PyAny>, Py<RankMap>)>,
    payloads: Vec<Bound<'py, PyBytes>>,
) -> PyResult<(usize, i64, Vec<Told<'py>>)> {
    let numbers: Vec<Option<i128>> =
        ranks.iter().map(|(number, _)| number.extract()).collect::<PyResult<_>>()?;
    let maps: Vec<&RankMap> = ranks.iter().map(|(_, map)| map.get()).collect();
    let bytes: Vec<&[u8]> = payloads.iter().map(|payload| payload.as_bytes()).collect();
    let (done, grown, told) = py.detach(|| {
        let mut told: Vec<Option<(f64, Vec<Signal>)>> = vec![None; maps.len()];
        let mut grown = 0;
        let mut at = 0;
        for (done, payload) in bytes.iter().enumerate() {
            let Ok(batch) = decode_batch(payload) else { return (done, grown, told) };
            let number = batch.data_parallel_rank.map(|number| number.value());
            // Most often of the rank that the one before was of.
            if numbers.get(at) != Some(&number) {
                let Some(place) = numbers.iter().position(|known| *known == number) else {
                    return (done, grown, told);
                };
                at = place;
            }
            // Held for one batch: a lookup waits no longer.
            let mut map = maps[at].lock();
            let before = map.len() as i64;
            let signals = map.apply(&batch);
            grown += map.len() as i64 - before;
            drop(map);
            let (ts, all) = told[at].get_or_insert_default();
            *ts = batch.ts;
            all.extend(signals);
        }
        (bytes.len(), grown, told)
    });
    let told = ranks.into_iter().zip(told).filter_map(|((number, _), told)| {
        let (ts, signals) = told?;
        Some((number, ts, names(&signals)))
    });
    Ok((done, grown, told.collect()))
}

/// A lookup's hashes where they lie, in a Python list or tuple; read only where a search asks.
struct Listed<'py> {
    items: Items<'py>,
    length: usize,
    fault: RefCell<Option<PyErr>>,
}

enum Items<'py> {
    List(Bound<'py, PyList>),
    Tuple(Bound<'py, PyTuple>),
}

impl<'py> Listed<'py> {
    fn new(hashes: &Bound<'py, PyAny>) -> PyResult<Self> {
        let items = if let Ok(list) = hashes.cast::<PyList>() {
            Items::List(list.clone())
        } else if let Ok(tuple) = hashes.cast::<PyTuple>() {
            Items::Tuple(tuple.clone())
        } else {
            let items: PyResult<Vec<Bound<'py, PyAny>>> = hashes.try_iter()?.collect();
            Items::List(PyList::new(hashes.py(), items?)?)
        };
        let length = match &items {
            Items::List(list) => list.len(),
            Items::Tuple(tuple) => tuple.len(),
        };
        Ok(Self { items, length, fault: RefCell::new(None) })
    }

    fn item(&self, index: usize) -> PyResult<Bound<'py, PyAny>> {
        match &self.items {
            Items::List(list) => list.get_item(index),
            Items::Tuple(tuple) => tuple.get_item(index),
        }
    }

    /// The low 64 bits of the hash at a place; what is no hash is as `kvhash.events.hash_key` says.
    fn read(&self, index: usize) -> PyResult<u64> {
        let item = self.item(index)?;
        if let Ok(bytes) = item.cast::<PyBytes>() {
            let bytes = bytes.as_bytes();
            if (8..=64).contains(&bytes.len()) {
                let last = &bytes[bytes.len() - 8..];
                return Ok(last.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)));
            }
        } else if item.is_exact_instance_of::<PyInt>() {
            if let Ok(number) = item.extract::<u64>() {
                return Ok(number);
            }
            return item.call_method1("__and__", (u64::MAX,))?.extract();
        } else if !matches!(item.get_type().name()?.to_str()?, "bool" | "bool_") {
            // NumPy's integers; its booleans are none.
            if let Ok(number) = item.call_method0("__index__") {
                return number.call_method1("__and__", (u64::MAX,))?.extract();
            }
        }
        Err(PyTypeError::new_err("a block hash is an integer or 8 to 64 bytes"))
    }
}

impl Hashes for Listed<'_> {
    fn len(&self) -> usize {
        self.length
    }

    fn key(&self, index: usize) -> u64 {
        self.read(index).unwrap_or_else(|error| {
            self.fault.borrow_mut().get_or_insert(error);
            0
        })
    }

    fn differs(&self, index: usize, digest: &[u8]) -> bool {
        let Ok(item) = self.item(index) else { return false };
        let Ok(bytes) = item.cast::<PyBytes>() else { return false };
        let bytes = bytes.as_bytes();
        bytes.len() > 8 && bytes.len() == digest.len() && bytes != digest
    }
}

/// What is compared: usable tokens, blocks, remote blocks.
type Worth = (u64, u64, u64);

/// The ranks of many engines, for lookups over all of them.
#[pyclass(frozen, module = "kvhash._native")]
pub(crate) struct Fleet {
    engines: Vec<Member>,
    by_name: HashMap<String, usize>,
    /// The tiers' names.
    tiers: Vec<Py<PyString>>,
    /// `kvhash.index.PrefixMatch`.
    make: Py<PyAny>,
}

/// Number and map of each of an engine's ranks.
type Ranks = Vec<(Py<PyAny>, Py<RankMap>)>;

struct Member {
    name: Py<PyString>,
    ranks: Ranks,
}

#[pymethods]
impl Fleet {
    /// `engines`: name, and number and map of each rank. `tiers`: their names. `make`: `kvhash.index.PrefixMatch`.
    #[new]
    fn new(
        py: Python<'_>,
        engines: Vec<(Py<PyString>, Ranks)>,
        tiers: Vec<Py<PyString>>,
        make: Py<PyAny>,
    ) -> PyResult<Self> {
        let engines: Vec<Member> = engines.into_iter().map(|(name, ranks)| Member { name, ranks }).collect();
        let names = engines.iter().enumerate();
        let by_name = names
            .map(|(at, engine)| Ok((engine.name.to_str(py)?.to_owned(), at)))
            .collect::<PyResult<_>>()?;
        Ok(Self { engines, by_name, tiers, make })
    }

    /// Return what each engine holds of a prompt: of its ranks the one with most usable tokens answers.
    ///
    /// `engines`: their names; None: all. One that is not here holds nothing.
    fn longest_prefix<'py>(
        &self,
        hashes: &Bound<'py, PyAny>,
        num_tokens: Option<u64>,
        engines: Option<Vec<Bound<'py, PyString>>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let py = hashes.py();
        let listed = Listed::new(hashes)?;
        let answers = PyDict::new(py);
        let nothing = self.make.bind(py).call0()?;
        let mut members: Vec<&Member> = Vec::with_capacity(self.engines.len());
        match engines {
            None => members.extend(&self.engines),
            Some(names) => {
                for name in names {
                    match self.by_name.get(name.to_str()?) {
                        Some(&at) => members.push(&self.engines[at]),
                        None => answers.set_item(name, &nothing)?,
                    }
                }
            }
        }
        let found = best_matches(&members, &listed, num_tokens);
        if let Some(error) = listed.fault.into_inner() {
            return Err(error);
        }
        // Engines that hold the same are answered by one value.
        let mut last: Option<(&Match, &Py<PyAny>, Bound<'py, PyAny>)> = None;
        for (member, best) in members.iter().zip(&found) {
            let Some((rank, found)) = best else {
                answers.set_item(&member.name, &nothing)?;
                continue;
            };
            let number = &member.ranks[*rank].0;
            let answer = match &last {
                Some((known, rank, answer)) if *known == found && rank.is(number) => answer.clone(),
                _ => self.answer(py, found, number)?,
            };
            answers.set_item(&member.name, &answer)?;
            last = Some((found, number, answer));
        }
        Ok(answers)
    }
}

impl Fleet {
    fn answer<'py>(&self, py: Python<'py>, found: &Match, rank: &Py<PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let named = |counts: &[(usize, u64)]| -> PyResult<Bound<'py, PyDict>> {
            let names = PyDict::new(py);
            for &(tier, blocks) in counts {
                names.set_item(&self.tiers[tier], blocks)?;
            }
            Ok(names)
        };
        let blocks = found.tokens.checked_div(found.unit).unwrap_or(0);
        let (by_tier, remote) = (named(&found.by_tier)?, named(&found.remote)?);
        self.make.bind(py).call1((blocks, found.tokens, by_tier, found.usable_tokens, remote, rank))
    }
}

/// For each engine the rank (its place) that holds most of the prompt, and what; `None` where none holds any.
///
/// Each map is locked for itself, and one that a batch is just being applied to is asked last. What will be read is
/// read ahead: the ranks' memory is far apart, and the processor fetches many places at once as long as none depends
/// on another.
fn best_matches(
    members: &[&Member],
    hashes: &Listed<'_>,
    num_tokens: Option<u64>,
) -> Vec<Option<(usize, Match)>> {
    let mut maps: Vec<(usize, usize, &RankMap)> = Vec::with_capacity(members.len());
    for (engine, member) in members.iter().enumerate() {
        maps.extend(member.ranks.iter().enumerate().map(|(rank, (_, map))| (engine, rank, map.get())));
    }
    let mut best: Vec<Option<(Worth, usize, Match)>> = Vec::new();
    best.resize_with(members.len(), || None);
    let mut hint = 0_usize;
    let mut ask = |engine: usize, rank: usize, map: &kvhash::index::RankMap, hint: &mut usize| {
        let found = map.longest_prefix(hashes, num_tokens, *hint);
        let blocks = found.tokens.checked_div(found.unit).unwrap_or(0);
        if blocks > 0 {
            *hint = usize::try_from(blocks).unwrap_or(0);
        }
        let worth = (found.usable_tokens, blocks, found.remote.iter().map(|(_, blocks)| blocks).sum());
        let better = match &best[engine] {
            None => worth > (0, 0, 0),
            Some((known, first, _)) => worth > *known || (worth == *known && rank < *first),
        };
        if better {
            best[engine] = Some((worth, rank, found));
        }
    };
    let mut busy = Vec::new();
    for (place, &(engine, rank, map)) in maps.iter().enumerate() {
        if place == 1 {
            let ends = [hint.checked_sub(1), Some(hint)].into_iter().flatten();
            let keys: Vec<u64> = ends.filter(|&end| end < hashes.len()).map(|end| hashes.key(end)).collect();
            let free = maps[1..].iter().filter_map(|(_, _, map)| map.lock_if_free());
            let read: usize = free.map(|map| map.touch(&keys)).sum();
            std::hint::black_box(read);
        }
        match map.lock_if_free() {
            Some(held) => ask(engine, rank, &held, &mut hint),
            None => busy.push((engine, rank, map)),
        }
    }
    for (engine, rank, map) in busy {
        ask(engine, rank, &map.lock_soon(), &mut hint);
    }
    best.into_iter().map(|best| best.map(|(_, rank, found)| (rank, found))).collect()
}
