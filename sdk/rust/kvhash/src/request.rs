//! A request line: checked field by field, in the order and with the words of the Python SDK.

use std::sync::Arc;

use crate::error::{Code, Error, Result};
use crate::extra_keys::{Lora, MultimodalItem, PromptEmbeds, RequestKeys};
use crate::hasher::{BlockHasher, Settings, MAX_BLOCK_SIZE, MAX_LOOKAHEAD};
use crate::json::{self, Json, Text};
use crate::{Contract, Result as KvResult};

const FIELDS: [&str; 11] = [
    "tokens",
    "vllm",
    "algorithm",
    "hash_seed",
    "block_size",
    "lookahead",
    "decode_context_parallel_size",
    "lora",
    "cache_salt",
    "multimodal",
    "prompt_embeds",
];
const MAX_INT: i128 = (1 << 63) - 1;

/// Everything that decides the block hashes of one prompt. The request's part is checked; the engine's settings are
/// checked by [`Request::hasher`].
#[derive(Debug, Clone)]
pub struct Request {
    tokens: Vec<u64>,
    keys: RequestKeys,
    vllm: String,
    algorithm: Json,
    hash_seed: Json,
    block_size: Json,
    lookahead: Json,
    decode_context_parallel_size: Json,
}

type Fields = [(Text, Json)];

impl Request {
    /// Read one request line.
    ///
    /// # Errors
    /// [`Code::InvalidUtf8`], [`Code::InvalidJson`], and those of the fields.
    pub fn parse(line: &[u8]) -> KvResult<Self> {
        Self::from_json(json::parse(line, "the line")?)
    }

    pub(crate) fn from_json(value: Json) -> Result<Self> {
        let Json::Object(fields) = value else {
            return Err(Error::at(
                Code::InvalidRequest,
                "$",
                format!("expected a JSON object, got {}", value.type_name()),
            ));
        };
        let fields: Vec<_> = fields.into_iter().filter(|(name, _)| name.plain() != Some("id")).collect();
        check_fields(&fields, "$", &FIELDS, Code::InvalidRequest)?;
        let Some(tokens) = get(&fields, "tokens") else {
            return Err(Error::at(
                Code::InvalidRequest,
                "$.tokens",
                "a request needs 'tokens', a list of token ids",
            ));
        };
        let tokens = read_tokens(tokens)?;
        let keys = read_keys(&fields, tokens.len() as u64)?;
        let setting = |name: &str, default: Json| match get(&fields, name) {
            Some(Json::Null) if default != Json::Null && matches!(default, Json::Int(_)) => default,
            Some(value) => value.clone(),
            None => default,
        };
        let vllm = match get(&fields, "vllm") {
            None => "latest".to_owned(),
            Some(value) => check_text(value, "$.vllm", "the vLLM release", Code::InvalidRequest)?.to_owned(),
        };
        Ok(Self {
            tokens,
            keys,
            vllm,
            algorithm: setting("algorithm", Json::Text(Text::Plain("sha256".into()))),
            hash_seed: setting("hash_seed", Json::Null),
            block_size: setting("block_size", Json::Int(16)),
            lookahead: setting("lookahead", Json::Int(0)),
            decode_context_parallel_size: setting("decode_context_parallel_size", Json::Int(1)),
        })
    }

    /// The token ids.
    #[must_use]
    pub fn tokens(&self) -> &[u64] {
        &self.tokens
    }

    /// What the request adds to its blocks' keys.
    #[must_use]
    pub fn keys(&self) -> &RequestKeys {
        &self.keys
    }

