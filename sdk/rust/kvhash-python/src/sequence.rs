//! Unsafe: token ids of lists and tuples, read without a reference count or a call an element, and lists of digests.
//!
//! Everything here runs attached to the interpreter.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::OnceLock;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

/// How a positive int of one digit looks in this interpreter: the word behind its header, which tells the number of
/// digits and the sign. Unset where a probe found another layout.
///
/// An int's layout is not part of the stable ABI, so nothing is taken on trust: [`probe`] compares what it reads with
/// known values, and everything that does not look so goes through the C API. All reads lie within the smallest int
/// object (a header of two words, a word, a digit of 32 bits).
static SMALL_INT: OnceLock<usize> = OnceLock::new();

/// The word and the digit behind an int's header.
///
/// # Safety
/// `item` is a live exact int.
#[inline]
unsafe fn word_and_digit(item: *mut ffi::PyObject) -> (usize, u32) {
    // SAFETY: as told at `SMALL_INT`.
    unsafe {
        let word = item.cast::<usize>().add(2);
        (word.read(), word.add(1).cast::<u32>().read())
    }
}

/// Find out how small ints look; called once, when the module is imported.
pub(crate) fn probe(py: Python<'_>) {
    if std::mem::size_of::<usize>() != 8 {
        return;
    }
    let look = |value: i128| {
        let int = value.into_pyobject(py).ok()?.into_any();
        // SAFETY: the int is alive while it is read.
        unsafe { (ffi::PyLong_CheckExact(int.as_ptr()) != 0).then(|| word_and_digit(int.as_ptr())) }
    };
    let Some((small, 5)) = look(5) else { return };
    let one_digit = [1, 23, 256, 65_535, 70_000, 151_000, (1 << 29) + 12_345, (1 << 30) - 1];
    let others = [0, -1, -5, -70_000, 1 << 30, (1 << 30) + 5, 1 << 40, (1 << 64) - 1, -(1 << 31), -(1 << 40)];
    let alike = one_digit.iter().all(|value| look(*value).is_some_and(|seen| seen == (small, *value as u32)))
        && others.iter().all(|value| look(*value).is_some_and(|(word, _)| word != small));
    if alike {
        let _ = SMALL_INT.set(small);
    }
}

/// Which of the layouts were found that this module reads without a call: "small ints", "flat lists".
#[pyfunction]
pub(crate) fn probed() -> Vec<&'static str> {
    let found = [("small ints", SMALL_INT.get().is_some()), ("flat lists", FLAT_LISTS.get().is_some())];
    found.into_iter().filter_map(|(name, there)| there.then_some(name)).collect()
}

/// Token ids of a list or tuple.
pub(crate) enum Ids {
    /// All below 2^32.
    Narrow(Vec<u32>),
    /// Any.
    Wide(Vec<u64>),
}

/// Read a list or tuple (not a subclass) of plain ints from 0 to 2^64 - 1; `None` for anything else.
pub(crate) fn read_sequence(object: &Bound<'_, PyAny>) -> Option<Ids> {
    let (items, len) = Items::of(object)?;
    // SAFETY (of all): the object is of that type and the place within its length, and an item is borrowed and used
    // at once. No Python code runs between, so the object cannot change under us.
    match items {
        Items::Flat(items) => read(len, |i| unsafe { items.add(i).read() }),
        Items::List(list) => read(len, |i| unsafe { ffi::PyList_GetItem(list, i as ffi::Py_ssize_t) }),
        Items::Tuple(tuple) => read(len, |i| unsafe { ffi::PyTuple_GetItem(tuple, i as ffi::Py_ssize_t) }),
    }
}

#[inline]
fn read(len: usize, item: impl Fn(usize) -> *mut ffi::PyObject) -> Option<Ids> {
    let small = SMALL_INT.get().copied();
    let mut narrow: Vec<u32> = Vec::with_capacity(len);
    for i in 0..len {
        let value = read_int(item(i), small)?;
        if let Ok(value) = u32::try_from(value) {
            narrow.push(value);
            continue;
        }
        let mut wide: Vec<u64> = Vec::with_capacity(len);
        wide.extend(narrow.iter().map(|value| u64::from(*value)));
        wide.push(value);
        for i in i + 1..len {
            wide.push(read_int(item(i), small)?);
        }
        return Some(Ids::Wide(wide));
    }
    Some(Ids::Narrow(narrow))
}

