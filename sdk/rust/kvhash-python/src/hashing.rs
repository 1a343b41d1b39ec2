//! The hasher and its chains, as `kvhash.hasher` uses them.

use std::collections::VecDeque;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use kvhash::contract::{ChainValues, Digest, LoraKey, MultimodalKey, PromptEmbedsKey, Serialization};
use kvhash::{
    Algorithm, BlockHash, BlockHasher, ChainState, Contract, Keyed, Lora, MultimodalItem, PromptEmbeds,
    RequestKeys,
};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::{PyBytes, PyInt, PyList};

use crate::sequence::{sequence_len, DigestList, NarrowInts};
use crate::tokens::{Data, Tokens};

/// From so many tokens on the interpreter is let go while they are hashed: some two milliseconds of work. Below, each
/// hash becomes a Python object at once, in the shadow of the next block's digest.
const DETACH_FROM: usize = 1 << 18;
/// From so many tokens on a batch is worth other threads.
const THREADS_FROM: usize = 1 << 14;

fn unknown(what: &str, value: &str) -> PyErr {
    PyValueError::new_err(format!("unknown {what} {value:?}"))
}

/// The error of a fault of this module.
fn internal() -> PyErr {
    PyRuntimeError::new_err("internal error in kvhash._native")
}

/// Run `work`; a panic, which would be a fault of this module, becomes a RuntimeError.
fn guarded<T>(work: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(internal()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn to_python<'py>(py: Python<'py>, hash: &BlockHash) -> PyResult<Bound<'py, PyAny>> {
    match hash {
        BlockHash::Sha256(digest) => Ok(PyBytes::new(py, digest).into_any()),
        BlockHash::Xxh3(digest) => Ok(PyBytes::new(py, digest).into_any()),
        BlockHash::Int(number) => {
            py.get_type::<PyInt>().call_method1("from_bytes", (PyBytes::new(py, number), "big"))
        }
    }
}

fn to_list<'py>(py: Python<'py>, hashes: &[BlockHash]) -> PyResult<Bound<'py, PyList>> {
    if matches!(hashes.first(), Some(BlockHash::Int(_))) {
        let values = hashes.iter().map(|hash| to_python(py, hash)).collect::<PyResult<Vec<_>>>()?;
        return PyList::new(py, values);
    }
    let mut digests = DigestList::new(py, hashes.len())?;
    hashes.iter().for_each(|hash| digests.push(hash.digest().unwrap_or_default()));
    digests.finish().ok_or_else(internal)
}

type Item = (PyBackedStr, u64, u64);

/// Hashes with the settings that `kvhash.BlockHasher` has checked.
#[pyclass(frozen, module = "kvhash._native")]
pub(crate) struct Engine(BlockHasher);

impl Engine {
    pub(crate) fn hasher(&self) -> &BlockHasher {
        &self.0
    }
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (
        *, serialization, digest, low64, chain_values, none_hash, span, lookahead, lora_key, multimodal_key,
        prompt_embeds_key, tagged_keys
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        serialization: &str,
        digest: &str,
        low64: bool,
        chain_values: &str,
        none_hash: &[u8],
        span: u64,
        lookahead: u64,
        lora_key: &str,
        multimodal_key: &str,
        prompt_embeds_key: &str,
        tagged_keys: bool,
    ) -> PyResult<Self> {
        let algorithm = Algorithm {
            name: "",
            serialization: match serialization {
                "pickle5" => Serialization::Pickle5,
                "cbor" => Serialization::Cbor,
                other => return Err(unknown("serialization", other)),
            },
            digest: match digest {
                "sha256" => Digest::Sha256,
                "xxh3_128" => Digest::Xxh3,
                other => return Err(unknown("digest", other)),
            },
            low64,
        };
        let chain_values = match chain_values {
            "int" => ChainValues::Int,
            "bytes" => ChainValues::Bytes,
            other => return Err(unknown("kind of chain values", other)),
        };
        let contract = Contract {
            chain_values,
            lora_key: match lora_key {
                "id" => LoraKey::Id,
                "name" => LoraKey::Name,
                "name_and_path" => LoraKey::NameAndPath,
                other => return Err(unknown("LoRA key", other)),
            },
            multimodal_key: match multimodal_key {
                "identifier" => MultimodalKey::Identifier,
                "identifier_and_offset" => MultimodalKey::IdentifierAndOffset,
                other => return Err(unknown("multimodal key", other)),
            },
            prompt_embeds_key: match prompt_embeds_key {
                "absent" => PromptEmbedsKey::Absent,
                "bytes" => PromptEmbedsKey::Bytes,
                "sha256" => PromptEmbedsKey::Sha256,
                other => return Err(unknown("prompt-embeds key", other)),
            },
            tagged_keys,
            ..Contract::newest()
        };
        let root = match (chain_values, none_hash.len()) {
            (ChainValues::Int, 32) => none_hash.try_into().ok().map(BlockHash::Int),
            (ChainValues::Bytes, 32) => none_hash.try_into().ok().map(BlockHash::Sha256),
            (ChainValues::Bytes, 16) => none_hash.try_into().ok().map(BlockHash::Xxh3),
            _ => None,
        };
        let root = root.ok_or_else(|| PyValueError::new_err("NONE_HASH has no known length"))?;
        if span == 0 || span > 1 << 62 || lookahead > 1 << 16 {
            return Err(PyValueError::new_err("span or look-ahead out of range"));
        }
        Ok(Self(BlockHasher::from_parts(contract, algorithm, root, span, lookahead)))
    }

