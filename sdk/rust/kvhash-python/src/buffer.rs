//! Unsafe: buffers of integers, read without copying.
//!
//! Everything here runs attached to the interpreter, except the reading of a buffer, which outlives the call that
//! opened it: [`Buffer`] keeps the exporter's view open, so its memory stays where it is. Another thread may write to
//! that memory meanwhile, as with every consumer of the buffer protocol; it then gets the hashes of what was read.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void, CStr};
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;

/// `Py_buffer`. It and its functions joined the stable ABI with Python 3.11; CPython 3.10 exports the same functions
/// over the same layout.
#[repr(C)]
struct View {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

extern "C" {
    fn PyObject_CheckBuffer(object: *mut ffi::PyObject) -> c_int;
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut View, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut View);
}

/// PyBUF_FORMAT | PyBUF_ND: elements side by side, in C order.
const FLAGS: c_int = 0x0004 | 0x0008;

/// How a buffer's elements are written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    U8,
    U16,
    U32,
    U64,
    I8,
    I16,
    I32,
    I64,
}

impl Element {
    /// Integers of so many bytes.
    pub(crate) fn of(size: usize, signed: bool) -> Option<Self> {
        Some(match (size, signed) {
            (1, false) => Self::U8,
            (2, false) => Self::U16,
            (4, false) => Self::U32,
            (8, false) => Self::U64,
            (1, true) => Self::I8,
            (2, true) => Self::I16,
            (4, true) => Self::I32,
            (8, true) => Self::I64,
            _ => return None,
        })
    }

    /// Whether `T` has the size of these.
    pub(crate) fn is<T>(self) -> bool {
        let size = match self {
            Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 => 4,
            Self::U64 | Self::I64 => 8,
        };
        std::mem::size_of::<T>() == size
    }
}

/// An open view of one dimension of integers.
pub(crate) struct Buffer {
    // On the heap: an exporter may point `shape` into the view itself, which must not move then.
    view: Box<View>,
    element: Element,
    len: usize,
}

// SAFETY: the view's memory is only read, and releasing it attaches to the interpreter first.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Open a buffer of native integers in one dimension, side by side; `None` for anything else.
    pub(crate) fn open(object: &Bound<'_, PyAny>) -> Option<Self> {
        let mut view = Box::new(View {
            buf: ptr::null_mut(),
            obj: ptr::null_mut(),
            len: 0,
            itemsize: 0,
            readonly: 0,
            ndim: 0,
            format: ptr::null_mut(),
            shape: ptr::null_mut(),
            strides: ptr::null_mut(),
            suboffsets: ptr::null_mut(),
            internal: ptr::null_mut(),
        });
        // SAFETY: the object is alive and the interpreter attached; the view is ours and is released by `drop`, which
        // is reached only where GetBuffer succeeded.
        unsafe {
            if PyObject_CheckBuffer(object.as_ptr()) == 0 {
                return None;
            }
            if PyObject_GetBuffer(object.as_ptr(), &mut *view, FLAGS) != 0 {
                ffi::PyErr_Clear();
                return None;
            }
        }
        let mut buffer = Self { view, element: Element::U8, len: 0 };
        buffer.check().then_some(buffer)
    }

    fn check(&mut self) -> bool {
        let view = &self.view;
        if view.ndim != 1 || view.shape.is_null() || !view.suboffsets.is_null() || view.format.is_null() {
            return false;
        }
        // SAFETY: a non-null format is a C string, and `shape` has `ndim` entries.
        let (format, len) = unsafe { (CStr::from_ptr(view.format).to_bytes(), *view.shape) };
        let native = if cfg!(target_endian = "little") { b'<' } else { b'>' };
        let code = match format {
            [code] => *code,
            [b'@' | b'=', code] => *code,
            [order, code] if *order == native => *code,
            _ => return false,
        };
        let signed = match code {
            b'b' | b'h' | b'i' | b'l' | b'q' | b'n' => true,
            b'B' | b'H' | b'I' | b'L' | b'Q' | b'N' => false,
            _ => return false,
        };
        let size = usize::try_from(view.itemsize).unwrap_or(0);
        let Some(element) = Element::of(size, signed) else { return false };
        self.element = element;
        let Ok(len) = usize::try_from(len) else { return false };
        self.len = len;
        len == 0
            || (!view.buf.is_null()
                && (view.buf as usize).is_multiple_of(view.itemsize as usize)
                && len.checked_mul(view.itemsize as usize) == usize::try_from(view.len).ok())
    }

    pub(crate) fn element(&self) -> Element {
        self.element
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The elements; `T` must be the type that [`Buffer::element`] names.
    pub(crate) fn slice<T: kvhash::Token>(&self) -> &[T] {
        assert!(self.element.is::<T>());
        if self.len == 0 {
            return &[];
        }
        // SAFETY: `check` found `len` aligned elements of this size side by side, every bit pattern is an integer,
        // and the view is open as long as `self` lives.
        unsafe { std::slice::from_raw_parts(self.view.buf.cast::<T>(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the view was opened by GetBuffer and is released once, attached.
        Python::attach(|_| unsafe { PyBuffer_Release(&mut *self.view) });
    }
}