#[inline]
fn read_int(item: *mut ffi::PyObject, small: Option<usize>) -> Option<u64> {
    // SAFETY: the item is a live borrowed reference; an exception that is set is taken away.
    unsafe {
        if item.is_null() {
            ffi::PyErr_Clear();
            return None;
        }
        if ffi::PyLong_CheckExact(item) == 0 {
            return None;
        }
        if let Some(small) = small {
            let (word, digit) = word_and_digit(item);
            if word == small {
                return Some(digit.into());
            }
        }
        let value = ffi::PyLong_AsUnsignedLongLong(item);
        if value == u64::MAX && !ffi::PyErr_Occurred().is_null() {
            ffi::PyErr_Clear();
            return None;
        }
        Some(value)
    }
}

/// Whether a list keeps its items' addresses side by side, at the address that stands behind its length.
///
/// As with ints, this is not part of the stable ABI, so it is used only where a probe found it, and each list is asked
/// for its first and last item through the C API before it is believed.
static FLAT_LISTS: OnceLock<()> = OnceLock::new();

/// What stands behind a list's header: its length, the address of its items, and how many have room there.
///
/// # Safety
/// `list` is a live exact list, of at least five words.
#[inline]
unsafe fn list_words(list: *mut ffi::PyObject) -> [usize; 3] {
    // SAFETY: as told above.
    unsafe { list.cast::<usize>().add(2).cast::<[usize; 3]>().read() }
}

/// Find out how lists look; called once, when the module is imported.
pub(crate) fn probe_lists(py: Python<'_>) {
    let words =
        |kind: Bound<'_, PyAny>| kind.getattr("__basicsize__").and_then(|size| size.extract::<usize>());
    let enough = words(py.get_type::<PyList>().into_any()).is_ok_and(|size| size >= 40);
    if std::mem::size_of::<usize>() != 8 || !enough {
        return;
    }
    let alike = [1, 2, 5, 100, 4097].iter().all(|len| {
        let Ok(list) = PyList::new(py, 1000..1000 + *len) else { return false };
        let grown = (0..*len as usize / 2).all(|i| list.append(i).is_ok());
        // SAFETY: the list is alive and has five words.
        let [seen, items, room] = unsafe { list_words(list.as_ptr()) };
        let plausible = seen == list.len()
            && (seen..2 * seen + 64).contains(&room)
            && items != 0
            && items.is_multiple_of(std::mem::align_of::<usize>());
        grown && plausible && flat_items(&list, items as *const *mut ffi::PyObject, list.len())
    });
    if alike {
        let _ = FLAT_LISTS.set(());
    }
}

/// Whether the addresses at `items` are those of the list's first, middle and last item.
fn flat_items(list: &Bound<'_, PyList>, items: *const *mut ffi::PyObject, len: usize) -> bool {
    [0, len / 2, len - 1].iter().all(|i| {
        // SAFETY: the place is within the list's length.
        unsafe { items.add(*i).read() == ffi::PyList_GetItem(list.as_ptr(), *i as ffi::Py_ssize_t) }
    })
}

/// The length of a list or tuple; `None` for anything else, subclasses too.
pub(crate) fn sequence_len(object: &Bound<'_, PyAny>) -> Option<usize> {
    let list = object.cast_exact::<PyList>().map(|list| list.len());
    list.or_else(|_| object.cast_exact::<PyTuple>().map(|tuple| tuple.len())).ok()
}

/// Where the items of a list or tuple are found.
#[derive(Clone, Copy)]
enum Items {
    Flat(*const *mut ffi::PyObject),
    List(*mut ffi::PyObject),
    Tuple(*mut ffi::PyObject),
}

/// The blocks of a list or tuple of ints that 32 bits hold, read as they are hashed: reading a block takes little time beside the
/// digest of the one before it.
///
/// No Python code may run between two blocks, so that the object cannot change under them.
pub(crate) struct NarrowInts<'py> {
    items: Items,
    len: usize,
    small: usize,
    /// How many blocks are still to come.
    blocks: usize,
    place: usize,
    block: Vec<u32>,
    alive: PhantomData<&'py ()>,
}

impl Items {
    /// The items of a list or tuple and how many there are; `None` for anything else, subclasses too.
    fn of(object: &Bound<'_, PyAny>) -> Option<(Self, usize)> {
        let Ok(list) = object.cast_exact::<PyList>() else {
            let tuple = object.cast_exact::<PyTuple>().ok()?;
            return Some((Self::Tuple(tuple.as_ptr()), tuple.len()));
        };
        let len = list.len();
        if FLAT_LISTS.get().is_some() && len > 0 {
            // SAFETY: the list is alive, and lists have five words where the probe looked.
            let [_, items, _] = unsafe { list_words(list.as_ptr()) };
            let items = items as *const *mut ffi::PyObject;
            if flat_items(list, items, len) {
                return Some((Self::Flat(items), len));
            }
        }
        Some((Self::List(list.as_ptr()), len))
    }
}

