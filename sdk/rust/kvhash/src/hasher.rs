//! Block hashes: `H(serialize((parent, tokens, extra_keys)))`, chained from NONE_HASH.

use crate::block_hash::BlockHash;
use crate::contract::{Algorithm, Contract};
use crate::error::{Code, Error, Result};
use crate::extra_keys::RequestKeys;
use crate::function::{Blocks, HashFunction, Scratch, Token};
use crate::value::Value;

/// The largest block size and context-parallel size.
pub const MAX_BLOCK_SIZE: u64 = (1 << 31) - 1;
/// The largest look-ahead.
pub const MAX_LOOKAHEAD: u64 = 1 << 16;

/// The settings of an engine that decide its block hashes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings<'a> {
    /// A vLLM release, or `latest`.
    pub vllm: &'a str,
    /// vLLM's `--prefix-caching-hash-algo`.
    pub algorithm: &'a str,
    /// Tokens per block.
    pub block_size: u64,
    /// PYTHONHASHSEED in the engine's environment, `None` where it is unset.
    pub hash_seed: Option<&'a str>,
    /// Tokens after a block that its hash covers.
    pub lookahead: u64,
    /// A hash covers the block size times this many tokens.
    pub decode_context_parallel_size: u64,
}

impl Default for Settings<'_> {
    fn default() -> Self {
        Self {
            vllm: "latest",
            algorithm: "sha256",
            block_size: 16,
            hash_seed: None,
            lookahead: 0,
            decode_context_parallel_size: 1,
        }
    }
}

/// Computes the block hashes of one engine's settings. An immutable value.
///
/// ```
/// use kvhash::{BlockHasher, Settings};
///
/// let hasher = BlockHasher::new(&Settings {
///     vllm: "0.33.0",
///     algorithm: "sha256_cbor",
///     block_size: 4,
///     hash_seed: Some("0"),
///     ..Settings::default()
/// })?;
/// let hashes = hasher.hash_tokens(&[1u32, 2, 3, 4]);
/// assert_eq!(hashes[0].to_string(), "c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb");
/// # Ok::<(), kvhash::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockHasher {
    contract: Contract,
    function: HashFunction,
    none_hash: BlockHash,
    span: u64,
    lookahead: u64,
}

impl BlockHasher {
    /// The hasher of these settings.
    ///
    /// # Errors
    /// [`Code::UnknownRelease`], the algorithm's codes, [`Code::InvalidBlockSize`], [`Code::InvalidRequest`] (the
    /// look-ahead), [`Code::FeatureNotInRelease`], [`Code::UnknownRoot`].
    pub fn new(settings: &Settings<'_>) -> Result<Self> {
        let contract = Contract::for_vllm(settings.vllm)?;
        let algorithm = contract.algorithm(settings.algorithm)?;
        let size = |value: u64, at: &str, what: &str| {
            if (1..=MAX_BLOCK_SIZE).contains(&value) {
                return Ok(value);
            }
            Err(Error::at(
                Code::InvalidBlockSize,
                at,
                format!("expected {what}, an integer from 1 to {MAX_BLOCK_SIZE}, got {value}"),
            ))
        };
        let block_size = size(settings.block_size, "$.block_size", "the block size")?;
        let parallel = size(
            settings.decode_context_parallel_size,
            "$.decode_context_parallel_size",
            "the decode context parallel size",
        )?;
        if settings.lookahead > MAX_LOOKAHEAD {
            return Err(Error::at(
                Code::InvalidRequest,
                "$.lookahead",
                format!(
                    "expected the look-ahead, an integer from 0 to {MAX_LOOKAHEAD}, got {}",
                    settings.lookahead
                ),
            ));
        }
        if settings.lookahead > 0 && !contract.lookahead {
            return Err(Error::at(
                Code::FeatureNotInRelease,
                "$.lookahead",
                format!("vLLM {} has no look-ahead hashing; expected a look-ahead of 0", contract.release),
            ));
        }
        let none_hash = none_hash(&contract, &algorithm, settings.hash_seed)?;
        Ok(Self::from_parts(contract, algorithm, none_hash, block_size * parallel, settings.lookahead))
    }

