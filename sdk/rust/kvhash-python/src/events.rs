//! Event batches that stay where they lie: what an index or a checker needs of each event, made into Python objects
//! only where it is asked for.
//!
//! Whatever is no batch, and every event that is not a plain store or removal, is left to the Python definition, which
//! says what is wrong in its own words.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::OnceLock;

use kvhash::events::{self, BlockRemoved, BlockStored, Event, EventSink, HashValue, Hashes, Integer, Tokens};
use pyo3::exceptions::{PyIndexError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyAny, PyBytes, PyInt, PyList, PySlice, PyTuple};

/// Run `work`; a panic, which would be a fault of this module, becomes a RuntimeError.
fn guarded<T>(work: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(PyRuntimeError::new_err("internal error in kvhash._native")))
}

fn changed() -> PyErr {
    PyRuntimeError::new_err("the payload changed while it was read")
}

/// A function of `kvhash.events.decode`, the definition.
fn definition<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    static MODULE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let module =
        MODULE.get_or_try_init(py, || py.import("kvhash.events.decode").map(|module| module.into()))?;
    module.bind(py).getattr(name)
}

fn to_int<'py>(py: Python<'py>, number: Integer) -> Bound<'py, PyInt> {
    let made = match number {
        Integer::Unsigned(number) => number.into_pyobject(py),
        Integer::Negative(number) => number.into_pyobject(py),
    };
    match made {
        Ok(made) => made,
        Err(never) => match never {},
    }
}

fn to_hash<'py>(py: Python<'py>, hash: HashValue<'_>) -> Bound<'py, PyAny> {
    match hash {
        HashValue::Int(number) => to_int(py, number).into_any(),
        HashValue::Bytes(bytes) => PyBytes::new(py, bytes).into_any(),
    }
}

fn to_hashes<'py>(py: Python<'py>, hashes: &Hashes<'_>) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(py, hashes.iter().map(|hash| to_hash(py, hash)).collect::<Vec<_>>())
}

fn to_keys<'py>(py: Python<'py>, hashes: &Hashes<'_>) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, hashes.iter().map(HashValue::key).collect::<Vec<_>>())
}

/// A part of the payload: where it starts and ends.
#[derive(Clone, Copy)]
struct Part {
    start: u32,
    end: u32,
}

impl Part {
    /// Where `part` lies in `payload`, which it is a part of; at most 256 MiB are read.
    fn of(payload: &[u8], part: &[u8]) -> Self {
        let start = part.as_ptr() as usize - payload.as_ptr() as usize;
        Self { start: start as u32, end: (start + part.len()) as u32 }
    }

    fn get(self, payload: &[u8]) -> &[u8] {
        payload.get(self.start as usize..self.end as usize).unwrap_or_default()
    }
}

/// Token ids in a payload, or pairs of them: a sequence that decodes what is asked for.
#[pyclass(frozen, sequence, module = "kvhash._native")]
pub(crate) struct RawTokens {
    payload: Py<PyBytes>,
    body: Part,
    count: u32,
    pairs: bool,
}

impl RawTokens {
    fn tokens<'a>(&'a self, py: Python<'a>) -> Tokens<'a> {
        Tokens::from_body(self.body.get(self.payload.as_bytes(py)), self.count as usize, self.pairs)
    }

    fn items<'py>(&self, py: Python<'py>, tokens: &Tokens<'_>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        if self.pairs {
            let pair = |pair: [Integer; 2]| Ok(PyTuple::new(py, pair.map(|id| to_int(py, id)))?.into_any());
            return tokens.pairs().map(pair).collect();
        }
        Ok(tokens.iter().map(|id| to_int(py, id).into_any()).collect())
    }

    fn all<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.items(py, &self.tokens(py))?)
    }
}

#[pymethods]
impl RawTokens {
    fn __len__(&self) -> usize {
        self.count as usize
    }

    fn __getitem__<'py>(&self, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = index.py();
        if let Ok(slice) = index.cast::<PySlice>() {
            return guarded(|| self.all(py)?.as_any().get_item(slice));
        }
        let index: isize = index.extract()?;
        let count = self.count as isize;
        let place = if index < 0 { index + count } else { index };
        if !(0..count).contains(&place) {
            return Err(PyIndexError::new_err("token index out of range"));
        }
        guarded(|| {
            let mut tokens = self.tokens(py);
            tokens.take_front(place as usize);
            self.items(py, &tokens.take_front(1))?.pop().ok_or_else(changed)
        })
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        guarded(|| Ok(self.all(py)?.try_iter()?.into_any()))
    }

    fn __eq__<'py>(&self, other: &Bound<'py, PyAny>) -> PyResult<bool> {
        let py = other.py();
        guarded(|| match other.cast::<Self>() {
            Ok(other) => self.all(py)?.eq(other.get().all(py)?),
            Err(_) => self.all(py)?.eq(other),
        })
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<isize> {
        guarded(|| self.all(py)?.hash())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        guarded(|| Ok(self.all(py)?.repr()?.to_string()))
    }
}

