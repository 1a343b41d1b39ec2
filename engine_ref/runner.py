"""What computes tokens: one small interface, and runners that need no model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from .coordinator import CacheConfig
from .null_pages import NullPages, PageMismatchError
from .request import Request
from .scheduler import StepPlan

__all__ = ["ModelRunner", "NullRunner", "PageMismatchError", "PagedRunner", "ScriptedRunner"]


class ModelRunner(Protocol):
    """Runs one planned step.

    Returns for each request of the plan that samples its accepted drafts and one token more.
    """

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        """Run `plan`, the next in the order in which plans were made.

        `requests`: by id those to be run. A request that ended after the step was planned is among them, since
        others may go on from the blocks that it fills; its tokens are dropped. One of the plan that is not among
        them must not be run, and the runner forgets its block table (it comes again whole). A request that cannot be
        computed gets an ``error`` and no tokens; the others go on.
        """
        ...


@runtime_checkable
class PagedRunner(Protocol):
    """A runner whose KV can be read and written one block at a time, for connectors.

    ``page_fingerprint`` names all that makes a page readable: model and weights, dtype, layout, block sizes. A tier
    never hands a page to a runner with another fingerprint. Pages are read after the step that filled them and
    written before the step that reads them, always on the thread that runs the steps.
    """

    page_fingerprint: str

    def read_page(self, group: int, block_id: int) -> bytes:
        """Return the KV of all layers of a group in one block, a copy, always of the same length."""
        ...

    def write_page(self, group: int, block_id: int, page: bytes) -> None:
        """Put back what `read_page` gave; raises ValueError for a page of another length."""
        ...


class NullRunner:
    """Makes tokens from the request's own: the same tokens always go on in the same way, wherever they run.

    With `cache`, the geometry of the engine's KV cache, it keeps pages that stand for KV (`NullPages`) and is a
    `PagedRunner`: a step that would read KV of other tokens raises PageMismatchError.
    """

    def __init__(self, *, vocab_size: int = 32000, cache: CacheConfig | None = None) -> None:
        self.vocab_size = vocab_size
        self.pages = NullPages(cache) if cache is not None else None
        #: What a page can be read by: the same vocabulary and the same groups.
        self.page_fingerprint = f"null-1:{vocab_size}:{self.pages.describe() if self.pages else ''}"

    def read_page(self, group: int, block_id: int) -> bytes:
        """Return the page of a block; raises RuntimeError when the runner keeps none."""
        return self._kept_pages().read(group, block_id)

    def write_page(self, group: int, block_id: int, page: bytes) -> None:
        """Replace the page of a block; raises ValueError for one of another length."""
        self._kept_pages().write(group, block_id, page)

    def _kept_pages(self) -> NullPages:
        if self.pages is None:
            raise RuntimeError("this runner keeps no pages: it was made without the geometry of a cache")
        return self.pages

    def next_token(self, token_ids: Sequence[int], count: int) -> int:
        """Return the token after `count` tokens, the last of which are `token_ids`; the last 8 matter."""
        text = repr((count, list(token_ids[-8:])))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % self.vocab_size

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        """Accept the drafts that are what would have been made."""
        sampled: dict[str, list[int]] = {}
        for request_id in _sampling(plan, requests):
            known = requests[request_id].all_token_ids
            new: list[int] = []
            for draft in [*plan.spec_token_ids.get(request_id, ()), None]:
                new.append(self.next_token([*known[-8:], *new], len(known) + len(new)))
                if new[-1] != draft:
                    break
            sampled[request_id] = new
        if self.pages is not None:
            self._run_pages(self.pages, plan, requests, sampled)
        return sampled

    def _run_pages(
        self,
        pages: NullPages,
        plan: StepPlan,
        requests: Mapping[str, Request],
        sampled: Mapping[str, Sequence[int]],
    ) -> None:
        pages.keep(requests)
        for source, target in plan.block_copies:
            pages.copy(source, target)
        starts: dict[str, int] = {}
        for new in plan.new_requests:
            starts[new.request_id] = new.num_computed_tokens
            pages.start(new.request_id, new.block_ids)
        for cached in plan.cached_requests:
            starts[cached.request_id] = cached.num_computed_tokens
            if cached.resumed:
                pages.start(cached.request_id, cached.new_block_ids or ())
            elif cached.new_block_ids is not None and cached.request_id in requests:
                pages.extend(cached.request_id, cached.new_block_ids)
        for request_id, count in plan.num_scheduled_tokens.items():
            request = requests.get(request_id)
            if request is None:
                continue
            accepted = sampled.get(request_id, ())[:-1]
            tokens = [*request.all_token_ids, *accepted] if accepted else request.all_token_ids
            # Planned before it was known that drafts would be rejected, the start may lie too far on.
            start = min(starts[request_id], request.num_tokens - 1)
            pages.run(request, tokens, start, min(start + count, len(tokens)))


class ScriptedRunner:
    """Gives each request the output that was written down for it."""

    def __init__(self, outputs: Mapping[str, Sequence[int]]) -> None:
        self.outputs = dict(outputs)

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        """Accept the drafts that are in the script."""
        sampled: dict[str, list[int]] = {}
        for request_id in _sampling(plan, requests):
            script = self.outputs[request_id][requests[request_id].num_output_tokens :]
            accepted = 0
            for draft in plan.spec_token_ids.get(request_id, ()):
                if draft != script[accepted]:
                    break
                accepted += 1
            sampled[request_id] = list(script[: accepted + 1])
        return sampled


def _sampling(plan: StepPlan, requests: Mapping[str, Request]) -> list[str]:
    """Return the requests that get a token and have not ended since the step was planned."""
    return [
        request_id
        for request_id, samples in plan.samples.items()
        if samples and request_id in requests and not requests[request_id].status.is_finished
    ]
