"""KV pages without a model: each slot holds a digest of the tokens up to it, and a step checks those that it reads.

What a model would attend to is what is checked, so a page that is wrong, stale, or restored under the wrong block
stops the run instead of giving tokens that only look right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from .block import cdiv
from .coordinator import CacheConfig
from .request import Request
from .spec import ChunkedLocalAttentionSpec, GroupSpec, MambaSpec, SlidingWindowSpec

__all__ = ["NullPages", "PageMismatchError"]

#: Bytes of a slot.
_SLOT = 8


class PageMismatchError(RuntimeError):
    """A request would have read KV that was not computed from its own tokens."""


class NullPages:
    """The pages of one pool.

    A page of an attention group has a slot for each token of its block; a page of a state group has one slot, the
    state. A slot's digest covers every token up to it, the adapter and the cache salt: what a block hash covers.
    """

    def __init__(self, cache: CacheConfig) -> None:
        self.groups = cache.groups
        dcp = cache.decode_context_parallel_size
        self.sizes = [spec.block_size * (1 if isinstance(spec, MambaSpec) else dcp) for spec in cache.groups]
        #: Pages put back by `write` since the start.
        self.writes = 0
        self._pages: dict[int, bytearray] = {}
        self._tables: dict[str, list[list[int]]] = {}
        self._chains: dict[str, bytearray] = {}

    def describe(self) -> str:
        """Return what tells pages of another geometry apart."""
        return ";".join(f"{spec!r}x{size}" for spec, size in zip(self.groups, self.sizes, strict=True))

    # ---- block tables, as plans tell them

    def start(self, request_id: str, rows: Sequence[Sequence[int]]) -> None:
        """Take the whole block table of a request that is new or starts again."""
        self._tables[request_id] = [list(row) for row in rows]
        self._chains.pop(request_id, None)

    def extend(self, request_id: str, rows: Sequence[Sequence[int]]) -> None:
        """Take the blocks that a running request got."""
        for row, new in zip(self._tables[request_id], rows, strict=True):
            row += new

    def keep(self, request_ids: Iterable[str]) -> None:
        """Forget all requests but these."""
        kept = set(request_ids)
        for request_id in [i for i in self._tables if i not in kept]:
            del self._tables[request_id]
            self._chains.pop(request_id, None)

    # ---- pages

    def page_bytes(self, group: int) -> int:
        """Return the length of a page of this group in bytes."""
        return _SLOT * (1 if isinstance(self.groups[group], MambaSpec) else self.sizes[group])

    def read(self, group: int, block_id: int) -> bytes:
        """Return a page; zeros where nothing was written."""
        return bytes(self._page(group, block_id))

    def write(self, group: int, block_id: int, page: bytes) -> None:
        """Replace a page; raises ValueError for one of another length."""
        if len(page) != self.page_bytes(group):
            raise ValueError(f"a page of group {group} is {self.page_bytes(group)} bytes, got {len(page)}")
        self._pages[block_id] = bytearray(page)
        self.writes += 1

    def copy(self, source: int, target: int) -> None:
        """Copy a page."""
        if source in self._pages:
            self._pages[target] = bytearray(self._pages[source])

    def _page(self, group: int, block_id: int) -> bytearray:
        page, size = self._pages.get(block_id), self.page_bytes(group)
        if page is None or len(page) != size:  # another group had the block before
            page = self._pages[block_id] = bytearray(size)
        return page

    # ---- a step

    def run(self, request: Request, tokens: Sequence[int], start: int, end: int) -> None:
        """Read what the tokens `start` to `end` attend to, check it, and write their own slots.

        `tokens`: all tokens that are known, at least `end`. Raises PageMismatchError.
        """
        chain = self._chain(request, tokens, end)
        for group, spec in enumerate(self.groups):
            row = self._tables[request.request_id][group]
            if isinstance(spec, MambaSpec):
                if start:
                    self._check(request, group, row, chain, start - 1, start)
                if end > start:
                    state = self._page(group, _block_at(request, row, cdiv(end, self.sizes[group]) - 1))
                    state[:] = chain[(end - 1) * _SLOT : end * _SLOT]
                continue
            self._check(request, group, row, chain, _first_read(spec, start), start)
            for index, low, high in self._spans(group, start, end):
                page = self._page(group, _block_at(request, row, index))
                base = index * self.sizes[group]
                page[(low - base) * _SLOT : (high - base) * _SLOT] = chain[low * _SLOT : high * _SLOT]

    def _check(
        self, request: Request, group: int, row: Sequence[int], chain: bytearray, first: int, end: int
    ) -> None:
        state = isinstance(self.groups[group], MambaSpec)
        for index, low, high in self._spans(group, first, end):
            block_id = _block_at(request, row, index)
            base = low if state else index * self.sizes[group]
            found = self._page(group, block_id)[(low - base) * _SLOT : (high - base) * _SLOT]
            if found != chain[low * _SLOT : high * _SLOT]:
                raise PageMismatchError(
                    f"request {request.request_id}: block {block_id} of group {group} does not hold the KV of "
                    f"its tokens {low} to {high}"
                )

    def _spans(self, group: int, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield for each block that the tokens `first` to `end` lie in: its index, and the tokens inside it."""
        size = self.sizes[group]
        for index in range(first // size, cdiv(end, size)):
            low, high = max(first, index * size), min(end, (index + 1) * size)
            if low < high:
                yield index, low, high

    def _chain(self, request: Request, tokens: Sequence[int], count: int) -> bytearray:
        """Return the slots of the first `count` tokens, one after the other."""
        chain = self._chains.setdefault(request.request_id, bytearray())
        keys = request.chain.keys
        last = bytes(chain[-_SLOT:]) or repr((keys.lora, keys.cache_salt)).encode()
        for token in tokens[len(chain) // _SLOT : count]:
            last = hashlib.blake2b(last + token.to_bytes(8, "big"), digest_size=_SLOT).digest()
            chain += last
        return chain


def _first_read(spec: GroupSpec, start: int) -> int:
    """Return the first token that the token at `start` attends to."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, start - spec.sliding_window + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return start // spec.attention_chunk_size * spec.attention_chunk_size
    return 0


def _block_at(request: Request, row: Sequence[int], index: int) -> int:
    block_id = row[index] if index < len(row) else 0
    if block_id == 0:
        raise PageMismatchError(f"request {request.request_id} has no block at index {index} of its table")
    return block_id