/// Where an event lies: the payload, its part of it, and its number in the batch.
struct Place {
    payload: Py<PyBytes>,
    event: Part,
    index: usize,
}

impl Place {
    fn raw<'a>(&'a self, py: Python<'a>) -> &'a [u8] {
        self.event.get(self.payload.as_bytes(py))
    }

    /// The event as `decode_batch` gives it.
    fn decode<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        decode_event(py, self.raw(py), self.index)
    }

    fn stored<T>(&self, py: Python<'_>, read: impl FnOnce(&BlockStored<'_>) -> T) -> PyResult<T> {
        guarded(|| match events::decode_event(self.raw(py), 0) {
            Event::Stored(event) => Ok(read(&event)),
            _ => Err(changed()),
        })
    }

    fn removed<T>(&self, py: Python<'_>, read: impl FnOnce(&BlockRemoved<'_>) -> T) -> PyResult<T> {
        guarded(|| match events::decode_event(self.raw(py), 0) {
            Event::Removed(event) => Ok(read(&event)),
            _ => Err(changed()),
        })
    }
}

fn decode_event<'py>(py: Python<'py>, raw: &[u8], index: usize) -> PyResult<Bound<'py, PyAny>> {
    definition(py, "_event")?.call1((PyBytes::new(py, raw), format!("$.events[{index}]")))
}

type Text = Option<String>;

fn text(value: Option<&str>) -> Text {
    value.map(str::to_owned)
}

fn number<'py>(py: Python<'py>, value: Option<Integer>) -> Option<Bound<'py, PyInt>> {
    value.map(|value| to_int(py, value))
}

/// What of an event an index or a checker asks for, as places in the payload.
#[derive(Clone, Copy)]
enum Shape {
    Stored(Part, StoredShape),
    Removed(Part, HashesShape),
    /// What the definition reads.
    Other(Part),
}

#[derive(Clone, Copy)]
struct HashesShape {
    body: Part,
    count: u32,
}

#[derive(Clone, Copy)]
struct StoredShape {
    hashes: HashesShape,
    parent: Parent,
    tokens: Part,
    num_tokens: u32,
    pairs: bool,
    block_size: u64,
}

#[derive(Clone, Copy)]
enum Parent {
    None,
    Int(Integer),
    Bytes(Part),
}

impl HashesShape {
    fn of(payload: &[u8], hashes: &Hashes<'_>) -> Self {
        Self { body: Part::of(payload, hashes.body()), count: hashes.len() as u32 }
    }

    fn get(self, payload: &[u8]) -> Hashes<'_> {
        Hashes::from_body(self.body.get(payload), self.count as usize)
    }
}

impl Shape {
    #[inline(always)]
    fn of(payload: &[u8], event: &Event<'_>) -> Self {
        let place = Part::of(payload, event.raw());
        match event {
            Event::Stored(event) => {
                let shape = StoredShape {
                    hashes: HashesShape::of(payload, &event.block_hashes),
                    parent: match event.parent_block_hash {
                        None => Parent::None,
                        Some(HashValue::Int(number)) => Parent::Int(number),
                        Some(HashValue::Bytes(bytes)) => Parent::Bytes(Part::of(payload, bytes)),
                    },
                    tokens: Part::of(payload, event.token_ids.body()),
                    num_tokens: event.token_ids.len() as u32,
                    pairs: event.token_ids.bigram(),
                    block_size: event.block_size,
                };
                Self::Stored(place, shape)
            }
            Event::Removed(event) => Self::Removed(place, HashesShape::of(payload, &event.block_hashes)),
            _ => Self::Other(place),
        }
    }

    fn make<'py>(self, py: Python<'py>, payload: &Py<PyBytes>, index: usize) -> PyResult<Bound<'py, PyAny>> {
        let place = |event| Place { payload: payload.clone_ref(py), event, index };
        Ok(match self {
            Self::Stored(event, shape) => {
                Bound::new(py, RawStored { place: place(event), shape })?.into_any()
            }
            Self::Removed(event, hashes) => {
                Bound::new(py, RawRemoved { place: place(event), hashes })?.into_any()
            }
            Self::Other(event) => decode_event(py, event.get(payload.as_bytes(py)), index)?,
        })
    }
}

