"""How far a rank's blocks carry a request: the hits of all KV cache groups combined, tier after tier.

Lengths are in tokens here. The combination is that of vLLM's KV cache coordinator: full attention gives the longest
run from the start, every other kind accepts that length or shortens it, and after a shortening all are asked again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from kvhash.events.schema import hash_key

from .layer import Keys, Layer

__all__ = ["Combination", "GroupView", "Kind", "Request", "continue_in_tier", "kind_of"]

Kind = Literal["full", "window", "state", "chunked"]

_KINDS: dict[str | None, Kind] = {
    None: "full",
    "full_attention": "full",
    "mla_attention": "full",
    "sink_full_attention": "full",
    "sliding_window": "window",
    "sliding_window_mla": "window",
    "mamba": "state",
    "chunked_local_attention": "chunked",
}


def kind_of(published: str | None, *, sliding_window: int | None, chunk: int | None) -> Kind:
    """Return how a group of this published kind is searched.

    A kind that is not known, and a window or chunk whose size is not known, is searched as full attention, which
    needs every block: it can claim too little, never too much.
    """
    kind = _KINDS.get(published, "full")
    if (kind == "window" and not sliding_window) or (kind == "chunked" and not chunk):
        return "full"
    return kind


class Request:
    """A lookup's hashes, one each `unit` tokens, read when a search asks for them."""

    def __init__(self, hashes: Sequence[bytes | int], unit: int) -> None:
        self.hashes = hashes
        self.unit = unit
        self.num_tokens = len(hashes) * unit

    def keys(self, size: int) -> Keys:
        """Return the keys of blocks of `size` tokens: each block's hash is that of its last unit."""
        hashes, factor = self.hashes, size // self.unit

        def at(index: int) -> int:
            return hash_key(hashes[(index + 1) * factor - 1])

        def digest_at(index: int) -> bytes | None:
            value = hashes[(index + 1) * factor - 1]
            return bytes(value) if isinstance(value, bytes) and len(value) > 8 else None

        return Keys(len(hashes) // factor if factor else 0, at, digest_at)


@dataclass
class GroupView:
    """Groups of one geometry, searched together: a block is there when each of their layers holds it."""

    kind: Kind
    size: int
    window: int
    chunk: int
    request: Request
    layers: list[Layer] = field(default_factory=list)

    @cached_property
    def keys(self) -> Keys:
        """The request's blocks at the groups' size."""
        return self.request.keys(self.size)

    @cached_property
    def units(self) -> Keys:
        """The request's hashes."""
        return self.request.keys(self.request.unit)

    @cached_property
    def run(self) -> int:
        """How many of the request's first blocks are there."""
        return min((layer.run(self.keys) for layer in self.layers), default=0)

    def holds(self, keys: Keys, index: int) -> bool:
        """Return whether every layer holds the block at a place."""
        return all(layer.holds(keys, index) for layer in self.layers)


class Combination:
    """The longest prefix that all groups of one tier can go on from.

    ``use_eagle``: a drafter needs the last unit of a hit recomputed.
    """

    def __init__(self, groups: Sequence[GroupView], unit: int) -> None:
        self.groups = sorted(groups, key=lambda group: group.kind != "full")
        self.unit = unit
        # Several groups of one geometry are a hybrid too: they are aligned to the lcm, which is their own size.
        self.hybrid = sum(len(group.layers) for group in groups) > 1
        self.fine = self.hybrid and self._hits_end_inside_blocks()
        self.alignment = unit if self.fine else math.lcm(*(group.size for group in groups))

    def _hits_end_inside_blocks(self) -> bool:
        """Return whether hits may end at any hash: a state block spans several, and every group can be cut there."""
        if not any(group.kind == "state" and group.size > self.unit for group in self.groups):
            return False
        return all(group.kind in ("full", "state") or group.size == self.unit for group in self.groups)

    def longest(self, max_length: int, *, use_eagle: bool = False) -> int:
        """Return the length of the hit, at most `max_length` tokens."""
        if not self.groups:
            return 0
        full = self.groups[0].kind == "full"
        found: dict[int, int] = {}
        settled: set[int] = set()  # groups whose unit is dropped already at the current length
        length = max_length
        while True:
            current = length
            for number, group in enumerate(self.groups):
                if group.kind == "full" and number in found:
                    current = min(current, found[number])
                    continue
                drop = use_eagle and number not in settled
                hit = self._hit(group, self._reach(group, current) if drop else current, drop)
                if drop:
                    settled.add(number)
                elif hit < current:
                    settled.clear()
                current = found[number] = hit
            if not self.hybrid or current >= length:
                return current
            length = current
            if len(self.groups) == 2 and full:
                return current

    def _reach(self, group: GroupView, current: int) -> int:
        """Return how far to look when a unit will be dropped: one unit more, so that the hit can be `current`."""
        if not self.hybrid or group.kind == "state":
            return current
        margin = self.unit if self.fine and group.kind == "full" and group.size > self.unit else group.size
        return min(current + margin, group.request.num_tokens)

    def _hit(self, group: GroupView, max_length: int, drop: bool) -> int:
        search = {"full": self._full, "window": self._window, "state": self._state, "chunked": self._chunked}
        return search[group.kind](group, max_length, drop)

    def _full(self, group: GroupView, max_length: int, drop: bool) -> int:
        """Whole blocks from the left up to the first miss, then the boundaries inside the next block."""
        size, step = group.size, self.alignment
        length = min(group.run, max_length // size) * size
        if step < size and size % step == 0:
            first = length // step
            last = min(first + size // step - 1, max_length // step, group.units.count)
            for index in range(last - 1, first - 1, -1):
                if group.holds(group.units, index):
                    length = (index + 1) * step
                    break
        if drop and length:
            length -= min(step, size)
        return length - length % step

    def _window(self, group: GroupView, max_length: int, drop: bool) -> int:
        """From the right, the first run of blocks as long as a window; a shorter one counts only at the start."""
        size, step = group.size, self.alignment
        need = -(-(group.window - 1) // size) + drop
        run, end = 0, 0
        for index in range(max_length // size - 1, -1, -1):
            if not group.holds(group.keys, index):
                run = 0
                continue
            if run == 0:
                if size != step and (index + (not drop)) * size % step:
                    continue  # no hit may end here
                end = index + 1
            run += 1
            if run >= need:
                break
        else:
            end = self._aligned(run, size)
        if drop and end:
            end = self._aligned(end - 1, size)
        return end * size

    def _aligned(self, blocks: int, size: int) -> int:
        while size != self.alignment and blocks * size % self.alignment:
            blocks -= 1
        return blocks

    def _state(self, group: GroupView, max_length: int, drop: bool) -> int:
        """From the right, the first state."""
        del drop
        fine = self.alignment < group.size and group.size % self.alignment == 0
        step, keys = (self.alignment, group.units) if fine else (group.size, group.keys)
        for index in range(min(max_length // step, keys.count) - 1, -1, -1):
            end = (index + 1) * step
            if end % self.alignment == 0 and group.holds(keys, index):
                return end
        return 0

    def _chunked(self, group: GroupView, max_length: int, drop: bool) -> int:
        """The blocks of the chunk that the hit's end lies in, from the left; chunks before it need none."""
        del drop
        index = max(0, max_length) // group.chunk * group.chunk // group.size
        while index < max_length // group.size and group.holds(group.keys, index):
            index += 1
        return index * group.size


def continue_in_tier(
    groups: Sequence[GroupView], start: int, max_length: int, chunk_blocks: int | None
) -> int:
    """Return how far a tier below the device carries on from `start` tokens, in whole chunks.

    Full attention decides the run; a window group must hold the blocks of its window before the end (those before
    `start` are on the device already), a state group the block at the end. `chunk_blocks`: blocks per chunk; None:
    a chunk ends where one of the tier's stores ended.
    """
    full = [group for group in groups if group.kind in ("full", "chunked")]
    others = [group for group in groups if group.kind in ("window", "state")]
    if not full:
        return start
    length = min(_whole_chunks(group, start, max_length, chunk_blocks) for group in full)
    step = math.gcd(*(group.size for group in full))
    while length > start and not all(_serves(group, start, length) for group in others):
        length -= step
    return max(length, start)


def _whole_chunks(group: GroupView, start: int, max_length: int, chunk_blocks: int | None) -> int:
    size, keys = group.size, group.keys
    first, most = start // size, min(keys.count, max_length // size)
    if chunk_blocks is None:
        end = min(min(layer.run(keys, first) for layer in group.layers), most)
        while end > first:
            cut = min(layer.chunk_end(keys, first, end) for layer in group.layers)
            if cut == end:
                break
            end = cut
        return end * size
    end = first // chunk_blocks * chunk_blocks
    while end + chunk_blocks <= most and group.holds(keys, end + chunk_blocks - 1):
        end += chunk_blocks
    return end * size


def _serves(group: GroupView, start: int, length: int) -> bool:
    if length % group.size:
        return False
    end = length // group.size
    need = 1 if group.kind == "state" else -(-(group.window - 1) // group.size)
    first = max(end - need, start // group.size)
    return all(group.holds(group.keys, index) for index in range(first, end))
