//! What besides the tokens goes into a block's hash: LoRA adapter, multimodal items, cache salt, prompt embeddings.

use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use crate::contract::{Contract, LoraKey, MultimodalKey, PromptEmbedsKey};
use crate::error::{Code, Error, Result};
use crate::value::{Tag, Value};

/// A LoRA adapter as registered with the engine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lora {
    /// Hashed from vLLM 0.11.1 on.
    pub name: Option<Arc<str>>,
    /// Hashed from vLLM 0.31 on; exactly as the engine got it.
    pub path: Option<Arc<str>>,
    /// Hashed before vLLM 0.11.1.
    pub id: Option<i64>,
}

impl Lora {
    /// The adapter's part of every block's key.
    ///
    /// # Errors
    /// [`Code::InvalidLora`] where what the release hashes was not given.
    pub fn key(&self, contract: &Contract) -> Result<Value> {
        let needed = |value: &Option<Arc<str>>, what: &str| {
            value.clone().map(Value::Text).ok_or_else(|| missing(contract, what))
        };
        Ok(match contract.lora_key {
            LoraKey::Id => Value::Int(self.id.ok_or_else(|| missing(contract, "id"))?.into()),
            LoraKey::Name => needed(&self.name, "name")?,
            LoraKey::NameAndPath => {
                let name = needed(&self.name, "name")?;
                Value::Tuple(vec![Value::Tag(Tag::Lora), name, needed(&self.path, "path")?])
            }
        })
    }
}

fn missing(contract: &Contract, what: &str) -> Error {
    Error::at(
        Code::InvalidLora,
        format!("$.lora.{what}"),
        format!("vLLM {} hashes the adapter's {what}, and none was given", contract.release),
    )
}

/// An image, audio or video in the prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MultimodalItem {
    /// The identifier of its content.
    pub identifier: Arc<str>,
    /// Its first placeholder token, counted from the start of the prompt.
    pub offset: u64,
    /// How many placeholder tokens it fills, at least 1.
    pub length: u64,
}

impl MultimodalItem {
    /// The position after the item's last token.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }
}

/// Prompt embeddings: rows of `row_size` bytes, one a prompt token.
#[derive(Clone)]
pub struct PromptEmbeds {
    /// Bytes of one row, at least 1.
    pub row_size: usize,
    /// The rows, little-endian.
    pub data: Arc<dyn AsRef<[u8]> + Send + Sync>,
}

impl PromptEmbeds {
    /// The bytes of rows `start` to `end`; rows that do not exist are left out.
    fn rows(&self, start: u64, end: u64) -> &[u8] {
        let data = (*self.data).as_ref();
        let place = |row: u64| {
            usize::try_from(row).ok().and_then(|row| row.checked_mul(self.row_size)).unwrap_or(usize::MAX)
        };
        &data[place(start).min(data.len())..place(end).min(data.len())]
    }
}

impl std::fmt::Debug for PromptEmbeds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PromptEmbeds").field("row_size", &self.row_size).finish_non_exhaustive()
    }
}

/// What one request adds to its blocks' keys.
#[derive(Debug, Clone, Default)]
pub struct RequestKeys {
    /// The adapter.
    pub lora: Option<Lora>,
    /// The salt; an empty one is none.
    pub cache_salt: Option<Arc<str>>,
    /// The items, sorted by offset and not overlapping ([`RequestKeys::check_items`]).
    pub multimodal: Vec<MultimodalItem>,
    /// The embeddings.
    pub prompt_embeds: Option<PromptEmbeds>,
}

impl RequestKeys {
    /// Check that the items are sorted, do not overlap and (with `num_tokens`) end within the prompt.
    ///
    /// # Errors
    /// [`Code::InvalidMultimodal`].
    pub fn check_items(items: &[MultimodalItem], num_tokens: Option<u64>) -> Result<()> {
        for i in 0..items.len() {
            Self::check_item(items, i, num_tokens)?;
        }
        Ok(())
    }

    pub(crate) fn check_item(items: &[MultimodalItem], i: usize, num_tokens: Option<u64>) -> Result<()> {
        let item = &items[i];
        let fault = |field: &str, message: String| {
            Err(Error::at(Code::InvalidMultimodal, format!("$.multimodal[{i}].{field}"), message))
        };
        if let Some(before) = i.checked_sub(1).map(|i| &items[i]) {
            if item.offset < before.offset {
                return fault(
                    "offset",
                    format!("items must be sorted by offset: {} comes after {}", item.offset, before.offset),
                );
            }
            if item.offset < before.end() {
                return fault(
                    "offset",
                    format!(
                        "items must not overlap: the one before ends at {}, this starts at {}",
                        before.end(),
                        item.offset
                    ),
                );
            }
        }
        match num_tokens {
            Some(num_tokens) if item.end() > num_tokens => fault(
                "length",
                format!("the item ends at {}, past the {num_tokens} tokens of the prompt", item.end()),
            ),
            _ => Ok(()),
        }
    }

    /// Whether no block of this request can have a key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lora.is_none()
            && self.salt().is_none()
            && self.multimodal.is_empty()
            && self.prompt_embeds.is_none()
    }

    fn salt(&self) -> Option<&Arc<str>> {
        self.cache_salt.as_ref().filter(|salt| !salt.is_empty())
    }

    /// The extra keys of the tokens `start` to `end`, `None` where there are none. `lora` is [`Lora::key`], made once.
    pub(crate) fn block(
        &self,
        contract: &Contract,
        lora: Option<&Value>,
        start: u64,
        end: u64,
    ) -> Option<Vec<Value>> {
        let mut keys: Vec<Value> = lora.cloned().into_iter().collect();
        let first = self.multimodal.partition_point(|item| item.end() <= start);
        for item in self.multimodal[first..].iter().take_while(|item| item.offset < end) {
            let identifier = Value::Text(item.identifier.clone());
            let offset = Value::Int(i128::from(item.offset) - i128::from(start));
            keys.push(match contract.multimodal_key {
                MultimodalKey::Identifier => identifier,
                MultimodalKey::IdentifierAndOffset if contract.tagged_keys => {
                    Value::Tuple(vec![Value::Tag(Tag::Multimodal), identifier, offset])
                }
                MultimodalKey::IdentifierAndOffset => Value::Tuple(vec![identifier, offset]),
            });
        }
        let tagged = |tag: Tag, value: Value| {
            if contract.tagged_keys {
                Value::Tuple(vec![Value::Tag(tag), value])
            } else {
                value
            }
        };
        if let (Some(salt), 0) = (self.salt(), start) {
            keys.push(tagged(Tag::CacheSalt, Value::Text(salt.clone())));
        }
        if let Some(embeds) = &self.prompt_embeds {
            let rows = embeds.rows(start, end);
            let content: Option<Arc<[u8]>> = match contract.prompt_embeds_key {
                PromptEmbedsKey::Absent => None,
                PromptEmbedsKey::Bytes => Some(rows.into()),
                PromptEmbedsKey::Sha256 => Some(Sha256::digest(rows).as_slice().into()),
            };
            keys.extend(content.map(|content| tagged(Tag::PromptEmbeds, Value::Bytes(content))));
        }
        (!keys.is_empty()).then_some(keys)
    }
}