/// A `BlockStored` in its payload.
#[pyclass(frozen, module = "kvhash._native")]
pub(crate) struct RawStored {
    place: Place,
    shape: StoredShape,
}

impl StoredShape {
    fn parent<'py>(&self, py: Python<'py>, payload: &[u8]) -> Option<Bound<'py, PyAny>> {
        match self.parent {
            Parent::None => None,
            Parent::Int(number) => Some(to_int(py, number).into_any()),
            Parent::Bytes(part) => Some(PyBytes::new(py, part.get(payload)).into_any()),
        }
    }

    fn tokens<'a>(&self, payload: &'a [u8]) -> Tokens<'a> {
        Tokens::from_body(self.tokens.get(payload), self.num_tokens as usize, self.pairs)
    }
}

/// The blocks of stored events one after the other, each made into a triple when its turn comes.
struct Blocks<'a, 'py, S> {
    py: Python<'py>,
    payload: &'a Py<PyBytes>,
    events: S,
    /// How many blocks are still to come.
    left: usize,
    event: Option<EventBlocks<'a, 'py>>,
}

/// What is left of one event.
struct EventBlocks<'a, 'py> {
    hashes: Hashes<'a>,
    parent: Bound<'py, PyAny>,
    tokens: Tokens<'a>,
    size: usize,
}

/// A triple, or why there is none.
struct Made<'py>(PyResult<Bound<'py, PyTuple>>);

impl<'py> IntoPyObject<'py> for Made<'py> {
    type Target = PyTuple;
    type Output = Bound<'py, PyTuple>;
    type Error = PyErr;

    fn into_pyobject(self, _: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.0
    }
}

impl<'a, 'py, S: Iterator<Item = &'a StoredShape> + Clone> Blocks<'a, 'py, S> {
    fn list(py: Python<'py>, payload: &'a Py<PyBytes>, events: S) -> PyResult<Bound<'py, PyList>> {
        let left = events.clone().map(|event| event.hashes.count as usize).sum();
        PyList::new(py, Self { py, payload, events, left, event: None })
    }

    fn block(&mut self) -> Option<PyResult<Bound<'py, PyTuple>>> {
        let (py, bytes) = (self.py, self.payload.as_bytes(self.py));
        loop {
            let Some(event) = &mut self.event else {
                let event = self.events.next()?;
                self.event = Some(EventBlocks {
                    hashes: event.hashes.get(bytes),
                    parent: event.parent(py, bytes).unwrap_or_else(|| py.None().into_bound(py)),
                    tokens: event.tokens(bytes),
                    size: usize::try_from(event.block_size).unwrap_or(usize::MAX),
                });
                continue;
            };
            let Some(hash) = event.hashes.take_first() else {
                self.event = None;
                continue;
            };
            let hash = to_hash(py, hash);
            let tokens = event.tokens.take_front(event.size);
            let view = RawTokens {
                payload: self.payload.clone_ref(py),
                body: Part::of(bytes, tokens.body()),
                count: tokens.len() as u32,
                pairs: tokens.bigram(),
            };
            let parent = std::mem::replace(&mut event.parent, hash.clone());
            return Some(
                Bound::new(py, view).and_then(|view| PyTuple::new(py, [hash, parent, view.into_any()])),
            );
        }
    }
}

impl<'a, 'py, S: Iterator<Item = &'a StoredShape> + Clone> Iterator for Blocks<'a, 'py, S> {
    type Item = Made<'py>;

    fn next(&mut self) -> Option<Made<'py>> {
        self.left = self.left.checked_sub(1)?;
        Some(Made(self.block().unwrap_or_else(|| Err(changed()))))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl<'a, S: Iterator<Item = &'a StoredShape> + Clone> ExactSizeIterator for Blocks<'a, '_, S> {}

