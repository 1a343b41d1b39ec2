//! KV events, decoded where they lie: every release's shape and SGLang's.
//!
//! ```
//! use kvhash::events::{decode_batch, Event};
//!
//! // [1.5, [["BlockRemoved", [7, 8]], ["Later"]], 0]
//! let payload = b"\x93\xca\x3f\xc0\0\0\x92\x92\xacBlockRemoved\x92\x07\x08\x91\xa5Later\0";
//! let batch = decode_batch(payload)?;
//! assert_eq!(batch.ts, 1.5);
//! let Event::Removed(event) = &batch.events[0] else { panic!() };
//! assert_eq!(event.block_hashes.iter().map(|hash| hash.key()).collect::<Vec<_>>(), [7, 8]);
//! assert!(matches!(batch.events[1], Event::Unknown { tag: "Later", .. }));
//! # Ok::<(), kvhash::Error>(())
//! ```

mod batch;
mod decode;
mod fast;
mod json;
mod msgpack;
mod value;

pub use batch::{
    BlockRemoved, BlockStored, Event, EventBatch, ExtraField, FieldName, HashValue, Hashes, Layout, PerBlock,
    Tokens,
};
pub use decode::{decode_batch, decode_event, decode_into, EventSink, MAX_PAYLOAD_BYTES};
pub(crate) use json::write_batch;
pub use msgpack::Integer;
#[cfg(test)]
pub(crate) use msgpack::INT_WIDTH;
pub use value::Value;