    /// A hasher of parts that are known to fit: `span` tokens a hash (at least 1), `lookahead` tokens after them.
    #[must_use]
    pub fn from_parts(
        contract: Contract,
        algorithm: Algorithm,
        none_hash: BlockHash,
        span: u64,
        lookahead: u64,
    ) -> Self {
        let function = HashFunction::new(algorithm, contract.chain_values);
        Self { contract, function, none_hash, span: span.max(1), lookahead }
    }

    /// The contract of the release.
    #[must_use]
    pub fn contract(&self) -> &Contract {
        &self.contract
    }

    /// The algorithm together with what its release chains.
    #[must_use]
    pub fn function(&self) -> HashFunction {
        self.function
    }

    /// NONE_HASH, the parent of block 0.
    #[must_use]
    pub fn none_hash(&self) -> BlockHash {
        self.none_hash
    }

    /// Tokens that one hash covers.
    #[must_use]
    pub fn span(&self) -> u64 {
        self.span
    }

    /// Tokens after a block that its hash covers.
    #[must_use]
    pub fn lookahead(&self) -> u64 {
        self.lookahead
    }

    /// The hash of every full block of a prompt that has nothing but tokens.
    #[must_use]
    pub fn hash_tokens<T: Token>(&self, tokens: &[T]) -> Vec<BlockHash> {
        let mut state = ChainState::new(self.none_hash);
        let mut hashes = Vec::with_capacity(self.blocks_in(tokens.len()));
        state.grow(self, None, tokens, |hash| hashes.push(hash));
        hashes
    }

    /// Hash the blocks of a prompt that has nothing but tokens, from wherever they are, and give each hash to `sink`.
    ///
    /// Without look-ahead only: `blocks` gives nothing that follows a block. Every block must have the hasher's span.
    pub fn hash_blocks<B: Blocks>(&self, blocks: &mut B, mut sink: impl FnMut(BlockHash)) {
        let span = usize::try_from(self.span).unwrap_or(usize::MAX);
        let mut hash = self.none_hash;
        self.function.plain_run(&mut Scratch::default(), &mut hash, span, blocks, &mut sink);
    }

    /// The hashes of many prompts, over as many threads as the machine runs at once.
    #[must_use]
    pub fn hash_prompts<T: Token>(&self, prompts: &[&[T]]) -> Vec<Vec<BlockHash>> {
        let workers = std::thread::available_parallelism().map_or(1, usize::from).min(prompts.len());
        let next = std::sync::atomic::AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            loop {
                let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                let Some(prompt) = prompts.get(i) else { return done };
                done.push((i, self.hash_tokens(prompt)));
            }
        };
        let mut results = vec![Vec::new(); prompts.len()];
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..workers).map(|_| scope.spawn(work)).collect();
            let mut done = work();
            for other in others {
                done.extend(other.join().unwrap_or_default());
            }
            for (i, hashes) in done {
                results[i] = hashes;
            }
        });
        results
    }

    /// Start the chain of a request; its tokens follow with [`Chain::append`].
    ///
    /// # Errors
    /// [`Code::InvalidLora`] where what the release hashes of the adapter was not given.
    pub fn chain(&self, keys: RequestKeys) -> Result<Chain> {
        let keyed = Keyed::new(self, keys)?;
        Ok(Chain {
            hasher: self.clone(),
            state: ChainState::new(self.none_hash),
            keyed,
            hashes: Vec::new(),
            following: Vec::new(),
        })
    }

    fn blocks_in(&self, tokens: usize) -> usize {
        let tokens = (tokens as u64).saturating_sub(self.lookahead);
        usize::try_from(tokens / self.span).unwrap_or(0)
    }
}