#[pymethods]
impl RawStored {
    /// One hash a block, as on the wire.
    #[getter]
    fn block_hashes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        guarded(|| to_hashes(py, &self.shape.hashes.get(self.place.payload.as_bytes(py))))
    }

    /// The hash before the first block's; None at a prompt's start.
    #[getter]
    fn parent_block_hash<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.shape.parent(py, self.place.payload.as_bytes(py))
    }

    /// The tokens of all blocks, where they lie.
    #[getter]
    fn token_ids(&self, py: Python<'_>) -> RawTokens {
        let StoredShape { tokens: body, num_tokens: count, pairs, .. } = self.shape;
        RawTokens { payload: self.place.payload.clone_ref(py), body, count, pairs }
    }

    /// Tokens per block.
    #[getter]
    fn block_size(&self) -> u64 {
        self.shape.block_size
    }

    #[getter]
    fn bigram(&self) -> bool {
        self.shape.pairs
    }

    /// The low 64 bits of each hash.
    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        guarded(|| to_keys(py, &self.shape.hashes.get(self.place.payload.as_bytes(py))))
    }

    /// Per block its hash, its parent's, and its tokens where they lie.
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        guarded(|| Blocks::list(py, &self.place.payload, std::iter::once(&self.shape)))
    }

    /// The event as `kvhash.events.decode_batch` gives it.
    fn decode<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.place.decode(py)
    }

    #[getter]
    fn lora_id<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyInt>>> {
        self.place.stored(py, |event| number(py, event.lora_id))
    }

    #[getter]
    fn medium(&self, py: Python<'_>) -> PyResult<Text> {
        self.place.stored(py, |event| text(event.medium))
    }

    #[getter]
    fn lora_name(&self, py: Python<'_>) -> PyResult<Text> {
        self.place.stored(py, |event| text(event.lora_name))
    }

    #[getter]
    fn extra_keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.decode(py)?.getattr("extra_keys")
    }

    #[getter]
    fn group_idx<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyInt>>> {
        self.place.stored(py, |event| number(py, event.group_idx))
    }

    #[getter]
    fn kv_cache_spec_kind(&self, py: Python<'_>) -> PyResult<Text> {
        self.place.stored(py, |event| text(event.kv_cache_spec_kind))
    }

    #[getter]
    fn kv_cache_spec_sliding_window<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyInt>>> {
        self.place.stored(py, |event| number(py, event.kv_cache_spec_sliding_window))
    }

    #[getter]
    fn locality(&self, py: Python<'_>) -> PyResult<Text> {
        self.place.stored(py, |event| text(event.locality))
    }

    #[getter]
    fn ownership(&self, py: Python<'_>) -> PyResult<Text> {
        self.place.stored(py, |event| text(event.ownership))
    }

    #[getter]
    fn session_id(&self, py: Python<'_>) -> PyResult<Text> {
        self.place.stored(py, |event| text(event.session_id))
    }

    #[getter]
    fn lookahead_token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.decode(py)?.getattr("lookahead_token_ids")
    }

    #[getter]
    fn cache_salt(&self, py: Python<'_>) -> PyResult<Text> {
        self.place.stored(py, |event| text(event.cache_salt))
    }

    #[getter]
    fn extra<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.decode(py)?.getattr("extra")
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Raw{}", self.decode(py)?.repr()?))
    }
}

/// A `BlockRemoved` in its payload.
#[pyclass(frozen, module = "kvhash._native")]
pub(crate) struct RawRemoved {
    place: Place,
    hashes: HashesShape,
}

#[pymethods]
impl RawRemoved {
    /// The hashes, as on the wire.
    #[getter]
    fn block_hashes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        guarded(|| to_hashes(py, &self.hashes.get(self.place.payload.as_bytes(py))))
    }

    /// The low 64 bits of each hash.
    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        guarded(|| to_keys(py, &self.hashes.get(self.place.payload.as_bytes(py))))
    }

    /// The event as `kvhash.events.decode_batch` gives it.
    fn decode<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.place.decode(py)
    }

    #[getter]
    fn medium(&self, py: Python<'_>) -> PyResult<Text> {
        self.place.removed(py, |event| text(event.medium))
    }

    #[getter]
    fn group_idx<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyInt>>> {
        self.place.removed(py, |event| number(py, event.group_idx))
    }

    #[getter]
    fn locality(&self, py: Python<'_>) -> PyResult<Text> {
        self.place.removed(py, |event| text(event.locality))
    }

    #[getter]
    fn ownership(&self, py: Python<'_>) -> PyResult<Text> {
        self.place.removed(py, |event| text(event.ownership))
    }

    #[getter]
    fn extra<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.decode(py)?.getattr("extra")
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Raw{}", self.decode(py)?.repr()?))
    }
}

/// One published message in its payload.
#[pyclass(frozen, module = "kvhash._native")]
pub(crate) struct RawBatch {
    payload: Py<PyBytes>,
    shapes: Shapes,
    /// The events as objects, made when first asked for.
    events: OnceLock<Py<PyTuple>>,
    ts: f64,
    data_parallel_rank: Option<Integer>,
    layout: Option<events::Layout>,
    has_extra: bool,
}

