//! The residency of one rank, for `kvhash.index`: what it holds lives here, what is known of its stream in Python.

use std::cell::RefCell;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvhash::events::decode_batch;
use kvhash::index::{Group, Hashes, Hashing, Parent, Place, RankSettings, Signal, Tiers};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};

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

impl RankMap {
    // A panic while it was locked leaves counts that may be off by one event, and nothing worse.
    fn lock(&self) -> MutexGuard<'_, kvhash::index::RankMap> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
/// `ranks`: (number, map) of each. Returns how many were applied and what they said. It stops before one that cannot be
/// read, and before one of a rank that is not there.
#[pyfunction]
pub(crate) fn apply_payloads<'py>(
    py: Python<'py>,
    ranks: Vec<(Bound<'py, PyAny>, Py<RankMap>)>,
    payloads: Vec<Bound<'py, PyBytes>>,
) -> PyResult<(usize, Vec<Told<'py>>)> {
    let numbers: Vec<Option<i128>> =
        ranks.iter().map(|(number, _)| number.extract()).collect::<PyResult<_>>()?;
    let maps: Vec<&RankMap> = ranks.iter().map(|(_, map)| map.get()).collect();
    let bytes: Vec<&[u8]> = payloads.iter().map(|payload| payload.as_bytes()).collect();
    let (done, told) = py.detach(|| {
        let mut told: Vec<Option<(f64, Vec<Signal>)>> = vec![None; maps.len()];
        for (done, payload) in bytes.iter().enumerate() {
            let Ok(batch) = decode_batch(payload) else { return (done, told) };
            let number = batch.data_parallel_rank.map(|number| number.value());
            let Some(at) = numbers.iter().position(|known| *known == number) else { return (done, told) };
            let signals = maps[at].lock().apply(&batch);
            let (ts, all) = told[at].get_or_insert_default();
            *ts = batch.ts;
            all.extend(signals);
        }
        (bytes.len(), told)
    });
    let told = ranks.into_iter().zip(told).filter_map(|((number, _), told)| {
        let (ts, signals) = told?;
        Some((number, ts, names(&signals)))
    });
    Ok((done, told.collect()))
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

    fn read(&self, index: usize) -> PyResult<u64> {
        let item = self.item(index)?;
        if let Ok(bytes) = item.cast::<PyBytes>() {
            let bytes = bytes.as_bytes();
            let last = &bytes[bytes.len().saturating_sub(8)..];
            return Ok(last.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)));
        }
        if let Ok(number) = item.extract::<u64>() {
            return Ok(number);
        }
        if !item.is_instance_of::<pyo3::types::PyInt>() {
            let kind = item.get_type().name()?.to_string();
            return Err(PyTypeError::new_err(format!("a block hash is bytes or an int, not {kind}")));
        }
        item.call_method1("__and__", (u64::MAX,))?.extract()
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

/// What is compared (usable tokens, blocks, remote blocks), the match, and its rank's number.
type Best<'py> = ((u64, u64, u64), kvhash::index::Match, Bound<'py, PyAny>);

/// Return what each engine holds of a prompt: of its ranks the one with most usable tokens answers.
///
/// `engines`: by name, (number, map) of each rank. `make`: `kvhash.index.PrefixMatch`. `tiers`: their names.
#[pyfunction]
pub(crate) fn longest_prefix<'py>(
    engines: &Bound<'py, PyDict>,
    hashes: &Bound<'py, PyAny>,
    num_tokens: Option<u64>,
    tiers: Vec<Bound<'py, PyString>>,
    make: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyDict>> {
    let py = hashes.py();
    let listed = Listed::new(hashes)?;
    let answers = PyDict::new(py);
    let mut hint = 0;
    for (name, ranks) in engines.iter() {
        let ranks = ranks.cast::<PyList>()?;
        let mut best: Option<Best<'py>> = None;
        for rank in ranks.iter() {
            let rank = rank.cast::<PyTuple>()?;
            let (number, map) = (rank.get_item(0)?, rank.get_item(1)?);
            let found = map.cast::<RankMap>()?.get().lock().longest_prefix(&listed, num_tokens, hint);
            let blocks = found.tokens.checked_div(found.unit).unwrap_or(0);
            if blocks > 0 {
                hint = usize::try_from(blocks).unwrap_or(0);
            }
            let remote = found.remote.iter().map(|(_, blocks)| blocks).sum();
            let score = (found.usable_tokens, blocks, remote);
            if score > best.as_ref().map_or((0, 0, 0), |(score, ..)| *score) {
                best = Some((score, found, number));
            }
        }
        let answer = match best {
            None => make.call0()?,
            Some(((usable, blocks, _), found, number)) => {
                let named = |counts: &[(usize, u64)]| -> PyResult<Bound<'py, PyDict>> {
                    let names = PyDict::new(py);
                    for &(tier, blocks) in counts {
                        names.set_item(&tiers[tier], blocks)?;
                    }
                    Ok(names)
                };
                make.call1((
                    blocks,
                    found.tokens,
                    named(&found.by_tier)?,
                    usable,
                    named(&found.remote)?,
                    number,
                ))?
            }
        };
        answers.set_item(name, answer)?;
    }
    match listed.fault.into_inner() {
        Some(error) => Err(error),
        None => Ok(answers),
    }
}
