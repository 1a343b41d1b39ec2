"""Mamba-style state in ``align`` mode: one recurrent state, kept as a block where a hit can start from it.

A request holds one block at a time; the table has null blocks before it. A state can be found at the end of a block
and at the prompt's last hash boundary; going on from a shared state writes into a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvhash.block_hash import BlockHashWithGroupId

from ..block import Block, cdiv
from ..block_pool import hashes_at
from ..request import Request
from .base import GroupManager, count_free
from .lookup import GroupHit, Lookup

__all__ = ["MambaManager", "checkpoint_position"]


def checkpoint_position(num_tokens: int, unit: int, *, drop_eagle: bool, lookahead: int) -> int:
    """Return the last multiple of `unit` at which a state of `num_tokens` can serve a hit.

    A token must be left to compute, and those that the checkpoint's hash looks ahead at; with Eagle one unit more.
    """
    limit = num_tokens if drop_eagle else num_tokens - max(1, lookahead)
    return max(limit // unit * unit - (unit if drop_eagle else 0), 0)


class MambaManager(GroupManager):
    """Keeps the latest state of a request."""

    fine_grained = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.drop_eagle_checkpoint = False
        #: States cached in this step are not computed yet: who hits one waits for the next step.
        self._cached_this_step: set[BlockHashWithGroupId] = set()
        self._last_state: dict[str, int] = {}
        self._num_retired: dict[str, int] = {}
        self._has_allocated: set[str] = set()

    def new_step_starts(self) -> None:
        """States cached in the last step are computed by now."""
        self._cached_this_step.clear()

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return all but the last computed token: the state holds the rest."""
        return num_computed_tokens - 1

    def find_longest_hit(self, lookup: Lookup) -> GroupHit:
        """Look from the right for one cached state."""
        size, unit, pool = self.block_size, lookup.alignment, lookup.pool
        rows: list[list[Block]] = [[] for _ in lookup.group_ids]
        fine = unit < size and size % unit == 0
        step = unit if fine else size
        hashes = lookup.hashes if fine else hashes_at(lookup.hashes, pool.hash_block_size, size)
        for index in range(min(lookup.max_length // step, len(hashes)) - 1, -1, -1):
            end = (index + 1) * step
            if end % unit:
                continue
            found = pool.get_cached_blocks(hashes[index], lookup.group_ids)
            if found is None:
                continue
            for row, block in zip(rows, found, strict=True):
                row += [pool.null_block] * (cdiv(end, size) - 1)
                row.append(block)
            return GroupHit(rows, end)
        return GroupHit(rows, 0)

    def num_blocks_to_allocate(
        self,
        request_id: str,
        *,
        num_tokens: int,
        hit_blocks: Sequence[Block],
        total_computed_tokens: int,
        local_computed_tokens: int,
        main_model_tokens: int,
        apply_cap: bool = False,
    ) -> int:
        """Return at most one block for the state and one for a copy; more than there are to make the caller wait."""
        del num_tokens, apply_cap
        if (
            total_computed_tokens > local_computed_tokens
        ):  # a connector brings the state, into a block of its own
            state_blocks = cdiv(total_computed_tokens, self.block_size)
            return 1 + (cdiv(main_model_tokens, self.block_size) > state_blocks)
        if hit_blocks and hit_blocks[-1].block_hash in self._cached_this_step:
            return self.pool.num_blocks + 1
        held = len(self.req_to_blocks.get(request_id, ()))
        new = cdiv(main_model_tokens, self.block_size) - len(hit_blocks) - held
        copy = self._ends_inside_block(hit_blocks, local_computed_tokens) or request_id in self._partial_hits
        if copy:
            new = max(new, 0) + 1
        # Fewer than none when rejected drafts left a block over: it makes up for another group's need, as in vLLM.
        return min(new, 1 + copy) + count_free(hit_blocks)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, main_model_tokens: int) -> list[Block]:
        """Take a block for the state at the end of the step, with null blocks between it and the last one."""
        del num_tokens
        blocks = self.req_to_blocks.setdefault(request_id, [])
        required = cdiv(main_model_tokens, self.block_size)
        partial = self._partial_hits.pop(request_id, None)
        had_allocated = request_id in self._has_allocated
        self._has_allocated.add(request_id)
        held = len(blocks)
        if required <= held and partial is None:
            return []
        if had_allocated or held:
            self._last_state[request_id] = held - 1
        blocks += [self.pool.null_block] * (required - 1 - held)
        taken = blocks[held:]
        new = self.pool.get_new_blocks(max(required - len(blocks), 0) + (partial is not None))
        if partial is not None:
            index, source = partial
            copy = new.pop(0)
            if had_allocated:
                # It wrote the state itself and writes on: the copy is what the cache keeps.
                assert blocks[index] is source
                self.pool.move_keys(source, copy)
                self._pending_copies.append((source, copy))
                source.ref_cnt += 1
                if copy.block_hash is not None:
                    self._cached_this_step.add(copy.block_hash)
            else:
                self._write_into_copy(blocks, index, source, copy)
                taken = [copy, *taken]
        blocks += new
        return taken + new

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Cache the states at block ends, and the one at the prompt's last hash boundary."""
        before = self.num_cached.get(request.request_id, 0)
        super().cache_blocks(request, num_tokens)
        after = self.num_cached.get(request.request_id, 0)
        partial = self._cache_prompt_tail(request, num_tokens)
        if partial is not None:
            self._cached_this_step.add(partial)
        for block in self.req_to_blocks.get(request.request_id, [])[before:after]:
            if not block.is_null and block.block_hash is not None:
                self._cached_this_step.add(block.block_hash)

    def remove_skipped_blocks(self, request_id: str, computed_tokens: int) -> None:
        """Free the states before the last one, and the last one once the next has been computed from it."""
        super().remove_skipped_blocks(request_id, computed_tokens)
        last = self._last_state.get(request_id)
        if last is not None and last < cdiv(computed_tokens, self.block_size) - 1:
            blocks = self.req_to_blocks[request_id]
            self.pool.free_blocks([blocks[last]])
            blocks[last] = self.pool.null_block

    def pop_blocks(self, request_id: str) -> list[Block]:
        """Forget a request and return its blocks."""
        self._has_allocated.discard(request_id)
        self._last_state.pop(request_id, None)
        self._num_retired.pop(request_id, None)
        return super().pop_blocks(request_id)

    def _null_out(self, request_id: str, end: int) -> None:
        # Null blocks lie between states here, so the walk cannot stop at the first.
        blocks = self.req_to_blocks.get(request_id, [])
        first, end = self._num_retired.get(request_id, 0), min(end, len(blocks))
        if first >= end:
            return
        freed = [block for block in reversed(blocks[first:end]) if not block.is_null]
        blocks[first:end] = [self.pool.null_block] * (end - first)
        self.pool.free_blocks(freed)
        self._num_retired[request_id] = end

    def _cache_prompt_tail(self, request: Request, num_tokens: int) -> BlockHashWithGroupId | None:
        unit = self.pool.hash_block_size
        boundary = checkpoint_position(
            request.num_prompt_tokens,
            unit,
            drop_eagle=self.drop_eagle_checkpoint,
            lookahead=request.chain.hasher.lookahead,
        )
        if num_tokens <= 0 or num_tokens % unit or num_tokens != boundary:
            return None
        blocks = self.req_to_blocks[request.request_id]
        index = cdiv(num_tokens, self.block_size) - 1
        if index >= len(blocks) or blocks[index].is_null or blocks[index].num_hashed_tokens == num_tokens:
            return None
        block = blocks[index]
        key = self.pool.cache_partial_block(request, block, num_tokens=num_tokens, group_id=self.group_id)
        if key is not None and num_tokens % self.block_size:
            self._partial_hits[request.request_id] = (index, block)
            self.num_cached[request.request_id] = index
        return key