    /// Start a chain; the keys are those that `kvhash.extra_keys` has checked.
    #[pyo3(signature = (*, lora=None, cache_salt=None, multimodal=Vec::new(), prompt_embeds=None))]
    fn chain(
        &self,
        lora: Option<(Option<PyBackedStr>, Option<PyBackedStr>, Option<i64>)>,
        cache_salt: Option<PyBackedStr>,
        multimodal: Vec<Item>,
        prompt_embeds: Option<(usize, PyBackedBytes)>,
    ) -> PyResult<Chain> {
        let keys = RequestKeys {
            lora: lora.map(|(name, path, id)| Lora {
                name: name.map(|text| (*text).into()),
                path: path.map(|text| (*text).into()),
                id,
            }),
            cache_salt: cache_salt.map(|text| (*text).into()),
            multimodal: multimodal
                .into_iter()
                .map(|(identifier, offset, length)| MultimodalItem {
                    identifier: (*identifier).into(),
                    offset,
                    length,
                })
                .collect(),
            prompt_embeds: prompt_embeds
                .map(|(row_size, data)| PromptEmbeds { row_size, data: Arc::new(data) }),
        };
        let keyed = Keyed::new(&self.0, keys).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let state = ChainState::new(self.0.none_hash());
        Ok(Chain {
            hasher: self.0.clone(),
            keyed: keyed.map(Arc::new),
            state: Mutex::new(State { state, following: Vec::new() }),
        })
    }

    /// The hashes of a prompt that has nothing but tokens; None for what `take_tokens` must look at.
    fn hash_tokens<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        guarded(|| hash_tokens(py, &self.0, tokens))
    }

    /// Hash many prompts over `threads` threads; `normalize(i)` stands in for a prompt that cannot be taken in as it
    /// is, and raises or returns a list.
    #[pyo3(signature = (prompts, normalize, threads))]
    fn hash_batch<'py>(
        &self,
        py: Python<'py>,
        prompts: Vec<Bound<'py, PyAny>>,
        normalize: &Bound<'py, PyAny>,
        threads: usize,
    ) -> PyResult<Bound<'py, PyList>> {
        let take = |i: usize| -> PyResult<Data> {
            if let Some(data) = Data::take(&prompts[i]) {
                return Ok(data);
            }
            Data::take(&normalize.call1((i,))?)
                .ok_or_else(|| PyRuntimeError::new_err("token ids changed while they were read"))
        };
        guarded(|| hash_batch(py, &self.0, &prompts, take, threads))
    }
}

/// The hashes of one prompt; `None` for what `Data::take` must look at.
fn hash_tokens<'py>(
    py: Python<'py>,
    hasher: &BlockHasher,
    tokens: &Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, PyList>>> {
    if hasher.lookahead() > 0 || matches!(hasher.none_hash(), BlockHash::Int(_)) {
        return Ok(None);
    }
    let span = usize::try_from(hasher.span()).unwrap_or(usize::MAX);
    if let Some(len) = sequence_len(tokens).filter(|len| *len < DETACH_FROM) {
        // The list comes first: making one may run finalizers, and no Python code may run behind `ints`.
        let mut digests = DigestList::new(py, len / span)?;
        if let Some(mut ints) = NarrowInts::of(tokens, span) {
            hasher.hash_blocks(&mut ints, |hash| digests.push(hash.digest().unwrap_or_default()));
            if ints.all_were_narrow() {
                return Ok(digests.finish());
            }
        }
    }
    Data::take(tokens).map(|data| hash_data(py, hasher, &data)).transpose()
}

