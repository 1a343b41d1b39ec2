"""One place's blocks: those that one rank holds of one KV cache group in one tier, linked as a forest of prefixes.

A block is known by its key, the low 64 bits of its hash. Since a block hash covers its whole prefix, a lookup asks
only whether each of its own hashes is held; where a block stands follows from the lookup, never from an event. The
links (which block is whose parent) are there to make that fast:

* a block is *reachable* when every block from the root to it is held; its ``depth`` is then its distance from the
  root, 1 for a first block. The reachable blocks are closed under prefixes, so a lookup searches for the last of its
  hashes that is reachable at the right depth instead of walking to it;
* all other blocks (their parent is not held, or not known) have depth 0 and are found one by one, after the reachable
  run. So links that are missing cost time, and answers are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

__all__ = ["ROOT", "UNPLACED", "Block", "Keys", "Layer"]

#: Parent of a prompt's first block.
ROOT = -1
#: Parent of a block whose parent is not known.
UNPLACED = -2


class Block:
    """One held block.

    ``copies``: stores minus removals. ``parent``: a key, ROOT or UNPLACED. ``depth``: see the module. ``children``:
    keys of held blocks whose parent this is, in the order in which they were linked. ``digest``: its whole hash, where
    that was published. ``ends_chunk``: whether what was stored with it may be retrieved up to here.
    """

    __slots__ = ("children", "copies", "depth", "digest", "ends_chunk", "parent")

    def __init__(self, parent: int, digest: bytes | None, ends_chunk: bool) -> None:
        self.copies = 1
        self.parent = parent
        self.depth = 0
        self.children: dict[int, None] | None = None
        self.digest = digest
        self.ends_chunk = ends_chunk


class Keys:
    """A lookup's hashes at one block size: key and digest of the block at each place, made when asked for."""

    __slots__ = ("_at", "_digest_at", "count")

    def __init__(
        self, count: int, at: Callable[[int], int], digest_at: Callable[[int], bytes | None]
    ) -> None:
        self.count = count
        self._at = at
        self._digest_at = digest_at

    def key(self, index: int) -> int:
        """Return the key at a place."""
        return self._at(index)

    def digest(self, index: int) -> bytes | None:
        """Return the whole hash at a place, where the lookup has it."""
        return self._digest_at(index)