    /// The hasher of the request's settings.
    ///
    /// # Errors
    /// As [`BlockHasher::new`], and for settings of the wrong type.
    pub fn hasher(&self) -> Result<BlockHasher> {
        let contract = Contract::for_vllm(&self.vllm)?;
        let Json::Text(algorithm) = &self.algorithm else {
            return Err(Error::at(
                Code::UnknownAlgorithm,
                "$.algorithm",
                format!("the algorithm must be text, got {}", self.algorithm.type_name()),
            ));
        };
        let algorithm = match algorithm {
            Text::Plain(name) => contract.algorithm(name)?.name,
            Text::Lone(_) => {
                return Err(Error::at(
                    Code::UnknownAlgorithm,
                    "$.algorithm",
                    format!(
                        "unknown algorithm {}; vLLM {} has: {}",
                        algorithm.repr(),
                        contract.release,
                        contract.algorithms.join(", ")
                    ),
                ))
            }
        };
        let block_size = check_int(
            &self.block_size,
            "$.block_size",
            "the block size",
            1,
            MAX_BLOCK_SIZE.into(),
            Code::InvalidBlockSize,
        )?;
        let parallel = check_int(
            &self.decode_context_parallel_size,
            "$.decode_context_parallel_size",
            "the decode context parallel size",
            1,
            MAX_BLOCK_SIZE.into(),
            Code::InvalidBlockSize,
        )?;
        let lookahead = check_int(
            &self.lookahead,
            "$.lookahead",
            "the look-ahead",
            0,
            MAX_LOOKAHEAD.into(),
            Code::InvalidRequest,
        )?;
        // The seed is checked last, but an unusable look-ahead comes before it.
        let mut settings = Settings {
            vllm: &self.vllm,
            algorithm,
            block_size: block_size as u64,
            hash_seed: Some(""),
            lookahead: lookahead as u64,
            decode_context_parallel_size: parallel as u64,
        };
        BlockHasher::new(&settings)?;
        settings.hash_seed = match &self.hash_seed {
            Json::Null => None,
            Json::Text(_) => {
                Some(check_text(&self.hash_seed, "$.hash_seed", "the hash seed", Code::InvalidSeed)?)
            }
            other => {
                return Err(Error::at(
                    Code::InvalidSeed,
                    "$.hash_seed",
                    format!(
                        "expected the hash seed as text, got {}; vLLM hashes PYTHONHASHSEED as the text that it is, \
                         so write \"{}\"",
                        other.type_name(),
                        other.repr()
                    ),
                ))
            }
        };
        BlockHasher::new(&settings)
    }
}

fn get<'a>(fields: &'a Fields, name: &str) -> Option<&'a Json> {
    fields.iter().find(|(field, _)| field.plain() == Some(name)).map(|(_, value)| value)
}

fn present<'a>(fields: &'a Fields, name: &str) -> Option<&'a Json> {
    get(fields, name).filter(|value| **value != Json::Null)
}

fn check_fields(fields: &Fields, at: &str, allowed: &[&str], code: Code) -> Result<()> {
    match fields.iter().find(|(name, _)| !name.plain().is_some_and(|name| allowed.contains(&name))) {
        None => Ok(()),
        Some((name, _)) => Err(Error::at(
            code,
            at,
            format!("unknown field {}; expected one of: {}", name.repr(), allowed.join(", ")),
        )),
    }
}

fn object<'a>(value: &'a Json, at: &str, allowed: &[&str], code: Code) -> Result<&'a Fields> {
    let Json::Object(fields) = value else {
        return Err(Error::at(code, at, format!("expected an object, got {}", value.type_name())));
    };
    check_fields(fields, at, allowed, code)?;
    Ok(fields)
}

fn check_text<'a>(value: &'a Json, at: &str, what: &str, code: Code) -> Result<&'a str> {
    match value {
        Json::Text(Text::Plain(text)) => Ok(text),
        Json::Text(Text::Lone(_)) => {
            Err(Error::at(code, at, format!("{what} holds a lone surrogate, which UTF-8 cannot carry")))
        }
        _ => Err(Error::at(code, at, format!("expected {what} as text, got {}", value.type_name()))),
    }
}

fn check_int(value: &Json, at: &str, what: &str, minimum: i128, maximum: i128, code: Code) -> Result<i128> {
    let number = match value {
        Json::Int(number) => Some(*number),
        Json::Big(_) => None,
        _ => {
            return Err(Error::at(
                code,
                at,
                format!("expected {what} as an integer, got {}", value.type_name()),
            ))
        }
    };
    if let Some(number) = number.filter(|number| (minimum..=maximum).contains(number)) {
        return Ok(number);
    }
    let below = match value {
        Json::Big(digits) => digits.starts_with('-'),
        _ => number.is_some_and(|number| number < minimum),
    };
    let shown = match number.filter(|number| number.unsigned_abs() < 1 << 70) {
        Some(number) => number.to_string(),
        None => if below { "a smaller one" } else { "a larger one" }.into(),
    };
    let limit = if maximum < 1 << 62 {
        format!("from {minimum} to {maximum}")
    } else if below {
        format!("of at least {minimum}")
    } else {
        "of at most 2^63 - 1".to_owned()
    };
    Err(Error::at(code, at, format!("expected {what}, an integer {limit}, got {shown}")))
}