#[pymethods]
impl RawBatch {
    #[getter]
    fn payload(&self, py: Python<'_>) -> Py<PyBytes> {
        self.payload.clone_ref(py)
    }

    #[getter]
    fn events(&self, py: Python<'_>) -> PyResult<Py<PyTuple>> {
        if let Some(events) = self.events.get() {
            return Ok(events.clone_ref(py));
        }
        let made = guarded(|| self.make_events(py))?;
        // Two threads may both have made them: the first ones stay. No thread waits here with the GIL.
        Ok(self.events.get_or_init(|| made).clone_ref(py))
    }

    /// Per stored block its hash, its parent's, and its tokens where they lie, over all events.
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let stored = self.shapes.iter().filter_map(|shape| match shape {
            Shape::Stored(_, shape) => Some(shape),
            _ => None,
        });
        guarded(|| Blocks::list(py, &self.payload, stored))
    }

    fn __len__(&self) -> usize {
        self.shapes.iter().count()
    }

    #[getter]
    fn ts(&self) -> f64 {
        self.ts
    }

    #[getter]
    fn data_parallel_rank<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyInt>> {
        number(py, self.data_parallel_rank)
    }

    #[getter]
    fn layout(&self) -> Option<&'static str> {
        self.layout.map(events::Layout::as_str)
    }

    #[getter]
    fn extra<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        if !self.has_extra {
            return Ok(None);
        }
        self.decode(py)?.getattr("extra").map(Some)
    }

    /// The batch as `kvhash.events.decode_batch` gives it.
    fn decode<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        definition(py, "decode_batch")?.call1((&self.payload,))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Raw{}", self.decode(py)?.repr()?))
    }
}

impl RawBatch {
    fn make_events(&self, py: Python<'_>) -> PyResult<Py<PyTuple>> {
        if let Shapes { first: Some(one), rest } = &self.shapes {
            if rest.is_empty() {
                return Ok(PyTuple::new(py, [one.make(py, &self.payload, 0)?])?.unbind());
            }
        }
        let make = |(i, shape): (usize, &Shape)| shape.make(py, &self.payload, i);
        let events = self.shapes.iter().enumerate().map(make).collect::<PyResult<Vec<_>>>()?;
        Ok(PyTuple::new(py, events)?.unbind())
    }
}

/// The shapes of a batch's events; most batches have one.
#[derive(Default)]
struct Shapes {
    first: Option<Shape>,
    rest: Vec<Shape>,
}

impl Shapes {
    fn iter(&self) -> impl Iterator<Item = &Shape> + Clone {
        self.first.iter().chain(&self.rest)
    }
}

struct Shaper<'a> {
    payload: &'a [u8],
    shapes: Shapes,
}

impl<'a> EventSink<'a> for Shaper<'a> {
    #[inline(always)]
    fn event(&mut self, event: Event<'a>) {
        let shape = Shape::of(self.payload, &event);
        if self.shapes.first.is_none() {
            self.shapes.first = Some(shape);
        } else {
            self.shapes.rest.push(shape);
        }
    }

    fn forget(&mut self) {
        self.shapes = Shapes::default();
    }
}

/// Read one payload; what is no batch, or no bytes, is left to the definition, which says what is wrong.
#[pyfunction]
#[pyo3(signature = (payload, /))]
pub(crate) fn decode_raw<'py>(payload: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = payload.py();
    let Ok(bytes) = payload.cast_exact::<PyBytes>() else {
        let bytes = py.get_type::<PyBytes>().call1((payload,))?;
        return match bytes.cast_exact::<PyBytes>() {
            Ok(bytes) => read(bytes),
            Err(error) => Err(error.into()),
        };
    };
    read(bytes)
}

#[inline]
fn read<'py>(payload: &Bound<'py, PyBytes>) -> PyResult<Bound<'py, PyAny>> {
    let py = payload.py();
    let batch = guarded(|| {
        let mut shaper = Shaper { payload: payload.as_bytes(), shapes: Shapes::default() };
        let Ok(batch) = events::decode_into(payload.as_bytes(), &mut shaper) else { return Ok(None) };
        let batch = RawBatch {
            payload: payload.clone().unbind(),
            shapes: shaper.shapes,
            events: OnceLock::new(),
            ts: batch.ts,
            data_parallel_rank: batch.data_parallel_rank,
            layout: batch.layout,
            has_extra: !batch.extra.is_empty(),
        };
        Ok(Some(Bound::new(py, batch)?.into_any()))
    })?;
    match batch {
        Some(batch) => Ok(batch),
        None => py.import("kvhash.events.raw")?.getattr("decode_by_definition")?.call1((payload,)),
    }
}