/// The hashes of token ids that were taken in.
fn hash_data<'py>(py: Python<'py>, hasher: &BlockHasher, data: &Data) -> PyResult<Bound<'py, PyList>> {
    let blocks = data.len() / usize::try_from(hasher.span()).unwrap_or(usize::MAX);
    let mut state = ChainState::new(hasher.none_hash());
    if data.len() < DETACH_FROM && !matches!(hasher.none_hash(), BlockHash::Int(_)) {
        let mut digests = DigestList::new(py, blocks)?;
        data.grow(&mut state, hasher, None, |hash| digests.push(hash.digest().unwrap_or_default()));
        return digests.finish().ok_or_else(internal);
    }
    let mut hashes = Vec::with_capacity(blocks);
    py.detach(|| data.grow(&mut state, hasher, None, |hash| hashes.push(hash)));
    to_list(py, &hashes)
}

fn total_len(prompts: &[Bound<'_, PyAny>]) -> usize {
    prompts.iter().map(|prompt| prompt.len().unwrap_or(0)).fold(0, usize::saturating_add)
}

struct State {
    state: ChainState,
    /// With look-ahead, the tokens after each hashed block.
    following: Vec<u64>,
}

/// A growing chain. It holds the last hash and the tokens that wait, not the hashes.
#[pyclass(frozen, module = "kvhash._native")]
pub(crate) struct Chain {
    hasher: BlockHasher,
    keyed: Option<Arc<Keyed>>,
    state: Mutex<State>,
}

impl Chain {
    fn ints(&self) -> bool {
        matches!(self.hasher.none_hash(), BlockHash::Int(_))
    }

    fn run(&self, state: &mut State, tokens: &Data, mut sink: impl FnMut(BlockHash)) {
        let State { state, following } = state;
        let lookahead = self.hasher.lookahead() as usize;
        if lookahead == 0 {
            return tokens.grow(state, &self.hasher, self.keyed.as_deref(), sink);
        }
        let mut known = state.pending_tokens().to_vec();
        known.extend(tokens.range(0, tokens.len()));
        let mut hashed = 0;
        tokens.grow(state, &self.hasher, self.keyed.as_deref(), |hash| {
            hashed += 1;
            sink(hash);
        });
        let span = self.hasher.span() as usize;
        for i in 1..=hashed {
            following.extend_from_slice(&known[i * span..i * span + lookahead]);
        }
    }
}

#[pymethods]
impl Chain {
    /// Add token ids; returns the hashes of the blocks that these completed.
    fn append<'py>(&self, py: Python<'py>, tokens: &Tokens) -> PyResult<Bound<'py, PyList>> {
        guarded(|| match self.state.try_lock() {
            Ok(mut state) if tokens.0.len() < DETACH_FROM && !self.ints() => {
                let waiting = (state.state.pending() + tokens.0.len()) as u64;
                let blocks = waiting.saturating_sub(self.hasher.lookahead()) / self.hasher.span();
                let mut digests = DigestList::new(py, usize::try_from(blocks).unwrap_or(0))?;
                self.run(&mut state, &tokens.0, |hash| digests.push(hash.digest().unwrap_or_default()));
                digests.finish().ok_or_else(internal)
            }
            held => {
                drop(held);
                let mut hashes = Vec::new();
                py.detach(|| self.run(&mut lock(&self.state), &tokens.0, |hash| hashes.push(hash)));
                to_list(py, &hashes)
            }
        })
    }

    /// How many tokens wait for their block to be full.
    #[getter]
    fn pending(&self, py: Python<'_>) -> usize {
        py.detach(|| lock(&self.state).state.pending())
    }

    /// With look-ahead L, the L tokens after each hashed block, one after the other.
    fn following(&self, py: Python<'_>) -> Vec<u64> {
        py.detach(|| lock(&self.state).following.clone())
    }

    /// An independent chain in the same state.
    fn copy(&self, py: Python<'_>) -> Self {
        let state = py.detach(|| {
            let held = lock(&self.state);
            State { state: held.state.clone(), following: held.following.clone() }
        });
        Self { hasher: self.hasher.clone(), keyed: self.keyed.clone(), state: Mutex::new(state) }
    }
}

/// Hash a chain of messages of these lengths, each with the digest before it inside, by SHA-256 alone: what
/// benchmarks compare with. `padded`: in place and padded beforehand, the least that any chain can cost.
#[pyfunction]
#[pyo3(signature = (lengths, *, padded=false))]
pub(crate) fn bare_sha256_chain<'py>(
    py: Python<'py>,
    lengths: Vec<usize>,
    padded: bool,
) -> PyResult<Bound<'py, PyBytes>> {
    let longest = lengths.iter().copied().max().unwrap_or(0);
    if lengths.iter().any(|length| *length < 35) || longest > 1 << 24 {
        return Err(PyValueError::new_err("expected lengths from 35 to 2^24"));
    }
    let digest = py.detach(|| {
        if padded {
            return kvhash::sha256_floor(&lengths);
        }
        let mut message = vec![0x17; longest];
        let mut digest = [0; 32];
        for length in &lengths {
            message[3..35].copy_from_slice(&digest);
            digest = kvhash::sha256(std::hint::black_box(&message[..*length]));
        }
        digest
    });
    Ok(PyBytes::new(py, &digest))
}