impl<'py> NarrowInts<'py> {
    /// The blocks of `span` items; `None` for what is neither a list nor a tuple, and where small ints are not known.
    pub(crate) fn of(object: &'py Bound<'_, PyAny>, span: usize) -> Option<Self> {
        let small = SMALL_INT.get().copied()?;
        let (items, len) = Items::of(object)?;
        let block = vec![0; if len >= span { span } else { 0 }];
        Some(Self { items, len, small, blocks: len / span, place: 0, block, alive: PhantomData })
    }

    /// Read the next items into the block; whether all are such ints.
    #[inline]
    fn read_block(&mut self) -> bool {
        // SAFETY (of all): the object lives as long as `self`, is of the kind named, and the places are within its
        // length.
        match self.items {
            Items::Flat(items) => self.fill(|i| unsafe { items.add(i).read() }),
            Items::List(list) => self.fill(|i| unsafe { ffi::PyList_GetItem(list, i as ffi::Py_ssize_t) }),
            Items::Tuple(tuple) => {
                self.fill(|i| unsafe { ffi::PyTuple_GetItem(tuple, i as ffi::Py_ssize_t) })
            }
        }
    }

    /// Whether every block was read and what follows them are such ints too.
    pub(crate) fn all_were_narrow(mut self) -> bool {
        if self.blocks > 0 {
            return false;
        }
        self.block.resize(self.len - self.place, 0); // Less than a block.
        self.read_block()
    }

    #[inline]
    fn fill(&mut self, item: impl Fn(usize) -> *mut ffi::PyObject) -> bool {
        let (small, place) = (self.small, self.place);
        for (i, to) in self.block.iter_mut().enumerate() {
            // SAFETY: the item is a live borrowed reference, or null with an exception set.
            match unsafe { narrow_int(item(place + i), small) } {
                Some(digit) => *to = digit,
                None => return false,
            }
        }
        true
    }
}

/// The value of an int that 32 bits hold; `None` for any other item.
///
/// # Safety
/// `item` is a live object, or null with an exception set.
#[inline]
unsafe fn narrow_int(item: *mut ffi::PyObject, small: usize) -> Option<u32> {
    // SAFETY: as told above; only an int is read as one.
    unsafe {
        if item.is_null() {
            ffi::PyErr_Clear();
            return None;
        }
        if ffi::PyLong_CheckExact(item) == 0 {
            return None;
        }
        let (word, digit) = word_and_digit(item);
        if word == small {
            return Some(digit);
        }
    }
    other_int(item)
}

/// Zero, which has no digit, and ints of two digits that 32 bits hold.
#[cold]
fn other_int(item: *mut ffi::PyObject) -> Option<u32> {
    read_int(item, None).and_then(|value| u32::try_from(value).ok())
}

impl kvhash::Blocks for NarrowInts<'_> {
    type Token = u32;

    #[inline]
    fn next_block(&mut self) -> Option<&[u32]> {
        if self.blocks == 0 || !self.read_block() {
            return None;
        }
        self.blocks -= 1;
        self.place += self.block.len();
        Some(&self.block)
    }
}

/// A list of digests that is filled one by one, each made while the next one is computed.
pub(crate) struct DigestList<'py> {
    list: Bound<'py, PyAny>,
    room: usize,
    filled: usize,
}

impl<'py> DigestList<'py> {
    /// A list of so many digests to come.
    pub(crate) fn new(py: Python<'py>, room: usize) -> PyResult<Self> {
        let len = ffi::Py_ssize_t::try_from(room).unwrap_or(ffi::Py_ssize_t::MAX);
        // SAFETY: attached; a new reference, or null with an exception set.
        let list = unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyList_New(len))? };
        Ok(Self { list, room, filled: 0 })
    }

    /// Add a digest; those that have no room are left out.
    #[inline]
    pub(crate) fn push(&mut self, digest: &[u8]) {
        if self.filled < self.room {
            let bytes = PyBytes::new(self.list.py(), digest);
            // SAFETY: the place is free and within the list's length; the reference is given away.
            unsafe {
                ffi::PyList_SetItem(self.list.as_ptr(), self.filled as ffi::Py_ssize_t, bytes.into_ptr())
            };
            self.filled += 1;
        }
    }

    /// The list; `None` where it is not full.
    pub(crate) fn finish(self) -> Option<Bound<'py, PyList>> {
        (self.filled == self.room).then(|| self.list.cast_into().ok()).flatten()
    }
}