/// NONE_HASH: the hash of the seed as a text string.
///
/// # Errors
/// [`Code::UnknownRoot`] where vLLM draws it at random.
pub fn none_hash(contract: &Contract, algorithm: &Algorithm, hash_seed: Option<&str>) -> Result<BlockHash> {
    let fixed = contract.default_seed.filter(|_| algorithm.collision_resistant());
    let Some(seed) = hash_seed.or(fixed) else {
        return Err(Error::at(
            Code::UnknownRoot,
            "$.hash_seed",
            format!(
                "vLLM {} draws NONE_HASH at random for {} when PYTHONHASHSEED is not set, so its block hashes cannot \
                 be reproduced; set PYTHONHASHSEED in the engine's environment and give the same value as the hash \
                 seed",
                contract.release, algorithm.name
            ),
        ));
    };
    Ok(HashFunction::new(*algorithm, contract.chain_values).text(seed))
}

/// What a request adds to its blocks' keys, with the constant part made once.
#[derive(Debug, Clone)]
pub struct Keyed {
    keys: RequestKeys,
    lora: Option<Value>,
}

impl Keyed {
    /// The keys of a request, or `None` where no block has any.
    ///
    /// # Errors
    /// [`Code::InvalidLora`].
    pub fn new(hasher: &BlockHasher, keys: RequestKeys) -> Result<Option<Self>> {
        if keys.is_empty() && hasher.lookahead == 0 {
            return Ok(None);
        }
        let lora = keys.lora.as_ref().map(|lora| lora.key(&hasher.contract)).transpose()?;
        Ok(Some(Self { keys, lora }))
    }

    /// What stands in the key slot of block `index`, which `following` tokens follow.
    fn slot<T: Token>(&self, hasher: &BlockHasher, index: u64, following: &[T]) -> Option<Vec<Value>> {
        let start = index * hasher.span;
        let end = start + hasher.span + following.len() as u64;
        let keys = self.keys.block(&hasher.contract, self.lora.as_ref(), start, end);
        if hasher.lookahead == 0 {
            return keys;
        }
        let own = keys.map_or(Value::None, Value::Tuple);
        let tokens = following.iter().map(|token| Value::Int(token.value().into()));
        Some(std::iter::once(own).chain(tokens).collect())
    }
}

/// Where a chain stands: its last hash, how many blocks it has, and the tokens that no hash covers yet.
#[derive(Debug, Clone)]
pub struct ChainState {
    parent: BlockHash,
    blocks: u64,
    pending: Vec<u64>,
    scratch: Scratch,
}

impl ChainState {
    /// The start of a chain.
    #[must_use]
    pub fn new(none_hash: BlockHash) -> Self {
        Self { parent: none_hash, blocks: 0, pending: Vec::new(), scratch: Scratch::default() }
    }

    /// How many tokens wait for their block to be full.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// The tokens that wait for their block to be full.
    #[must_use]
    pub fn pending_tokens(&self) -> &[u64] {
        &self.pending
    }

    /// Add tokens and give `sink` the hashes of the blocks that these completed. Costs what the new blocks cost.
    pub fn grow<T: Token>(
        &mut self,
        hasher: &BlockHasher,
        keyed: Option<&Keyed>,
        tokens: &[T],
        mut sink: impl FnMut(BlockHash),
    ) {
        let mut rest = tokens;
        if !self.pending.is_empty() {
            // The blocks that start among the waiting tokens are hashed from a joined copy, the others in place.
            let waiting = self.pending.len() as u64;
            let starts = waiting.div_ceil(hasher.span);
            let wanted = starts * hasher.span + hasher.lookahead - waiting;
            let taken = usize::try_from(wanted).unwrap_or(usize::MAX).min(rest.len());
            let mut joined = std::mem::take(&mut self.pending);
            joined.extend(rest[..taken].iter().map(|token| token.value()));
            let used = self.hash_all(hasher, keyed, &joined, &mut sink);
            if used < waiting as usize {
                joined.drain(..used);
                self.pending = joined;
                return;
            }
            rest = &rest[used - waiting as usize..];
        }
        let used = self.hash_all(hasher, keyed, rest, &mut sink);
        self.pending.extend(rest[used..].iter().map(|token| token.value()));
    }

