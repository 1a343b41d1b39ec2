//! The module `kvhash._native`: the `kvhash` crate for the Python package, which falls back to its own code without it.
#![deny(unsafe_code)]

mod buffer;
mod dlpack;
mod events;
mod hashing;
mod index;
mod sequence;
mod tokens;

use pyo3::prelude::*;

/// The native core of kvhash; `kvhash` uses it where it is built.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    sequence::probe(module.py());
    sequence::probe_lists(module.py());
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<hashing::Engine>()?;
    module.add_class::<hashing::Chain>()?;
    module.add_class::<index::RankMap>()?;
    module.add_class::<index::Fleet>()?;
    module.add_function(wrap_pyfunction!(index::apply_payloads, module)?)?;
    module.add_class::<tokens::Tokens>()?;
    module.add_class::<events::RawBatch>()?;
    module.add_class::<events::RawStored>()?;
    module.add_class::<events::RawRemoved>()?;
    module.add_class::<events::RawTokens>()?;
    module.add_function(wrap_pyfunction!(events::decode_raw, module)?)?;
    module.add_function(wrap_pyfunction!(tokens::take_tokens, module)?)?;
    module.add_function(wrap_pyfunction!(sequence::probed, module)?)?;
    module.add_function(wrap_pyfunction!(hashing::bare_sha256_chain, module)?)
}