fn read_tokens(value: &Json) -> Result<Vec<u64>> {
    let Json::List(items) = value else {
        return Err(Error::at(
            Code::InvalidToken,
            "$.tokens",
            format!("expected a list of token ids, got {}", value.type_name()),
        ));
    };
    let fault = |i: usize, item: &Json| {
        let mut shown = item.repr();
        if shown.chars().count() > 40 {
            shown = shown.chars().take(37).collect::<String>() + "...";
        }
        Error::at(
            Code::InvalidToken,
            format!("$.tokens[{i}]"),
            format!("expected a token id, an integer from 0 to 2^64 - 1, got {shown} ({})", item.type_name()),
        )
    };
    // A value that is no integer is said before an integer that is out of range, wherever they stand.
    if let Some((i, item)) =
        items.iter().enumerate().find(|(_, item)| !matches!(item, Json::Int(_) | Json::Big(_)))
    {
        return Err(fault(i, item));
    }
    items
        .iter()
        .enumerate()
        .map(|(i, item)| match item {
            Json::Int(number) => u64::try_from(*number).map_err(|_| fault(i, item)),
            _ => Err(fault(i, item)),
        })
        .collect()
}

fn read_keys(fields: &Fields, num_tokens: u64) -> Result<RequestKeys> {
    let cache_salt = present(fields, "cache_salt")
        .map(|value| check_text(value, "$.cache_salt", "the cache salt", Code::InvalidSalt))
        .transpose()?
        .map(Arc::from);
    let prompt_embeds = present(fields, "prompt_embeds").map(read_embeds).transpose()?;
    if let Some((_, rows)) = &prompt_embeds {
        if *rows < i128::from(num_tokens) {
            return Err(Error::at(
                Code::InvalidPromptEmbeds,
                "$.prompt_embeds.shape[0]",
                format!("{rows} rows for {num_tokens} tokens; expected a row per token"),
            ));
        }
    }
    let lora = present(fields, "lora").map(read_lora).transpose()?;
    let multimodal = match present(fields, "multimodal") {
        None => Vec::new(),
        Some(value) => read_items(value, num_tokens)?,
    };
    Ok(RequestKeys { lora, cache_salt, multimodal, prompt_embeds: prompt_embeds.map(|(embeds, _)| embeds) })
}

fn read_lora(value: &Json) -> Result<Lora> {
    let code = Code::InvalidLora;
    let fields = object(value, "$.lora", &["name", "path", "id"], code)?;
    let text = |name: &str| -> Result<Option<Arc<str>>> {
        let Some(value) = present(fields, name) else { return Ok(None) };
        let at = format!("$.lora.{name}");
        let text = check_text(value, &at, &format!("the adapter's {name}"), code)?;
        if text.is_empty() {
            return Err(Error::at(code, at, format!("the adapter's {name} is empty")));
        }
        Ok(Some(text.into()))
    };
    let (name, path) = (text("name")?, text("path")?);
    let id = present(fields, "id")
        .map(|value| check_int(value, "$.lora.id", "the adapter's id", 1, MAX_INT, code))
        .transpose()?;
    Ok(Lora { name, path, id: id.map(|id| id as i64) })
}