    /// Hash every block that `tokens` fills, look-ahead included; returns how many tokens these blocks have.
    fn hash_all<T: Token>(
        &mut self,
        hasher: &BlockHasher,
        keyed: Option<&Keyed>,
        tokens: &[T],
        sink: &mut impl FnMut(BlockHash),
    ) -> usize {
        let blocks = hasher.blocks_in(tokens.len());
        if blocks == 0 {
            return 0;
        }
        let span = hasher.span as usize; // A block of this size fits in memory: it is full.
        let lookahead = hasher.lookahead as usize;
        let function = hasher.function;
        let scratch = &mut self.scratch;
        let mut parent = self.parent;
        // Blocks without keys, most of all blocks, are hashed as runs.
        let mut run_from = 0;
        for i in 0..blocks {
            let following = &tokens[(i + 1) * span..(i + 1) * span + lookahead];
            let keys = keyed.and_then(|keyed| keyed.slot(hasher, self.blocks + i as u64, following));
            let Some(keys) = keys else { continue };
            let mut run = tokens[run_from * span..i * span].chunks_exact(span);
            function.plain_run(scratch, &mut parent, span, &mut run, sink);
            parent = function.keyed_block(scratch, &parent, &tokens[i * span..(i + 1) * span], Some(&keys));
            sink(parent);
            run_from = i + 1;
        }
        let mut run = tokens[run_from * span..blocks * span].chunks_exact(span);
        function.plain_run(scratch, &mut parent, span, &mut run, sink);
        self.parent = parent;
        self.blocks += blocks as u64;
        blocks * span
    }
}

/// The growing chain of one request: tokens in, hashes of the blocks that became full out.
///
/// ```
/// use kvhash::{BlockHasher, RequestKeys, Settings};
///
/// let hasher = BlockHasher::new(&Settings { block_size: 4, hash_seed: Some("0"), ..Settings::default() })?;
/// let mut chain = hasher.chain(RequestKeys { cache_salt: Some("tenant".into()), ..RequestKeys::default() })?;
/// assert_eq!(chain.append(&[1u32, 2, 3]).len(), 0);
/// assert_eq!(chain.append(&[4u32, 5]).len(), 1);
/// # Ok::<(), kvhash::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Chain {
    hasher: BlockHasher,
    state: ChainState,
    keyed: Option<Keyed>,
    hashes: Vec<BlockHash>,
    /// With look-ahead, the tokens after each hashed block.
    following: Vec<u64>,
}

impl Chain {
    /// Add token ids and return the hashes of the blocks that these completed.
    pub fn append<T: Token>(&mut self, tokens: &[T]) -> &[BlockHash] {
        let before = self.hashes.len();
        if self.hasher.lookahead == 0 {
            self.state.grow(&self.hasher, self.keyed.as_ref(), tokens, |hash| self.hashes.push(hash));
        } else {
            let mut known: Vec<u64> = self.state.pending.clone();
            known.extend(tokens.iter().map(|token| token.value()));
            self.state.grow(&self.hasher, self.keyed.as_ref(), tokens, |hash| self.hashes.push(hash));
            let (span, lookahead) = (self.hasher.span as usize, self.hasher.lookahead as usize);
            for i in 1..=self.hashes.len() - before {
                self.following.extend_from_slice(&known[i * span..i * span + lookahead]);
            }
        }
        &self.hashes[before..]
    }

    /// The hashes so far, one a full block.
    #[must_use]
    pub fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// How many tokens the chain has, hashed or not.
    #[must_use]
    pub fn num_tokens(&self) -> u64 {
        self.state.blocks * self.hasher.span + self.state.pending.len() as u64
    }

    /// The extra keys of every hashed block, as hashed (with the look-ahead tokens where there are any).
    #[must_use]
    pub fn extra_keys(&self) -> Vec<Option<Vec<Value>>> {
        let lookahead = self.hasher.lookahead as usize;
        (0..self.hashes.len())
            .map(|i| {
                let following = &self.following[i * lookahead..(i + 1) * lookahead];
                self.keyed.as_ref().and_then(|keyed| keyed.slot(&self.hasher, i as u64, following))
            })
            .collect()
    }
}
