"""Recomputes every published hash from a stream of batches: match, mismatch, or not derivable and why.

A match is proof that the settings are the engine's. A mismatch is said only where everything that enters the
hash was published; where something was not, the block is not derivable, with the reason.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvhash._checks import MAX_TOKEN
from kvhash._errors import UnknownRootError
from kvhash.block_hash import BlockHash, ChainValue, external_hash
from kvhash.contract import ALGORITHMS, Contract
from kvhash.extra_keys import _CACHE_SALT, _LORA, _MM, _PROMPT_EMBEDS
from kvhash.hasher import BlockHasher

from .schema import BlockStored, EventBatch, HashValue, hash_key

__all__ = ["REASONS", "BlockCheck", "Reason", "Verdict", "Verifier"]

Verdict = Literal["match", "mismatch", "not-derivable"]
Reason = Literal[
    "bigram-tokens",
    "block-size",
    "coarse-extra-keys",
    "extra-keys-unpublished",
    "invalid-tokens",
    "lookahead-unpublished",
    "lora-name-unpublished",
    "lora-path-unknown",
    "malformed-event",
    "no-tokens",
    "parent-mismatch",
    "random-root",
    "sparse-blocks",
    "unknown-parent",
]

#: Why a block's hash cannot be recomputed.
REASONS: Mapping[str, str] = {
    "bigram-tokens": "the event carries pairs of tokens, which vLLM does not hash",
    "block-size": "the event's block size is no multiple of the tokens that one hash covers",
    "coarse-extra-keys": "extra keys of a block of several hashes do not say which of them they belong to",
    "extra-keys-unpublished": "this event does not publish extra keys, and without any the hash is another",
    "invalid-tokens": "a token id is outside 0 to 2^64 - 1",
    "lookahead-unpublished": "the hash covers tokens after the block that the event does not publish",
    "lora-name-unpublished": "the hash covers the adapter's name, which the event does not publish",
    "lora-path-unknown": "the hash covers the adapter's path, which events never publish; give it by name",
    "malformed-event": "the event's lists do not fit each other",
    "no-tokens": "the event carries no tokens",
    "parent-mismatch": "its parent's published hash did not match",
    "random-root": "the engine draws NONE_HASH at random with these settings",
    "sparse-blocks": "the event has fewer hashes than blocks of tokens, and none of the blocks fits",
    "unknown-parent": "the parent's digest is unknown: its event was not seen, or could not be recomputed",
}


@dataclass(frozen=True, slots=True)
class BlockCheck:
    """The verdict on one published block hash.

    ``event`` and ``block``: its place in the batch. ``expected``: what the settings give, in the published
    form, where it could be computed. ``reason``: a key of `REASONS`, for ``not-derivable``. ``lora_name`` as
    published.
    """

    event: int
    block: int
    published: HashValue
    verdict: Verdict
    expected: HashValue | None = None
    reason: Reason | None = None
    lora_name: str | None = None

    def __str__(self) -> str:
        where = f"$.events[{self.event}].block_hashes[{self.block}]"
        if self.verdict == "mismatch":
            return f"mismatch: published {self.published!r}, expected {self.expected!r} - at {where}"
        return f"{self.verdict}{': ' + REASONS[self.reason] if self.reason else ''} - at {where}"


class _NotDerivable(Exception):
    def __init__(self, reason: Reason) -> None:
        self.reason: Reason = reason


class Verifier:
    """Recomputes hashes under an engine's settings, batch by batch.

    The settings are those of `BlockHasher`; ``block_size`` is the tokens of one hash (the hash block size
    where there are several KV cache groups). ``lora_paths``: adapter name -> path as the engine got it. At
    most ``max_blocks`` recomputed digests are kept, the least recently used go first (their children are then
    ``unknown-parent``). A random NONE_HASH is no error here: blocks that hang on it are ``random-root``.
    Raises as `BlockHasher` otherwise.
    """

    def __init__(
        self,
        *,
        vllm: str | Contract = "latest",
        algorithm: str = "sha256",
        block_size: int = 16,
        hash_seed: str | None = None,
        lookahead: int = 0,
        decode_context_parallel_size: int = 1,
        lora_paths: Mapping[str, str] | None = None,
        max_blocks: int = 1_000_000,
    ) -> None:
        settings: dict[str, Any] = {
            "vllm": vllm,
            "algorithm": algorithm,
            "block_size": block_size,
            "lookahead": lookahead,
            "decode_context_parallel_size": decode_context_parallel_size,
        }
        self._root: ChainValue | None
        try:
            self.hasher = BlockHasher(hash_seed=hash_seed, **settings)
            self._root = self.hasher.none_hash
        except UnknownRootError:
            self.hasher = BlockHasher(hash_seed="", **settings)
            self._root = None
        self.lora_paths = dict(lora_paths or {})
        self.max_blocks = max_blocks
        self._contract = self.hasher.contract
        # By published hash: the digest, or why it is not known, which then holds for its children too.
        self._known: OrderedDict[int, ChainValue | Reason] = OrderedDict()
        #: How many blocks got each verdict, and each reason.
        self.verdicts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def feed(self, batch: EventBatch) -> list[BlockCheck]:
        """Return the verdict on every block hash that `batch` stores, in order."""
        checks = [
            check
            for i, event in enumerate(batch.events)
            if isinstance(event, BlockStored)
            for check in self._event(i, event)
        ]
        for check in checks:
            self.verdicts[check.verdict] += 1
            if check.reason:
                self.reasons[check.reason] += 1
        return checks

    def _event(self, index: int, event: BlockStored) -> Iterator[BlockCheck]:
        def cannot(block: int, reason: Reason) -> BlockCheck:
            published = event.block_hashes[block]
            self._keep(published, reason)
            return BlockCheck(index, block, published, "not-derivable", None, reason, event.lora_name)

        try:
            size = self._tokens_per_hash(event)
            parent = self._parent(event)
            if size is None:
                yield from self._sparse(index, event, parent)
                return
        except _NotDerivable as fault:
            for block in range(len(event.block_hashes)):
                yield cannot(block, fault.reason)
            return
        known: ChainValue | None = parent
        lost: Reason = "parent-mismatch"
        for block, published in enumerate(event.block_hashes):
            if known is None:
                yield cannot(block, lost)
                known = self._direct(published)
                continue
            first = block == 0 and event.parent_block_hash is None
            try:
                value = self._hash(event, block, size, known, first)
            except _NotDerivable as fault:
                yield cannot(block, fault.reason)
                known, lost = self._direct(published), fault.reason
                continue
            if self._same(value, published):
                self._keep(published, value)
                known = value
                yield self._check(index, block, event, "match", value)
                continue
            known, lost = self._direct(published), "parent-mismatch"
            if event.extra_keys is None:
                lost = "extra-keys-unpublished"
                yield cannot(block, lost)
            else:
                self._keep(published, "parent-mismatch")
                yield self._check(index, block, event, "mismatch", value)

    def _check(
        self, index: int, block: int, event: BlockStored, verdict: Verdict, value: ChainValue
    ) -> BlockCheck:
        published = event.block_hashes[block]
        form: Any = "bytes" if isinstance(published, bytes) and isinstance(value, bytes) else "uint64"
        return BlockCheck(index, block, published, verdict, external_hash(value, form), None, event.lora_name)

    # --- what enters a hash ---------------------------------------------------------------------------------

    def _tokens_per_hash(self, event: BlockStored) -> int | None:
        """Return the tokens that each published hash covers; None where there are more tokens than hashes."""
        tokens, count, span = event.token_ids, len(event.block_hashes), self.hasher.span
        if not tokens:
            raise _NotDerivable("no-tokens")
        if event.bigram:
            raise _NotDerivable("bigram-tokens")
        plain: Any = tokens
        if min(plain) < 0 or max(plain) > MAX_TOKEN:
            raise _NotDerivable("invalid-tokens")
        for per_block in (event.extra_keys, event.lookahead_token_ids):
            if per_block is not None and len(per_block) != count:
                raise _NotDerivable("malformed-event")
        size = event.block_size
        if len(tokens) == count * span and size < span:
            return span  # context parallelism: the event's block size is that of one rank
        if size < 1:
            raise _NotDerivable("malformed-event")
        if size % span:
            raise _NotDerivable("block-size")
        if len(tokens) == count * size:
            return size
        if len(tokens) % size or len(tokens) < count * size:
            raise _NotDerivable("malformed-event")
        return None

    def _parent(self, event: BlockStored) -> ChainValue:
        published = event.parent_block_hash
        if published is None:
            if self._root is None:
                raise _NotDerivable("random-root")
            return self._root
        direct = self._direct(published)
        if direct is not None:
            return direct
        key = hash_key(published)
        if key not in self._known:
            raise _NotDerivable("unknown-parent" if self._root is not None else "random-root")
        self._known.move_to_end(key)
        value = self._known[key]
        if isinstance(value, str):
            raise _NotDerivable(value)
        return value

    def _direct(self, published: HashValue) -> ChainValue | None:
        """Return the chain value if a published hash is one by itself: a whole digest, a 64-bit integer."""
        algorithm = ALGORITHMS[self.hasher.algorithm]
        if self._contract.chain_values == "int":
            whole = isinstance(published, int) and algorithm.keeps == "low64"
            return hash_key(published) if whole else None
        length = 32 if algorithm.digest == "sha256" else 16
        if isinstance(published, bytes) and len(published) == length:
            return BlockHash(published)
        return None

    def _hash(self, event: BlockStored, block: int, size: int, parent: ChainValue, first: bool) -> ChainValue:
        """Recompute one block of `size` tokens; a coarse one through the hashes inside it."""
        span = self.hasher.span
        tokens: tuple[int, ...] = event.token_ids[block * size : (block + 1) * size]  # type: ignore[assignment]
        keys = self._keys(event, block)
        ahead = self._lookahead(event, block)
        if size == span:
            return self._one(parent, tokens, keys, ahead)
        if any(key[0] not in ("lora", "salt") for key in keys):
            raise _NotDerivable("coarse-extra-keys")
        following = tokens + ahead
        for start in range(0, size, span):
            here = [key for key in keys if key[0] == "lora" or (first and start == 0)]
            window = following[start + span : start + span + len(ahead)]
            parent = self._one(parent, tokens[start : start + span], here, window)
        return parent

    def _one(
        self, parent: ChainValue, tokens: tuple[int, ...], keys: list[tuple[str, Any]], ahead: tuple[int, ...]
    ) -> ChainValue:
        own = tuple(value for _, value in keys) or None
        slot = (own, *ahead) if ahead else own
        if slot is None:
            return self.hasher.hash_function.plain_block(parent, list(tokens))
        return self.hasher.hash_function((parent, tokens, slot))

    def _lookahead(self, event: BlockStored, block: int) -> tuple[int, ...]:
        if not self._contract.lookahead:
            return ()
        if event.lookahead_token_ids is None:
            if self.hasher.lookahead:
                raise _NotDerivable("lookahead-unpublished")
            return ()
        return event.lookahead_token_ids[block]

    def _keys(self, event: BlockStored, block: int) -> list[tuple[str, Any]]:
        """Return the block's extra keys as hashed, each with what it is. Their order is fixed by vLLM."""
        contract = self._contract
        published = None if event.extra_keys is None else event.extra_keys[block]
        if event.extra_keys is None:
            return self._adapter(event)
        keys: list[tuple[str, Any]] = []
        for place, value in enumerate(published or ()):
            if place == 0 and event.lora_name is not None and isinstance(value, str):
                keys += self._adapter(event)
            elif isinstance(value, tuple) and len(value) == 2:
                keys.append(("mm", (_MM, *value) if contract.tagged_keys else value))
            elif isinstance(value, bytes):
                keys.append(("embeds", (_PROMPT_EMBEDS, value) if contract.tagged_keys else value))
            elif isinstance(value, str):
                # Before identifiers carried an offset they were text as a salt is; both are hashed as they
                # are.
                kind = "salt" if contract.multimodal_key != "identifier" else "mm"
                keys.append((kind, (_CACHE_SALT, value) if contract.tagged_keys else value))
            else:
                raise _NotDerivable("malformed-event")
        return keys

    def _adapter(self, event: BlockStored) -> list[tuple[str, Any]]:
        name = event.lora_name
        if name is None and event.lora_id is None:
            return []
        if self._contract.lora_key == "id":
            return [] if event.lora_id is None else [("lora", event.lora_id)]
        if name is None:
            raise _NotDerivable("lora-name-unpublished")
        if self._contract.lora_key == "name":
            return [("lora", name)]
        if name not in self.lora_paths:
            raise _NotDerivable("lora-path-unknown")
        return [("lora", (_LORA, name, self.lora_paths[name]))]

    # --- sparse groups --------------------------------------------------------------------------------------

    def _sparse(self, index: int, event: BlockStored, parent: ChainValue) -> Iterator[BlockCheck]:
        """Find which of an event's blocks of tokens its fewer hashes are, by recomputing all of them.

        Possible only where no block has keys of its own: those of the blocks left out are not published.
        """
        if any(event.extra_keys or ()) and event.lora_name is None:
            raise _NotDerivable("sparse-blocks")
        if event.lookahead_token_ids is not None or self.hasher.lookahead:
            raise _NotDerivable("sparse-blocks")
        keys, span = self._adapter(event), self.hasher.span
        values: dict[int, ChainValue] = {}
        for start in range(0, len(event.token_ids), span):
            tokens: Any = event.token_ids[start : start + span]
            parent = self._one(parent, tokens, keys, ())
            if (start + span) % event.block_size == 0:
                values[hash_key(external_hash(parent))] = parent
        for block, published in enumerate(event.block_hashes):
            value = values.get(hash_key(published))
            if value is None or not self._same(value, published):
                yield BlockCheck(
                    index, block, published, "not-derivable", None, "sparse-blocks", event.lora_name
                )
                continue
            self._keep(published, value)
            yield self._check(index, block, event, "match", value)

    # --- digests --------------------------------------------------------------------------------------------

    def _same(self, value: ChainValue, published: HashValue) -> bool:
        if isinstance(published, bytes) and isinstance(value, bytes) and len(published) > 8:
            return bytes(value) == published
        return hash_key(external_hash(value)) == hash_key(published)

    def _keep(self, published: HashValue, value: ChainValue | Reason) -> None:
        if self._direct(published) is not None:
            return
        key = hash_key(published)
        if isinstance(value, str) and not isinstance(self._known.get(key, value), str):
            return  # recomputed once, a digest stays known whatever a later event leaves out
        self._known[key] = value
        self._known.move_to_end(key)
        if len(self._known) > self.max_blocks:
            self._known.popitem(last=False)
