"""What every KV cache group does alike: count, take, cache and free the blocks of each request."""

from __future__ import annotations

from collections.abc import Sequence

from ..block import Block, cdiv, trim_null_head
from ..block_pool import BlockPool
from ..request import Request
from .lookup import GroupHit, Lookup

__all__ = ["GroupManager", "count_free"]


class GroupManager:
    """The blocks that requests hold in one group.

    ``block_size``: tokens per block, context parallelism included. ``hit_alignment``: tokens that every hit of the
    engine is a multiple of. ``admission_cap``: blocks that a request ever holds at once where the group recycles
    them, else None. ``use_eagle``: hits of this group drop their last unit.
    """

    #: Whether a hit may end inside a block, at a hash boundary.
    fine_grained = False

    def __init__(
        self,
        *,
        block_size: int,
        pool: BlockPool,
        group_id: int,
        hit_alignment: int,
        admission_cap: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.pool = pool
        self.group_id = group_id
        self.hit_alignment = hit_alignment
        self.admission_cap = admission_cap
        self.use_eagle = False
        self.req_to_blocks: dict[str, list[Block]] = {}
        #: Blocks of each running request that are cached, or passed over for good.
        self.num_cached: dict[str, int] = {}
        # A hit that ends inside a block shares it; the request must write into a copy of its own.
        self._partial_hits: dict[str, tuple[int, Block]] = {}
        self._pending_copies: list[tuple[Block, Block]] = []

    # ---- what a kind says of itself

    def find_longest_hit(self, lookup: Lookup) -> GroupHit:
        """Return the longest hit of this kind within the lookup's bounds."""
        raise NotImplementedError

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return how many leading tokens the next token does not need any more."""
        del num_computed_tokens
        return 0

    def reachable_mask(self, first: int, end: int) -> list[bool] | None:
        """Return which of the blocks `first` to `end` a hit can ever need; None: all."""
        del first, end
        return None

    def new_step_starts(self) -> None:
        """Hear that a new scheduling step begins."""

    # ---- counting and taking

    def has_room(self, request: Request, num_tokens: int) -> bool:
        """Whether a running request can go on to `num_tokens` as it is: nothing to take, to cache or to free.

        A kind may say False without looking; then everything is looked at.
        """
        del request, num_tokens
        return False

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
        """Return how many free blocks an allocation takes: new ones, and hit ones that are free now.

        `num_tokens`: slots needed in all; `main_model_tokens`: of these, those that are no look-ahead slots.
        """
        del main_model_tokens
        required = cdiv(num_tokens, self.block_size)
        if apply_cap and self.admission_cap is not None:
            required = min(required, self.admission_cap)
        held = len(self.req_to_blocks.get(request_id, ()))
        if request_id in self.num_cached:  # it runs, so it has no new hits
            return max(required - held, 0)
        skipped = self.num_skipped_tokens(total_computed_tokens) // self.block_size
        new = max(required - max(skipped, len(hit_blocks) + held), 0)
        if self._ends_inside_block(hit_blocks, local_computed_tokens):
            new += 1  # for the copy
        return new + count_free(hit_blocks[max(0, skipped - held) :])

    def add_hit_blocks(
        self, request_id: str, hit_blocks: Sequence[Block], *, local_tokens: int, external_tokens: int
    ) -> None:
        """Give a request its hit blocks and hold them; those before the window become null blocks."""
        blocks = self.req_to_blocks.setdefault(request_id, [])
        assert not blocks
        skipped = self.num_skipped_tokens(local_tokens + external_tokens) // self.block_size
        kept = list(hit_blocks[skipped:])
        self.pool.touch(kept)
        blocks += [self.pool.null_block] * skipped
        blocks += kept
        self.num_cached[request_id] = len(blocks)
        if self._ends_inside_block(kept, local_tokens):
            index = local_tokens // self.block_size
            self._partial_hits[request_id] = (index, kept[-1])
            self.num_cached[request_id] = index

    def add_external_blocks(self, request_id: str, *, local_tokens: int, external_tokens: int) -> None:
        """Take blocks for tokens that a connector will load."""
        total = local_tokens + external_tokens
        if min(total - self.num_skipped_tokens(total), external_tokens) <= 0:
            return
        blocks = self.req_to_blocks.setdefault(request_id, [])
        blocks += self.pool.get_new_blocks(max(0, cdiv(total, self.block_size) - len(blocks)))

    def allocate_new_blocks(self, request_id: str, num_tokens: int, main_model_tokens: int) -> list[Block]:
        """Take what `num_tokens` need beyond the blocks held; returns the blocks taken."""
        del main_model_tokens
        taken: list[Block] = []
        blocks = self.req_to_blocks.setdefault(request_id, [])
        if request_id in self._partial_hits:
            index, source = self._partial_hits.pop(request_id)
            copy = self.pool.get_new_blocks(1)[0]
            self._write_into_copy(blocks, index, source, copy)
            taken.append(copy)
        new = self.pool.get_new_blocks(max(0, cdiv(num_tokens, self.block_size) - len(blocks)))
        blocks += new
        return taken + new

    def take_pending_copies(self) -> list[tuple[Block, Block]]:
        """Return the (source, copy) pairs to be copied before the step runs, each held once more until then."""
        copies, self._pending_copies = self._pending_copies, []
        return copies

    # ---- caching and freeing

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the blocks that `num_tokens` fill findable, as far as they are hashed and not cached yet."""
        first = self.num_cached.get(request.request_id, 0)
        hashed = len(request.block_hashes) * self.pool.hash_block_size
        end = min(num_tokens, hashed) // self.block_size
        if first >= end:
            return
        self.pool.cache_full_blocks(
            request,
            self.req_to_blocks[request.request_id],
            first=first,
            end=end,
            block_size=self.block_size,
            group_id=self.group_id,
            mask=self.reachable_mask(first, end),
        )
        self.num_cached[request.request_id] = end

    def remove_skipped_blocks(self, request_id: str, computed_tokens: int) -> None:
        """Free the blocks that nobody's next token needs and put null blocks in their place."""
        skipped = self.num_skipped_tokens(computed_tokens) // self.block_size
        if skipped > 0:
            self._null_out(request_id, skipped)

    def pop_blocks(self, request_id: str) -> list[Block]:
        """Forget a request and return its blocks, leading null blocks apart, without freeing them."""
        self.num_cached.pop(request_id, None)
        self._partial_hits.pop(request_id, None)
        return trim_null_head(self.req_to_blocks.pop(request_id, []))

    def free(self, request_id: str) -> None:
        """Free a request's blocks, the last first: a prefix is worth more than what follows it."""
        self.pool.free_blocks(reversed(self.pop_blocks(request_id)))

    def _null_out(self, request_id: str, end: int) -> None:
        blocks = self.req_to_blocks.get(request_id, [])
        freed: list[Block] = []
        for index in range(min(end, len(blocks)) - 1, -1, -1):
            if blocks[index].is_null:  # what is before it was freed earlier
                break
            freed.append(blocks[index])
            blocks[index] = self.pool.null_block
        self.pool.free_blocks(freed)

    def _ends_inside_block(self, hit_blocks: Sequence[Block], local_tokens: int) -> bool:
        return bool(hit_blocks) and local_tokens % self.block_size != 0

    def _write_into_copy(self, blocks: list[Block], index: int, source: Block, copy: Block) -> None:
        assert blocks[index] is source
        blocks[index] = copy
        # The request's reference to the source goes on to the pending copy; the copy gets one for it too.
        self._pending_copies.append((source, copy))
        copy.ref_cnt += 1


def count_free(blocks: Sequence[Block]) -> int:
    """Return how many of the blocks wait in the free queue."""
    return sum(block.ref_cnt == 0 and not block.is_null for block in blocks)