fn read_items(value: &Json, num_tokens: u64) -> Result<Vec<MultimodalItem>> {
    let code = Code::InvalidMultimodal;
    let Json::List(values) = value else {
        return Err(Error::at(
            code,
            "$.multimodal",
            format!("expected a list of items, got {}", value.type_name()),
        ));
    };
    let names = ["identifier", "offset", "length"];
    let mut items: Vec<MultimodalItem> = Vec::with_capacity(values.len());
    for (i, value) in values.iter().enumerate() {
        let at = format!("$.multimodal[{i}]");
        let fields = object(value, &at, &names, code)?;
        let needed = |name: &str| {
            get(fields, name).ok_or_else(|| Error::at(code, &at, format!("a multimodal item needs '{name}'")))
        };
        let (identifier, offset, length) = (needed("identifier")?, needed("offset")?, needed("length")?);
        let identifier = check_text(identifier, &format!("{at}.identifier"), "the identifier", code)?;
        let offset = check_int(offset, &format!("{at}.offset"), "the offset", 0, MAX_INT, code)?;
        let length = check_int(length, &format!("{at}.length"), "the length", 1, MAX_INT, code)?;
        items.push(MultimodalItem {
            identifier: identifier.into(),
            offset: offset as u64,
            length: length as u64,
        });
        RequestKeys::check_item(&items, i, Some(num_tokens))?;
    }
    Ok(items)
}

/// Read embeddings and how many rows they have.
fn read_embeds(value: &Json) -> Result<(PromptEmbeds, i128)> {
    let code = Code::InvalidPromptEmbeds;
    let at = "$.prompt_embeds";
    if !matches!(value, Json::Object(_)) {
        return Err(Error::at(
            code,
            at,
            format!("expected a matrix (rows, hidden size), got {} ()", value.type_name()),
        ));
    }
    let fields = object(value, at, &["shape", "dtype", "data"], code)?;
    let needed = |name: &str| {
        get(fields, name).ok_or_else(|| Error::at(code, at, format!("prompt embeddings need '{name}'")))
    };
    let (shape, dtype, data) = (needed("shape")?, needed("dtype")?, needed("data")?);
    let bytes = match data {
        Json::Text(text) => Some(
            text.plain()
                .and_then(from_hex)
                .ok_or_else(|| Error::at(code, format!("{at}.data"), "the data is not hex"))?,
        ),
        _ => None,
    };
    let Json::List(shape) = shape else {
        return Err(Error::at(
            code,
            format!("{at}.shape"),
            format!("expected [rows, hidden size], got {}", shape.type_name()),
        ));
    };
    let [rows, hidden] = shape.as_slice() else {
        return Err(Error::at(
            code,
            format!("{at}.shape"),
            format!("expected [rows, hidden size], got {} numbers", shape.len()),
        ));
    };
    let rows = check_int(rows, &format!("{at}.shape[0]"), "the number of rows", 0, MAX_INT, code)?;
    let hidden = check_int(hidden, &format!("{at}.shape[1]"), "the hidden size", 1, MAX_INT, code)?;
    let named = match dtype {
        Json::Text(Text::Plain(name)) => match name.as_str() {
            "float32" => Some((name, 4u128)),
            "float16" | "bfloat16" => Some((name, 2)),
            _ => None,
        },
        _ => None,
    };
    let Some((name, width)) = named else {
        return Err(Error::at(
            code,
            format!("{at}.dtype"),
            format!("unknown dtype {}; expected one of: float32, float16, bfloat16", dtype.repr()),
        ));
    };
    let Some(bytes) = bytes else {
        return Err(Error::at(
            code,
            format!("{at}.data"),
            format!("expected the rows as bytes, got {}", data.type_name()),
        ));
    };
    let row_size = hidden as u128 * width;
    let size = rows as u128 * row_size; // Below 2^128: both factors are below 2^63, and a width is at most 4.
    if bytes.len() as u128 != size {
        return Err(Error::at(
            code,
            format!("{at}.data"),
            format!("{rows} rows of {hidden} {name} are {size} bytes, got {}", bytes.len()),
        ));
    }
    // A row that no usize holds belongs to a matrix without rows.
    let row_size = usize::try_from(row_size).unwrap_or(usize::MAX);
    Ok((PromptEmbeds { row_size, data: Arc::new(bytes) }, rows))
}

/// `bytes.fromhex`: pairs of hex digits, with white space between the pairs.
pub(crate) fn from_hex(text: &str) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len() / 2);
    let mut bytes = text.bytes();
    while let Some(first) = bytes.next() {
        if matches!(first, b' ' | b'\t' | b'\n' | b'\r' | 0x0b | 0x0c) {
            continue;
        }
        let high = char::from(first).to_digit(16)?;
        let low = char::from(bytes.next()?).to_digit(16)?;
        out.push((high << 4 | low) as u8);
    }
    Some(out)
}
