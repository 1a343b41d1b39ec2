"""The free queue: free blocks in the order in which they will be handed out, with O(1) removal from the middle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .block import Block

__all__ = ["FreeBlockQueue"]


class FreeBlockQueue:
    """A doubly linked list through the blocks themselves.

    The head and the tail are sentinels that are never handed out, so no operation has an empty case.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self._length = 0
        self.append(blocks)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        """Yield the free blocks, the next to be handed out first."""
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def pop(self, count: int) -> list[Block]:
        """Take the first `count` blocks; the caller has checked that there are as many."""
        taken: list[Block] = []
        for _ in range(count):
            block = self._head.next_free
            assert block is not None
            if block is self._tail:
                raise IndexError(f"the free queue holds {len(taken)} blocks, {count} were asked for")
            self.remove(block)
            taken.append(block)
        return taken

    def remove(self, block: Block) -> None:
        """Take one block from wherever it is in the queue."""
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise ValueError(f"block {block.block_id} is not in the free queue")
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self._length -= 1

    def append(self, blocks: Iterable[Block]) -> None:
        """Put blocks at the back, to be reused last."""
        last = self._tail.prev_free
        assert last is not None
        self._insert_after(last, blocks)

    def prepend(self, blocks: Iterable[Block]) -> None:
        """Put blocks at the front in the order given, to be reused first."""
        self._insert_after(self._head, blocks)

    def _insert_after(self, before: Block, blocks: Iterable[Block]) -> None:
        after = before.next_free
        assert after is not None
        for block in blocks:
            before.next_free, block.prev_free = block, before
            before = block
            self._length += 1
        before.next_free, after.prev_free = after, before
