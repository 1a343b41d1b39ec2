"""Block hashes: ``H(serialize((parent, tokens, extra_keys)))``, chained from NONE_HASH.

Only a full block has a hash. With look-ahead L (drafters, from 0.33) the key slot becomes
``(extra_keys, tok_1 .. tok_L)`` with the L tokens after the block, the extra keys are those of the block *and* of
these tokens, and the block is hashed once they exist.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from ._backend import is_plain, make_engine, start_chain, take_tokens
from ._checks import TokenIds, check_int, check_text, normalize_tokens
from ._errors import (
    FeatureNotInReleaseError,
    InvalidBlockSizeError,
    InvalidSeedError,
    UnknownRootError,
)
from .block_hash import BlockHash, BlockHashView, ChainValue, ExternalForm, external_hash
from .block_size import check_block_size
from .contract import Algorithm, Contract
from .digest import sha256, xxh3_128
from .extra_keys import ExtraKeys, Lora, MultimodalItem, RequestKeys, event_extra_keys
from .serialize import Value, encode_cbor, encode_pickle5
from .serialize.cbor import CborTokens
from .serialize.pickle5 import PickleTokens

__all__ = ["BlockHasher", "Chain", "HashFunction", "none_hash"]

_DIGESTS = {"sha256": sha256, "xxh3_128": xxh3_128}
_SERIALIZERS = {"cbor": encode_cbor, "pickle5": encode_pickle5}
_CBOR_PREIMAGE, _CBOR_NO_KEYS = b"\x83", b"\xf6"


class HashFunction:
    """One algorithm of one release: a preimage in, a chain value out."""

    def __init__(self, algorithm: Algorithm, contract: Contract) -> None:
        self._algorithm = algorithm
        self._serialize = _SERIALIZERS[algorithm.serialization]
        self._digest = _DIGESTS[algorithm.digest]
        self._as_int = contract.chain_values == "int"
        self._low64 = algorithm.keeps == "low64"
        self._cbor = CborTokens() if algorithm.serialization == "cbor" else None
        self._pickle = PickleTokens()

    def serialize(self, preimage: Value) -> bytes:
        """Return the bytes that are hashed for `preimage`."""
        return self._serialize(preimage)

    def keep(self, digest: bytes) -> ChainValue:
        """Return what of a digest goes into the chain."""
        if not self._as_int:
            return BlockHash(digest)
        return int.from_bytes(digest[-8:] if self._low64 else digest, "big")

    def __call__(self, preimage: Value) -> ChainValue:
        """Hash any preimage; the definition."""
        return self.keep(self._digest(self.serialize(preimage)))

    def plain_block(self, parent: ChainValue, tokens: list[int]) -> ChainValue:
        """Hash a block without extra keys: as ``self((parent, tuple(tokens), None))``, faster."""
        if self._cbor is not None:
            data = b"".join((_CBOR_PREIMAGE, encode_cbor(parent), self._cbor.encode(tokens), _CBOR_NO_KEYS))
        else:
            data = self._pickle.encode(parent, tokens)
        return self.keep(self._digest(data))


def none_hash(contract: Contract, algorithm: Algorithm, hash_seed: str | None) -> ChainValue:
    """Return NONE_HASH, the parent of block 0: the hash of the seed as a text string.

    `hash_seed` is PYTHONHASHSEED in the engine's environment, None where it is unset; the empty text is a seed.
    Raises UnknownRootError where vLLM draws it at random, InvalidSeedError where the seed is not text.
    """
    if hash_seed is not None:
        if not isinstance(hash_seed, str):
            raise InvalidSeedError(
                f"expected the hash seed as text, got {type(hash_seed).__name__}; vLLM hashes PYTHONHASHSEED as the "
                f'text that it is, so write "{hash_seed}"',
                at="$.hash_seed",
            )
        check_text(hash_seed, at="$.hash_seed", what="the hash seed", error=InvalidSeedError)
    seed = hash_seed
    if seed is None and algorithm.collision_resistant:
        seed = contract.default_seed
    if seed is None:
        raise UnknownRootError(
            f"vLLM {contract.release} draws NONE_HASH at random for {algorithm.name} when PYTHONHASHSEED is not set, "
            "so its block hashes cannot be reproduced; set PYTHONHASHSEED in the engine's environment and give the "
            "same value as the hash seed",
            at="$.hash_seed",
        )
    return HashFunction(algorithm, contract)(seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHasher:
    """Computes the block hashes of one engine's settings. An immutable value.

    ``vllm``: a release, ``"latest"``, or a `Contract`. ``algorithm``: vLLM's ``--prefix-caching-hash-algo``.
    ``block_size``: tokens per block. ``hash_seed``: PYTHONHASHSEED of the engine, None where unset.
    ``lookahead``: tokens after a block that its hash covers. ``decode_context_parallel_size``: a hash covers
    ``block_size`` times this many tokens.

    Raises UnknownReleaseError, AlgorithmError, InvalidBlockSizeError, InvalidSeedError, UnknownRootError,
    FeatureNotInReleaseError.
    """

    vllm: str | Contract = "latest"
    algorithm: str = "sha256"
    block_size: int = 16
    hash_seed: str | None = None
    lookahead: int = 0
    decode_context_parallel_size: int = 1
    contract: Contract = field(init=False, repr=False)
    none_hash: ChainValue = field(init=False, repr=False)
    hash_function: HashFunction = field(init=False, repr=False, compare=False)
    #: The native engine, or None where pure Python hashes.
    _engine: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        contract = self.vllm if isinstance(self.vllm, Contract) else Contract.for_vllm(self.vllm)
        algorithm = contract.algorithm(self.algorithm)
        size = check_block_size(self.block_size)
        dcp = check_block_size(
            self.decode_context_parallel_size,
            at="$.decode_context_parallel_size",
            what="the decode context parallel size",
        )
        lookahead = check_int(
            self.lookahead, at="$.lookahead", what="the look-ahead", minimum=0, maximum=1 << 16
        )
        if lookahead and not contract.lookahead:
            raise FeatureNotInReleaseError(
                f"vLLM {contract.release} has no look-ahead hashing; expected a look-ahead of 0",
                at="$.lookahead",
            )
        root = none_hash(contract, algorithm, self.hash_seed)
        for name, value in (
            ("block_size", size),
            ("decode_context_parallel_size", dcp),
            ("lookahead", lookahead),
            ("contract", contract),
            ("none_hash", root),
            ("hash_function", HashFunction(algorithm, contract)),
            ("_engine", make_engine(contract, algorithm, root, size * dcp, lookahead)),
        ):
            object.__setattr__(self, name, value)

    @property
    def span(self) -> int:
        """Tokens that one hash covers: the block size times the decode context parallel size."""
        return self.block_size * self.decode_context_parallel_size

    def hash_tokens(
        self,
        tokens: TokenIds,
        *,
        lora: Lora | Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        multimodal: Iterable[MultimodalItem | Mapping[str, Any]] | None = None,
        prompt_embeds: Any = None,
    ) -> list[ChainValue]:
        """Return the hash of every full block of a whole prompt.

        Raises as `chain` does.
        """
        if self._engine is not None and not (
            lora is not None or cache_salt is not None or multimodal is not None or prompt_embeds is not None
        ):
            plain = is_plain(tokens)
            hashes: list[ChainValue] | None = self._engine.hash_tokens(tokens) if plain else None
            if hashes is not None:
                return hashes
        chain = self.chain(
            tokens, lora=lora, cache_salt=cache_salt, multimodal=multimodal, prompt_embeds=prompt_embeds
        )
        return chain.block_hashes

    def hash_batch(
        self, prompts: Sequence[TokenIds], *, threads: int | None = None
    ) -> list[list[ChainValue]]:
        """Return the hashes of every full block of many prompts that have no extra keys, in their order.

        The native backend hashes over `threads` threads (None: as many as there are processors) and lets the
        interpreter go meanwhile; the pure path hashes one after the other. Raises InvalidTokenError as `chain`
        does, with the prompt's place first (``$[3][17]``), and InvalidRequestError for a number of threads below 1.
        """
        if threads is not None:
            threads = check_int(threads, at="$.threads", what="the number of threads", minimum=1)
        if self._engine is None or self.lookahead:
            return [
                Chain(self, RequestKeys(), take_tokens(self._engine, prompt, at=f"$[{i}]")).block_hashes
                for i, prompt in enumerate(prompts)
            ]
        given = [
            prompt if is_plain(prompt) else normalize_tokens(prompt, at=f"$[{i}]")
            for i, prompt in enumerate(prompts)
        ]
        batch: list[list[ChainValue]] = self._engine.hash_batch(
            given,
            lambda i: normalize_tokens(given[i], at=f"$[{i}]"),
            min(threads or os.cpu_count() or 1, 256),
        )
        return batch

    def chain(
        self,
        tokens: TokenIds | None = None,
        *,
        lora: Lora | Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        multimodal: Iterable[MultimodalItem | Mapping[str, Any]] | None = None,
        prompt_embeds: Any = None,
    ) -> Chain:
        """Start the chain of one request; more tokens follow with `Chain.append`.

        `tokens`: the whole prompt. Multimodal items must lie within it and prompt embeddings must have a row for
        each of its tokens. None: the prompt comes by `append`, and neither can be checked here.
        `lora`: a `Lora` or a mapping with name, path, id. `multimodal`: `MultimodalItem` or mappings with
        identifier, offset, length, sorted and not overlapping. `prompt_embeds`: a `PromptEmbeds`, a mapping, a
        NumPy array or a torch tensor (rows, hidden size).

        Raises InvalidTokenError, InvalidLoraError, InvalidSaltError, InvalidMultimodalError,
        InvalidPromptEmbedsError.
        """
        ids = None if tokens is None else take_tokens(self._engine, tokens, at="$.tokens")
        keys = RequestKeys.of(
            lora=lora,
            cache_salt=cache_salt,
            multimodal=multimodal,
            prompt_embeds=prompt_embeds,
            num_tokens=None if ids is None else len(ids),
        )
        return Chain(self, keys, ids)


class Chain:
    """The growing chain of one request: tokens in, hashes of the blocks that became full out.

    Made by `BlockHasher.chain`. Tokens of hashed blocks are not kept, so appending costs what the new blocks cost,
    however long the chain is.
    """

    def __init__(self, hasher: BlockHasher, keys: RequestKeys, tokens: Any) -> None:
        self.hasher = hasher
        self.keys = keys
        if keys.lora:
            keys.lora.key(hasher.contract)  # a missing name, path or id is said before the first block
        self._hashes: list[ChainValue] = []
        self._keyed: dict[int, ExtraKeys] = {}
        self._pending: list[int] = []
        self._first_item = 0
        self._always_keyed = bool(hasher.lookahead) or not keys.empty
        self._native = None if hasher._engine is None else start_chain(hasher._engine, keys)
        if tokens is not None:
            self._grow(tokens)

    @property
    def num_tokens(self) -> int:
        """How many tokens the chain has, hashed or not."""
        waiting = len(self._pending) if self._native is None else self._native.pending
        return len(self._hashes) * self.hasher.span + waiting

    @property
    def block_hashes(self) -> list[ChainValue]:
        """The hashes so far, one a full block; a copy."""
        return list(self._hashes)

    @property
    def none_hash(self) -> ChainValue:
        """The parent of block 0."""
        return self.hasher.none_hash

    def __len__(self) -> int:
        return len(self._hashes)

    def append(self, tokens: TokenIds) -> list[ChainValue]:
        """Add token ids and return the hashes of the blocks that these completed.

        Raises InvalidTokenError and then leaves the chain as it was.
        """
        return self._grow(take_tokens(self.hasher._engine, tokens, at="$"))

    def extra_keys(self) -> list[ExtraKeys]:
        """Return the extra keys of every hashed block, as hashed (with the look-ahead tokens where there are any)."""
        if self._native is None or not self._always_keyed:
            return [self._keyed.get(i) for i in range(len(self._hashes))]
        # The native chain does not keep keys: they follow from the request and, with look-ahead, the next tokens.
        following, width = self._native.following(), self.hasher.lookahead
        self._first_item = 0
        return [self._block_keys(i, following[i * width : (i + 1) * width]) for i in range(len(self._hashes))]

    def event_extra_keys(self) -> list[ExtraKeys]:
        """Return the extra keys of every hashed block as events publish them: untagged, without look-ahead tokens."""
        published: list[ExtraKeys] = []
        for keys in self.extra_keys():
            if self.hasher.lookahead:
                assert keys is not None
                own = keys[0]
                assert own is None or isinstance(own, tuple)
                keys = own
            published.append(event_extra_keys(keys, self.hasher.contract))
        return published

    def external(self, form: ExternalForm = "uint64") -> list[int | bytes]:
        """Return the hashes as events carry them: ``"uint64"``, ``"int64"`` or ``"bytes"``."""
        return [external_hash(value, form) for value in self._hashes]

    def view(self, block_size: int) -> BlockHashView:
        """Return the hashes at a coarser block size, a multiple of this chain's span; follows the chain as it grows.

        Raises InvalidBlockSizeError.
        """
        size = check_block_size(block_size)
        if size % self.hasher.span:
            raise InvalidBlockSizeError(
                f"a view needs a multiple of the {self.hasher.span} tokens of a hash, got {size}",
                at="$.block_size",
            )
        return BlockHashView(self._hashes, size // self.hasher.span)

    def copy(self) -> Chain:
        """Return an independent chain in the same state, to go on from a shared prefix."""
        other = copy(self)
        other._hashes = list(self._hashes)
        other._keyed = dict(self._keyed)
        other._pending = list(self._pending)
        other._native = None if self._native is None else self._native.copy()
        return other

    def _grow(self, tokens: Any) -> list[ChainValue]:
        if self._native is not None:
            grown: list[ChainValue] = self._native.append(tokens)
            self._hashes += grown
            return grown
        span, lookahead = self.hasher.span, self.hasher.lookahead
        hash_function = self.hasher.hash_function
        waiting = self._pending + tokens if self._pending else tokens
        parent = self._hashes[-1] if self._hashes else self.hasher.none_hash
        new: list[ChainValue] = []
        position = 0
        while position + span + lookahead <= len(waiting):
            block = waiting[position : position + span]
            position += span
            keys: ExtraKeys = None
            if self._always_keyed:
                index = len(self._hashes) + len(new)
                keys = self._block_keys(index, waiting[position : position + lookahead])
                if keys is not None:
                    self._keyed[index] = keys
            if keys is None:
                parent = hash_function.plain_block(parent, block)
            else:
                parent = hash_function((parent, tuple(block), keys))
            new.append(parent)
        self._hashes += new
        self._pending = waiting[position:]
        return new

    def _block_keys(self, index: int, following: list[int]) -> ExtraKeys:
        start = index * self.hasher.span
        items = self.keys.multimodal
        while self._first_item < len(items) and items[self._first_item].end <= start:
            self._first_item += 1
        end = start + self.hasher.span + len(following)
        keys = self.keys.block(self.hasher.contract, start, end, self._first_item)
        return (keys, *following) if self.hasher.lookahead else keys

    def __repr__(self) -> str:
        return f"Chain({len(self)} blocks, {self.num_tokens} tokens)"
