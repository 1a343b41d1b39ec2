//! The module `kvhash._native`: the `kvhash` crate for the Python package, which falls back to its own code without it.
#![deny(unsafe_code)]

mod hashing;
mod index;
mod raw;
mod tokens;

use pyo3::prelude::*;

/// The native core of kvhash; `kvhash` uses it where it is built.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    raw::probe(module.py());
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<hashing::Engine>()?;
    module.add_class::<hashing::Chain>()?;
    module.add_class::<index::RankMap>()?;
    module.add_function(wrap_pyfunction!(index::longest_prefix, module)?)?;
    module.add_function(wrap_pyfunction!(index::apply_payloads, module)?)?;
    module.add_class::<tokens::Tokens>()?;
    module.add_function(wrap_pyfunction!(tokens::take_tokens, module)?)?;
    module.add_function(wrap_pyfunction!(hashing::bare_sha256_chain, module)?)
}
