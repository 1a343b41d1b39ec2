"""One KV cache block: an id, a reference count, and the hash under which it can be hit."""

from __future__ import annotations

from kvhash.block_hash import BlockHashWithGroupId

__all__ = ["Block", "cdiv", "trim_null_head"]


class Block:
    """A block of one pool.

    ``ref_cnt``: how many requests hold it; 0 means that it waits in the free queue. ``block_hash``: its first key in
    the hash map, None while it cannot be hit. ``num_hashed_tokens``: tokens of the request's prefix that this key
    covers. ``is_null``: the placeholder for tokens that have no block; its count is not kept.
    """

    __slots__ = (
        "block_hash",
        "block_id",
        "is_null",
        "next_free",
        "num_hashed_tokens",
        "prev_free",
        "ref_cnt",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: BlockHashWithGroupId | None = None
        self.num_hashed_tokens: int | None = None
        self.is_null = False
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    def forget_hash(self) -> None:
        """Make the block one that no lookup finds."""
        self.block_hash = None
        self.num_hashed_tokens = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, hashed={self.block_hash is not None})"


def cdiv(value: int, divisor: int) -> int:
    """Return the quotient rounded up."""
    return -(-value // divisor)


def trim_null_head(blocks: list[Block]) -> list[Block]:
    """Return the blocks without the null blocks that lead them."""
    for index, block in enumerate(blocks):
        if not block.is_null:
            return blocks[index:] if index else blocks
    return []
