//! The KV-cache block hashes that vLLM computes, computed outside vLLM.
//!
//! vLLM names each full KV-cache block by a chained hash, `H(serialize((parent, tokens, extra_keys)))`. This crate
//! computes these hashes for every release since 0.9.2, every reproducible algorithm and every extra key, near the
//! speed of the digest itself. The Python package of the same name is the readable definition; both answer alike.
//!
//! [`BlockHasher`] is where to start; [`events`] reads the KV events that engines publish; [`lines`] answers the
//! request and event lines of the test corpus.

#![deny(unsafe_code)] // but for the module that uses the processor's own instructions

mod block_hash;
mod cbor;
pub mod contract;
#[rustfmt::skip]
mod contract_table;
mod cpu;
mod error;
pub mod events;
mod extra_keys;
mod function;
mod hasher;
pub mod index;
mod json;
pub mod lines;
mod pickle5;
mod request;
mod sha256_chain;
mod text;
mod value;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use block_hash::BlockHash;
pub use contract::{Algorithm, Contract, Release};
pub use error::{Code, Error, Result};
pub use extra_keys::{Lora, MultimodalItem, PromptEmbeds, RequestKeys};
pub use function::{sha256, sha256_floor, Blocks, HashFunction, Token};
pub use hasher::{none_hash, BlockHasher, Chain, ChainState, Keyed, Settings, MAX_BLOCK_SIZE, MAX_LOOKAHEAD};
pub use request::Request;
pub use value::{Tag, Value};
