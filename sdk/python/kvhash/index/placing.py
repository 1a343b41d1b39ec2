"""Where an event's blocks stand: how many tokens each has, and which block is whose parent; nothing is guessed."""

from __future__ import annotations

from collections import Counter

from kvhash._checks import MAX_TOKEN
from kvhash.block_hash import BlockHash, ChainValue, external_hash
from kvhash.contract import ALGORITHMS
from kvhash.events.schema import BlockStored, hash_key
from kvhash.hasher import BlockHasher

from .layer import ROOT, UNPLACED
from .types import EngineSettings

__all__ = ["Placing"]


class Placing:
    """Reads stores under an engine's settings. ``hasher``: of its hash settings, where those are known."""

    def __init__(self, settings: EngineSettings, hasher: BlockHasher | None) -> None:
        self._settings = settings
        self._hasher = hasher

    def block_tokens(self, event: BlockStored) -> int:
        """Return the tokens of one block of an event: what each hash has, where every block has a hash."""
        count, tokens = len(event.block_hashes), len(event.token_ids)
        if tokens and count and self._is_dense(event):
            return tokens // count
        return event.block_size

    def _is_dense(self, event: BlockStored) -> bool:
        """Return whether an event has a hash for each of its blocks of tokens.

        With context parallelism the event's block size can be that of one device; only the settings tell this from
        an event that leaves blocks out.
        """
        count, tokens = len(event.block_hashes), len(event.token_ids)
        if not count or tokens % count:
            return False
        return tokens // count in (event.block_size, self._given_size(event.group_idx or 0))

    def _given_size(self, group: int) -> int | None:
        if group in self._settings.groups:
            return self._settings.groups[group].block_size
        if self._settings.tokens_per_hash is not None:
            return self._settings.tokens_per_hash
        return None if self._hasher is None else self._hasher.span

    def parents(self, event: BlockStored, keys: list[int], counts: Counter[str]) -> list[int]:
        """Return the parent of each of an event's blocks, UNPLACED where the event does not say it; count how."""
        first = ROOT if event.parent_block_hash is None else hash_key(event.parent_block_hash)
        if not event.token_ids:
            # Without tokens "no parent" means that it is not said; and further hashes need not follow each other.
            counts["tokenless"] += len(keys)
            unplaced = [UNPLACED] * len(keys)
            return unplaced if first == ROOT else [first, *unplaced[1:]][: len(keys)]
        if self._is_dense(event):
            return [first, *keys[:-1]][: len(keys)]
        found = {} if self._hasher is None else _recompute(event, self._hasher)
        parents = [found.get(key, UNPLACED) for key in keys]
        counts["sparse_placed"] += len(keys) - parents.count(UNPLACED)
        counts["sparse_unplaced"] += parents.count(UNPLACED)
        return parents


def _recompute(event: BlockStored, hasher: BlockHasher) -> dict[int, int]:
    """Return key -> parent's key of every block in an event's tokens, by hashing them; empty where that cannot be.

    It can where no extra keys are about, and the parent is the root or published whole.
    """
    parent = _root_of(event, hasher)
    if parent is None or event.block_size < 1 or event.bigram:
        return {}
    if event.lora_name or event.lora_id or any(event.extra_keys or ()) or event.lookahead_token_ids:
        return {}
    tokens = event.token_ids
    if min(tokens) < 0 or max(tokens) > MAX_TOKEN:  # type: ignore[operator]
        return {}
    found: dict[int, int] = {}
    before = ROOT if event.parent_block_hash is None else hash_key(event.parent_block_hash)
    for end in range(hasher.span, len(tokens) + 1, hasher.span):
        parent = hasher.hash_function.plain_block(parent, list(tokens[end - hasher.span : end]))  # type: ignore[arg-type]
        if end % event.block_size == 0:
            key = hash_key(external_hash(parent))
            found[key], before = before, key
    return found


def _root_of(event: BlockStored, hasher: BlockHasher) -> ChainValue | None:
    published = event.parent_block_hash
    if published is None:
        return hasher.none_hash
    length = 32 if ALGORITHMS[hasher.algorithm].digest == "sha256" else 16
    if isinstance(published, bytes) and len(published) == length:
        return BlockHash(published)
    return None