class Layer:
    """The blocks of one place. `conflicts` counts parents that contradicted another or made no sense."""

    __slots__ = ("_waiting", "blocks", "collisions", "conflicts", "reachable")

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        #: How many blocks are reachable from the root.
        self.reachable = 0
        self.conflicts = 0
        self.collisions = 0
        # Parent that is not held -> the held blocks that wait for it.
        self._waiting: dict[int, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self.blocks)

    # --- changes ----------------------------------------------------------------------------------------------

    def store(
        self, key: int, parent: int, digest: bytes | None = None, ends_chunk: bool = True
    ) -> bool | None:
        """Add one copy of a block; return whether it is new, or None where another block has its key.

        `parent` is a key, ROOT or UNPLACED. A parent that contradicts the one known, or is the block itself, makes
        the block UNPLACED. A different digest under a key that is held is a collision: that block is not taken in.
        """
        if parent == key:
            self.conflicts += 1
            parent = UNPLACED
        block = self.blocks.get(key)
        if block is None:
            self.blocks[key] = block = Block(parent, digest, ends_chunk)
            waiting = self._waiting.pop(key, None)
            block.children = waiting
            self._attach(key, block)
            return True
        if digest is not None and block.digest is not None and digest != block.digest:
            self.collisions += 1
            return None
        block.copies += 1
        block.digest = block.digest or digest
        block.ends_chunk = block.ends_chunk or ends_chunk
        if parent != UNPLACED:
            self.place(key, parent)
        return False

    def place(self, key: int, parent: int) -> None:
        """Say which parent a held block has."""
        block = self.blocks[key]
        if block.parent == parent:
            return
        known = block.parent
        self._detach(key, block)
        if known == UNPLACED and parent != key:
            block.parent = parent
        else:
            self.conflicts += 1
            block.parent = UNPLACED
        self._attach(key, block)

    def remove(self, key: int, digest: bytes | None = None) -> bool | None:
        """Take one copy of a block away; return whether it was the last, or None where no such block is held."""
        block = self.blocks.get(key)
        if block is None or (digest is not None and block.digest is not None and digest != block.digest):
            return None
        block.copies -= 1
        if block.copies:
            return False
        self.drop(key)
        return True

    def drop(self, key: int) -> None:
        """Forget a held block, all its copies. What hangs on it becomes unreachable and waits for it."""
        block = self.blocks[key]
        self._detach(key, block)
        del self.blocks[key]
        if block.children:
            self._waiting[key] = block.children

    def evict(self, count: int) -> int:
        """Forget up to `count` blocks, leaves first: those of the chains that began longest ago. Returns how many.

        From the block held longest down by the first of each one's children; what is dropped there lets the next of
        its siblings be followed, and its parent be dropped after the last of them. So what others hang on stays.
        """
        oldest = [*itertools.islice(self.blocks, count)]  # each is dropped by the time that it is passed
        oldest.reverse()
        path: list[int] = []
        below: set[int] = set()
        dropped = 0
        while dropped < count and self.blocks:
            while not path:
                if (key := oldest.pop()) in self.blocks:
                    path, below = [key], {key}
            while (children := self.blocks[path[-1]].children) and (key := next(iter(children))) not in below:
                path.append(key)  # a circle of parents is nobody's prefix: it ends where it began
                below.add(key)
            self.drop(path.pop())
            dropped += 1
        return dropped

    def _attach(self, key: int, block: Block) -> None:
        if block.parent == ROOT:
            self._reach(key, 1)
        elif block.parent != UNPLACED:
            parent = self.blocks.get(block.parent)
            if parent is None:
                self._waiting.setdefault(block.parent, {})[key] = None
                return
            if parent.children is None:
                parent.children = {}
            parent.children[key] = None
            if parent.depth:
                self._reach(key, parent.depth + 1)

    def _detach(self, key: int, block: Block) -> None:
        if block.depth:
            self._reach(key, 0)
        if block.parent < 0:
            return
        parent = self.blocks.get(block.parent)
        if parent is not None:
            assert parent.children is not None
            del parent.children[key]
            if not parent.children:
                parent.children = None
            return
        waiting = self._waiting[block.parent]
        del waiting[key]
        if not waiting:
            del self._waiting[block.parent]

    def _reach(self, key: int, depth: int) -> None:
        """Give a block its depth, and all that hangs on it theirs; 0 makes them unreachable."""
        todo = [(key, depth)]
        while todo:
            key, depth = todo.pop()
            block = self.blocks[key]
            self.reachable += bool(depth) - bool(block.depth)
            block.depth = depth
            if block.children:
                below = depth + 1 if depth else 0
                todo += [(child, below) for child in block.children]

    def beginnings(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield what hangs on each first block.

        Its key, the key and depth of the last block up to where its prompts go together, and how many blocks hang on
        it, itself included.
        """
        for first, block in self.blocks.items():
            if block.depth != 1:
                continue
            end = first
            while (children := self.blocks[end].children) and len(children) == 1:
                end = next(iter(children))
            below, todo = 0, [first]
            while todo:
                below += 1
                todo += self.blocks[todo.pop()].children or ()
            yield first, end, self.blocks[end].depth, below

    # --- lookups ----------------------------------------------------------------------------------------------

    def holds(self, keys: Keys, index: int) -> bool:
        """Return whether the block at a place is held."""
        block = self.blocks.get(keys.key(index))
        return block is not None and _same(block, keys, index)

    def run(self, keys: Keys, start: int = 0) -> int:
        """Return the place after the last of the held blocks that follow each other from `start`."""
        end = max(start, self._reachable_run(keys))
        while end < keys.count and self.holds(keys, end):
            end += 1
        return end

    def _reachable_run(self, keys: Keys) -> int:
        """Return how many of the first blocks are reachable, found by doubling and halving."""

        def reached(count: int) -> bool:
            block = self.blocks.get(keys.key(count - 1))
            return block is not None and block.depth == count and _same(block, keys, count - 1)

        if not self.reachable or not keys.count or not reached(1):
            return 0
        good, step = 1, 1
        while good + step <= keys.count and reached(good + step):
            good += step
            step *= 2
        bad = min(good + step, keys.count + 1)
        while bad - good > 1:
            middle = (good + bad) // 2
            if reached(middle):
                good = middle
            else:
                bad = middle
        return good

    def chunk_end(self, keys: Keys, start: int, end: int) -> int:
        """Return the last place of `start` to `end` at which a chunk ends; `start` where none does."""
        while end > start:
            block = self.blocks.get(keys.key(end - 1))
            if block is not None and block.ends_chunk:
                break
            end -= 1
        return end

    def items(self) -> Iterator[tuple[int, Block]]:
        """Yield key and block, the one held longest first."""
        return iter(self.blocks.items())


def _same(block: Block, keys: Keys, index: int) -> bool:
    if block.digest is None:
        return True
    digest = keys.digest(index)
    return digest is None or len(digest) != len(block.digest) or digest == block.digest
