//! What a preimage is made of, and the interface of the two serializations.

use std::sync::Arc;

/// A constant text of vLLM's own code. It is one object, so pickle writes its second use in a block as a
/// back-reference; every other text came over the wire and is an object of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tag {
    /// `"lora"`
    Lora,
    /// `"mm"`
    Multimodal,
    /// `"cache_salt"`
    CacheSalt,
    /// `"prompt_embeds"`
    PromptEmbeds,
}

impl Tag {
    /// The text of the tag.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Lora => "lora",
            Self::Multimodal => "mm",
            Self::CacheSalt => "cache_salt",
            Self::PromptEmbeds => "prompt_embeds",
        }
    }
}

/// A part of a block's extra keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// None.
    None,
    /// An integer: an adapter's id, an offset, a look-ahead token.
    Int(i128),
    /// A text, an object of its own.
    Text(Arc<str>),
    /// Bytes, an object of their own.
    Bytes(Arc<[u8]>),
    /// A constant text of vLLM.
    Tag(Tag),
    /// A tuple.
    Tuple(Vec<Value>),
}

/// Writes one preimage, value by value. A tuple is opened and closed with its length.
pub(crate) trait Serializer {
    fn none(&mut self);
    fn int(&mut self, value: i128);
    /// An unsigned integer of 256 bits, big-endian.
    fn uint256(&mut self, value: &[u8; 32]);
    fn text(&mut self, value: &str);
    fn tag(&mut self, value: Tag);
    fn bytes(&mut self, value: &[u8]);
    fn open(&mut self, len: usize);
    fn close(&mut self, len: usize);

    fn value(&mut self, value: &Value) {
        match value {
            Value::None => self.none(),
            Value::Int(number) => self.int(*number),
            Value::Text(text) => self.text(text),
            Value::Bytes(bytes) => self.bytes(bytes),
            Value::Tag(tag) => self.tag(*tag),
            Value::Tuple(items) => self.tuple(items),
        }
    }

    fn tuple(&mut self, items: &[Value]) {
        self.open(items.len());
        for item in items {
            self.value(item);
        }
        self.close(items.len());
    }
}
