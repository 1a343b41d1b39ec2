//! The one error type: a stable code, what was wrong, and where.

use std::fmt;

/// What went wrong, by its stable name. Codes never change once released; messages may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Code {
    /// The text is no vLLM release, or one older than any that can be reproduced.
    UnknownRelease,
    /// No algorithm has that name.
    UnknownAlgorithm,
    /// The release does not have the algorithm.
    AlgorithmNotInRelease,
    /// The algorithm gives other hashes in every process (`builtin`).
    AlgorithmNotReproducible,
    /// NONE_HASH is random for these settings.
    UnknownRoot,
    /// The release does not have a feature that the request uses.
    FeatureNotInRelease,
    /// A field is missing, unknown, or of the wrong type or range.
    InvalidRequest,
    /// A block size is not usable.
    InvalidBlockSize,
    /// A token id is not an integer from 0 to 2^64 - 1.
    InvalidToken,
    /// The hash seed is not text.
    InvalidSeed,
    /// The cache salt is not text.
    InvalidSalt,
    /// The adapter lacks what the release hashes, or has it in the wrong type.
    InvalidLora,
    /// A multimodal item overlaps another, is out of order, or reaches past the end.
    InvalidMultimodal,
    /// The embedding matrix has too few rows, an unknown dtype, or data of the wrong length.
    InvalidPromptEmbeds,
    /// The text is not JSON.
    InvalidJson,
    /// The text is not UTF-8.
    InvalidUtf8,
    /// A request line is longer than the limit.
    LineTooLong,
    /// A payload is no batch of KV events.
    InvalidBatch,
    /// A payload is not msgpack.
    InvalidMsgpack,
    /// A payload is nested too deeply to be read.
    NestedTooDeeply,
    /// A payload is longer than the limit.
    PayloadTooLarge,
}

impl Code {
    /// The code as answer lines carry it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::UnknownRelease => "unknown-release",
            Self::UnknownAlgorithm => "unknown-algorithm",
            Self::AlgorithmNotInRelease => "algorithm-not-in-release",
            Self::AlgorithmNotReproducible => "algorithm-not-reproducible",
            Self::UnknownRoot => "unknown-root",
            Self::FeatureNotInRelease => "feature-not-in-release",
            Self::InvalidRequest => "invalid-request",
            Self::InvalidBlockSize => "invalid-block-size",
            Self::InvalidToken => "invalid-token",
            Self::InvalidSeed => "invalid-seed",
            Self::InvalidSalt => "invalid-salt",
            Self::InvalidLora => "invalid-lora",
            Self::InvalidMultimodal => "invalid-multimodal",
            Self::InvalidPromptEmbeds => "invalid-prompt-embeds",
            Self::InvalidJson => "invalid-json",
            Self::InvalidUtf8 => "invalid-utf8",
            Self::LineTooLong => "line-too-long",
            Self::InvalidBatch => "invalid-batch",
            Self::InvalidMsgpack => "invalid-msgpack",
            Self::NestedTooDeeply => "nested-too-deeply",
            Self::PayloadTooLarge => "payload-too-large",
        }
    }
}

/// An error that kvhash raises on purpose: a [`Code`], a message, and the path of the offending value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// The stable name of the fault.
    pub code: Code,
    /// What was wrong and what would be right.
    pub message: String,
    /// Where in the request, such as `$.multimodal[1].offset`.
    pub at: Option<String>,
}

impl Error {
    /// An error with a place.
    pub fn at(code: Code, at: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), at: Some(at.into()) }
    }

    /// An error without a place.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), at: None }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.at {
            Some(at) => write!(f, "{} - at {at}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for Error {}

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
