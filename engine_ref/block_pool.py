"""The block pool: hands blocks out, takes them back, finds them by hash, and says in events what changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvhash.block_hash import (
    BlockHash,
    BlockHashView,
    BlockHashWithGroupId,
    ChainValue,
    ExternalForm,
    external_hash,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from kvhash.events.schema import AllBlocksCleared, BlockRemoved, BlockStored

from .block import Block
from .events import KVEvent
from .free_queue import FreeBlockQueue
from .request import Request
from .spec import GroupSpec

__all__ = ["BlockPool", "block_key", "hashes_at", "stored_event"]


def hashes_at(hashes: Sequence[ChainValue], hash_block_size: int, block_size: int) -> Sequence[ChainValue]:
    """Return hashes made at `hash_block_size` tokens as those of blocks of `block_size` tokens."""
    return hashes if hash_block_size == block_size else BlockHashView(hashes, block_size // hash_block_size)


class BlockPool:
    """All blocks of one medium.

    A block with a hash stays findable after it is freed, until the pool hands it out again: eviction happens then and
    only then. Equal content is kept twice where two requests computed it, so the block ids of a running request
    never change. Block 0 is the null block; it is never handed out.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        hash_block_size: int,
        groups: Sequence[GroupSpec],
        enable_caching: bool = True,
        enable_events: bool = True,
        medium: str = "GPU",
        external_form: ExternalForm = "uint64",
    ) -> None:
        self.num_blocks = num_blocks
        self.hash_block_size = hash_block_size
        self.groups = tuple(groups)
        self.enable_caching = enable_caching
        self.enable_events = enable_events
        self.medium = medium
        self.external_form: ExternalForm = external_form
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free_queue = FreeBlockQueue(self.blocks)
        self.null_block = self.free_queue.pop(1)[0]
        self.null_block.is_null = True
        self._cached: dict[BlockHashWithGroupId, dict[int, Block]] = {}
        # A state block can be hit at several boundaries; its keys beside the first, in order of insertion.
        self._more_keys: dict[int, dict[BlockHashWithGroupId, None]] = {}
        self._events: list[KVEvent] = []

    # ---- lookup

    def get_cached_blocks(self, block_hash: ChainValue, group_ids: Sequence[int]) -> list[Block] | None:
        """Return a block with this hash for each of the groups, or None if one of them has none.

        Of several blocks with the hash it is the one cached first.
        """
        found: list[Block] = []
        for group_id in group_ids:
            same = self._cached.get(block_key(block_hash, group_id))
            if same is None:
                return None
            found.append(next(iter(same.values())))
        return found

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out, hashed ones included."""
        return len(self.free_queue)

    @property
    def usage(self) -> float:
        """The share of blocks in use, 0.0 to 1.0, the null block apart."""
        total = self.num_blocks - 1
        return 1.0 - self.num_free_blocks / total if total else 0.0

    @property
    def cached_keys(self) -> dict[BlockHashWithGroupId, frozenset[int]]:
        """Every key of the hash map with the ids of its blocks; a copy."""
        return {key: frozenset(blocks) for key, blocks in self._cached.items()}

    def keys_of(self, block: Block) -> list[BlockHashWithGroupId]:
        """Return all keys under which a block can be found."""
        first = [] if block.block_hash is None else [block.block_hash]
        return [*first, *self._more_keys.get(block.block_id, ())]

    # ---- handing out and taking back

    def get_new_blocks(self, count: int) -> list[Block]:
        """Hand out `count` blocks with one reference each, evicting what they held."""
        if count > self.num_free_blocks:
            raise ValueError(f"{count} blocks asked for, {self.num_free_blocks} are free")
        blocks = self.free_queue.pop(count)
        for block in blocks:
            self.evict(block)
            block.ref_cnt += 1
        return blocks

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add a reference to each block; a free one leaves the free queue and cannot be evicted any more."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        """Drop a reference to each; those that nobody holds become free, the first given to be reused first.

        Unhashed blocks go to the front of the free queue (they cannot be hit), hashed ones to the back.
        """
        front: list[Block] = []
        back: list[Block] = []
        for block in blocks:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                hittable = self.enable_caching and block.block_hash is not None
                (back if hittable else front).append(block)
        self.free_queue.prepend(front)
        self.free_queue.append(back)

    def evict(self, block: Block) -> bool:
        """Make a block unfindable; returns whether it was findable."""
        removed = self._drop_keys(block)
        self._say_removed(removed)
        return bool(removed)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable by id, held or not (a connector could not load them)."""
        for block_id in block_ids:
            self.evict(self.blocks[block_id])

    def reset(self) -> bool:
        """Forget every hash; refused with False while any block is held."""
        if self.num_free_blocks != self.num_blocks - 1:
            return False
        self._cached.clear()
        self._more_keys.clear()
        for block in self.blocks:
            block.forget_hash()
        if self.enable_events:
            self._events.append(AllBlocksCleared())
        return True

    # ---- caching

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Sequence[Block],
        *,
        first: int,
        end: int,
        block_size: int,
        group_id: int,
        mask: Sequence[bool] | None = None,
    ) -> None:
        """Make blocks `first` to `end` of a request findable and say so in one event.

        Null blocks are left out, and so are those that `mask` (one flag for each) denies. The event is made even
        when nothing is left, as vLLM does.
        """
        if first >= end:
            return
        hashes = hashes_at(request.block_hashes, self.hash_block_size, block_size)
        stored: list[int] = []
        for index in range(first, end):
            block = blocks[index]
            if block.is_null or (mask is not None and not mask[index - first]):
                continue
            if block.block_hash is not None:  # it was findable at an inner boundary and is full now
                self._say_removed(self._drop_keys(block))
            self._insert(block_key(hashes[index], group_id), block, (index + 1) * block_size)
            stored.append(index)
        if not self.enable_events:
            return
        self._say_stored(
            request,
            hashes=[hashes[index] for index in stored],
            parent=hashes[first - 1] if first else None,
            start=first * block_size,
            end=end * block_size,
            block_size=block_size,
            spans=[(index * block_size, (index + 1) * block_size) for index in stored],
            group_id=group_id,
        )

    def cache_partial_block(
        self, request: Request, block: Block, *, num_tokens: int, group_id: int
    ) -> BlockHashWithGroupId | None:
        """Make a block findable at a hash boundary inside it, `num_tokens` into the request; returns the key."""
        if block.is_null:
            return None
        unit = self.hash_block_size
        count = num_tokens // unit
        key = block_key(request.block_hashes[count - 1], group_id)
        known = block.block_hash == key or block.block_id in self._cached.get(key, ())
        if not known and block.num_hashed_tokens is not None and block.num_hashed_tokens < count * unit:
            self._say_removed(self._drop_keys(block))
        self._insert(key, block, count * unit)
        if self.enable_events and not known:
            start = (count - 1) * unit
            self._say_stored(
                request,
                hashes=[request.block_hashes[count - 1]],
                parent=request.block_hashes[count - 2] if count > 1 else None,
                start=start,
                end=num_tokens,
                block_size=num_tokens - start,
                spans=[(start, num_tokens)],
                group_id=group_id,
            )
        return key

    def move_keys(self, source: Block, target: Block) -> None:
        """Let `target`, a fresh copy of `source`, be found in its place. No event: the hashes stay cached."""
        num_tokens = source.num_hashed_tokens
        for key in self._drop_keys(source):
            self._insert(key, target, num_tokens)

    def take_events(self) -> list[KVEvent]:
        """Return the events since the last call and forget them."""
        events, self._events = self._events, []
        return events

    def _insert(self, key: BlockHashWithGroupId, block: Block, num_tokens: int | None) -> None:
        same = self._cached.setdefault(key, {})
        if block.block_id in same:
            return
        if block.block_hash is None:
            block.block_hash, block.num_hashed_tokens = key, num_tokens
        else:
            self._more_keys.setdefault(block.block_id, {})[key] = None
        same[block.block_id] = block

    def _drop_keys(self, block: Block) -> list[BlockHashWithGroupId]:
        keys = self.keys_of(block)
        if keys:
            self._more_keys.pop(block.block_id, None)
            block.forget_hash()
        for key in keys:
            same = self._cached[key]
            del same[block.block_id]
            if not same:
                del self._cached[key]
        return keys

    def _say_removed(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        if not self.enable_events:
            return
        for key in keys:
            value = external_hash(get_block_hash(key), self.external_form)
            self._events.append(
                BlockRemoved(block_hashes=(value,), medium=self.medium, group_idx=get_group_id(key))
            )

    def _say_stored(
        self,
        request: Request,
        *,
        hashes: Sequence[ChainValue],
        parent: ChainValue | None,
        start: int,
        end: int,
        block_size: int,
        spans: Sequence[tuple[int, int]],
        group_id: int,
    ) -> None:
        self._events.append(
            stored_event(
                request,
                hashes=hashes,
                parent=parent,
                start=start,
                end=end,
                block_size=block_size,
                spans=spans,
                group_id=group_id,
                spec=self.groups[group_id],
                medium=self.medium,
                form=self.external_form,
            )
        )


def stored_event(
    request: Request,
    *,
    hashes: Sequence[ChainValue],
    parent: ChainValue | None,
    start: int,
    end: int,
    block_size: int,
    spans: Sequence[tuple[int, int]],
    group_id: int,
    spec: GroupSpec,
    medium: str,
    form: ExternalForm,
) -> BlockStored:
    """Return the event for blocks of a request's tokens `start` to `end`; `spans`: the tokens of each block."""
    tokens, lora, lookahead = request.all_token_ids, request.lora, request.chain.hasher.lookahead
    return BlockStored(
        block_hashes=tuple(external_hash(value, form) for value in hashes),
        parent_block_hash=None if parent is None else external_hash(parent, form),
        token_ids=tuple(tokens[start:end]),
        block_size=block_size,
        lora_id=lora.id if lora else None,
        medium=medium,
        lora_name=lora.name if lora else None,
        extra_keys=tuple(request.event_extra_keys(*span) for span in spans),
        group_idx=group_id,
        kv_cache_spec_kind=spec.kind,
        kv_cache_spec_sliding_window=spec.sliding_window,
        lookahead_token_ids=tuple(tuple(tokens[stop : stop + lookahead]) for _, stop in spans)
        if lookahead
        else None,
    )


def block_key(block_hash: ChainValue, group_id: int) -> BlockHashWithGroupId:
    """Return what finds a block of a group: the digest and the group; an integer hash as 32 bytes, big-endian."""
    if isinstance(block_hash, int):  # of the releases that chain integers
        block_hash = BlockHash(block_hash.to_bytes(32, "big"))
    return make_block_hash_with_group_id(block_hash, group_id)
