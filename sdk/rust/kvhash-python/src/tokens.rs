//! Token ids taken in once: from lists and tuples of ints, and from buffers and tensors without copying.

use kvhash::{BlockHash, BlockHasher, ChainState, Keyed, Token};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};

use crate::buffer::{Buffer, Element};
use crate::dlpack::Dlpack;
use crate::sequence::{read_sequence, Ids};

/// Token ids as they were given.
pub(crate) enum Data {
    Ids(Ids),
    Buffer(Buffer),
    Dlpack(Dlpack),
}

macro_rules! with_slice {
    ($data:expr, $tokens:ident => $body:expr) => {
        match $data {
            Data::Ids(Ids::Narrow($tokens)) => $body,
            Data::Ids(Ids::Wide($tokens)) => $body,
            Data::Buffer(buffer) => with_slice!(buffer, buffer, $tokens => $body),
            Data::Dlpack(tensor) => with_slice!(buffer, tensor, $tokens => $body),
        }
    };
    (buffer, $buffer:ident, $tokens:ident => $body:expr) => {
        match $buffer.element() {
            Element::U8 => with_slice!(@ $buffer, u8, $tokens => $body),
            Element::U16 => with_slice!(@ $buffer, u16, $tokens => $body),
            Element::U32 => with_slice!(@ $buffer, u32, $tokens => $body),
            Element::U64 => with_slice!(@ $buffer, u64, $tokens => $body),
            Element::I8 => with_slice!(@ $buffer, i8, $tokens => $body),
            Element::I16 => with_slice!(@ $buffer, i16, $tokens => $body),
            Element::I32 => with_slice!(@ $buffer, i32, $tokens => $body),
            Element::I64 => with_slice!(@ $buffer, i64, $tokens => $body),
        }
    };
    (@ $buffer:ident, $type:ty, $tokens:ident => $body:expr) => {{
        let $tokens = $buffer.slice::<$type>();
        $body
    }};
}

fn any_negative<T: Token>(tokens: &[T]) -> bool {
    tokens.iter().fold(false, |any, token| any | token.is_negative())
}

impl Data {
    /// Take token ids in; `None` for what is left to the Python definition, which says what is wrong or makes a list.
    pub(crate) fn take(object: &Bound<'_, PyAny>) -> Option<Self> {
        if let Some(ids) = read_sequence(object) {
            return Some(Self::Ids(ids));
        }
        // These are buffers of small integers too, and almost surely a mistake.
        if object.is_instance_of::<PyBytes>() || object.is_instance_of::<PyByteArray>() {
            return None;
        }
        let data = match Buffer::open(object) {
            Some(buffer) => Self::Buffer(buffer),
            None => Self::Dlpack(Dlpack::open(object)?),
        };
        (!with_slice!(&data, tokens => any_negative(tokens))).then_some(data)
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Ids(Ids::Narrow(tokens)) => tokens.len(),
            Self::Ids(Ids::Wide(tokens)) => tokens.len(),
            Self::Buffer(buffer) => buffer.len(),
            Self::Dlpack(tensor) => tensor.len(),
        }
    }

    pub(crate) fn grow(
        &self,
        state: &mut ChainState,
        hasher: &BlockHasher,
        keyed: Option<&Keyed>,
        sink: impl FnMut(BlockHash),
    ) {
        with_slice!(self, tokens => state.grow(hasher, keyed, tokens, sink));
    }

    /// The tokens from `start` to `end`.
    pub(crate) fn range(&self, start: usize, end: usize) -> Vec<u64> {
        with_slice!(self, tokens => tokens[start..end].iter().map(|token| token.value()).collect())
    }
}

/// Token ids taken in by the native module.
#[pyclass(frozen, module = "kvhash._native")]
pub(crate) struct Tokens(pub(crate) Data);

#[pymethods]
impl Tokens {
    fn __len__(&self) -> usize {
        self.0.len()
    }
}

/// Take in a list or tuple of ints, or a one-dimensional integer buffer or tensor; None where the Python definition must look.
#[pyfunction]
pub(crate) fn take_tokens(tokens: &Bound<'_, PyAny>) -> Option<Tokens> {
    Data::take(tokens).map(Tokens)
}
