//! Unsafe: tensors of integers on the CPU, read through DLPack without copying and without the library they are from.
//!
//! The exporter's capsule is kept, not consumed: it owns the tensor until it is dropped.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use pyo3::ffi;
use pyo3::prelude::*;

use crate::buffer::Element;

/// `DLTensor`, which `DLManagedTensor` begins with; unchanged in every version of DLPack without a version field.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: c_int,
    device_id: c_int,
    ndim: c_int,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// Where memory is that this process reads as its own: `kDLCPU`, and pinned memory of CUDA and ROCm.
const HOST: [c_int; 3] = [1, 3, 11];

/// An open tensor of one dimension of integers.
pub(crate) struct Dlpack {
    /// Owns the tensor.
    _capsule: Py<PyAny>,
    data: *const c_void,
    element: Element,
    len: usize,
}

// SAFETY: the tensor's memory is only read, and dropping the capsule attaches to the interpreter first.
unsafe impl Send for Dlpack {}
// SAFETY: as above.
unsafe impl Sync for Dlpack {}

impl Dlpack {
    /// Open a tensor of native integers in one dimension, side by side, in this process's memory; `None` for anything
    /// else, and for what has no `tolist`, as the Python definition cannot read it.
    pub(crate) fn open(object: &Bound<'_, PyAny>) -> Option<Self> {
        if !object.hasattr("__dlpack__").unwrap_or(false) || !object.hasattr("tolist").unwrap_or(false) {
            return None;
        }
        // Asked first: an export may copy, or wait for, another device.
        let (device, _): (c_int, i64) = object.call_method0("__dlpack_device__").ok()?.extract().ok()?;
        if !HOST.contains(&device) {
            return None;
        }
        let capsule = object.call_method0("__dlpack__").ok()?;
        // SAFETY: the name is a C string. Null, with an exception set, for what is no capsule of that name.
        let tensor =
            unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), c"dltensor".as_ptr()).cast::<Tensor>() };
        if tensor.is_null() {
            // SAFETY: attached.
            unsafe { ffi::PyErr_Clear() };
            return None;
        }
        // SAFETY: a capsule of that name holds such a structure, which lives as long as the capsule.
        let tensor = unsafe { &*tensor };
        let element = Element::of(usize::from(tensor.bits) / 8, tensor.code == 0)
            .filter(|_| tensor.code <= 1 && tensor.bits % 8 == 0 && tensor.lanes == 1)?;
        if !HOST.contains(&tensor.device_type) || tensor.ndim != 1 || tensor.shape.is_null() {
            return None;
        }
        // SAFETY: there is one length and, where there are strides, one of them.
        let (len, stride) =
            unsafe { (*tensor.shape, if tensor.strides.is_null() { 1 } else { *tensor.strides }) };
        let len = usize::try_from(len).ok().filter(|len| stride == 1 || *len <= 1)?;
        let data = tensor.data.cast_const().wrapping_byte_add(usize::try_from(tensor.byte_offset).ok()?);
        let aligned = (data as usize).is_multiple_of(usize::from(tensor.bits) / 8);
        (len == 0 || (!tensor.data.is_null() && aligned)).then(|| Self {
            _capsule: capsule.unbind(),
            data,
            element,
            len,
        })
    }

    pub(crate) fn element(&self) -> Element {
        self.element
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The elements; `T` must be the type that [`Dlpack::element`] names.
    pub(crate) fn slice<T: kvhash::Token>(&self) -> &[T] {
        assert!(self.element.is::<T>());
        if self.len == 0 {
            return &[];
        }
        // SAFETY: `open` found `len` aligned elements of this size side by side, every bit pattern is an integer, and
        // the capsule owns them as long as `self` lives.
        unsafe { std::slice::from_raw_parts(self.data.cast::<T>(), self.len) }
    }
}
