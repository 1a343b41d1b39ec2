"""A connector over tiers, the quickest first: pages are saved in all, and loaded from the first that has them.

Tiers in host memory are read and written at once. The others work on threads of the connector's own: a request that may
find something there waits for the answer while others run, is then loaded asynchronously, and is computed as if nothing
had been there when a page does not come.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvhash.block_hash import external_hash, get_block_hash, get_group_id
from kvhash.events.schema import BlockRemoved, BlockStored

from ..block import Block
from ..block_pool import block_key, hashes_at, stored_event
from ..cache_manager import CacheManager
from ..events import KVEvent
from ..request import Request
from .background import SaveQueue
from .base import ConnectorOutput, KVConnector
from .envelope import fingerprint_digest
from .prefix import Page, PrefixGeometry
from .tier import Tier

if TYPE_CHECKING:
    from ..runner import PagedRunner

__all__ = ["TierConnector"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
#: Keys of pages given to slow tiers that are remembered, so that a prefix hit again and again is not sent each time.
_MAX_KNOWN = 1 << 17
#: Pages of asynchronous loads written before one step, so that a long load does not hold up who is running.
_MAX_WRITES = 256


@dataclass(slots=True)
class _Load:
    """The load of one request. ``content``: as far as it has come, None for a page that did not.

    ``written``: pages taken from it already; ``missing``: of these, the first tokens of those that did not come.
    """

    request: Request
    pages: list[Page]
    load_async: bool
    content: list[bytes | None] = field(default_factory=list)
    cancelled: bool = False
    written: int = 0
    missing: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Match:
    """What was last answered for a request: tokens `start` to `end`, and the tier that has each key."""

    start: int
    end: int
    where: Mapping[bytes, Tier]


class TierConnector(KVConnector):
    """Keeps KV in `tiers`.

    `load_async`: None: asynchronously unless every page is in a fast tier; else as it says. `saves`, `loads`: what
    ``kv_role`` allows. `max_pending_bytes`: pages that wait to be saved; beyond that they are not saved, and counted.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        load_async: bool | None = None,
        saves: bool = True,
        loads: bool = True,
        kv_load_failure_policy: str = "recompute",
        max_pending_bytes: int = 256 << 20,
        close_timeout: float = 5.0,
    ) -> None:
        self.tiers = tuple(tiers)
        self.kv_load_failure_policy = kv_load_failure_policy
        self.counters: Counter[str] = Counter()
        self._fast = [tier for tier in tiers if tier.fast]
        self._slow = [tier for tier in tiers if not tier.fast]
        self._load_async = load_async
        self._saves, self._loads = saves, loads
        self._close_timeout = close_timeout
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="kv-load")
        self._queue = SaveQueue(self._save_slow, max_bytes=max_pending_bytes) if self._slow else None
        self._news = threading.Event()
        self._lookups: dict[str, Future[dict[bytes, Tier]]] = {}
        self._matches: dict[str, _Match] = {}
        self._planned: list[_Load] = []
        self._loading: dict[str, _Load] = {}
        self._fetched: queue.SimpleQueue[_Load] = queue.SimpleQueue()
        self._arrived: deque[_Load] = deque()
        self._failed: dict[str, int] = {}
        self._num_saved: dict[str, list[int]] = {}
        self._known: OrderedDict[bytes, None] = OrderedDict()
        # What stored blocks are, until the slow tiers have them: the event, and how many saves are under way.
        self._described: dict[bytes, tuple[BlockStored, int]] = {}
        self._settled: queue.SimpleQueue[tuple[bytes, bool]] = queue.SimpleQueue()

    def bind(self, runner: PagedRunner, cache: CacheManager) -> None:
        """Open the tiers under the runner's fingerprint, and tell what is there already."""
        self._runner, self._cache = runner, cache
        self._prefix = PrefixGeometry(cache)
        digest = fingerprint_digest(runner.page_fingerprint)
        self._events: list[KVEvent] = [
            self._stored_unknown(tier, key) for tier in self.tiers for key in tier.bind(digest)
        ]

    # ---- planning

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return what the tiers have after the local hit; None while the slow ones are being asked."""
        start, limit = num_computed_tokens, self._prefix.limit(request)
        if not self._loads or start >= limit:
            return 0, False
        lookup = self._lookups.get(request.request_id)
        if lookup is not None and not lookup.done():
            return None, False
        keys = self._prefix.keys(request, start, limit)
        asked = [key for row in keys.values() for key in row]
        where = {key: tier for tier in reversed(self._fast) for key in self._there(tier, asked)}
        missing = [key for key in asked if key not in where]
        if missing and self._slow:
            if lookup is None:
                lookup = self._lookups[request.request_id] = self._threads.submit(self._look_up, missing)
                lookup.add_done_callback(lambda _: self._news.set())
            if not lookup.done():
                return None, False
            where = lookup.result() | where
        end = self._prefix.longest(keys, start, limit, where)
        if end <= start:
            return 0, False
        self._matches[request.request_id] = _Match(start, end, where)
        if self._load_async is not None:
            return end - start, self._load_async
        return end - start, not all(where[page.key].fast for page in self._prefix.pages(keys, start, end))

    def update_state_after_alloc(
        self, request: Request, blocks: tuple[list[Block], ...], num_external_tokens: int
    ) -> None:
        """Note which page goes into which block; pages of fast tiers are held from now on."""
        self._lookups.pop(request.request_id, None)
        match = self._matches.get(request.request_id)
        if num_external_tokens == 0 or match is None:
            return
        pages = [
            Page(
                page.first,
                page.group,
                blocks[page.group][page.first // self._prefix.size(page.group)].block_id,
                page.key,
            )
            for page in self._prefix.pages(
                self._prefix.keys(request, match.start, match.end), match.start, match.end
            )
        ]
        load_async = self._load_async
        if load_async is None:
            load_async = not all(match.where[page.key].fast for page in pages)
        load = _Load(request, pages, load_async)
        if not load_async:
            load.content = [self._fetch(page.key, self._fast) for page in pages]
        self._planned.append(load)
        if load_async:
            self._loading[request.request_id] = load

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[str, int]:
        """Split the tokens of a load by tier, as its lookup found them."""
        match = self._matches.pop(request.request_id, None)
        if match is None or not num_external_tokens:
            return {}
        pages = self._prefix.pages(self._prefix.keys(request, match.start, match.end), match.start, match.end)
        group, _, size = max(
            self._prefix.groups, key=lambda g: sum(page.group == g[0] for page in pages) * g[2]
        )
        tokens = Counter[str]()
        for page in pages:
            if page.group == group:
                tokens[match.where[page.key].source] += size
        outermost = max((match.where[page.key] for page in pages), key=self.tiers.index).source
        tokens[outermost] += num_external_tokens - tokens.total()
        return {source: count for source, count in tokens.items() if count}

    def build_connector_meta(self) -> list[_Load] | None:
        """Return the loads planned since the last call."""
        planned, self._planned = self._planned, []
        return planned or None

    # ---- loading

    def start_load_kv(self, meta: Sequence[_Load]) -> None:
        """Write the pages of synchronous loads; send for those of asynchronous ones."""
        for load in meta:
            if load.cancelled:
                continue
            if load.load_async:
                self._threads.submit(self._fetch_all, load)
                continue
            load.content = [
                self._fetch(page.key, self._slow) if content is None else content
                for page, content in zip(load.pages, load.content, strict=True)
            ]
            self._write(load, len(load.pages))

    def get_finished(self) -> ConnectorOutput:
        """Write pages that have come, a bounded number, and say whose are all there."""
        while not self._fetched.empty():
            self._arrived.append(self._fetched.get())
        finished: list[str] = []
        budget = _MAX_WRITES
        while self._arrived and budget > 0:
            load = self._arrived[0]
            if not load.cancelled:
                budget -= self._write(load, budget)
                if load.written < len(load.pages):
                    break
                del self._loading[load.request.request_id]
                finished.append(load.request.request_id)
            self._arrived.popleft()
        if self._arrived:
            self._news.set()
        failed, self._failed = self._failed, {}
        return ConnectorOutput(finished_recving=finished, failed_loads=failed)

    def cancel_load(self, request_id: str) -> bool:
        """Give up a load; its pages are only ever written on the engine's thread, so that takes effect at once."""
        load = self._loading.pop(request_id, None)
        if load is not None:
            load.cancelled = True
        return True

    def wait(self, timeout: float) -> None:
        """Wait for an answer of the slow tiers."""
        if self._news.wait(timeout):
            self._news.clear()

    def _look_up(self, keys: Sequence[bytes]) -> dict[bytes, Tier]:
        where: dict[bytes, Tier] = {}
        for tier in self._slow:
            missing = [key for key in keys if key not in where]
            where.update(dict.fromkeys(self._there(tier, missing), tier))
        return where

    def _fetch_all(self, load: _Load) -> None:
        try:
            for page in load.pages:
                if load.cancelled:
                    break
                load.content.append(self._fetch(page.key, self.tiers))
        except Exception:
            _log.exception("pages of %s could not be fetched", load.request.request_id)
        load.content += [None] * (len(load.pages) - len(load.content))
        self._fetched.put(load)
        self._news.set()

    def _fetch(self, key: bytes, tiers: Sequence[Tier]) -> bytes | None:
        for tier in tiers:
            page = self._ask(tier, partial(tier.get, key), None)
            if page is not None:
                return page
        return None

    def _there(self, tier: Tier, keys: Sequence[bytes]) -> set[bytes]:
        return self._ask(tier, lambda: tier.contains(keys), set()) if keys else set()

    def _ask(self, tier: Tier, ask: Callable[[], _T], otherwise: _T) -> _T:
        """Return a tier's answer; whatever it raises is counted, logged the first time, and a miss."""
        try:
            return ask()
        except Exception:
            tier.counters["exceptions"] += 1
            if tier.counters["exceptions"] == 1:
                _log.exception("the tier %s failed; what it has is a miss", tier.name)
            return otherwise

    def _write(self, load: _Load, count: int) -> int:
        """Write up to `count` of the pages that came; returns how many it took. The last say what is missing."""
        chunk = slice(load.written, load.written + count)
        pages = load.pages[chunk]
        for page, content in zip(pages, load.content[chunk], strict=True):
            if content is not None:
                try:
                    self._runner.write_page(page.group, page.block_id, content)
                except ValueError as error:
                    _log.warning("a page of the tiers does not fit the runner: %s", error)
                else:
                    self._promote(load.request, page, content)
                    continue
            load.missing.append(page.first)
            self._known.pop(page.key, None)  # it will be computed, and can be saved again
        load.written += len(pages)
        if load.written == len(load.pages):
            self._settle(load)
        return len(pages)

    def _settle(self, load: _Load) -> None:
        total, missing = len(load.pages), len(load.missing)
        self.counters["loaded_blocks"] += total - missing
        if missing:
            request_id = load.request.request_id
            self.counters["failed_blocks"] += missing
            self.counters["failed_loads"] += 1
            self._failed[request_id] = min(load.missing)
            _log.warning("%d of %d blocks of %s could not be loaded", missing, total, request_id)

    def _promote(self, request: Request, page: Page, content: bytes) -> None:
        """Keep in the fast tiers what a slow one had; if it came from a fast one it becomes the last to go there."""
        if self._saves:
            for tier in self._fast:
                self._put(tier, request, page.key, content, page.group, page.first)

    # ---- saving

    def save_kv(self, request: Request, blocks: tuple[list[Block], ...], num_tokens: int) -> None:
        """Save the blocks that are full and can be hit, each once."""
        if not self._saves:
            return
        pool = self._cache.pool
        saved = self._num_saved.get(request.request_id)
        if saved is None:
            saved = self._num_saved[request.request_id] = [0] * len(self._prefix.groups)
        for group, manager, size in self._prefix.groups:
            end = min(num_tokens // size, manager.num_cached.get(request.request_id, 0))
            if saved[group] >= end:
                continue
            hashes = hashes_at(request.block_hashes, pool.hash_block_size, size)
            for index in range(saved[group], end):
                block, key = blocks[group][index], block_key(hashes[index], group)
                if not block.is_null and key in pool.keys_of(block):
                    self._save(request, key, block, group, index * size)
            saved[group] = end

    def request_finished(self, request: Request, blocks: tuple[list[Block], ...], num_tokens: int) -> bool:
        """Save the rest; pages are copied here, so the blocks can go."""
        if num_tokens:
            self.save_kv(request, blocks, num_tokens)
        self._num_saved.pop(request.request_id, None)
        self._matches.pop(request.request_id, None)
        self._lookups.pop(request.request_id, None)
        return False

    def _save(self, request: Request, key: bytes, block: Block, group: int, first: int) -> None:
        fast = [tier for tier in self._fast if not self._there(tier, [key])]
        slow = bool(self._slow) and key not in self._known
        if not fast and not slow:
            return
        page = self._runner.read_page(group, block.block_id)
        for tier in fast:
            self._put(tier, request, key, page, group, first)
        if slow and self._queue is not None:
            event, count = self._described.get(key) or (self._stored(request, key, group, first), 0)
            if not self._queue.put(key, page):
                self.counters["saves_dropped"] += 1
                return
            self._described[key] = event, count + 1
            self._known[key] = None
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def _put(self, tier: Tier, request: Request, key: bytes, page: bytes, group: int, first: int) -> None:
        if self._ask(tier, lambda: tier.put(key, page), None):
            event = self._stored(request, key, group, first)
            self._tell(tier, {key: event})

    def _save_slow(self, key: bytes, page: bytes) -> None:
        kept = [self._ask(tier, partial(tier.put, key, page), None) is not None for tier in self._slow]
        self._settled.put((key, all(kept)))

    # ---- events, reset, the end

    def take_events(self) -> list[KVEvent]:
        """Return what the tiers stored and dropped, each under its medium."""
        settled: list[tuple[bytes, bool]] = []
        while not self._settled.empty():
            settled.append(self._settled.get())
        described = {key: event for key, (event, _) in self._described.items()}
        for tier in self.tiers:
            self._tell(tier, described)
        for key, kept in settled:
            event, count = self._described.pop(key)
            if count > 1:
                self._described[key] = event, count - 1
            if not kept:
                self._known.pop(key, None)
        events, self._events = self._events, []
        return events

    def reset_cache(self) -> bool:
        """Drop what waits to be saved and every page in every tier, other engines' too where a tier is shared."""
        quiet = self._queue is None or self._queue.drop(timeout=self._close_timeout)
        if not quiet:
            return False
        self._events = self.take_events()  # of what was saved until now
        self._known.clear()
        self._described.clear()
        self._lookups.clear()
        self._matches.clear()
        cleared = [self._ask(tier, tier.clear, False) for tier in self.tiers]
        return all(cleared)

    def flush(self, *, timeout: float) -> bool:
        """Wait until what is being saved is saved; False after `timeout` seconds."""
        return self._queue is None or self._queue.flush(timeout=timeout)

    def get_stats(self) -> dict[str, dict[str, int]]:
        """Return the counters of the connector and of each tier."""
        stats = {"connector": dict(self.counters)}
        for tier in self.tiers:
            stats[tier.name] = dict(tier.counters)
        return stats

    def close(self) -> None:
        """Save what waits, as far as the time allows, and close the tiers."""
        if self._queue is not None and not self._queue.close(timeout=self._close_timeout):
            _log.warning("not all pages were saved within %s s; the rest is dropped", self._close_timeout)
        self._threads.shutdown(wait=True, cancel_futures=True)
        for tier in self.tiers:
            self._ask(tier, tier.close, None)

    def _tell(self, tier: Tier, described: Mapping[bytes, BlockStored]) -> None:
        locality = tier.locality
        for key, came in tier.take_changes():
            if not self._cache.config.enable_events:
                continue
            if not came:
                self._events.append(
                    BlockRemoved(
                        block_hashes=(
                            external_hash(get_block_hash(key), self._cache.config.event_hash_form),
                        ),
                        medium=tier.medium,
                        group_idx=get_group_id(key),
                        locality=locality,
                    )
                )
            elif key in described:
                self._events.append(
                    msgspec.structs.replace(described[key], medium=tier.medium, locality=locality)
                )
            else:
                self._events.append(self._stored_unknown(tier, key))

    def _stored(self, request: Request, key: bytes, group: int, first: int) -> BlockStored:
        """Return the event of one block; `first`: its first token."""
        size, pool = self._prefix.size(group), self._cache.pool
        hashes = hashes_at(request.block_hashes, pool.hash_block_size, size)
        index = first // size
        return stored_event(
            request,
            hashes=[get_block_hash(key)],
            parent=hashes[index - 1] if index else None,
            start=first,
            end=first + size,
            block_size=size,
            spans=[(first, first + size)],
            group_id=group,
            spec=self._cache.config.groups[group],
            medium="",
            form=self._cache.config.event_hash_form,
        )

    def _stored_unknown(self, tier: Tier, key: bytes) -> BlockStored:
        """Return the event of a block from before the engine's time: its tokens are not known, its hash is."""
        group = get_group_id(key)
        spec = self._cache.config.groups[group] if group < len(self._cache.config.groups) else None
        return BlockStored(
            block_hashes=(external_hash(get_block_hash(key), self._cache.config.event_hash_form),),
            parent_block_hash=None,
            token_ids=(),
            block_size=0,
            medium=tier.medium,
            group_idx=group,
            kv_cache_spec_kind=spec.kind if spec else None,
            kv_cache_spec_sliding_window=spec.sliding_window if spec else None,
            locality=tier.locality,
        )