// --- batches ------------------------------------------------------------------------------------------------------

#[derive(Default)]
struct Work {
    /// Taken in, not yet hashed.
    waiting: VecDeque<(usize, Arc<Data>)>,
    /// Hashed, not yet made into Python objects.
    done: Vec<(usize, Vec<BlockHash>)>,
    closed: bool,
}

struct Pool<'a> {
    hasher: &'a BlockHasher,
    work: Mutex<Work>,
    changed: Condvar,
}

impl Pool<'_> {
    fn hash(&self, data: &Data) -> Vec<BlockHash> {
        let mut hashes = Vec::with_capacity(data.len() / self.hasher.span() as usize);
        data.grow(&mut ChainState::new(self.hasher.none_hash()), self.hasher, None, |hash| hashes.push(hash));
        hashes
    }

    fn help(&self) {
        let mut work = lock(&self.work);
        loop {
            if let Some((i, data)) = work.waiting.pop_front() {
                drop(work);
                let hashes = self.hash(&data);
                work = lock(&self.work);
                work.done.push((i, hashes));
                self.changed.notify_all();
            } else if work.closed {
                return;
            } else {
                work = self.changed.wait(work).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

/// Closes the pool however the work ends, so that the helpers end too.
struct Closing<'a, 'b>(&'a Pool<'b>);

impl Drop for Closing<'_, '_> {
    fn drop(&mut self) {
        let mut work = lock(&self.0.work);
        work.closed = true;
        work.waiting.clear();
        self.0.changed.notify_all();
    }
}

/// The calling thread takes prompts in for the others and makes Python objects, which need the interpreter, and hashes
/// prompts itself while the others have enough to do; the others only hash.
fn hash_batch<'py>(
    py: Python<'py>,
    hasher: &BlockHasher,
    prompts: &[Bound<'py, PyAny>],
    take: impl Fn(usize) -> PyResult<Data>,
    threads: usize,
) -> PyResult<Bound<'py, PyList>> {
    let count = prompts.len();
    let threads = if total_len(prompts) < THREADS_FROM { 1 } else { threads.clamp(1, count.max(1)) };
    let pool = Pool { hasher, work: Mutex::default(), changed: Condvar::new() };
    let mut results: Vec<Option<Bound<'py, PyList>>> = vec![None; count];
    // Buffers are released attached: here they are owned until the helpers have ended.
    let mut taken: Vec<Arc<Data>> = Vec::new();
    let mut held = 0;
    std::thread::scope(|scope| {
        let closing = Closing(&pool);
        let mut helpers = 0;
        for _ in 1..threads {
            // Without another thread the caller does the work alone.
            if std::thread::Builder::new().spawn_scoped(scope, || pool.help()).is_err() {
                break;
            }
            helpers += 1;
        }
        let (mut next, mut built) = (0, 0);
        while built < count {
            let mut work = lock(&pool.work);
            let done = std::mem::take(&mut work.done);
            let backlog = work.waiting.len();
            if !done.is_empty() {
                drop(work);
                for (i, hashes) in done {
                    results[i] = Some(to_list(py, &hashes)?);
                    built += 1;
                }
            } else if next < count && backlog < 2 * helpers {
                drop(work);
                let data = Arc::new(take(next)?);
                taken.push(Arc::clone(&data));
                lock(&pool.work).waiting.push_back((next, data));
                pool.changed.notify_one();
                next += 1;
            } else if next < count {
                drop(work);
                held += prompts[next].len().unwrap_or(0);
                let hashes = match hash_tokens(py, hasher, &prompts[next])? {
                    Some(hashes) => hashes,
                    None => hash_data(py, hasher, &take(next)?)?,
                };
                results[next] = Some(hashes);
                next += 1;
                built += 1;
                if held >= DETACH_FROM {
                    held = 0;
                    py.detach(std::thread::yield_now); // Other Python threads' turn.
                }
            } else if let Some((i, data)) = work.waiting.pop_front() {
                drop(work);
                results[i] = Some(hash_data(py, hasher, &data)?);
                built += 1;
            } else {
                drop(work);
                py.detach(|| {
                    let work = lock(&pool.work);
                    let ready = |work: &mut Work| work.done.is_empty();
                    drop(pool.changed.wait_while(work, ready).unwrap_or_else(PoisonError::into_inner));
                });
            }
        }
        drop(closing);
        PyResult::Ok(())
    })?;
    PyList::new(py, results.into_iter().flatten())
}
